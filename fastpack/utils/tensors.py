"""Send tensors to a device, and map a function over the tensors in an object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Send a tensor from the host to a device, through pinned memory: other copies wait for the GPU."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def map_tensors(value: Value, change: Callable[[Tensor], Tensor]) -> Value:
    """Return a copy of nested dataclasses and tuples with ``change(tensor)`` in place of each tensor."""
    result: Any = value
    if isinstance(value, Tensor):
        result = change(value)
    elif isinstance(value, tuple):
        result = tuple(map_tensors(item, change) for item in value)
    elif is_dataclass(value):
        parts = {part.name: map_tensors(getattr(value, part.name), change) for part in fields(value) if part.init}
        result = replace(result, **parts)
    return result
