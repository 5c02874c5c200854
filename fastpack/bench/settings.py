"""What one run does, and what it measured: all that passes between the parent and a contestant's process."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fastpack.bench.flops import Mode
from fastpack.bench.pair_lengths import Pair, make_pair_lengths, sequences


@dataclass(frozen=True)
class Settings:
    """What one run does; the flags of ``fastpack bench``. ``rows`` are those of a batch; of DPO, its pairs."""

    contestant: str
    trainer: str = "sft"
    shape: str = "tiny"
    mode: Mode = "full"
    rows: int = 16
    steps: int = 20
    warmup: int = 3
    lengths: str = "alpaca"
    max_length: int | None = None
    checkpointing: bool = False
    loop: str = "trl"
    attention: str = "auto"
    kernels: Any = "auto"
    graphs: Any = None
    loss: Any = None
    offload: Any = None
    dtype: str = "auto"
    trainer_waits: bool = False
    power: bool = False
    seed: int = 0

    def row_lengths(self, extra_steps: int = 0) -> list[int]:
        """Tokens of every row, warm-up and timed steps after each other; ``extra_steps`` repeat the last one."""
        from fastpack.bench.lengths import make_lengths

        lengths = make_lengths(self.rows * (self.warmup + self.steps), kind=self.lengths, seed=self.seed)
        lengths += lengths[-self.rows :] * extra_steps
        return lengths if self.max_length is None else [min(length, self.max_length) for length in lengths]

    def pair_lengths(self, extra_steps: int = 0) -> list[Pair]:
        """As :meth:`row_lengths`, of pairs."""
        count = self.rows * (self.warmup + self.steps)
        found = make_pair_lengths(count, kind=self.lengths, seed=self.seed, max_length=self.max_length)
        return found + found[-self.rows :] * extra_steps

    def timed_pairs(self) -> list[list[Pair]]:
        """Pairs of each timed step."""
        timed = self.pair_lengths()[self.rows * self.warmup :]
        return [timed[i : i + self.rows] for i in range(0, len(timed), self.rows)]

    def timed_batches(self) -> list[list[int]]:
        """Tokens of the rows of each timed step; of a pair there are two."""
        if self.trainer == "dpo":
            return [sequences(batch) for batch in self.timed_pairs()]
        timed = self.row_lengths()[self.rows * self.warmup :]
        return [timed[i : i + self.rows] for i in range(0, len(timed), self.rows)]


@dataclass
class Figures:
    """What one run measured.

    Attributes:
        backend: the attention kernel.
        seconds, tokens: of each timed step; ``tokens`` are real ones.
        slots: of all timed steps: what the model was given, padding included.
        peak_memory: GiB in tensors, once the model is built.
        held_memory: GiB that the allocator had taken for them, which is what others see; CUDA graphs keep theirs.
        losses, gradient_norms: of the first steps, on which contestants are compared.
        kernels, launches, busy: of the last step again, under the profiler: kernels on the device, calls that launch
            one or a graph of them, and the seconds in which any ran. None on a CPU.
        drawn: what :class:`fastpack.bench.power.Drawn` holds, of the timed steps; None where nobody asked.
        error: why there are no figures.
    """

    contestant: str
    backend: str = ""
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    slots: int = 0
    peak_memory: float = 0.0
    held_memory: float | None = None
    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    kernels: int | None = None
    launches: int | None = None
    busy: float | None = None
    drawn: dict[str, Any] | None = None
    error: str | None = None

    @property
    def step_median(self) -> float:
        """Seconds of the step in the middle."""
        return statistics.median(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Median of the rates of all timed steps: their lengths differ."""
        return statistics.median(n / seconds for n, seconds in zip(self.tokens, self.seconds, strict=True))

    @property
    def tokens_per_second_overall(self) -> float:
        """Of all timed steps together, as a run would have it."""
        return sum(self.tokens) / sum(self.seconds)

    @property
    def padding_share(self) -> float:
        """Which part of the slots held no token."""
        return 1 - sum(self.tokens) / self.slots

    @property
    def in_brief(self) -> str:
        """A few words for a log."""
        if self.error is not None:
            return self.error
        return f"{self.step_median * 1e3:,.0f} ms a step, {self.tokens_per_second:,.0f} real tokens/s"

    def to_dict(self) -> dict[str, Any]:
        """Everything measured, and what follows from it."""
        record = asdict(self)
        if self.error is None:
            low, high = spread(self.seconds)
            record |= {
                "step_median": self.step_median,
                "step_p10": low,
                "step_p90": high,
                "tokens_per_second": self.tokens_per_second,
                "tokens_per_second_overall": self.tokens_per_second_overall,
                "padding_share": self.padding_share,
            }
        return record


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The 10th and the 90th percentile."""
    if len(values) < 2:
        return values[0], values[0]
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return deciles[0], deciles[-1]
