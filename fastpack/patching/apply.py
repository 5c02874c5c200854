"""Apply a plan to a model, undo it, and disable it for a while."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from fastpack.errors import NoFasterWarning, PatchError
from fastpack.layers.hf_attention import private_config, register_interface
from fastpack.layers.mlp import mlp_forward
from fastpack.layers.norm import norm_forward
from fastpack.model.head import head_forward
from fastpack.model.unwrap import STATE_ATTRIBUTE, Parts, find_parts, refuse_wrapped, wrapper_chain
from fastpack.packing.two_way import TwoWay
from fastpack.patching.changes import Attribute, Change, restore_copies, restore_head
from fastpack.patching.match import Match
from fastpack.patching.options import PatchOptions
from fastpack.patching.plan import PatchPlan, make_plan
from fastpack.patching.state import PatchState, carries, state_of
from fastpack.utils.replacement import FORWARD_COPY, Replacement, Restore, replaces


def plan_all(models: list[nn.Module], options: PatchOptions, match: Match) -> list[PatchPlan]:
    """Return plans for the models that these options change; see :func:`make_plan`.

    Each model is planned without fastpack's forwards: an existing patch is undone first. If any plan fails, every
    undone patch is installed again.
    """
    plans: list[PatchPlan] = []
    with ExitStack() as on_failure:
        for model in models:
            parts = find_parts(model)
            backbone, state = parts.backbone, state_of(parts.backbone)
            if any(plan.backbone is backbone for plan in plans):
                continue
            if state is not None:
                if state.options == options and (parts.head is None or carries(parts.head, state)):
                    continue
                _refuse_another_head(parts, state)
            refuse_wrapped(model)
            for reinstall in restore(model):
                on_failure.callback(reinstall)  # the stack calls the last one first
            plans.append(make_plan(model, options, match))
            if plans[-1].mixing.describe()["tier"] == "re-padded model":
                warnings.warn(
                    f"{plans[-1].report.model} runs as a re-padded model: its sequences are exact and isolated, but "
                    "run on padded rows, so nothing gets faster.",
                    NoFasterWarning,
                    stacklevel=3,
                )
        on_failure.pop_all()
    return plans


def _refuse_another_head(parts: Parts, state: PatchState) -> None:
    """Raise if a backbone is patched together with another head, which this patch would make stock again."""
    heads = [change.module for change in state.changes if replaces(change, head_forward)]
    if not heads or parts.head in heads:
        return
    other = "the backbone alone" if parts.head is None else f"another head, a {type(parts.head).__name__},"
    raise PatchError(
        f"this {type(parts.backbone).__name__} is patched with its {type(heads[0]).__name__}, and a patch with "
        f"{other} would leave that head stock. Patch the same model again, or unpatch it first. Nothing was changed."
    )


def apply(plan: PatchPlan, options: PatchOptions) -> None:
    """Install the changes of a plan, and store a record of them on the backbone."""
    register_interface(options.attention)
    changes: list[Change] = []
    configs: dict[tuple[int, TwoWay | None], Any] = {}
    for replacement in plan.replacements:
        changes.append(replacement)
        if replacement.function in (norm_forward, mlp_forward):
            changes.append(Attribute(replacement.module, FORWARD_COPY, replacement))
    for module, two_way in plan.interface_modules.items():
        key = id(module.config), two_way
        if key not in configs:
            context = plan.runtime.layers.context
            configs[key] = private_config(module.config, options.attention, context, two_way)
        changes.append(Attribute(module, "config", configs[key]))
    changes += [*plan.attributes, plan.pre_hook]
    for change in changes:
        change.install()
    plan.runtime.user_changes.configs += configs.values()
    plan.backbone.__dict__[STATE_ATTRIBUTE] = PatchState(options, plan.report, plan.mixing, plan.runtime, changes)


def restore(model: nn.Module) -> list[Restore]:
    """Undo a patch, and return functions that install it again, to be called from the last to the first."""
    parts = find_parts(model)
    state = state_of(parts.backbone)
    if state is None:
        if parts.head is not None:
            restore_head(parts.head)
        return []
    restores: list[Restore] = [functools.partial(setattr, parts.backbone, STATE_ATTRIBUTE, state)]
    del parts.backbone.__dict__[STATE_ATTRIBUTE]
    restores += [change.undo() for change in reversed(state.changes)]
    return restores + restore_copies(model, [change.module for change in state.changes])


@contextmanager
def temporarily_patched(model: nn.Module, match: Match) -> Iterator[None]:
    """Patch a stock model with the default options inside a ``with`` block, then restore it."""
    options = PatchOptions()
    for plan in plan_all([model], options, match):
        apply(plan, options)
    try:
        yield
    finally:
        restore(model)


@contextmanager
def without_wrappers(model: nn.Module) -> Iterator[PatchState]:
    """Remove wrappers of other code around fastpack's and the model's forwards inside a ``with`` block.

    Autocast is an example. Accelerate's hooks, which move tensors, stay.

    Yields:
        The record of the patch.
    """
    state = state_of(find_parts(model).backbone)
    assert state is not None
    with ExitStack() as later:
        for module in wrapper_chain(model):
            wrapped = module.__dict__.get("_original_forward")  # accelerate's prepare() stores it there
            if wrapped is not None and "_hf_hook" not in module.__dict__:
                later.callback(setattr, module, "forward", module.__dict__["forward"])
                module.forward = wrapped
        for change in state.changes:
            if isinstance(change, Replacement):
                later.callback(change.remove_wrapper())
        yield state


@contextmanager
def disabled(state: PatchState) -> Iterator[None]:
    """Disable every change inside a ``with`` block, so that the model is stock. Changes by other code stay."""
    with ExitStack() as later:
        for change in reversed(state.changes):
            later.callback(change.disable())
        yield
