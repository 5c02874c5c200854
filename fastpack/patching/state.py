"""The record of a patch, kept on the model's backbone, and of what a trainer was given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from fastpack.layers.hf_attention import register_interface
from fastpack.model.runtime import ModelRuntime
from fastpack.model.unwrap import STATE, find_parts, models_of
from fastpack.patching.changes import Change
from fastpack.patching.options import PatchOptions
from fastpack.patching.report import PatchReport
from fastpack.patching.token_mixers import Mixing

BUDGET, FUSED_LOSS = "_fastpack_budget", "_fastpack_loss"
"""The attributes of a trainer under which its token budget, and the loss in place of its own, are kept."""


def kept_on(target: object, name: str) -> Any:
    """The thing that a trainer has under one of these; None where it has nothing, and for a model."""
    return getattr(target, "__dict__", {}).get(name)


@dataclass
class PatchState:
    """The record of one model's patch: what was changed, in order, and what was known of it beforehand."""

    options: PatchOptions
    report: PatchReport
    mixing: Mixing
    runtime: ModelRuntime
    changes: list[Change]

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A model that comes out of a pickle in a fresh process needs our name in AttentionInterface again.
        self.__dict__.update(state)
        register_interface(self.options.attention)


def options_of(model: nn.Module) -> PatchOptions | None:
    """The options of the patch in force on a model, None where there is none."""
    state = state_of(find_parts(model).backbone)
    return None if state is None else state.options


def state_of(backbone: nn.Module) -> PatchState | None:
    """The record of the patch in force on a backbone."""
    return backbone.__dict__.get(STATE)


def carries(module: nn.Module, state: PatchState) -> bool:
    """True where a patch changed this very module."""
    return any(change.module is module for change in state.changes)


def is_patched(target: object) -> bool:
    """True where ``patch`` is in force on this model; for a trainer, on the model that it trains."""
    return state_of(find_parts(models_of(target)[0]).backbone) is not None
