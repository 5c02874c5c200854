"""When two runs of a preference trainer are equal, by what the trainer logs of each step.

In float32, relative to the stock run: losses and norms of the gradients to 1e-5, log-probabilities to 1e-6, rewards and
margins to 1e-6 x beta x the largest log-probability, since they are differences of such.

Losses are functions of margins too, and where log-probabilities are near -3,000, float32 rounds a margin by more than
1e-5: its eps x beta x the largest one. Losses may be off by that much, times the steepness of the loss, where it is
more than 1e-5 of them; so may the norm of the gradients, relative. The same stock run with its batches padded wider is
off by as much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

STEP_BOUND, SUM_BOUND = 1e-5, 1e-6
FLOOR = 1e-2
"""Losses below this (GRPO's are 0 but for rounding) are compared as if they were as large."""
EPS = 2.0**-23
"""float32's."""
LN_2_BOUND = 1e-6
LOG_PROBS = ("logps/chosen", "logps/rejected")
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins")
SCORES = ("margin", "mean_reward", "min_reward", "max_reward", "entropy", "kl", "policy_loss")
"""What trainers without log-probabilities of completions log: values near 1."""

FIGURES = ("loss", "grad_norm", "log_probs", "rewards")

Steps = Sequence[Mapping[str, float]]
"""What a trainer logged of each step."""


def differences(run: Steps, stock: Steps, beta: float) -> dict[str, float]:
    """Return the largest of a run against the stock one, each relative to what its bound is relative to.

    NaN is what neither has logged, infinity what is no number.

    Raises:
        ValueError: the runs did not take the same steps.
    """
    if len(run) != len(stock) or not stock:
        raise ValueError(f"{len(run)} steps, stock {len(stock)}")

    def off(*names: str, floor: float = EPS, scale: float | None = None) -> float:
        gaps = [
            abs(a[name] - b[name]) / (scale or max(abs(b[name]), floor))
            for a, b in zip(run, stock, strict=True)
            for name in names
            if name in b
        ]
        # ``max`` may pass over what is no number
        return max((math.inf if math.isnan(gap) else gap for gap in gaps), default=math.nan)

    log_prob = largest(stock, LOG_PROBS)
    return {
        "loss": off("loss", floor=FLOOR),
        "grad_norm": off("grad_norm", floor=FLOOR),
        "log_probs": off(*LOG_PROBS),
        "rewards": off(*REWARDS, scale=beta * log_prob) if log_prob else off(*SCORES, scale=largest(stock, SCORES)),
    }


def largest(steps: Steps, names: Sequence[str]) -> float:
    """Return the largest value of these names, without its sign."""
    return max((abs(step[name]) for step in steps for name in names if name in step), default=0.0)


def problems(
    run: Steps, stock: Steps, *, beta: float, starts_at_ln_2: bool, steepness: float = 1.0, has_log_probs: bool = False
) -> list[str]:
    """Say in which ways a patched run is not equal to the stock one.

    Args:
        beta: by which log-probabilities are multiplied to become rewards.
        starts_at_ln_2: policy and reference are the same at first, and the loss is the sigmoid one.
        steepness: by how much the loss changes with a margin, at most.
        has_log_probs: whether the trainer has log-probabilities of completions, which have to have been compared.
    """
    off = differences(run, stock, beta)
    rounding = steepness * EPS * beta * largest(stock, LOG_PROBS)
    smallest = max(min(abs(step["loss"]) for step in stock), FLOOR)
    bounds = {
        "loss": max(STEP_BOUND, rounding / smallest),
        "grad_norm": max(STEP_BOUND, rounding),
        "log_probs": SUM_BOUND,
        "rewards": SUM_BOUND if has_log_probs else STEP_BOUND,
    }
    found = [
        f"{name} off by {off[name]:.1e}, allowed {bound:.1e}" for name, bound in bounds.items() if off[name] > bound
    ]
    required = FIGURES if has_log_probs else FIGURES[:2]
    found += [f"no {name} to compare: none was logged" for name in required if math.isnan(off[name])]
    first = run[0]["loss"] - math.log(2)
    if starts_at_ln_2 and not abs(first) <= LN_2_BOUND:
        found.append(f"the first loss is off ln 2 by {first:.1e}")
    return found
