"""The settings of one run and its results: everything that passes between the parent and a variant's process."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any, Literal

from fastpack.bench.images import Grid, make_grids, tokens_of
from fastpack.bench.lengths import Pair, make_completion_lengths, make_lengths, make_pair_lengths, sequences
from fastpack.bench.shapes import has_experts, has_images, make_config
from fastpack.bench.variants import ROLLOUTS, VARIANTS, Variant

COMPARED_STEPS = 5
"""The number of first steps in which losses and gradient norms are read and compared."""

LEARNING_RATE = 1e-4
LORA_RANK = 16
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class RunSettings:
    """The settings of one run: the flags of ``fastpack bench``.

    ``rows`` counts a batch's rows, or DPO's pairs, or the prompts of GRPO and distillation. With ``lora_experts``, LoRA
    is on experts too. ``generations`` counts GRPO's completions for each prompt, ``completions`` names their lengths,
    and ``micro_batches`` counts the trainer's own micro-batches of a step. Patched trainers split these by
    ``max_tokens``. ``teacher`` is the shape of distillation's teacher. ``vram`` is the GiB that the allocator may hold.
    """

    variant: str
    trainer: str = "sft"
    shape: str = "tiny"
    mode: Literal["full", "lora", "qlora", "mxfp4"] = "full"
    rank: int = LORA_RANK
    lora_experts: bool = False
    rows: int = 16
    steps: int = 20
    warmup: int = 3
    lengths: str = "alpaca"
    max_length: int | None = None
    teacher: str | None = None
    generations: int = 8
    completions: str = "chat"
    micro_batches: int = 1
    max_tokens: int | None = None
    checkpointing: bool = False
    loop: str = "trl"
    attention: str = "auto"
    kernels: Any = "auto"
    graphs: Any = None
    loss: Any = None
    offload: Any = None
    vram: float | None = None
    trainer_waits: bool = False
    seed: int = 0

    @property
    def spec(self) -> Variant:
        """Return the variant that the name ``variant`` stands for."""
        return VARIANTS[self.variant]

    @property
    def trains_experts(self) -> bool:
        """Return whether experts train, or LoRA on them."""
        return self.lora_experts or (self.mode == "full" and has_experts(self.shape))

    @property
    def total_steps(self) -> int:
        """Return the number of warm-up and timed steps."""
        return self.warmup + self.steps

    def pair_lengths(self) -> list[Pair]:
        """Return the lengths of every pair, warm-up steps first, then timed steps."""
        count = self.rows * self.total_steps
        return make_pair_lengths(count, kind=self.lengths, seed=self.seed, max_length=self.max_length)

    def text_lengths(self) -> list[int]:
        """Return the length of every row, in the order of :meth:`pair_lengths`; of its text, if it has an image."""
        count = self.rows * self.total_steps
        return make_lengths(count, kind=self.lengths, seed=self.seed, max_length=self.max_length)

    def grids(self) -> list[Grid]:
        """Return the grid of every row's image, in the order of :meth:`text_lengths`; none for a shape without one."""
        if not has_images(self.shape):
            return []
        return make_grids(self.rows * self.total_steps, make_config(self.shape).vision_config, self.seed)

    @property
    def branches(self) -> int:
        """Return the number of completions of each prompt; distillation has one."""
        return self.generations if self.trainer == "grpo" else 1

    def completion_lengths(self) -> list[int]:
        """Return the length of every completion of the prompts, which are the rows of :meth:`text_lengths`."""
        count = self.branches * self.rows * self.total_steps
        return make_completion_lengths(count, kind=self.completions, seed=self.seed)

    def row_lengths(self) -> list[int]:
        """Return the length of every row, in the order of :meth:`pair_lengths`.

        A pair has two rows, and a prompt has one for each of its completions.
        """
        if self.trainer == "dpo":
            return sequences(self.pair_lengths())
        lengths, grids = self.text_lengths(), self.grids()
        if grids:
            vision = make_config(self.shape).vision_config
            lengths = [text + tokens_of(grid, vision) for text, grid in zip(lengths, grids, strict=True)]
        if self.trainer not in ROLLOUTS:
            return lengths
        prompts = [length for length in lengths for _ in range(self.branches)]
        return [prompt + own for prompt, own in zip(prompts, self.completion_lengths(), strict=True)]

    def timed_batches(self) -> list[list[int]]:
        """Return the row lengths of each timed step."""
        lengths = self.row_lengths()
        size = len(lengths) // self.total_steps
        return [lengths[at : at + size] for at in range(self.warmup * size, len(lengths), size)]


@dataclass
class RunResult:
    """The measurements of one run.

    Attributes:
        backend: the attention kernel.
        seconds, tokens: the seconds and the real tokens of each timed step.
        slots: tokens of all timed steps, padding included.
        peak_memory: the peak GiB in tensors after the model is built; on a CPU, the process's peak GiB.
        held_memory: the GiB that the allocator reserved, including the memory that CUDA graphs keep; other processes
            see all of it as used. None on a CPU.
        losses, gradient_norms, expert_norms: the losses, gradient norms, and norms of the gradients of experts that
            train, of the first steps, by which variants are compared.
        error: why there are no results.
    """

    variant: str
    backend: str = ""
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    slots: int = 0
    peak_memory: float = 0.0
    held_memory: float | None = None
    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    expert_norms: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def tokens_per_second(self) -> float:
        """Return the median rate of all timed steps; it is a median since steps differ in length."""
        return statistics.median(n / seconds for n, seconds in zip(self.tokens, self.seconds, strict=True))
