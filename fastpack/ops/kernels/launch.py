"""Helpers of the launchers: the device and time of a launch, grouped launches, and strides of rows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

UNPIPELINED = 1
"""The stages of a loop that loads tiles for matmuls and reads the same tiles into registers.

With more, Triton 3.6 to 3.9 gives these tiles a buffer too few on Hopper: a copy for a later step overwrites what
matmuls still read, and a few elements of the result are wrong at times (tests/ops/kernels/pipelines.py).
"""
MAX_GROUP = 3
"""The most members of a group in one launch: q, k and v."""

_CURRENT_DEVICE = contextlib.nullcontext()


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which Triton launches on the device of ``x``: a model may be spread over several."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return _CURRENT_DEVICE
    return torch.cuda.device(x.device)


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Wait until the previous kernel in the stream has ended and its results can be read. Kernels call this first."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def rows_that_count(count, rows):
    """Return how many of the first rows have to be read: the int32 at ``count``, or all rows if that is None."""
    if count is not None:
        rows = tl.minimum(rows, tl.load(count))
    return rows


def early(x: Tensor) -> dict[str, bool]:
    """Return the arguments that let a kernel on the device of ``x`` launch before the previous kernel ends.

    Hopper and its successors can set a kernel up and place its programs while the last programs of the previous kernel
    still run (programmatic dependent launch). The kernel must then wait for them itself, as :func:`wait_for_inputs`
    does. This saves 1.4 us between two kernels. No kernel here lets the next one begin before its own end: waiting
    programs would take the place of working ones.
    """
    if x.is_cuda and _can_launch_early(x.device):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@functools.cache
def _can_launch_early(device: torch.device) -> bool:
    compiled = isinstance(wait_for_inputs, triton.JITFunction)  # Triton's interpreter has no early launches
    return compiled and capability(device) >= (9, 0)


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA GPU, or (0, 0) for other GPUs, which number theirs differently."""
    return torch.cuda.get_device_capability(device) if torch.version.cuda is not None else (0, 0)


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors; 2 on a CPU, where Triton's interpreter runs one program after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use; 1 MiB on a CPU."""
    properties: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return 2**20 if properties is None else int(properties.shared_memory_per_block_optin)


def stages_that_fit(device: torch.device, most: int, resident: int, streamed: int) -> int:
    """Return how many pipeline stages of ``streamed`` bytes fit beside ``resident`` bytes: at most ``most``, or 0."""
    return max(0, min(most, (shared_memory(device) - resident) // streamed))


def filled(values: Sequence[Any], places: int = MAX_GROUP) -> list[Any]:
    """Return ``values`` padded to ``places`` entries with the last one; the kernels ignore the padding."""
    return [*values, *[values[-1]] * (places - len(values))]


def threes(entries: Sequence[tuple[Any, ...]]) -> Iterator[tuple[slice, list[Any]]]:
    """Yield each launch's slice of up to three entries and its flat arguments; the last entry fills missing places."""
    for first in range(0, len(entries), MAX_GROUP):
        group = slice(first, first + MAX_GROUP)
        yield group, [argument for entry in filled(entries[group]) for argument in entry]


def in_rows(x: Tensor, width: int) -> tuple[Tensor, int]:
    """Return ``x`` as rows ``[*, width]`` and their stride: a view if evenly spaced, else a contiguous copy."""
    if x.is_contiguous():
        return x, width
    rows = x.reshape(-1, width)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    return rows, rows.stride(0)
