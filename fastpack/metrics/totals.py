"""What a run amounts to, in whole numbers that add up over steps and ranks."""

from __future__ import annotations

from dataclasses import astuple, dataclass

NANO = 1_000_000_000


@dataclass(frozen=True)
class Totals:
    """Of one rank or all.

    Attributes:
        steps: optimizer steps; all ranks take part in each, so it is counted once.
        real, trained: tokens; those that the loss predicts.
        unlabelled: batches without a label for each token: where there are some, ``trained`` says nothing.
        slots: real tokens and padding, as batches came to the model.
        wasted: slots with padding that the layers worked on.
        padded_slots: what the batches' sequences would take if each had a row of its own as long as the longest.
        flops: operations that the steps needed, but for those that checkpointing does a second time.
        recomputed: these.
        inside, loading, elapsed: nanoseconds inside steps, in waiting for batches, and all, summed over ranks.
    """

    steps: int = 0
    real: int = 0
    trained: int = 0
    unlabelled: int = 0
    slots: int = 0
    wasted: int = 0
    padded_slots: int = 0
    flops: int = 0
    recomputed: int = 0
    inside: int = 0
    loading: int = 0
    elapsed: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def figures(totals: Totals, *, ranks: int, peak: float | None) -> dict[str, float]:
    """What is logged of one interval: a step's counts, shares, speed; see :mod:`fastpack.metrics` for each.

    Args:
        totals: of all ranks.
        ranks: how many.
        peak: operations a second of one device, or None.
    """
    steps = max(totals.steps, 1)
    found: dict[str, float] = {"real_tokens": totals.real / steps}
    if not totals.unlabelled:
        found["trained_tokens"] = totals.trained / steps
    found |= {"padding_tokens": (totals.slots - totals.real) / steps, **shares(totals)}
    training = (totals.inside + totals.loading) / NANO
    elapsed = totals.elapsed / NANO
    if training:
        found["tokens_per_second_per_gpu"] = totals.real / training
        found["tflops_per_gpu"] = (totals.flops + totals.recomputed) / training / 1e12
        if peak is not None:
            found["mfu"] = (totals.flops + totals.recomputed) / training / peak
            if totals.recomputed:
                found["mfu_once"] = totals.flops / training / peak
    found["step_seconds"] = totals.inside / NANO / ranks / steps
    if elapsed:
        found["data_share"] = totals.loading / totals.elapsed
        found["outside_share"] = max(0.0, 1 - totals.inside / totals.elapsed)
    return found


def cumulative(totals: Totals) -> dict[str, float]:
    """What is logged of a whole run."""
    found: dict[str, float] = {"total_real_tokens": totals.real}
    if not totals.unlabelled:
        found["total_trained_tokens"] = totals.trained
    found["total_padding_tokens"] = totals.slots - totals.real
    return found | {f"total_{name}": value for name, value in shares(totals).items()}


def shares(totals: Totals) -> dict[str, float]:
    """Of padding: in what came, in what was worked on, and in padded batches of the same sequences."""
    worked_on = totals.real + totals.wasted
    return {
        "padding_share": _share(totals.slots - totals.real, totals.slots),
        "wasted_share": _share(totals.wasted, worked_on),
        "padding_share_without": _share(totals.padded_slots - totals.real, totals.padded_slots),
    }


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
