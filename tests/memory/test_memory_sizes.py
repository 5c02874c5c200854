"""Weights, adapters, gradients and moments: the bytes are those of a real model's tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import nf4, with_lora
from tiny import EXPERTS, FAST, VOCAB, tiny_config, tiny_model
from torch import Tensor

import fastpack
from fastpack.memory.settings import TrainingSettings
from fastpack.memory.sizes import ModelSizes, read_sizes
from fastpack.memory.step import WORKSPACE, Step
from fastpack.memory.terms import quantised_bytes

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "smollm3")
RANK = 4


def sizes_of(model: Any) -> ModelSizes:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return read_sizes(base.config)


def nbytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def state_bytes(sizes: ModelSizes, **settings: Any) -> float:
    """The bytes of weights, adapters, gradients and moments in the terms of a step."""
    step = Step(sizes, TrainingSettings(**settings, accumulation=True, dtype=torch.float32), tokens=64, longest=64)
    return sum(term.of(64) for term in step.fixed()) - WORKSPACE


@pytest.mark.sample(3)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_state_of_a_step(family: str, mode: Any, tied: bool) -> None:
    model: Any = tiny_model(family, tie_word_embeddings=tied)
    model = with_lora(model, r=RANK) if mode == "lora" else model
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    ids = torch.randint(3, VOCAB, (1, 16))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    moments = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    real = nbytes(model.parameters()) + nbytes(p.grad for p in trained) + nbytes(moments)

    sizes = sizes_of(model)
    assert state_bytes(sizes, mode=mode, rank=RANK) == real
    other = {"mode": "lora", "rank": RANK + 1} if mode == "lora" else {"mode": "lora", "rank": RANK}
    assert state_bytes(sizes, **other) != real, "control"
    assert sizes.tied == tied


def test_weights_in_four_bits(tmp_path: Path) -> None:
    model: Any = nf4(tmp_path)
    sizes = sizes_of(model)
    parts: list[Tensor] = []
    for module in model.modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:
            parts += [module.weight, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    assert len(parts) == 6 * len(sizes.linear)
    assert sum(quantised_bytes(out * inputs) for out, inputs in sizes.linear.values()) == nbytes(parts)
    others = [p for p in model.parameters() if type(p).__name__ != "Params4bit"]
    assert 4 * sizes.other == nbytes(others)
    assert 4 * sizes.parameters > 4 * nbytes(parts) + nbytes(others), "control"


def test_sizes_of_a_real_shape() -> None:
    from fastpack.bench.shapes import make_config

    sizes = read_sizes(make_config("llama8b"))
    assert sizes.parameters == 8_030_261_248
    assert (sizes.layers, sizes.hidden, sizes.intermediate, sizes.queries, sizes.keys) == (32, 4096, 14336, 4096, 1024)
    assert (sizes.heads, sizes.rotary, sizes.vocabulary, sizes.tied, sizes.head_norms) == (
        32,
        128,
        128256,
        False,
        False,
    )
    assert sizes.lora_parameters(32) == 83_886_080
    qwen = read_sizes(make_config("qwen3-4b"))
    assert (qwen.tied, qwen.head_norms, qwen.queries) == (True, True, 4096)


@pytest.mark.parametrize(
    ("family", "what"),
    [("mixtral", "MixtralSparseMoeBlock"), ("gemma2", "Gemma2DecoderLayer"), ("gpt_oss", "GptOssAttention")],
)
def test_parts_that_were_not_worked_out(family: str, what: str) -> None:
    with pytest.raises(fastpack.UnsupportedModelError, match=f"{what} is not counted"):
        read_sizes(tiny_config(family))


@pytest.mark.slow
def test_every_family_is_counted_or_refused() -> None:
    counted: list[str] = []
    for family in FAST:
        try:
            sizes = read_sizes(tiny_config(family))
        except fastpack.UnsupportedModelError:
            continue
        assert sizes.parameters == sum(p.numel() for p in tiny_model(family).parameters())
        counted.append(family)
    assert {"llama", "mistral", "qwen2", "qwen3"} <= {*counted}
    assert not {*counted} & {*EXPERTS}, "control"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "half"}, "mode='half' is not a choice"),
        ({"rank": 0}, "rank=0; pass LoRA's rank"),
        ({"checkpointing": False}, "--offload none"),
        ({"offload": "activations"}, "offload='activations' is not a choice"),
        ({"loss": "mine"}, "loss='mine' is not a choice"),
        ({"vram": 0}, "vram=0 and reserve=1; pass the GiB of a card"),
        ({"reserve": -1}, "vram=24 and reserve=-1; pass"),
    ],
)
def test_bad_settings(settings: Any, message: str) -> None:
    with pytest.raises(fastpack.PatchError, match=message):
        fastpack.fit(tiny_config("llama"), **{"vram": 24, **settings})
