"""Apply a plan to a model, undo it, and lay it aside for a while."""

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
from fastpack.model.unwrap import STATE, Parts, find_parts, refuse_wrapped, way_in
from fastpack.patching.changes import Attribute, Change, take_off_copies, take_off_head
from fastpack.patching.match import Match
from fastpack.patching.options import PatchOptions
from fastpack.patching.plan import Plan, make_plan
from fastpack.patching.state import PatchState, carries, state_of
from fastpack.utils.replacement import FORWARD_COPY, Replacement, Restore, replaces


def plan_all(models: list[nn.Module], options: PatchOptions, match: Match) -> list[Plan]:
    """Plans for the models that these options change, each seen without our forwards; see :func:`make_plan`.

    A patch in force is taken off to look beneath it; where any plan fails, every such patch is put back.
    """
    plans: list[Plan] = []
    with ExitStack() as put_back:
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
            for put_on in restore(model):
                put_back.callback(put_on)  # it calls the last one first
            plans.append(make_plan(model, options, match))
            if plans[-1].mixing.describe()["tier"] == "re-padded model":
                warnings.warn(
                    f"{plans[-1].report.model} runs as a re-padded model: sequences are exact and apart, but on padded "
                    "rows, so that nothing gets faster.",
                    NoFasterWarning,
                    stacklevel=3,
                )
        put_back.pop_all()
    return plans


def _refuse_another_head(parts: Parts, state: PatchState) -> None:
    """Raise where a patch of this backbone has a head which this patch would leave stock without a word."""
    heads = [change.module for change in state.changes if replaces(change, head_forward)]
    if not heads or parts.head in heads:
        return
    other = "the backbone alone" if parts.head is None else f"another head, a {type(parts.head).__name__},"
    raise PatchError(
        f"this {type(parts.backbone).__name__} is patched with its {type(heads[0]).__name__}, and to patch it with "
        f"{other} would leave that one stock. Patch the same model again, or unpatch it first. Nothing was changed."
    )


def apply(plan: Plan, options: PatchOptions) -> None:
    """Change what a plan says, and keep on the backbone what was changed."""
    register_interface(options.attention)
    changes: list[Change] = []
    configs: dict[int, Any] = {}
    for replacement in plan.replacements:
        changes.append(replacement)
        if replacement.function in (norm_forward, mlp_forward):
            changes.append(Attribute(replacement.module, FORWARD_COPY, replacement))
    for module in plan.interface_modules:
        original = module.config
        if id(original) not in configs:
            configs[id(original)] = private_config(original, options.attention, plan.runtime.layers.context)
        changes.append(Attribute(module, "config", configs[id(original)]))
    changes.append(plan.pre_hook)
    for change in changes:
        change.install()
    plan.runtime.watch.configs += configs.values()
    plan.backbone.__dict__[STATE] = PatchState(options, plan.report, plan.mixing, plan.runtime, changes)


def restore(model: nn.Module) -> list[Restore]:
    """Undo a patch; what puts it back again, to be called from the last to the first."""
    parts = find_parts(model)
    state = state_of(parts.backbone)
    if state is None:
        if parts.head is not None:
            take_off_head(parts.head)
        return []
    restores: list[Restore] = [functools.partial(setattr, parts.backbone, STATE, state)]
    del parts.backbone.__dict__[STATE]
    restores += [change.undo() for change in reversed(state.changes)]
    return restores + take_off_copies(model, [change.module for change in state.changes])


@contextmanager
def temporarily_patched(model: nn.Module, match: Match) -> Iterator[None]:
    """Patch a stock model with the usual options, and restore it behind."""
    options = PatchOptions()
    for plan in plan_all([model], options, match):
        apply(plan, options)
    try:
        yield
    finally:
        restore(model)


@contextmanager
def uncovered(model: nn.Module) -> Iterator[PatchState]:
    """A patched model without what others have put over our forwards since, and over its own, such as autocast.

    Accelerate's hooks, which move tensors, stay.
    """
    state = state_of(find_parts(model).backbone)
    assert state is not None
    with ExitStack() as later:
        for module in way_in(model):
            wrapped = module.__dict__.get("_original_forward")  # as accelerate's prepare() leaves it
            if wrapped is not None and "_hf_hook" not in module.__dict__:
                later.callback(setattr, module, "forward", module.__dict__["forward"])
                module.forward = wrapped
        for change in state.changes:
            if isinstance(change, Replacement):
                later.callback(change.remove_wrapper())
        yield state


@contextmanager
def disabled(state: PatchState) -> Iterator[None]:
    """The stock model, until the end: every change is as if it were undone, and nothing that others did is touched."""
    with ExitStack() as later:
        for change in reversed(state.changes):
            later.callback(change.disable())
        yield
