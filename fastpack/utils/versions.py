"""The versions of other packages that fastpack needs and was tried with, and the command that installs them.

Only ``pyproject.toml`` says the ranges. A checkout reads that file; an installed fastpack reads its metadata, which is
made from that file.
"""

from __future__ import annotations

import functools
import platform
import shlex
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from fastpack.errors import PatchError, UntriedVersionWarning

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

DISTRIBUTION = "fastpack-train"
"""The name that pip knows, ``[project].name``; Python imports ``fastpack``."""

NEWEST_TRIED = {"torch": "2.15", "trl": "1.16", "peft": "0.21", "accelerate": "1.15"}
"""The newest minor release of each package with which the test suite passes, at least on a CPU. With a newer release
the suite fails until that release is entered here, since the suite makes errors of fastpack's warnings. Transformers is
not listed: each of its classes is proved by itself (:mod:`fastpack.families.lock`)."""


def check_versions(packages: Iterable[str]) -> None:
    """Raise if a package is older than fastpack needs, and warn if one is newer than was tried.

    A pre-release counts as the release that it precedes, and a patch release as its minor release.

    Args:
        packages: names of packages that have the same name for import and for pip. Packages without a known range are
            skipped.

    Raises:
        PatchError: a package is too old; the message has its version, the allowed versions, and the command that
            updates it.

    Warns:
        UntriedVersionWarning: some packages are too new; or fastpack was copied here without its metadata, so that the
            needed versions are unknown.
    """
    needed, newer = version_ranges(), []
    for name in sorted(packages):
        version = version_of(name) if name in needed or name in NEWEST_TRIED else None
        if version is None:
            continue
        if is_too_old(name, version):
            raise PatchError(
                f"{name} {version} is too old: fastpack needs {name}{needed[name]}. Run `{install_command(name)}` and "
                "restart Python. Nothing was changed."
            )
        if is_untried(name, version):
            newer.append(f"{name} {version} (tried up to {NEWEST_TRIED[name]})")
    if newer:
        warnings.warn(
            f"newer than what fastpack was tried with: {', '.join(newer)}. fastpack.verify(model) tries yours.",
            UntriedVersionWarning,
            stacklevel=3,
        )
    if not needed:
        warnings.warn(
            f"it is unknown which versions fastpack needs: it was copied here without {DISTRIBUTION}'s metadata.",
            UntriedVersionWarning,
            stacklevel=3,
        )


def version_of(package: str) -> str | None:
    """Return the version of the imported package, else of the installed one, else None."""
    from importlib import metadata

    imported = getattr(sys.modules.get(package), "__version__", None)
    if imported is not None:
        return str(imported)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions_of(*packages: str) -> dict[str, str]:
    """Return the versions of these packages, without the missing ones, and that of Python."""
    versions = {package: version for package in packages if (version := version_of(package)) is not None}
    return {**versions, "python": platform.python_version()}


def is_too_old(package: str, version: str) -> bool:
    """Return whether a version is below the lowest that fastpack needs."""
    floors = (limit for limit in version_ranges().get(package, ()) if limit.operator == ">=")
    return not all(floor.contains(Version(version).base_version) for floor in floors)


def is_untried(package: str, version: str) -> bool:
    """Return whether a version belongs to a newer minor release than any that was tried."""
    return package in NEWEST_TRIED and Version(version).release[:2] > Version(NEWEST_TRIED[package]).release


@functools.cache
def version_ranges() -> dict[str, SpecifierSet]:
    """Return the version range of each package that has one, by name; empty if fastpack has no metadata."""
    from packaging.requirements import Requirement

    required = [Requirement(line) for line in _requirements()]
    return {each.name: each.specifier for each in required if str(each.specifier)}


def install_command(*packages: str) -> str:
    """Return the shell command that installs these packages, in the ranges that fastpack needs.

    The command names the packages and no extra of fastpack, so it works however fastpack was installed.
    """
    ranges = version_ranges()
    return " ".join(["pip install", *(shlex.quote(f"{name}{ranges.get(name, '')}") for name in packages)])


def _requirements() -> list[str]:
    """Return all requirements, extras included, from the checkout's pyproject.toml or the metadata."""
    import tomllib
    from importlib import metadata

    pyproject = Path(__file__).parent.parent.parent / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("project", {}) if pyproject.is_file() else {}
    if project.get("name") == DISTRIBUTION:
        return sum(project["optional-dependencies"].values(), project["dependencies"])
    try:
        return metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []
