"""Families whose attention runs on rows of its own, with 4-bit weights, from which no mask takes its dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import FLOAT32_BOUND, compare, make_sequences, run_alone, run_batch
from torch import nn

import fastpack
from fastpack.exactness.tiny import FIRST_PLAIN, build_tiny

bitsandbytes = pytest.importorskip("bitsandbytes")


def in_4_bits(model: nn.Module, compute_dtype: torch.dtype = torch.float32) -> Any:
    """Return the same model with NF4 projections that compute in this dtype."""
    linears = [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear and "lm_head" not in name]
    for name, linear in linears:
        wide = linear.bias is not None
        new = bitsandbytes.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=wide, compute_dtype=compute_dtype, quant_type="nf4"
        )
        new.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
        new.bias = linear.bias
        model.set_submodule(name, new)
    return model.to("cpu").train()


@pytest.mark.parametrize("model_type", ["bloom", "codegen", "gpt_neo", "gptj", "llama4_text", "minimax_m3_vl_text"])
def test_exact(model_type: str) -> None:
    sequences = make_sequences(76 + FIRST_PLAIN)
    alone = run_alone(in_4_bits(build_tiny(model_type)), sequences)
    model = fastpack.patch(in_4_bits(build_tiny(model_type)))
    assert fastpack.report(model).tier == "re-padded mixer"
    for kind in ("padded left", "packed_seq_lens"):
        error = compare(run_batch(model, sequences, kind), alone)
        assert error.worst <= FLOAT32_BOUND, f"{kind}: {error}"


def test_float32_hidden_states_under_autocast() -> None:
    """The model is as ``prepare_model_for_kbit_training`` leaves it.

    A-X-K2 fills the mask with the smallest number of the hidden states' dtype.
    """
    sequences = make_sequences(76 + FIRST_PLAIN)
    model = in_4_bits(build_tiny("axk2"), torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        alone = run_alone(model, sequences)
        error = compare(run_batch(fastpack.patch(model), sequences, "padded left"), alone)
    assert error.loss <= 1e-2, error  # of logits and gradients routing decides, which rounding moves
