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
