"""Another shape for a tensor that nobody else holds."""

from __future__ import annotations

import torch
from torch import Tensor


def reshaped(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The same memory under another shape, of as many elements, which autograd does not take for a view.

    FSDP2 hangs its hooks on what a layer returns, and warns where that is a view: an operation in place would take the
    hooks off. ``x`` itself must not be read any more, since what is written into the result goes unnoticed there.
    """
    result: Tensor = torch.ops.aten._unsafe_view.default(x, shape)
    return result


def as_row(x: Tensor) -> Tensor:
    """``[T, ...]`` to ``[1, T, ...]``, see :func:`reshaped`."""
    return reshaped(x, (1, *x.shape))
