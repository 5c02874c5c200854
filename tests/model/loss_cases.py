"""Helpers for the tests of the fused loss: heads, runs without logits, and counts of the op's calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from oracle import FLOAT32_BOUND, INPUT_KINDS, LENGTHS, Result, compare, make_sequences, to_device, trained_tokens
from tiny import VOCAB
from torch import Tensor, nn

from fastpack.model import loss as module

NAIVE_BOUND = 1e-2
BALANCED: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
TRAITS: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.4},
    "gemma2": {"final_logit_softcapping": 2.0},
    "gemma3_text": {"final_logit_softcapping": 2.0},
    "gpt_oss": BALANCED,
    "granite": {"logits_scaling": 3.0},
    "mixtral": BALANCED,
    "qwen3_moe": BALANCED,
}
"""Settings of heads besides the matmul, with values whose effect shows."""


class Calls:
    """The calls of the op: the number of rows of each, and its number of kept labels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        self.options: list[dict[str, Any]] = []
        original = module.linear_cross_entropy

        def counted(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self.rows.append(len(hidden))
            self.options.append(kwargs)
            return original(hidden, *args, **kwargs)

        monkeypatch.setattr(module, "linear_cross_entropy", counted)


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.detach().clone().float() for n, p in model.named_parameters() if p.grad is not None}


def run_fused(model: nn.Module, sequences: list[Tensor], kind: str, reference: Result, **kwargs: Any) -> Result:
    """Run a batch as :func:`oracle.run_batch` does, without logits to compare."""
    batch = to_device(INPUT_KINDS[kind](sequences), next(model.parameters()).device)
    model.zero_grad(set_to_none=True)
    out = model(**batch, **{"num_items_in_batch": trained_tokens(sequences), **kwargs})
    assert out.logits is None
    out.loss.backward()
    return Result(reference.logits, out.loss.detach(), grads_of(model))


def check(
    model: nn.Module,
    alone: Result,
    calls: Calls,
    bound: float = FLOAT32_BOUND,
    kinds: Iterable[str] = ("padded left", "TRL's keywords"),
) -> None:
    """Check that the loss and every gradient equal those of each sequence alone, and that the op runs once a batch."""
    sequences = make_sequences(VOCAB)
    for kind in kinds:
        calls.rows.clear()
        error = compare(run_fused(model, sequences, kind, alone), alone)
        assert error.worst <= bound, f"{kind}: {error}"
        assert calls.rows == [sum(LENGTHS)], "the op ran once, on the real tokens alone"
