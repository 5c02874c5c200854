"""The record of a run of ``gists/smoke.sh``: its date, versions, setting, and the row of every result."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import fastpack
from fastpack.exactness.family_settings import HEAD_DIM
from fastpack.exactness.image_text import build_image_text, build_named
from fastpack.utils.versions import versions_of

if TYPE_CHECKING:
    from fastpack.exactness.verification import Verification

GPU_HEAD_DIM = 64


@dataclass(frozen=True)
class Setting:
    """The device, dtype and head size of tiny models: float32 on a CPU; bfloat16 and real head sizes on a GPU.

    Attributes:
        dtype: the name of a torch dtype; head_dim: a multiple of 16.
    """

    device: str = "cpu"
    dtype: str = "float32"
    head_dim: int = HEAD_DIM

    @classmethod
    def of_this_machine(cls, device: str | None = None, dtype: str | None = None) -> Setting:
        """Return the setting for this machine; an argument of None stands for the machine's default."""
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        gpu = device != "cpu"
        return cls(device, dtype or ("bfloat16" if gpu else "float32"), GPU_HEAD_DIM if gpu else HEAD_DIM)

    def build(self, model_type: str, dtype: torch.dtype | None = None) -> Any:
        """Return a family's model in training mode; in evaluation mode some models write states in place.

        Args:
            model_type: the family.
            dtype: another dtype than the setting's, or None.

        All errors of :func:`fastpack.exactness.image_text.build_named` may be raised.
        """
        return self._built(build_named, model_type, dtype)

    def build_for_images(self, model_type: str, dtype: torch.dtype | None = None) -> Any:
        """Return a model of the image-text mapping, as :meth:`build` does."""
        return self._built(build_image_text, model_type, dtype)

    def _built(self, build: Callable[..., Any], model_type: str, dtype: torch.dtype | None) -> Any:
        dtype = dtype or getattr(torch, self.dtype)
        return build(model_type, head_dim=self.head_dim, dtype=dtype).train().to(self.device)

    def named(self) -> str:
        """Return the setting as a line of text."""
        gpu = f" ({torch.cuda.get_device_name()})" if self.device.startswith("cuda") else ""
        return f"{self.device}{gpu}, {self.dtype}, heads of {self.head_dim}"


@dataclass(frozen=True)
class Row:
    """The result of one family in one mode, with one attention backend.

    Attributes:
        family, mode: the family and the mode.
        tier, backend, dtype: the patched model's; empty if the model was not patched, or has no attention.
        error: in modes ``exact`` and ``images``, the largest relative error of all inputs, compared with each sequence
            alone; in other modes, the error of :func:`fastpack.verify` that is nearest to its bound.
        bound: the largest allowed ``error``.
        kinds: in modes ``exact`` and ``images``, the error of each kind of input.
        loss: the largest relative difference of three losses from those of the stock model on padded batches.
        speed: the stock model's step time on padded batches divided by the patched model's, without the first step.
        refused: why the family is refused, at all, with images, or in this precision; else None.
        left_out: why the mode was left out: the error of training the stock model in this mode; else None.
        problem: why the row failed, or None.
    """

    family: str
    mode: str
    tier: str = ""
    backend: str = ""
    dtype: str = ""
    error: float | None = None
    bound: float | None = None
    kinds: dict[str, float] = field(default_factory=dict)
    loss: float | None = None
    speed: float | None = None
    refused: str | None = None
    left_out: str | None = None
    problem: str | None = None

    @classmethod
    def of(
        cls, family: str, mode: str, setting: Setting, model: Any, verification: Verification | None, **more: Any
    ) -> Row:
        """Return the row of a patched model and its verification (None if verify can't tell the model's tokens)."""
        report = fastpack.report(model)
        if verification is not None:
            more = {
                "error": verification.nearest.error,
                "bound": verification.nearest.bound,
                "problem": verification.problem,
                **more,
            }
        return cls(family, mode, report.tier, report.backend or "", setting.dtype, **more)

    @property
    def verdict(self) -> str:
        """Return the row's result in a word or two."""
        if self.problem is not None:
            return "FAILED"
        if self.left_out is not None:
            return "left out"
        return "exact" if self.refused is None else "refused"


@dataclass(frozen=True)
class Record:
    """The record of one run.

    Attributes:
        date: the day, in ISO format; versions: of fastpack, Python and the packages; setting: device, precision and
            head size.
        seconds: the run's duration; absent: families that this release of transformers does not have.
    """

    date: str
    versions: dict[str, str]
    setting: str
    seconds: float
    absent: tuple[str, ...]
    rows: tuple[Row, ...]

    @classmethod
    def of_now(cls, setting: str, seconds: float, absent: Sequence[str], rows: Sequence[Row]) -> Record:
        """Return a record with today's date and the installed versions."""
        versions = {"fastpack": fastpack.__version__, **versions_of("transformers", "torch", "trl", "peft")}
        return cls(date.today().isoformat(), versions, setting, seconds, tuple(absent), tuple(rows))

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a record from a file of :meth:`to_dict`."""
        data = json.loads(path.read_text())
        rows = tuple(Row(**row) for row in data.pop("rows"))
        return cls(**{**data, "absent": tuple(data["absent"])}, rows=rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain dicts, lists, strings and numbers."""
        return asdict(self)

    @property
    def made_with(self) -> str:
        """Return the date, versions and setting as a line of text."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.date}, {versions}, {self.setting}"
