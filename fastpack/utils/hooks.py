"""Tell whether calling a module does more than its class's forward: then it has to be called, and can't be read.

And tell how one is checkpointed.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

from torch import nn
from torch.nn.modules import module as _module
from torch.utils.checkpoint import checkpoint

_CAPTURING = "transformers.utils.output_capturing"
"""The module of the hooks that transformers leaves behind for good once outputs were captured."""


def carries_hooks(module: nn.Module) -> bool:
    """True where hooks run when a module is called, or its instance has a forward of its own."""
    return own_forward(module) is not None or has_hooks(module)


def own_forward(module: nn.Module) -> Any:
    """The forward that was set on the instance, unless it is its class's, which accelerate's hooks leave behind."""
    found = module.__dict__.get("forward")
    return None if getattr(found, "__func__", None) is type(module).forward else found


def has_hooks(module: nn.Module) -> bool:
    """True where hooks run when a module is called: its own, or those that torch runs for every module.

    Those that capture outputs for transformers don't count: while they do, the stock path runs.
    """
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks or hooks_for_every_module():
        return True
    hooks = module._forward_hooks
    return bool(hooks) and any(getattr(hook, "__module__", None) != _CAPTURING for hook in hooks.values())


def hooks_for_every_module() -> bool:
    """True where torch runs hooks whenever any module is called."""
    return bool(
        _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    )


def checkpointing(module: nn.Module) -> Literal["plain", "reentrant", "own", ""]:
    """Tell how transformers checkpoints a module: torch's checkpointing or its reentrant kind, or ``own`` for a
    function that we don't know; empty for one that was never given any."""
    function = module.__dict__.get("_gradient_checkpointing_func")
    if function is None:
        return ""
    if not isinstance(function, functools.partial) or function.func is not checkpoint or function.args:
        return "own"
    if not function.keywords.keys() <= {"use_reentrant", "preserve_rng_state"}:
        return "own"
    return "reentrant" if function.keywords.get("use_reentrant", True) else "plain"
