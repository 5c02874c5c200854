"""A run of ``gists/smoke.sh`` as a file: when, with which versions, on what, and every row."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

from fastpack.smoke.row import Row

PACKAGES = ("transformers", "torch", "trl", "peft")


@dataclass(frozen=True)
class Record:
    """One run.

    Attributes:
        date: ISO, of the day; versions: of the packages, fastpack and Python; setting: device, precision and heads.
        seconds: that it took; absent: families that this release of transformers does not have.
    """

    date: str
    versions: dict[str, str]
    setting: str
    seconds: float
    absent: tuple[str, ...]
    rows: tuple[Row, ...]

    @classmethod
    def of_now(cls, setting: str, seconds: float, absent: Sequence[str], rows: Sequence[Row]) -> Record:
        """With today's date and what is installed."""
        import fastpack

        versions = {name: found for name in PACKAGES if (found := _version(name)) is not None}
        versions |= {"fastpack": fastpack.__version__, "python": platform.python_version()}
        return cls(date.today().isoformat(), versions, setting, seconds, tuple(absent), tuple(rows))

    @classmethod
    def read(cls, path: Path) -> Record:
        """What :meth:`to_dict` gave, from a file."""
        found = json.loads(path.read_text())
        rows = tuple(Row(**row) for row in found.pop("rows"))
        return cls(**{**found, "absent": tuple(found["absent"])}, rows=rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        return asdict(self)

    @property
    def made_with(self) -> str:
        """A line for people."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.date}, {versions}, {self.setting}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
