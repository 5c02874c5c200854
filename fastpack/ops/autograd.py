"""What autograd Functions of ours share: backwards that can't be differentiated again, and views that are none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the backward of an autograd Function: who differentiates its results is told that this can't be done.

    torch's ``once_differentiable`` tells it only where an incoming gradient has a graph. Behind a loss it has none, and
    a penalty on a weight's gradient would silently have none either.

    Raises:
        RuntimeError: in the second differentiation, from the results that it returns under ``create_graph=True``.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor | None) -> Any:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return found
        results = found if isinstance(found, tuple) else (found,)
        refuse: Any = torch._C._functions.DelayedError(
            b"trying to differentiate twice through a model that is patched with fastpack, whose fast forwards are "
            b"differentiable once. Take the patch off for that: fastpack.unpatch(model).",
            len(results),
        )
        with_graph = [None if result is None else result.detach().requires_grad_() for result in results]
        return refuse(*with_graph)

    return wrapper


def is_last_pass() -> bool:
    """True in a backward after which nobody can read what was saved for it, so that its results may take its place."""
    return not torch.compiler.is_compiling() and not torch._C._autograd._get_current_graph_task_keep_graph()


def reshaped(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The same memory under another shape, of as many elements, which autograd does not take for a view.

    FSDP2 hangs its hooks on what a layer returns, and warns where that is a view: an operation in place would take the
    hooks off. ``x`` itself must not be read any more, since what is written into the result goes unnoticed there.
    """
    return torch.ops.aten._unsafe_view.default(x, shape)


def as_row(x: Tensor) -> Tensor:
    """``[T, ...]`` to ``[1, T, ...]``, see :func:`reshaped`."""
    return reshaped(x, (1, *x.shape))
