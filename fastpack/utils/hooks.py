"""Tell whether calling a module does more than run its class's forward, and how a module is checkpointed.

Such a module has to be called: reading its weights instead would skip the hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.nn.modules import module as _module
from torch.utils.checkpoint import checkpoint

_CAPTURING = "transformers.utils.output_capturing"
"""The module of the hooks that transformers never removes once it has captured outputs."""
_SHARDING = "torch.distributed.fsdp."
"""The package of FSDP2's hooks, which gather weights and hook gradients, and read a result only to cast it."""


def carries_hooks(module: nn.Module) -> bool:
    """Return whether hooks run when a module is called, or its instance has its own forward."""
    return own_forward(module) is not None or has_hooks(module)


def own_forward(module: nn.Module) -> Any:
    """Return the forward that was set on the instance, or None.

    The class's own forward does not count: accelerate's hooks leave it on the instance.
    """
    forward = module.__dict__.get("forward")
    return None if getattr(forward, "__func__", None) is type(module).forward else forward


def has_hooks(module: nn.Module, *, that_read: bool = False) -> bool:
    """Return whether hooks run when a module is called: its own, or those that torch runs for every module.

    Hooks that capture outputs for transformers don't count: while they capture, the stock path runs.

    Args:
        module: the module.
        that_read: whether to count only hooks that may read what the module returns, which FSDP2's don't.
    """
    if module._backward_hooks or module._backward_pre_hooks or hooks_for_every_module():
        return True
    if module._forward_pre_hooks and not that_read:
        return True
    passes = (_CAPTURING, _SHARDING) if that_read else (_CAPTURING,)
    return not all(str(getattr(hook, "__module__", "")).startswith(passes) for hook in module._forward_hooks.values())


def hooks_for_every_module() -> bool:
    """Return whether torch runs hooks whenever any module is called."""
    return bool(
        _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    )


@dataclass(frozen=True, eq=False)
class WrappedCheckpointing:
    """A module's checkpointing function, with something around it.

    Attributes:
        stock: the function of transformers.
        call: the function to call, which calls ``stock``.
    """

    stock: Callable[..., Any]
    call: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Checkpoint the module."""
        return self.call(*args, **kwargs)


def checkpointing(module: nn.Module) -> Literal["plain", "reentrant", "own", ""]:
    """Return how transformers checkpoints a module.

    The result is ``plain`` or ``reentrant`` for torch's two kinds, ``own`` for a function that we don't know, and empty
    for a module that is not checkpointed.
    """
    function = module.__dict__.get("_gradient_checkpointing_func")
    while isinstance(function, WrappedCheckpointing):
        function = function.stock
    if function is None:
        return ""
    if not isinstance(function, functools.partial) or function.func is not checkpoint or function.args:
        return "own"
    if not function.keywords.keys() <= {"use_reentrant", "preserve_rng_state"}:
        return "own"
    return "reentrant" if function.keywords.get("use_reentrant", True) else "plain"
