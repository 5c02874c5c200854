"""Per-token log-probabilities for TRL's trainers, without logits: ``patch(trainer, loss="fused")``.

TRL's reinforcement learning and preference trainers put a forward on their models' heads, and call it with
``fused_lm_head=True`` for log-probabilities and entropies of the labels. That forward runs the backbone, scores the
tokens that have a label with an op of its own (which computes each logit twice in training), and returns what the
trainer computes its loss from. Here a copy of that very function runs, with
:func:`fastpack.ops.loss.linear_log_probs.linear_log_probs` in place of TRL's op: shapes, settings, the auxiliary loss
of experts and the output's class stay TRL's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.model.loss import FUSED_LM_HEAD, is_trl_forward
from fastpack.model.model_runtime import runtime_of
from fastpack.model.unwrap import find_parts
from fastpack.ops.implementation import Implementation
from fastpack.ops.loss.linear_log_probs import linear_log_probs
from fastpack.utils.replacement import Replacement, replaces

_THEIR_OP, _COMPACTS = "_ChunkedLogProbFunction", "_use_triton"
"""The names of TRL's op, and of the function that says whether it gets only the tokens that have a label."""


@dataclass(eq=False)
class LogProbCalls:
    """How often a trainer's fused log-probabilities ran.

    Attributes:
        fused: the number of calls that our op served.
        tokens: the number of tokens in these calls.
        stock: the number of calls that TRL's op served.
        why_stock: why the last of them was not ours.
    """

    fused: int = 0
    tokens: int = 0
    stock: int = 0
    why_stock: str = ""


@dataclass(frozen=True)
class _LogProbs:
    """The stand-in for TRL's op: :meth:`apply` has the arguments and results of its ``apply``."""

    theirs: Any
    calls: LogProbCalls
    kernels: Implementation

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = (),
    ) -> tuple[Tensor | None, ...]:
        """Return the results that ``outputs`` names, in the order of TRL's op, and None for the others."""
        reason = _why_not_now(weight)
        if reason is not None:
            self.calls.stock, self.calls.why_stock = self.calls.stock + 1, reason
            further = (softcap, logit_scale, outputs)
            results: tuple[Tensor | None, ...] = self.theirs.apply(
                hidden, weight, bias, labels, temperature, chunk_size, *further
            )
            return results
        self.calls.fused += 1
        self.calls.tokens += len(labels)
        return linear_log_probs(
            hidden,
            weight,
            labels,
            bias=bias,
            softcap=softcap,
            logit_scale=logit_scale,
            temperature=temperature,
            outputs=outputs,
            implementation=self.kernels,
        )


def _why_not_now(weight: Tensor) -> str | None:
    """Return why TRL's op has to serve a call, or None."""
    if not weight.is_floating_point():
        return f"the weight of the head is quantised ({weight.dtype})"
    if hasattr(weight, "ds_id"):
        return "ZeRO-3 shards the weight of the head, and gathers it again in TRL's backward"
    if torch.compiler.is_compiling():
        return "torch.compile traces the head"
    return None


def log_probs_forward(patched: Replacement[LogProbCalls, None], *args: Any, **kwargs: Any) -> Any:
    """Run TRL's forward with our op if the call asks for TRL's per-token results, else TRL's forward as it is."""
    theirs: Any = patched.earlier
    if not kwargs.get(FUSED_LM_HEAD) or why_not_trl(theirs) is not None:
        return patched.stock(*args, **kwargs)
    function: FunctionType = theirs.__func__
    runtime = runtime_of(find_parts(patched.owner).backbone)
    kernels: Implementation = "auto" if runtime is None else runtime.layers.kernels
    op = _LogProbs(function.__globals__[_THEIR_OP], patched.spec, kernels)
    names = {**function.__globals__, _THEIR_OP: op}
    if _COMPACTS in function.__code__.co_names:
        names[_COMPACTS] = _always
    ours = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    ours.__kwdefaults__ = function.__kwdefaults__
    return ours(patched.owner, *args, **kwargs)


def _always(*_: Any) -> bool:
    return True


def why_not_trl(forward: Any) -> str | None:
    """Return why a method is not a forward of TRL's whose op can be exchanged, or None."""
    if not (isinstance(forward, MethodType) and is_trl_forward(forward)):
        return "its forward is not TRL's"
    function = forward.__func__
    if not isinstance(function, FunctionType) or _THEIR_OP not in function.__code__.co_names:
        return "this version of TRL computes log-probabilities in another way"
    return None if function.__globals__.get(_THEIR_OP) is not None else "TRL's own op is not available here"


def put_log_probs(head: nn.Module, calls: LogProbCalls) -> None:
    """Put our forward over TRL's, which may itself be under the forward that a patch put there."""
    holder = _holder(head, lambda forward: why_not_trl(forward) is None)
    assert holder is not None
    ours = Replacement(head, "forward", log_probs_forward, calls, None)
    ours.earlier = _get(holder)
    _set(holder, ours)


def remove_log_probs(head: nn.Module) -> None:
    """Put TRL's forward back, or disable ours if other code wraps it."""
    holder = _holder(head, lambda forward: replaces(forward, log_probs_forward))
    if holder is not None:
        _set(holder, _get(holder).earlier)


def log_probs_on(head: nn.Module) -> Replacement[LogProbCalls, None] | None:
    """Return our forward on a head, or None."""
    holder = _holder(head, lambda forward: replaces(forward, log_probs_forward))
    return None if holder is None else _get(holder)


def why_no_log_probs(head: Any) -> str | None:
    """Return why a head's log-probabilities can't be fused, or None."""
    if head is None:
        return "there is no head"
    if _holder(head, lambda forward: why_not_trl(forward) is None) is not None:
        return None
    forwards = [_get(holder) for holder in _holders(head)]
    if forwards and is_trl_forward(forwards[-1]):
        return why_not_trl(forwards[-1])
    if "_original_forward" in head.__dict__:
        return f"accelerate wrapped the forward of {type(head).__name__} before the patch"
    return f"the forward of {type(head).__name__} is not TRL's"


_Holder = tuple[Any, str]
"""An object and the name of its attribute that holds a forward."""


def _holders(head: Any) -> Iterator[_Holder]:
    """Yield what holds the head's forward, then what holds the forward under it, and so on."""
    holder: _Holder = (head, "forward")
    while True:
        forward = _get(holder)
        if forward is None:
            return
        yield holder
        if not isinstance(forward, Replacement):
            return
        holder = (forward, "earlier")


def _holder(head: Any, wanted: Any) -> _Holder | None:
    return next((holder for holder in _holders(head) if wanted(_get(holder))), None)


def _get(holder: _Holder) -> Any:
    owner, name = holder
    return owner.__dict__.get(name) if isinstance(owner, nn.Module) else getattr(owner, name)


def _set(holder: _Holder, forward: Any) -> None:
    owner, name = holder
    setattr(owner, name, forward)
