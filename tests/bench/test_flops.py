"""The floor's count of operations, against numbers worked by hand and against what torch counts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from fastpack.bench.flops import needed_flops, tower_flops
from fastpack.bench.models import lora_config, with_lora
from fastpack.bench.settings import RunSettings
from fastpack.bench.shapes import SHAPES, make_config
from fastpack.model.unwrap import find_parts

HIDDEN, INNER, LAYERS, VOCABULARY, RANK = 8, 20, 3, 50, 16
# q 8 x 8, k and v 8 x 4, o 8 x 8, gate and up 8 x 20, down 20 x 8: 64 + 32 + 32 + 64 + 3 x 160
WEIGHTS = 672
# inputs and outputs: q 16, k 12, v 12, o 16, gate, up and down 28 each
LORA = RANK * 140
LENGTHS = [3, 2, 5]
TOKENS, PREDICTED, PAIRS = 10, 7, 6 + 3 + 15
LINEAR, UPDATES = 2 * TOKENS * WEIGHTS * LAYERS, 2 * TOKENS * LORA * LAYERS
ATTENTION = 2 * 2 * PAIRS * HIDDEN * LAYERS
HEAD = 2 * HIDDEN * VOCABULARY


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunSettings:
    """A step on three rows, after one that is not timed."""
    (tmp_path / "lengths.json").write_text(json.dumps([9, 9, 9, *LENGTHS]))
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": VOCABULARY,
    }
    monkeypatch.setitem(SHAPES, "tiny", {**SHAPES["tiny"], **sizes})
    return RunSettings("", rows=3, steps=1, warmup=1, lengths=str(tmp_path / "lengths.json"))


def test_full_by_hand(small: RunSettings) -> None:
    assert needed_flops(small) == 3 * (LINEAR + ATTENTION + PREDICTED * HEAD)


@pytest.mark.parametrize("mode", ["lora", "qlora"])
def test_lora_by_hand(mode: Any, small: RunSettings) -> None:
    """Forward and the gradients of inputs, and of weights those of A and B."""
    expected = 2 * LINEAR + 3 * UPDATES + 3 * ATTENTION + 2 * PREDICTED * HEAD
    assert needed_flops(replace(small, mode=mode)) == expected


def test_checkpointing_by_hand(small: RunSettings) -> None:
    again = LINEAR - 2 * TOKENS * INNER * HIDDEN * LAYERS + ATTENTION
    assert needed_flops(replace(small, checkpointing=True)) - needed_flops(small) == again
    lora = replace(small, mode="lora")
    again += UPDATES - 2 * TOKENS * RANK * HIDDEN * LAYERS
    assert needed_flops(replace(lora, checkpointing=True)) - needed_flops(lora) == again


def test_pairs_by_hand(small: RunSettings, tmp_path: Path) -> None:
    """The policy's training and the reference's forward; the head on completions."""
    (tmp_path / "pairs.json").write_text("[[9, 9, 9], [5, 7, 11], [3, 2, 4]]")
    dpo = replace(small, trainer="dpo", rows=1, steps=2, lengths=str(tmp_path / "pairs.json"))
    tokens, pairs = 12 + 16 + 5 + 7, 78 + 136 + 15 + 28
    linear, attention = 2 * tokens * WEIGHTS * LAYERS, 4 * pairs * HIDDEN * LAYERS
    assert needed_flops(dpo) == 4 * (linear + attention + (7 + 11 + 2 + 4) * HEAD)
    updates = 2 * tokens * LORA * LAYERS
    # the reference is the policy with its adapters off
    expected = 3 * linear + 3 * updates + 4 * attention + 3 * (7 + 11 + 2 + 4) * HEAD
    assert needed_flops(replace(dpo, mode="lora")) == expected


def test_llama8b_is_what_is_known() -> None:
    """30 GFLOP a token with frozen weights: 6.98 billion in the layers, 0.53 in the head."""
    settings = RunSettings("", shape="llama8b", mode="lora", lengths="190", steps=1)
    assert needed_flops(settings) / 3040 == pytest.approx(30.4e9, rel=0.01)


EXPERTS, ROUTED, EXPERT_INNER, WINDOW = 6, 2, 12, 2
MOE_SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": VOCABULARY,
    "num_experts_per_tok": ROUTED,
}
# q, k, v and o as above, a router, and of each chosen expert gate and up 8 x 12, down 12 x 8
MOE_WEIGHTS = 192 + HIDDEN * EXPERTS + ROUTED * 3 * HIDDEN * EXPERT_INNER
ATTENTION_LORA = RANK * (16 + 12 + 12 + 16)
# gate and up in one: 8 + 24; down 12 + 8
EXPERT_LORA = ROUTED * RANK * (32 + 20)


@pytest.fixture
def experts(small: RunSettings, monkeypatch: pytest.MonkeyPatch) -> RunSettings:
    """The same step on a mixture of experts."""
    sizes = MOE_SIZES | {"moe_intermediate_size": EXPERT_INNER, "num_experts": EXPERTS}
    monkeypatch.setitem(SHAPES, "tiny-moe", {**SHAPES["tiny-moe"], **sizes})
    return replace(small, shape="tiny-moe")


def test_experts_by_hand(experts: RunSettings) -> None:
    linear = 2 * TOKENS * MOE_WEIGHTS * LAYERS
    assert needed_flops(experts) == 3 * (linear + ATTENTION + PREDICTED * HEAD)
    lora, both = replace(experts, mode="lora"), replace(experts, mode="lora", lora_experts=True)
    expected = 2 * linear + 3 * 2 * TOKENS * ATTENTION_LORA * LAYERS + 3 * ATTENTION + 2 * PREDICTED * HEAD
    assert needed_flops(lora) == expected
    assert needed_flops(both) == expected + 3 * 2 * TOKENS * EXPERT_LORA * LAYERS


def test_experts_with_checkpointing_by_hand(experts: RunSettings) -> None:
    """Again all but the chosen experts' last products, whose results only the layer's output needs."""
    again = 2 * TOKENS * (MOE_WEIGHTS - ROUTED * EXPERT_INNER * HIDDEN) * LAYERS + ATTENTION
    lora = again + 2 * TOKENS * ATTENTION_LORA * LAYERS
    both = lora + 2 * TOKENS * (EXPERT_LORA - ROUTED * RANK * HIDDEN) * LAYERS
    for settings, expected in (
        (experts, again),
        (replace(experts, mode="lora"), lora),
        (replace(experts, mode="lora", lora_experts=True), both),
    ):
        assert needed_flops(replace(settings, checkpointing=True)) - needed_flops(settings) == expected


def test_windows_by_hand(small: RunSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other layer sees two tokens."""
    sizes = MOE_SIZES | {"intermediate_size": EXPERT_INNER, "num_local_experts": EXPERTS, "sliding_window": WINDOW}
    monkeypatch.setitem(SHAPES, "gpt-oss-20b", {**SHAPES["gpt-oss-20b"], **sizes})
    pairs = 2 * (5 + 3 + 9) + PAIRS  # layers 0 and 2, and layer 1
    linear = 2 * TOKENS * MOE_WEIGHTS * LAYERS
    expected = 3 * (linear + 2 * 2 * pairs * HIDDEN + PREDICTED * HEAD)
    assert needed_flops(replace(small, shape="gpt-oss-20b")) == expected


