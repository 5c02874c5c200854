"""What is kept of a training run: what it logged, and the log-probability of every sequence in every forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Figures:
    """One run.

    Attributes:
        logged: of each step, what the trainer logged.
        policy, reference: log-probabilities of completions, one of each sequence in each forward, with and without
            gradients, in their order.
        beta: by which they are multiplied to become rewards.
        pairs: of DPO: (chosen, rejected) places in ``policy``.
    """

    beta: float = 1.0
    logged: list[dict[str, Any]] = field(default_factory=list)
    policy: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)

    @property
    def largest(self) -> float:
        """The largest log-probability, without its sign."""
        return max((abs(value) for value in (*self.policy, *self.reference)), default=0.0)

    @property
    def margins(self) -> list[float]:
        """Of each pair, beta times how much more the policy prefers the chosen one than the reference does."""
        if len(self.reference) != len(self.policy):
            return []
        gained = [ours - theirs for ours, theirs in zip(self.policy, self.reference, strict=True)]
        return [self.beta * (gained[chosen] - gained[rejected]) for chosen, rejected in self.pairs]


class Recorder:
    """Hears every forward that computes log-probabilities, as TRL's fused heads return them (``log_probs``)."""

    def __init__(self) -> None:
        self._with_gradients: list[torch.Tensor] = []
        self._without: list[torch.Tensor] = []

    def listen(self, *models: Any) -> None:
        """Register on these models; the same one twice counts once."""
        for model in {id(model): model for model in models if model is not None}.values():
            model.register_forward_hook(self._hear)

    def _hear(self, model: Any, args: Any, output: Any) -> None:
        found = getattr(output, "log_probs", None)
        if found is not None:
            kept = self._with_gradients if torch.is_grad_enabled() else self._without
            kept.append(found.detach().double().sum(-1))

    def figures(self, trainer: Any) -> Figures:
        """Everything heard, and everything that the trainer logged."""
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        beta = getattr(trainer.args, "beta", None)
        found = Figures(beta or 1.0, logged, _flat(self._with_gradients), _flat(self._without))
        data = trainer.train_dataset
        if "ref_chosen_logps" in data.column_names:  # precomputed: heard over the whole data, in their order
            found.reference = _as_in_batches(
                data["ref_chosen_logps"], data["ref_rejected_logps"], trainer.args.per_device_train_batch_size
            )[: len(found.policy)]
        if "chosen_ids" in data.column_names:
            for at, batch in zip(_starts(self._with_gradients), self._with_gradients, strict=True):
                half = len(batch) // 2  # TRL's batch: all that are chosen, then all that are rejected
                found.pairs += [(at + row, at + half + row) for row in range(half)]
        return found


def _flat(forwards: Sequence[torch.Tensor]) -> list[float]:
    return torch.cat(list(forwards)).tolist() if forwards else []


def _starts(forwards: Sequence[torch.Tensor]) -> list[int]:
    ends = torch.tensor([0, *(len(batch) for batch in forwards)]).cumsum(0)
    return ends[:-1].tolist()


def _as_in_batches(chosen: Sequence[float], rejected: Sequence[float], pairs: int) -> list[float]:
    found: list[float] = []
    for start in range(0, len(chosen), pairs):
        found += [*chosen[start : start + pairs], *rejected[start : start + pairs]]
    return found
