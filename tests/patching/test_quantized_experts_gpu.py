"""On a GPU: quantised experts in NF4 and MXFP4 against their dequantised selves, moved there or quantised there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mxfp4_models import dense_model, loaded_in_mxfp4
from oracle import GPU_FLOAT32_BOUND, compare, make_sequences, run_alone, run_batch
from test_quantize_experts import dequantized, quantized_model, stacks_of, with_lora
from tiny import VOCAB, tiny_model

import fastpack

pytestmark = pytest.mark.gpu
SEQUENCES = make_sequences(VOCAB)


def check(model: Any, dense: Any) -> None:
    """Check a quantised model against the dense one, with the order of sums as the stock model has it, or better."""
    alone = run_alone(dense, SEQUENCES)
    stock = compare(run_batch(dense, SEQUENCES, "padded right"), alone)
    fastpack.patch(model)
    assert fastpack.report(model).swapped["experts"]
    for kind in ("packed_seq_lens", "padded left"):
        error = compare(run_batch(model, SEQUENCES, kind), alone)
        assert error.worst <= max(GPU_FLOAT32_BOUND, 2 * stock.worst), (kind, error, stock)


@pytest.mark.parametrize("where", ["moved", "quantised there"])
@pytest.mark.parametrize("quant_type", ["nf4", "mxfp4"])
def test_stacks_of_qwen3_moe(quant_type: Any, where: str) -> None:
    if where == "moved":
        model = quantized_model("qwen3_moe", quant_type=quant_type)
        before = [stack.packed.clone() for stack in stacks_of(model).values()]
        model.to("cuda")
        after = [stack.packed for stack in stacks_of(model).values()]
        assert all(torch.equal(a.cpu(), b) for a, b in zip(after, before, strict=True))
    else:
        model = fastpack.quantize_experts(tiny_model("qwen3_moe").to("cuda"), quant_type=quant_type)
    model = with_lora(model).to("cuda")
    assert {each.device.type for each in stacks_of(model).values()} == {"cuda"}
    check(model, dequantized(model))
    model.to("cpu")
    assert {each.device.type for each in stacks_of(model).values()} == {"cpu"}
    assert {each.dense().device.type for each in stacks_of(model).values()} == {"cpu"}


def test_gpt_oss_in_mxfp4() -> None:
    dense = dense_model()
    model = fastpack.quantize_experts(loaded_in_mxfp4(dense))
    check(with_lora(model.to("cuda")).to("cuda"), with_lora(dense.to("cuda")).to("cuda"))


def test_memory_is_that_of_the_packed_bytes() -> None:
    """A step has less than two dense stacks at any time, although four layers have eight."""
    settings = {"num_hidden_layers": 4, "hidden_size": 512, "moe_intermediate_size": 512}
    model = tiny_model("qwen3_moe", **settings)
    fastpack.patch(with_lora(fastpack.quantize_experts(model).to("cuda")).to("cuda"))
    dense = max(each.numel() * 4 for each in stacks_of(model).values())
    ids = SEQUENCES[0].cuda()[None]
    for _ in range(2):  # the first step makes what stays: gradients, and workspaces of libraries
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(input_ids=ids, labels=ids).loss.backward()
    assert torch.cuda.max_memory_allocated() - before < 2 * dense