def test_qwen3_30b_is_what_is_known() -> None:
    """3.04 billion weights at work for a token: 1.81 of experts, 0.91 of attention, 0.31 of the head."""
    settings = RunSettings("", shape="qwen3-30b-a3b", lengths="190", steps=1)
    assert needed_flops(settings) / 3040 == pytest.approx(6 * 3.04e9, rel=0.02)


@pytest.mark.sample(1)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_experts_against_what_torch_counts(mode: Any, checkpointing: bool, experts: RunSettings) -> None:
    """Torch counts the products that a stock step runs: ours without attention, the head on every token."""
    model: Any = AutoModelForCausalLM.from_config(make_config("tiny-moe"), attn_implementation="sdpa").train()
    model.set_experts_implementation("eager")
    settings = RunSettings("", shape="tiny-moe", mode=mode, checkpointing=checkpointing, rows=1, steps=1, warmup=0)
    settings = replace(settings, lengths="24")
    if mode == "lora":
        model = with_lora(model, lora_config(settings))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(3, VOCABULARY, (1, 24))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    counted = sum(
        n for op, n in counter.get_flop_counts()["Global"].items() if str(op) in ("aten.mm", "aten.addmm", "aten.bmm")
    )
    needed = needed_flops(settings) + HEAD * (3 if mode == "full" else 2)
    needed -= 2 * 2 * 300 * HIDDEN * LAYERS * (4 if checkpointing else 3)
    if mode == "lora" and not checkpointing:
        needed -= 2 * 24 * (HIDDEN * 16 + 3 * RANK * HIDDEN)  # gradients of the first layer's input
    if checkpointing:
        needed += 2 * 24 * ROUTED * EXPERT_INNER * HIDDEN * LAYERS  # stock weighs the results, and so needs them
    assert counted == needed


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_against_what_torch_counts(mode: Any, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch counts the products that a stock step runs: ours without attention, the head on every token."""
    monkeypatch.setitem(SHAPES, "tiny", {**SHAPES["tiny"], "num_hidden_layers": 2})
    model: Any = AutoModelForCausalLM.from_config(make_config("tiny"), attn_implementation="sdpa").train()
    if mode == "lora":
        model = with_lora(model, lora_config(RunSettings("")))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(3, 2048, (1, 24))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    counted = sum(
        n for op, n in counter.get_flop_counts()["Global"].items() if str(op) in ("aten.mm", "aten.addmm", "aten.bmm")
    )
    settings = RunSettings("", mode=mode, checkpointing=checkpointing, rows=1, steps=1, warmup=0, lengths="24")
    needed = needed_flops(settings) + 2 * 256 * 2048 * (3 if mode == "full" else 2)
    needed -= 2 * 2 * 300 * 256 * 2 * (4 if checkpointing else 3)
    if mode == "lora" and not checkpointing:
        needed -= 2 * 24 * 3 * (256 * 256 + 16 * 256)  # gradients of the first layer's input
    if mode == "lora" and checkpointing:
        needed += 2 * (2 * 24 * 688 * 256)  # PEFT computes down_proj's product before what is kept of it
    assert counted == needed


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_an_image_tower_against_what_torch_counts(mode: Any) -> None:
    """Torch counts the products of a tower on two images: ours without attention. With LoRA the tower is frozen."""
    grids = [(4, 6), (2, 4)]
    model: Any = AutoModelForImageTextToText.from_config(make_config("tiny-vl"), attn_implementation="sdpa").train()
    if mode == "lora":
        model = with_lora(model, lora_config(RunSettings("", shape="tiny-vl")))
    tower = find_parts(model).composite.visual
    pixels = torch.randn(sum(h * w for h, w in grids), 3 * 2 * 16 * 16)
    with FlopCounterMode(display=False) as counter:
        out = tower(pixels, grid_thw=torch.tensor([[1, h, w] for h, w in grids]), return_dict=True)
        if mode == "full":
            (out.pooler_output.sum() + sum(each.sum() for each in out.deepstack_features)).backward()
    counted = sum(
        n
        for op, n in counter.get_flop_counts()["Global"].items()
        if str(op) in ("aten.mm", "aten.addmm", "aten.bmm", "aten.convolution", "aten.convolution_backward")
    )
    attention = 4 * 32 * 2 * (24**2 + 8**2)
    assert counted == tower_flops(model, grids) - attention * (3 if mode == "full" else 1)
