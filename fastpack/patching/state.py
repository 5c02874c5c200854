"""The record of a patch on a model's backbone, and a trainer's records of its token budget and fused loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from fastpack.layers.hf_attention import register_interface
from fastpack.model.model_runtime import ModelRuntime
from fastpack.model.unwrap import STATE_ATTRIBUTE, find_parts, models_of
from fastpack.patching.changes import Change
from fastpack.patching.options import PatchOptions
from fastpack.patching.report import PatchReport
from fastpack.patching.token_mixers import Mixing

BUDGET, FUSED_LOSS, CONTEXT_PARALLEL = "_fastpack_budget", "_fastpack_loss", "_fastpack_context_parallel"
"""The attributes of a trainer that hold its token budget, the loss that replaces its own, and what it had before its
batches were spread over ranks."""


def trainer_record(target: object, name: str) -> Any:
    """Return a trainer's record under one of the names above, or None. A model has no such record."""
    return getattr(target, "__dict__", {}).get(name)


@dataclass
class PatchState:
    """The record of one model's patch: its options, the report made beforehand, and the changes in order."""

    options: PatchOptions
    report: PatchReport
    mixing: Mixing
    runtime: ModelRuntime
    changes: list[Change]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the record, and register fastpack's attention in this process."""
        # In a fresh process an unpickled model needs fastpack's name in AttentionInterface again.
        self.__dict__.update(state)
        register_interface(self.options.attention)


def options_of(model: nn.Module) -> PatchOptions | None:
    """Return the options of the patch in force on a model, or None."""
    state = state_of(find_parts(model).backbone)
    return None if state is None else state.options


def state_of(backbone: nn.Module) -> PatchState | None:
    """Return the record of the patch in force on a backbone, or None."""
    return backbone.__dict__.get(STATE_ATTRIBUTE)


def carries(module: nn.Module, state: PatchState) -> bool:
    """Return whether a patch changed this very module."""
    return any(change.module is module for change in state.changes)


def is_patched(target: object) -> bool:
    """Return whether a model is patched; for a trainer, the model that it trains.

    Example:
        >>> fastpack.is_patched(fastpack.patch(model))  # doctest: +SKIP
        True
    """
    return state_of(find_parts(models_of(target)[0]).backbone) is not None
