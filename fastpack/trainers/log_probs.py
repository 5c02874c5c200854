"""The fused loss of TRL's trainers that compute theirs from per-token log-probabilities.

GRPO, RLOO, DPO, KTO and their kin call the policy, and a reference model, with ``fused_lm_head=True``. With
``fastpack.patch(trainer, loss="fused")`` both get log-probabilities from :mod:`fastpack.model.log_probs`; the loss, a
formula in these numbers, and the metrics stay the trainer's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from fastpack.model.log_probs import (
    LogProbCalls,
    log_probs_on,
    put_log_probs,
    remove_log_probs,
    why_no_log_probs,
)
from fastpack.model.unwrap import OTHER_MODELS, find_parts
from fastpack.patching.state import FUSED_LOSS, trainer_record
from fastpack.utils.console import counted


@dataclass(eq=False)
class LogProbsState:
    """The fused log-probabilities of a trainer.

    Attributes:
        reads_head_loss: whether the loss is that of the head.
        calls: the counts of the calls, which all heads share.
        heads: the heads with our forward.
        left: the models that keep TRL's own, each with the reason.
    """

    reads_head_loss: ClassVar[bool] = False
    calls: LogProbCalls
    heads: list[nn.Module]
    left: tuple[str, ...]

    def rejects(self, trainer: object) -> str | None:
        """Return why the trainer keeps its own loss now, or None; its forwards may have changed since the patch."""
        taken = next((head for head in self.heads if log_probs_on(head) is None), None)
        return None if taken is None else f"the forward of {type(taken).__name__} was replaced after the patch"

    def describe(self) -> str:
        """Return a line for the report."""
        calls = self.calls
        ran = f"{counted(calls.fused, 'call')} so far, {counted(calls.tokens, 'token')}" if calls.fused else "each call"
        stock = f"; {calls.stock} had TRL's own op ({calls.why_stock})" if calls.stock else ""
        left = f"; TRL's own stay in {', '.join(self.left)}" if self.left else ""
        return f"loss: log-probabilities fused with the head in {ran}; the loss itself is the trainer's{stock}{left}"


def plan_log_probs(trainer: Any) -> Callable[[], None] | str | None:
    """Return a function that fuses a trainer's log-probabilities and can't fail, None for no change, or why not."""
    heads: list[nn.Module] = []
    left: list[str] = []
    for name in ("model", *OTHER_MODELS):
        model = getattr(trainer, name, None)
        if not isinstance(model, nn.Module):
            continue
        head = find_parts(model).head
        reason = why_no_log_probs(head)
        if reason is None:
            heads.append(head)
        elif name == "model":
            return reason
        else:
            left.append(f"{name} ({reason})")
    state = trainer_record(trainer, FUSED_LOSS)
    same = isinstance(state, LogProbsState) and state.left == tuple(left)
    if same and [*map(id, state.heads)] == [*map(id, heads)] and state.rejects(trainer) is None:
        return None
    return functools.partial(_set_up, trainer, LogProbsState(LogProbCalls(), heads, tuple(left)))


def _set_up(trainer: Any, state: LogProbsState) -> None:
    for head in state.heads:
        remove_log_probs(head)
        put_log_probs(head, state.calls)
    trainer.__dict__[FUSED_LOSS] = state


def remove_state(trainer: Any, state: LogProbsState) -> None:
    """Give a trainer's heads TRL's forwards again."""
    for head in state.heads:
        remove_log_probs(head)
    trainer.__dict__.pop(FUSED_LOSS, None)
