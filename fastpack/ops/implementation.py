"""Which implementation of an op runs: its definition in torch, or its Triton kernel.

Kernels live in :mod:`fastpack.ops.kernels`, a module each, and are imported when first used: Triton is optional and
slow to import.
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
"""What kernels serve unless they say otherwise."""


def use_triton(implementation: Implementation, x: Tensor) -> bool:
    """True where the kernel is to run.

    ``auto`` takes it on a CUDA device with Triton installed, and leaves a region that ``torch.compile`` traces to
    the definition, which the compiler fuses with its neighbours. ``triton`` runs it wherever the tensor is, which on
    a CPU is what Triton's interpreter is for.

    Raises:
        KernelUnavailableError: ``triton`` in such a region: torch 2.11 traces Functions with wrong gradients (that of a
            normalisation's weight is zero); or on a CPU without Triton's interpreter.
    """
    compiling = torch.compiler.is_compiling()
    if implementation == "auto":
        return not compiling and x.is_cuda and triton_installed()
    if implementation == "triton" and compiling:
        raise KernelUnavailableError(
            "kernels can't be asked for inside torch.compile, which fuses the definitions: pass 'auto'."
        )
    if implementation == "triton" and x.device.type == "cpu" and not _interprets():
        raise KernelUnavailableError(
            "kernels='triton' was asked for and the tensors are on the CPU, for which Triton compiles nothing. Move "
            "the model to a GPU, pass kernels='auto', or set TRITON_INTERPRET=1 beforehand for Triton's interpreter."
        )
    return implementation == "triton"


def kernel_serves(implementation: Implementation, kernel: str, reason: str | None) -> bool:
    """True unless there is a reason why the kernel, where :func:`use_triton` would take it, can't serve.

    Args:
        kernel: what it is called in the message.
        reason: what it was given, and serves; None where it can.

    Raises:
        ValueError: there is, and the kernel was asked for by name.
    """
    if reason is not None and implementation == "triton":
        raise ValueError(f"The kernel of {kernel} was given {reason}. Pass implementation='auto' or 'torch'.")
    return reason is None


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def why_no_kernels() -> str | None:
    """Why no kernel can run on this machine, wherever tensors are; None if one can."""
    if not triton_installed():
        return "Triton is not installed: pip install triton, or pass kernels='auto'."
    if not torch.accelerator.is_available() and not _interprets():
        return (
            "there is no GPU here. Pass kernels='auto', or set TRITON_INTERPRET=1 beforehand for Triton's interpreter."
        )
    return None


@functools.cache
def triton_installed() -> bool:
    """True where Triton can be imported."""
    return importlib.util.find_spec("triton") is not None
