"""Check that all variants train the same model; otherwise their speeds mean nothing.

Before the next variant begins, each variant is compared with the first one over its first steps, by the loss and by the
norm of all gradients. With random weights, the loss hardly changes if sequences see each other (by 1e-3), but the norm
changes by 4 % or more. Only the norm shows a wrong backward. Experts, or LoRA on them, have a small part in that norm
(0.3 % of a small model's), and so the norm of their gradients alone is compared too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fastpack.bench.settings import COMPARED_STEPS, RunResult
from fastpack.utils.console import counted

BOUNDS = {"loss": 1e-4, "gradients' norm": 1e-3, "experts' gradients' norm": 1e-3}
HALF_PRECISION_BOUNDS = dict.fromkeys(BOUNDS, 2e-2)
"""The largest relative differences."""
NOT_COMPARED = 3
"""The exit code if nothing was compared; 1 means that losses differ, 2 that a flag is wrong."""


@dataclass(frozen=True)
class LossAgreement:
    """The largest difference from the first variant, relative to its bound.

    ``variant`` is None if there was nothing to compare. ``steps`` counts the compared losses, ``norm_steps`` the
    compared gradient norms.
    """

    agree: bool
    variant: str | None = None
    against: str = ""
    what: str = ""
    step: int = 0
    difference: float = 0.0
    bound: float = 0.0
    steps: int = 0
    norm_steps: int = 0

    @property
    def compared(self) -> bool:
        """Return whether there was anything to compare."""
        return self.variant is not None

    def __str__(self) -> str:
        """Return the verdict as one sentence."""
        if not self.compared:
            return "nothing was compared: fewer than two variants ran"
        return (
            f"losses of the first {counted(self.steps, 'step')} and gradients of {self.norm_steps} of them "
            f"{'agree' if self.agree else 'DISAGREE'}: the furthest from {self.against!r} is {self.variant!r}, in "
            f"{self.off}"
        )

    @property
    def off(self) -> str:
        """Return where the largest difference is, and how large."""
        return f"the {self.what} of step {self.step}, by {self.difference:.1e}, relative (bound {self.bound:g})"


def compare(results: Sequence[RunResult], *, half: bool) -> LossAgreement:
    """Return the verdict on all variants that ran, in half precision or in float32."""
    ran = [row for row in results if row.error is None]
    steps = min([COMPARED_STEPS, *(len(row.losses) for row in ran)])
    norm_steps = min([COMPARED_STEPS, *(len(row.gradient_norms) for row in ran)])
    comparisons: list[LossAgreement] = []
    for row in ran[1:]:
        for what, ours, theirs in (
            ("loss", row.losses[:steps], ran[0].losses),
            ("gradients' norm", row.gradient_norms[:norm_steps], ran[0].gradient_norms),
            ("experts' gradients' norm", row.expert_norms, ran[0].expert_norms),
        ):
            bound = (HALF_PRECISION_BOUNDS if half else BOUNDS)[what]
            for step, (our, their) in enumerate(zip(ours, theirs, strict=False), 1):
                off = abs(our - their) / abs(their) if their else math.inf
                difference = math.inf if math.isnan(off) else off
                comparisons.append(
                    LossAgreement(
                        agree=difference <= bound,
                        variant=row.variant,
                        against=ran[0].variant,
                        what=what,
                        step=step,
                        difference=difference,
                        bound=bound,
                        steps=steps,
                        norm_steps=norm_steps,
                    )
                )
    return max(comparisons, key=lambda verdict: verdict.difference / verdict.bound, default=LossAgreement(agree=True))
