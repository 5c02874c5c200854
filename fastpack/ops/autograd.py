"""Helpers for autograd Functions: a backward that refuses a second one, facts about torch's, reshapes without views."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a Function's ``backward`` so that differentiating its results raises an error.

    torch's ``once_differentiable`` raises only if an incoming gradient has a graph. The gradient that comes from a loss
    has none, so a penalty on a weight's gradient would silently get no gradient.

    Raises:
        RuntimeError: when results that the backward returned under ``create_graph=True`` are differentiated.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor | None) -> Any:
        with torch.no_grad():
            returned = backward(ctx, *grads)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return returned
        results = returned if isinstance(returned, tuple) else (returned,)
        refuse: Any = torch._C._functions.DelayedError(
            b"trying to differentiate twice through a model that is patched with fastpack, whose fast forwards can be "
            b"differentiated only once. Undo the patch first: fastpack.unpatch(model).",
            len(results),
        )
        with_graph = [None if result is None else result.detach().requires_grad_() for result in results]
        return refuse(*with_graph)

    return wrapper


@functools.cache
def clamp_passes_its_limits() -> bool:
    """Return whether torch's clamp has a gradient at exactly its limits: up to torch 2.13 it has, in 2.14.1 not.

    The first call may be inside a checkpointed layer, whose hooks must not see what this saves: a recomputation would
    not save it again.
    """
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        x = torch.zeros((), device="cpu", requires_grad=True)
        (slope,) = torch.autograd.grad(x.clamp(max=0.0), x)
    return bool(slope)


def is_last_pass() -> bool:
    """Return whether this backward is the last to read its saved tensors, so that it may overwrite them."""
    return not torch.compiler.is_compiling() and not torch._C._autograd._get_current_graph_task_keep_graph()


def keeps_what_it_saves() -> bool:
    """Return whether a forward's saved tensors are kept until the backward, as they are without checkpointing.

    In a backward, what is recomputed then saves tensors for a moment: a layer, or all that one checkpoint holds.
    """
    if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
        return False
    return not checkpoint_hook()


def checkpoint_hook() -> str:
    """Return the qualified name of the innermost saved-tensor hook if it is torch's checkpointing's, else nothing."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint":
        return ""
    return str(getattr(hooks[0], "__qualname__", ""))


def without_memory(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of x's dtype and device that stands for another one in autograd's graph.

    Nothing reads it but anomaly detection, which looks for NaN in gradients.
    """
    make = x.new_zeros if torch.is_anomaly_enabled() else x.new_empty
    return make((1,) * len(shape)).expand(shape)


def reshaped(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Reshape ``x`` without a copy; autograd does not treat the result as a view.

    FSDP2 attaches its hooks to the tensors that a layer returns, and warns about views, since an in-place operation on
    one would drop the hooks. ``shape`` must have as many elements as ``x``. Don't read ``x`` afterwards: autograd does
    not know that a write to the result changes ``x`` too.
    """
    return torch.ops.aten._unsafe_view.default(x, shape)


def as_row(x: Tensor) -> Tensor:
    """Add a leading dimension, ``[T, ...]`` to ``[1, T, ...]``, as :func:`reshaped` does."""
    return reshaped(x, (1, *x.shape))
