"""The callbacks of the benchmark's trainers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from fastpack.bench.measure import StepTimer
from fastpack.bench.settings import COMPARED_STEPS, LEARNING_RATE


def experts_norm(model: Any) -> float:
    """Return the norm of the gradients of a model's experts, or of the adapters on them; 0 if they have none."""
    experts = (parameter.grad for name, parameter in model.named_parameters() if ".experts." in name)
    return float(torch.nn.utils.get_total_norm([gradient for gradient in experts if gradient is not None]))


class StepCallback(TrainerCallback):
    """A callback that marks the ends of steps on a timer, and has the compared steps logged.

    Attributes:
        expert_norms: the norms of the experts' gradients in the compared steps.

    Args:
        timer: the timer.
        experts: whether experts or adapters on them train.
    """

    def __init__(self, timer: StepTimer, *, experts: bool) -> None:
        """Set up the callback with its timer."""
        self.timer, self._experts = timer, experts
        self.expert_norms: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start timing at the first step."""
        if state.global_step == 0:
            self.timer.mark()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the norm of the experts' gradients of a compared step."""
        if self._experts and state.global_step < COMPARED_STEPS:
            self.expert_norms.append(experts_norm(kwargs["model"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Mark the end of a step, and log it if it is compared."""
        self.timer.mark()
        control.should_log |= state.global_step <= COMPARED_STEPS


class LearnLater(TrainerCallback):
    """A callback that keeps the learning rate at 0 while variants are compared, since learning multiplies rounding.

    On images, Adam's first steps, whose sizes don't depend on the gradients', turn rounding in the image tower into
    differences of 2 % in the gradients' norm by the third step.

    In DPO, a reward is beta times the difference of two log-probabilities near -7,000 (700 tokens, random weights).
    Each is a sum of terms that half precision rounds by some hundredths. As soon as policy and reference differ at all,
    the rounding leaves noise of some hundredths in a loss of 0.7, and noise of a sixth in the gradients' norm. While
    policy and reference are the same computation, they round alike: the norms of stock and patched models agree to
    1e-3.
    """

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the step's learning rate."""
        for group in kwargs["optimizer"].param_groups:
            group["lr"] = LEARNING_RATE if state.global_step >= COMPARED_STEPS else 0.0
