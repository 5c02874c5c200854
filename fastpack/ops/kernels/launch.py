"""What launchers share: where and how early a kernel is launched, groups in one launch, rows of any distance."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 3
"""Members of a group in one launch: q, k and v."""

_HERE = contextlib.nullcontext()


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which must be the tensor's: a model may be spread over several."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(x.device)


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """What every kernel does first: wait until the kernel before it in the stream has ended, and can be read."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def rows_that_count(count, rows):
    """How many of the first rows have to be read: as many as the int32 at ``count`` says; all, where that is None."""
    if count is not None:
        rows = tl.minimum(rows, tl.load(count))
    return rows


def early(x: Tensor) -> dict[str, bool]:
    """Arguments of a launch on the device of ``x``, which need not wait until the kernel before has ended.

    Hopper and its successors can set a kernel up and place its programs while the last programs of the one before are
    still at work (programmatic dependent launch), if it waits for them by itself, as :func:`wait_for_inputs` does: 1.4
    us of what lies between two kernels are gone then. None of ours lets the next one begin before its own end: programs
    that wait would take the place of those that work.
    """
    if x.is_cuda and _can_launch_early(x.device):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@functools.cache
def _can_launch_early(device: torch.device) -> bool:
    compiled = isinstance(wait_for_inputs, triton.JITFunction)  # Triton's interpreter knows nothing of it
    return compiled and capability(device) >= (9, 0)


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of an NVIDIA GPU; that of others, which count otherwise, is (0, 0)."""
    return torch.cuda.get_device_capability(device) if torch.version.cuda is not None else (0, 0)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors; a few on a CPU, where Triton's interpreter runs programs one after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may hold beside its registers; plenty on a CPU."""
    properties: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return 2**20 if properties is None else int(properties.shared_memory_per_block_optin)


def stages_that_fit(device: torch.device, most: int, held: int, streamed: int) -> int:
    """How many tiles of ``streamed`` bytes may be on their way beside ``held`` bytes, at most so many; 0 for none."""
    return max(0, min(most, (shared_memory(device) - held) // streamed))


def filled(given: Sequence[Any], places: int = MOST) -> list[Any]:
    """As many as there are places: the last one again in those that are not looked at."""
    return [*given, *[given[-1]] * (places - len(given))]


def threes(given: Sequence[tuple[Any, ...]]) -> Iterator[tuple[slice, list[Any]]]:
    """The arguments of each launch; those of its last entry again where there are not three."""
    for first in range(0, len(given), MOST):
        some = slice(first, first + MOST)
        yield some, [argument for each in filled(given[some]) for argument in each]


def in_rows(x: Tensor, width: int) -> tuple[Tensor, int]:
    """``[..., width]``, and the distance of its rows: a view where they lie evenly, else a contiguous copy."""
    if x.is_contiguous():
        return x, width
    rows = x.reshape(-1, width)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    return rows, rows.stride(0)
