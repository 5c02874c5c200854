"""The public names of ``fastpack``: there, imported late, and the same to a type checker."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import fastpack

PACKAGE = Path(fastpack.__file__)
SHORT_PATHS = {
    "metrics": ("fastpack.trainers.metrics", "attach"),
    "preference": ("fastpack.trainers.preference_losses", "preference_loss"),
    "reference": ("fastpack.trainers.reference", "precompute"),
}
"""The module, and a function of it."""


def run(code: str) -> str:
    """What a process of its own prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def imported_for_type_checkers() -> dict[str, str]:
    """Each name of the block under TYPE_CHECKING, and the module that it comes from."""
    tree = ast.parse(PACKAGE.read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: str(node.module) for node in imports for alias in node.names}


def test_type_checkers_see_what_is_there() -> None:
    declared = imported_for_type_checkers()
    modules = {*SHORT_PATHS, "attention_dispatch"}
    assert {*declared} == {*fastpack.__all__, *modules} - {"__version__"}
    for name in {*declared} - modules:
        assert getattr(fastpack, name) is getattr(importlib.import_module(declared[name]), name), name


def test_every_name_is_listed_and_no_other_is_there() -> None:
    assert {*fastpack.__all__, *SHORT_PATHS} <= {*dir(fastpack)}
    with pytest.raises(AttributeError, match="no attribute 'patches'"):
        fastpack.patches  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT_PATHS)
def test_short_paths(name: str) -> None:
    """As an attribute, as an import, and with its names; each the module's own."""
    module, function = SHORT_PATHS[name]
    assert run(f"import fastpack; print(fastpack.{name}.{function}.__module__)").startswith(module)
    assert run(f"import fastpack.{name}; print(fastpack.{name}.{function}.__module__)").startswith(module)
    assert run(f"from fastpack.{name} import *; print({function}.__module__)").startswith(module)
    with pytest.raises(subprocess.CalledProcessError):
        run(f"from fastpack.{name} import nothing")


def test_importing_it_imports_nothing_else() -> None:
    code = "import sys; before = {*sys.modules}; import fastpack, fastpack.metrics; print(*({*sys.modules} - before))"
    result = run(code).split()
    assert [name for name in result if name.split(".")[0] not in (*sys.stdlib_module_names, "fastpack")] == []
    assert "fastpack.trainers.metrics" not in result
    assert "torch" in run(f"{code.replace('print', 'fastpack.PackedSeqLens; print')}").split(), "control"
