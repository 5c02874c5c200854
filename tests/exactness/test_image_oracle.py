"""The oracle of image-text models: batches with images equal each row alone, and what leaks is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

import fastpack
from fastpack.exactness.image_oracle import IMAGE_KINDS, ImageOracle, with_text_positions
from fastpack.exactness.image_text import build_image_text, flat_of
from fastpack.exactness.oracle import checkpointings
from fastpack.exactness.rule import CONTROL, FULL_BOUND
from fastpack.families.registry import family_of
from fastpack.model.unwrap import find_parts

MAIN = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "llava", "internvl", "mistral3", "glm4v"),
    *("glm4v_moe", "lfm2_vl", "smolvlm", "idefics3", "gemma3", "gemma4", "paligemma"),
)


def stock(model_type: str, dtype: torch.dtype = torch.float32) -> Any:
    return build_image_text(model_type, dtype=dtype).train()


def oracle_of(model_type: str) -> ImageOracle:
    family = family_of(find_parts(stock(model_type)).backbone)
    assert family is not None
    return ImageOracle.of(lambda dtype: stock(model_type, dtype), family.routers)


@pytest.mark.sample(3)
@pytest.mark.parametrize("model_type", [name for name in MAIN if name in CONFIG_MAPPING])
def test_batches_with_images_are_exact(model_type: str) -> None:
    """Logits and all gradients, of the tower too, in every kind of batch and with both kinds of checkpointing."""
    oracle, model = oracle_of(model_type), fastpack.patch(stock(model_type))
    result = oracle.prove(model)
    assert result.problem is None
    controls = [check for check in result.checks if check.at_least]
    assert len(oracle.checkpointing) == len(checkpointings(model))
    assert len(result.checks) == len(IMAGE_KINDS) + len(oracle.checkpointing) + len(controls)
    assert len(controls) == 1 + hasattr(model.base_model, "get_rope_index")
    assert max(check.error for check in result.checks if not check.at_least) <= FULL_BOUND
    backbone = {id(parameter) for parameter in find_parts(model).backbone.parameters()}
    trained = [
        p for name, p in model.named_parameters() if name in oracle.alone.grads and oracle.alone.grads[name].any()
    ]
    assert {id(parameter) in backbone for parameter in trained} == {True, False}


def test_a_stock_model_that_leaks_is_seen() -> None:
    oracle, model = oracle_of("llava"), stock("llava")

    def flattened(model: Any, rows: Any) -> dict[str, Any]:
        return {name: value for name, value in flat_of(model, rows).items() if name != "packed_seq_lens"}

    assert oracle.error(model, IMAGE_KINDS["images, padded left"]).of_tensors <= oracle.bound
    assert oracle.error(model, flattened).of_tensors > CONTROL * oracle.bound


def test_positions_of_one_axis_are_seen_or_refused() -> None:
    oracle, model = oracle_of("qwen3_vl"), fastpack.patch(stock("qwen3_vl"))
    assert oracle.error(model, with_text_positions).of_tensors > CONTROL * oracle.bound

    def one_axis(model: Any, rows: Any) -> dict[str, Any]:
        batch = flat_of(model, rows)
        return {**batch, "position_ids": batch["position_ids"][0]}

    with pytest.raises(fastpack.PackingError, match="one axis"):
        oracle.error(model, one_axis)


def test_the_positions_that_a_model_has_cached_are_kept() -> None:
    oracle, model = oracle_of("qwen3_vl"), fastpack.patch(stock("qwen3_vl"))
    cached = model.model.rope_deltas = torch.tensor([[3]])
    oracle.error(model, IMAGE_KINDS["images, padded right"])
    assert model.model.rope_deltas is cached
    assert fastpack.verify(model).passed
    assert model.model.rope_deltas is cached
