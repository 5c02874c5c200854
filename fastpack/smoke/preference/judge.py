"""When two runs of a preference trainer are equal.

In float32, relative to the stock run: losses and norms of the gradients to 1e-5, each sequence's log-probability to
1e-6, rewards and margins to 1e-6 x beta x the largest log-probability, since they are differences of such; accuracies
exactly, but for pairs whose margin lies inside that bound.

Losses are functions of margins too, and where log-probabilities are near -3,000, float32 rounds a margin by more than
1e-5: its eps x beta x the largest one. Losses may be off by that much, times the steepness of the loss, where it is
more than 1e-5 of them; so may the norm of the gradients, relative. The same stock run with its batches padded wider is
off by as much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fastpack.smoke.preference.figures import Figures

STEP_BOUND, SUM_BOUND = 1e-5, 1e-6
FLOOR = 1e-2
"""Losses below this (GRPO's are 0 but for rounding) are compared as if they were as large."""
EPS = 2.0**-23
"""float32's."""
LN_2_BOUND = 1e-6
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins")
SCORES = ("margin", "mean_reward", "min_reward", "max_reward", "entropy", "kl", "policy_loss")
"""What trainers without log-probabilities of completions log: values near 1."""


@dataclass(frozen=True)
class Differences:
    """The largest of a run against the stock one, each relative to what its bound is relative to; NaN if uncompared."""

    loss: float
    grad_norm: float
    log_probs: float
    rewards: float
    flipped: int

    @classmethod
    def between(cls, run: Figures, stock: Figures) -> Differences:
        """Compare step by step, and sequence by sequence.

        Raises:
            ValueError: the runs did not take the same steps.
        """
        counts = [(len(figures.logged), len(figures.policy), len(figures.reference)) for figures in (run, stock)]
        if counts[0] != counts[1] or not stock.logged:
            raise ValueError(f"steps, log-probabilities of policy and reference: {counts[0]}, stock {counts[1]}")
        return cls(
            loss=_steps(run, stock, "loss"),
            grad_norm=_steps(run, stock, "grad_norm"),
            log_probs=max(_relative(run.policy, stock.policy), _relative(run.reference, stock.reference), key=_worst),
            rewards=_rewards(run, stock),
            flipped=_flipped(run, stock),
        )


@dataclass(frozen=True)
class Verdict:
    """Of a patched run against the stock one; ``problems`` is empty where they are equal."""

    off: Differences
    problems: tuple[str, ...]


def judge(
    patched: Figures, stock: Figures, *, starts_at_ln_2: bool, steepness: float = 1.0, has_log_probs: bool = False
) -> Verdict:
    """Compare a patched run with the stock one.

    Args:
        starts_at_ln_2: policy and reference are the same at first, and the loss is the sigmoid one.
        steepness: by how much the loss changes with a margin, at most.
        has_log_probs: whether the trainer has log-probabilities of completions, which have to have been compared.
    """
    off = Differences.between(patched, stock)
    rounding = steepness * EPS * stock.beta * stock.largest
    smallest = max(min(abs(step["loss"]) for step in stock.logged), FLOOR)
    problems = [
        f"{name} off by {value:.1e}, allowed {bound:.1e}"
        for name, value, bound in (
            ("loss", off.loss, max(STEP_BOUND, rounding / smallest)),
            ("norm of the gradients", off.grad_norm, max(STEP_BOUND, rounding)),
            ("log-probabilities", off.log_probs, SUM_BOUND),
            ("rewards", off.rewards, SUM_BOUND if stock.margins else STEP_BOUND),
        )
        if not (math.isnan(value) or value <= bound)
    ]
    if math.isnan(off.loss) or math.isnan(off.grad_norm):
        problems.append("nothing to compare, or not a number")
    if has_log_probs and (math.isnan(off.log_probs) or math.isnan(off.rewards)):
        problems.append("no log-probabilities or rewards to compare: none was heard of a model, or logged")
    if off.flipped:
        problems.append(f"{off.flipped} pairs are ranked otherwise")
    first = patched.logged[0]["loss"] - math.log(2)
    if starts_at_ln_2 and not abs(first) <= LN_2_BOUND:
        problems.append(f"the first loss is off ln 2 by {first:.1e}")
    return Verdict(off, tuple(problems))


def _worst(value: float) -> float:
    return -1.0 if math.isnan(value) else value


def _relative(run: Sequence[float], stock: Sequence[float]) -> float:
    return max((_gap(a, b) / (abs(b) or EPS) for a, b in zip(run, stock, strict=True)), default=math.nan)


def _gap(ours: float, theirs: float) -> float:
    """Infinite, which no bound allows, where one is not a number: ``max`` may pass over such a one."""
    gap = abs(ours - theirs)
    return math.inf if math.isnan(gap) else gap


def _steps(run: Figures, stock: Figures, name: str) -> float:
    pairs = [(a[name], b[name]) for a, b in zip(run.logged, stock.logged, strict=True) if name in b]
    found = [abs(a - b) / max(abs(b), FLOOR) for a, b in pairs]
    return math.nan if not found or any(map(math.isnan, found)) else max(found)


def _rewards(run: Figures, stock: Figures) -> float:
    """Logged rewards and margins, over beta times the largest log-probability; other scores, over the largest."""
    logged = {name for step in stock.logged for name in step}
    names = [name for name in REWARDS if name in logged]
    scale = stock.beta * stock.largest
    if not names:
        names = [name for name in SCORES if name in logged]
        scale = max((abs(step[name]) for step in stock.logged for name in names), default=0.0)
    pairs = [(a[n], b[n]) for a, b in zip(run.logged, stock.logged, strict=True) for n in names if n in b]
    pairs += zip(run.margins, stock.margins, strict=True)
    return max((_gap(a, b) for a, b in pairs), default=math.nan) / scale if scale else math.nan


def _flipped(run: Figures, stock: Figures) -> int:
    bound = SUM_BOUND * stock.beta * stock.largest
    return sum(
        (a > 0) != (b > 0) and min(abs(a), abs(b)) > bound for a, b in zip(run.margins, stock.margins, strict=True)
    )
