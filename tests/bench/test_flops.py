"""The floor's count of operations, against numbers worked by hand and against what torch counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fastpack.bench.flops import layer_projections, step_flops
from fastpack.bench.shapes import SHAPES, make_config

SMALL = SimpleNamespace(
    hidden_size=8,
    intermediate_size=20,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    vocab_size=50,
)
# q 8 x 8, k and v 8 x 4, o 8 x 8, gate and up 8 x 20, down 20 x 8: 64 + 32 + 32 + 64 + 3 x 160
WEIGHTS = 672
LENGTHS = [3, 1, 6]
TOKENS, SCORED, PAIRS = 10, 7, 6 + 1 + 21


def test_full_by_hand() -> None:
    found = step_flops(SMALL, LENGTHS, mode="full")
    assert found.linear == 3 * 3 * 2 * 10 * 672 == 120_960
    assert found.attention == 3 * 7 * (2 * PAIRS * 2 * 4) == 9_408
    assert found.head == 3 * 2 * 7 * 8 * 50 == 16_800
    assert (found.lora, found.recomputed) == (0, 0)
    assert found.total == 147_168


def test_lora_by_hand() -> None:
    found = step_flops(SMALL, LENGTHS, mode="lora", rank=2)
    # forward and the gradients of inputs, without those of the first layer's q, k and v
    assert found.linear == 2 * 3 * 2 * 10 * 672 - 2 * 10 * (64 + 32 + 32) == 78_080
    # inputs and outputs: q 16, k 12, v 12, o 16, gate, up and down 28 each
    assert found.lora == 3 * 3 * 2 * 10 * 2 * 140 - 2 * 10 * 2 * (8 + 8 + 8) == 49_440
    assert found.head == 2 * 2 * 7 * 8 * 50
    assert step_flops(SMALL, LENGTHS, mode="qlora", rank=2) == found


def test_checkpointing_by_hand() -> None:
    full = step_flops(SMALL, LENGTHS, mode="full", checkpointing=True)
    assert full.recomputed == 3 * (2 * 10 * (672 - 160) + 4 * PAIRS * 2 * 4) == 33_408
    lora = step_flops(SMALL, LENGTHS, mode="lora", rank=2, checkpointing=True)
    assert lora.recomputed == full.recomputed + 3 * 2 * 10 * 2 * (140 - 8)


def test_llama8b_is_what_is_known() -> None:
    """6.98 billion weights in the layers, 0.53 in the head; 30 GFLOP a token with frozen weights."""
    config = make_config("llama8b")
    assert 32 * sum(a * b for a, b in layer_projections(config).values()) == 6_979_321_856
    per_token = step_flops(config, [190] * 16, mode="lora").total / 3040
    assert per_token == pytest.approx(30.4e9, rel=0.01)


@pytest.mark.parametrize("shape", SHAPES)
def test_projections_are_those_of_the_model(shape: str) -> None:
    from transformers import AutoModelForCausalLM

    config = make_config(shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    inside = [m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "layers.0." in name]
    assert sorted((m.in_features, m.out_features) for m in inside) == sorted(layer_projections(config).values())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_against_what_torch_counts(mode: Any, checkpointing: bool) -> None:
    """Torch counts the products that a stock step runs: ours without attention, the head on every token."""
    from transformers import AutoModelForCausalLM

    from fastpack.bench.models import with_lora

    config = make_config("tiny")
    config.num_hidden_layers = 2
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    if mode == "lora":
        model = with_lora(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(3, 2048, (1, 24))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    counted = sum(
        n for op, n in counter.get_flop_counts()["Global"].items() if str(op) in ("aten.mm", "aten.addmm", "aten.bmm")
    )
    found = step_flops(config, [24], mode=mode, checkpointing=checkpointing)
    needed = found.linear + found.lora + found.head // 23 * 24 + found.recomputed
    if checkpointing:
        needed -= found.attention * 2 // 7  # its forward, counted under recomputed
    wasted = 0
    if checkpointing and mode == "lora":
        # PEFT asks for gradients of the embeddings, and computes down_proj's product before what is kept of it
        first = 2 * 24 * 3 * (256 * 256 + 16 * 256)
        wasted = first + 2 * (2 * 24 * 688 * 256)
    assert counted == needed + wasted
