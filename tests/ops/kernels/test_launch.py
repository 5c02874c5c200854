"""Kernels that are launched before the previous kernel has ended wait for it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import triton
import triton.language as tl

from fastpack.ops import kernels
from fastpack.ops.kernels.launch import early
from fastpack.ops.norm import rms_norm

MODULES = sorted(Path(kernels.__file__).parent.glob("*.py"))


def unguarded(source: str) -> tuple[list[str], list[str]]:
    """Return a module's kernels that may be launched early, and the kernels among them that don't wait first."""
    result: list[str] = []
    wrong: list[str] = []
    for node in ast.parse(source).body:
        names = [a.arg for a in node.args.args] if isinstance(node, ast.FunctionDef) else []
        if isinstance(node, ast.FunctionDef) and "EARLY" in names and node.name != "wait_for_inputs":
            result.append(node.name)
            body = node.body[1:] if ast.get_docstring(node) else node.body
            if ast.unparse(body[0]) != "wait_for_inputs(EARLY)":
                wrong.append(node.name)
    return result, wrong


def test_every_kernel_waits_before_anything_else() -> None:
    result = {path.stem: unguarded(path.read_text()) for path in MODULES}
    assert not any(wrong for _, wrong in result.values()), result
    launched = {path.stem for path in MODULES if "early(" in path.read_text()} - {"launch"}
    assert launched == {name for name, (names, _) in result.items() if names}
    assert len(launched) >= 10


def test_negative_control() -> None:
    late = "def kernel(x, EARLY):\n    y = tl.load(x)\n    wait_for_inputs(EARLY)\n"
    assert unguarded(late) == (["kernel"], ["kernel"])


def test_elsewhere_kernels_are_launched_as_ever() -> None:
    assert early(torch.zeros(1)) == {"EARLY": False}


@triton.jit
def write_late(x, turns, BLOCK: tl.constexpr):
    """Write ones, long after the next kernel may start."""
    tl.extra.cuda.gdc_launch_dependents()
    one = tl.load(x) + 1.0  # which compilers don't know
    for _ in range(turns):
        one = one * 0.5 + 0.5
    tl.store(x + tl.arange(0, BLOCK), tl.full([BLOCK], 0.0, tl.float32) + one)


@triton.jit
def read_at_once(x, out, BLOCK: tl.constexpr):
    """Copy ``x`` to ``out`` without waiting."""
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at))


@pytest.mark.gpu
def test_a_kernel_that_is_let_in_early_waits_all_the_same() -> None:
    """A kernel that does not wait reads the old values, so the check can fail."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("kernels are launched early from Hopper on")
    size, turns = 1024, 3_000_000
    weight, out = torch.ones(size, device="cuda"), torch.empty(1, size, device="cuda")
    assert early(out)["EARLY"]

    def ours(x: Tensor) -> Tensor:
        return rms_norm(x, weight, 1e-6)

    def hasty(x: Tensor) -> Tensor:
        read_at_once[(1,)](x, out, size, launch_pdl=True)
        return out

    result: dict[str, float] = {}
    for name, reader in (("ours", ours), ("hasty", hasty)):
        for _ in range(2):  # the first time they are compiled
            x = torch.zeros(1, size, device="cuda")
            write_late[(1,)](x, turns, size)
            result[name] = float(reader(x).clone().min())
    assert result["ours"] == pytest.approx(1.0, abs=1e-5)
    assert result["hasty"] == 0.0
