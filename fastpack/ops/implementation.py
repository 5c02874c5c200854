"""The choice of an op's implementation: its definition in torch, or its Triton kernel.

Each kernel is a module of :mod:`fastpack.ops.kernels`, imported when it is first used: Triton is optional and slow to
import.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Literal, get_args

import torch
from torch import Tensor

from fastpack.errors import KernelUnavailableError

Implementation = Literal["auto", "torch", "triton"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes that kernels support unless they say otherwise."""


def use_triton(implementation: Implementation, x: Tensor) -> bool:
    """Return whether the Triton kernel should run on ``x``.

    ``auto`` chooses the kernel on a CUDA device if Triton is installed. Inside ``torch.compile`` it chooses the
    definition, which the compiler fuses with its neighbours. ``triton`` chooses the kernel on any device; on a CPU it
    needs Triton's interpreter. ``torch`` never chooses it.

    Raises:
        KernelUnavailableError: ``triton`` was passed inside ``torch.compile``, where torch 2.11 traces Functions with
            wrong gradients (zero for a norm's weight), or on a CPU without Triton's interpreter.
    """
    compiling = torch.compiler.is_compiling()
    if implementation == "auto":
        return not compiling and x.is_cuda and triton_installed()
    if implementation == "triton" and compiling:
        raise KernelUnavailableError(
            "kernels='triton' can't be used inside torch.compile, which fuses the definitions: pass kernels='auto'."
        )
    if implementation == "triton" and x.device.type == "cpu" and not _interprets():
        raise KernelUnavailableError(
            "kernels='triton' was passed, but the tensors are on the CPU, for which Triton can't compile kernels. Move "
            "the model to a GPU, pass kernels='auto', or start Python with TRITON_INTERPRET=1 for Triton's interpreter."
        )
    return implementation == "triton"


def kernel_serves(implementation: Implementation, kernel: str, reason: str | None) -> bool:
    """Return whether the kernel supports its inputs: whether ``reason`` is None.

    Args:
        implementation: the implementation that the caller passed to the op.
        kernel: the kernel's name in the error message.
        reason: the input that the kernel doesn't support, and what it supports instead; None if it supports all.

    Raises:
        ValueError: there is a reason, and ``implementation="triton"``.
    """
    if reason is not None and implementation == "triton":
        raise ValueError(f"The kernel for {kernel} got {reason}. Pass implementation='auto' or 'torch'.")
    return reason is None


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def why_no_kernels() -> str | None:
    """Return why no kernel can run on this machine, whatever device the tensors are on, or None."""
    if not triton_installed():
        return "Triton is not installed: pip install triton, or pass kernels='auto'."
    if not torch.accelerator.is_available() and not _interprets():
        return "there is no GPU here. Pass kernels='auto', or start Python with TRITON_INTERPRET=1 for its interpreter."
    return None


@functools.cache
def triton_installed() -> bool:
    """Return whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None
