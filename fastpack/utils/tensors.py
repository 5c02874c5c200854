"""Tensors on their way to a device, alone and in objects that hold several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Held = TypeVar("Held")


def send(made: Tensor, device: torch.device) -> Tensor:
    """Send a tensor made on the host, from pinned memory, since a copy from other memory waits for a GPU."""
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


def map_tensors(value: Held, change: Callable[[Tensor], Tensor]) -> Held:
    """Return a dataclass or tuple with ``change(tensor)`` in place of each tensor in it, however deep."""
    made: Any = value
    if isinstance(value, Tensor):
        made = change(value)
    elif isinstance(value, tuple):
        made = tuple(map_tensors(item, change) for item in value)
    elif is_dataclass(value):
        parts = {part.name: map_tensors(getattr(value, part.name), change) for part in fields(value) if part.init}
        made = replace(made, **parts)
    return made
