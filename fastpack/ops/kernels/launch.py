"""What launchers share: the device that a kernel runs on, and rows of any distance."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, overload

import torch
from torch import Tensor

_HERE = contextlib.nullcontext()


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which must be the tensor's: a model may be spread over several."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(x.device)


def processors(device: torch.device) -> int:
    """Multiprocessors; a few on a CPU, where Triton's interpreter runs programs one after another."""
    return _processors(device.index) if device.type == "cuda" else 2


@functools.cache
def _processors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may hold beside its registers; plenty on a CPU."""
    return _shared_memory(device.index) if device.type == "cuda" else 2**20


@functools.cache
def _shared_memory(index: int) -> int:
    properties: Any = torch.cuda.get_device_properties(index)
    return int(properties.shared_memory_per_block_optin)


def stages_that_fit(device: torch.device, most: int, held: int, streamed: int) -> int:
    """How many tiles of ``streamed`` bytes may be on their way beside ``held`` bytes, at most so many; 0 for none."""
    return max(0, min(most, (shared_memory(device) - held) // streamed))


@overload
def in_rows(x: Tensor, width: int) -> tuple[Tensor, int]: ...
@overload
def in_rows(x: Tensor | None, width: int) -> tuple[Tensor | None, int]: ...
def in_rows(x: Tensor | None, width: int) -> tuple[Tensor | None, int]:
    """``[..., width]``, and the distance of its rows: a view where they lie evenly, else a contiguous copy."""
    if x is None or x.is_contiguous():
        return x, width
    rows = x.reshape(-1, width)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    return rows, rows.stride(0)
