"""Kernels that are set up before the one ahead of them has ended: they wait by themselves."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")
from fastpack.ops import kernels
from fastpack.ops.glu import gated
from fastpack.ops.kernels.launch import early
from fastpack.ops.norm import rms_norm

MODULES = sorted(Path(kernels.__file__).parent.glob("*.py"))


def unguarded(source: str) -> tuple[list[str], list[str]]:
    """Kernels of a module that may be launched early, and those of them that don't wait first."""
    found: list[str] = []
    wrong: list[str] = []
    for node in ast.parse(source).body:
        names = [a.arg for a in node.args.args] if isinstance(node, ast.FunctionDef) else []
        if isinstance(node, ast.FunctionDef) and "EARLY" in names and node.name != "wait_for_inputs":
            found.append(node.name)
            body = node.body[1:] if ast.get_docstring(node) else node.body
            if ast.unparse(body[0]) != "wait_for_inputs(EARLY)":
                wrong.append(node.name)
    return found, wrong


def test_every_kernel_waits_before_anything_else() -> None:
    found = {path.stem: unguarded(path.read_text()) for path in MODULES}
    assert not any(wrong for _, wrong in found.values()), found
    launched = {path.stem for path in MODULES if "early(" in path.read_text()} - {"launch"}
    assert launched == {name for name, (names, _) in found.items() if names}
    assert len(launched) >= 10


def test_negative_control() -> None:
    late = "def kernel(x, EARLY):\n    y = tl.load(x)\n    wait_for_inputs(EARLY)\n"
    assert unguarded(late) == (["kernel"], ["kernel"])


def test_elsewhere_kernels_are_launched_as_ever() -> None:
    assert early(torch.zeros(1)) == {"EARLY": False}


@pytest.mark.gpu
def test_results_are_those_of_kernels_that_wait_for_each_other() -> None:
    torch.manual_seed(0)
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    assert early(x)["EARLY"] is hopper
    weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16)

    def chain(between: Callable[[], None]) -> list[Tensor]:
        """Each reads what the one before wrote last, over memory that the one before that still read."""
        kept: list[Tensor] = []
        y = x.clone()
        for turn in range(60):
            y = rms_norm(y, weight, 1e-6)
            between()
            y = gated(y, y.mul(1.5) if turn % 2 else y, F.silu) + x
            between()
            kept.append(y[::1024, ::64].clone())
        return kept

    waited = chain(torch.cuda.synchronize)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(chain(lambda: None), waited, strict=True))
