"""Positions of several axes: how many there are, and which batches with them are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastpack
from fastpack.exactness.image_oracle import IMAGE_KINDS, ImageOracle
from fastpack.exactness.image_text import batch_of, build_image_text, flat_of, samples
from fastpack.exactness.rule import CONTROL
from fastpack.model.position_axes import position_axes
from fastpack.packing.inputs import read_packing


def config(rope: Any) -> Any:
    text = SimpleNamespace(rope_parameters=rope)
    return SimpleNamespace(get_text_config=lambda decoder: text)


@pytest.mark.parametrize(
    ("rope", "axes"),
    [
        (None, 3),
        ({"rope_type": "default"}, 3),
        ({"mrope_section": [1, 1, 1, 1]}, 4),
        ({"full_attention": {"mrope_section": [1, 1, 1, 1]}, "sliding_attention": {}}, 4),
    ],
)
def test_the_config_says_how_many_axes_there_are(rope: Any, axes: int) -> None:
    assert position_axes(config(rope)) == axes


@pytest.mark.parametrize("axes", [3, 4])
def test_text_positions_before_the_axes_tell_sequences_apart(axes: int) -> None:
    text, same = torch.tensor([[0, 1, 0, 1, 2]]), torch.zeros(1, 5, dtype=torch.long)
    positions = torch.stack([text, *[same] * axes])
    assert read_packing((1, 5), same.device, position_ids=positions, axes=axes).lengths == (2, 3)
    assert read_packing((1, 5), same.device, position_ids=positions[1:], axes=axes).lengths == (5,)
    with pytest.raises(fastpack.PackingError, match="fall at token 2"):
        read_packing((1, 5), same.device, position_ids=text.expand(axes, 1, 5), axes=axes)
    apart = read_packing(
        (1, 5), same.device, position_ids=text.expand(axes, 1, 5), axes=axes, packing={"packed_seq_lens": [2, 3]}
    )
    assert apart.lengths == (2, 3)


def test_a_flat_batch_without_text_positions_is_refused() -> None:
    """Also without images, whose positions the model would compute itself."""
    model = fastpack.patch(build_image_text("qwen2_vl"))
    batch = flat_of(model, samples(model))
    positions = batch["position_ids"][1:]
    lengths = batch.pop("packed_seq_lens")
    with pytest.raises(fastpack.PackingError, match="fall at token"):
        model(**{**batch, "position_ids": positions})
    told = model(**{**batch, "position_ids": positions}, packed_seq_lens=lengths).logits
    assert torch.equal(told, model(**batch, packed_seq_lens=lengths).logits)


def test_a_model_on_rows_of_equal_length_gets_its_axes() -> None:
    oracle = ImageOracle.of(lambda dtype: build_image_text("qwen4_exp", dtype=dtype).train())
    model = fastpack.patch(build_image_text("qwen4_exp").train())
    assert fastpack.report(model).tier == "re-padded model"
    assert oracle.error(model, IMAGE_KINDS["images, padded left"]).of_tensors <= oracle.bound


def test_frequencies_that_depend_on_the_length_are_refused_with_several_axes() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    model = fastpack.patch(build_image_text("qwen2_vl", text_config={"rope_parameters": rope}))
    rows = samples(model)
    with pytest.raises(fastpack.PackingError, match="depend on each sequence's length"):
        model(**batch_of(model, rows))
    model(input_ids=rows[2]["input_ids"])


@pytest.mark.filterwarnings("ignore::fastpack.errors.UntriedVersionWarning")
def test_positions_that_count_the_images_of_all_rows_are_computed_for_each_row_alone() -> None:
    """The stock model's padded batch is not each row alone; a patched model's is."""
    stock, model = (build_image_text("hunyuan_vl").train() for _ in range(2))
    oracle = ImageOracle.of(lambda dtype: build_image_text("hunyuan_vl", dtype=dtype).train())
    padded = IMAGE_KINDS["images, padded right"]
    assert oracle.error(stock, padded).logits > CONTROL * oracle.bound
    assert oracle.error(fastpack.patch(model), padded).of_tensors <= oracle.bound
