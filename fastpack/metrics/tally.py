"""Sums over the batches of an interval, on the device, and over ranks when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fastpack.flops import Load, Span, StepFlops
from fastpack.metrics.counting import BatchCounts, Count
from fastpack.metrics.plan import ModelPlan
from fastpack.metrics.totals import Totals
from fastpack.packing.seqlens import sent

Kind = Literal["train", "forward", "bare", "reference"]
"""What the model was called for: forward and backward; a forward of the policy, with its adapters or without; a forward
of a reference model."""
KINDS: tuple[Kind, ...] = ("train", "forward", "bare", "reference")
_HOST = ("steps", "inside", "loading", "elapsed", "memory")
_BATCH = ("slots", "wasted", "padded_slots", "trained", "unlabelled")


@dataclass(frozen=True)
class Plans:
    """What the policy and a reference model compute; None where it is not known, or where there is none."""

    policy: ModelPlan | None
    reference: ModelPlan | None = None

    @property
    def spans(self) -> tuple[Span, ...]:
        """Of both, each once."""
        both = [span for plan in (self.policy, self.reference) if plan is not None for span in plan.spans]
        return tuple(dict.fromkeys(both))

    def flops(self, loads: Mapping[Kind, Load]) -> StepFlops:
        """Of all calls."""
        needed = StepFlops()
        if self.policy is not None:
            needed += self.policy.training(loads["train"])
            needed += self.policy.forward(loads["forward"])
            needed += self.policy.forward(loads["bare"], lora=False)
        if self.reference is not None:
            needed += self.reference.forward(loads["reference"])
        return needed


class Tally:
    """Adds up what comes, and gives it away.

    Counts that are tensors are added on the device; nobody waits for them before :meth:`take`.

    Args:
        device: where the sums are kept.
        plans: of the models.
        patched: whether padding that is marked as such never reaches the layers.
    """

    def __init__(self, device: torch.device, plans: Plans, *, patched: bool) -> None:
        self._plans = plans
        self._spans = plans.spans
        self._patched = patched
        self._device = device
        loads = [f"{kind}/{name}" for kind in KINDS for name in ("real", "head", *map(str, range(len(self._spans))))]
        self._names = (*_HOST, *_BATCH, *loads)
        self._at = {name: at for at, name in enumerate(self._names)}
        self._places: dict[Sequence[str], Tensor] = {}
        self._clear()

    @property
    def spans(self) -> tuple[Span, ...]:
        """What pairs have to be counted of."""
        return self._spans

    def add_batch(self, kind: Kind, counts: BatchCounts, head_positions: Count | None) -> None:
        """A call of a model has ended."""
        values: dict[str, Count] = {f"{kind}/real": counts.real}
        if head_positions is not None:
            values[f"{kind}/head"] = head_positions
        values |= {f"{kind}/{at}": pairs for at, pairs in enumerate(counts.pairs)}
        if kind == "train":
            dropped = self._patched and counts.marked
            values |= {"slots": counts.slots, "padded_slots": counts.padded_slots}
            values["wasted"] = counts.filler if dropped else counts.slots - counts.real
            values |= {"unlabelled": 1} if counts.trained is None else {"trained": counts.trained}
        self.add(**values)

    def add(self, **values: Count) -> None:
        """Add to the sums of these names."""
        remote = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        for name, value in values.items():
            if not isinstance(value, Tensor):
                self._host[self._at[name]] += value
        if remote:
            names = tuple(remote)
            if names not in self._places:
                self._places[names] = sent(torch.tensor([self._at[name] for name in names]), self._device)
            found = torch.stack([v.detach().to(self._device, torch.int64, non_blocking=True) for v in remote.values()])
            self._remote.index_add_(0, self._places[names], found)

    def take(self, accelerator: Any) -> tuple[Totals, int]:
        """The sums over all ranks, which all have to ask at once; and the most bytes that one of them held.

        One collective, and one copy to the host.
        """
        mine = self._remote + torch.tensor(self._host, device=self._device)
        rows: list[list[int]] = accelerator.gather(mine).reshape(-1, len(self._names)).tolist()
        self._clear()
        total = {name: sum(row[at] for row in rows) for name, at in self._at.items()}
        loads = {kind: self._load(kind, total) for kind in KINDS}
        needed = self._plans.flops(loads)
        totals = Totals(
            steps=total["steps"] // len(rows),
            real=total["train/real"],
            trained=total["trained"],
            unlabelled=total["unlabelled"],
            slots=total["slots"],
            wasted=total["wasted"],
            padded_slots=total["padded_slots"],
            flops=needed.once,
            recomputed=needed.recomputed,
            inside=total["inside"],
            loading=total["loading"],
            elapsed=total["elapsed"],
        )
        return totals, max(row[self._at["memory"]] for row in rows)

    def _load(self, kind: Kind, total: Mapping[str, int]) -> Load:
        pairs = {span: total[f"{kind}/{at}"] for at, span in enumerate(self._spans)}
        return Load(total[f"{kind}/real"], pairs, total[f"{kind}/head"])

    def _clear(self) -> None:
        self._host = [0] * len(self._names)
        self._remote = torch.zeros(len(self._names), dtype=torch.int64, device=self._device)
