"""Tiny image-text models: a stock model's padded batch equals each row alone, and its images matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fastpack.exactness.image_settings import LAYOUTS, NO_DECODER, NOT_BUILT, PACKAGES, RELEASES, TEXT_ALONE
from fastpack.exactness.image_text import (
    batch_of,
    build_image_text,
    flat_of,
    image_text_types,
    not_built,
    other_pixels,
    samples,
)
from fastpack.families.refused import REFUSED, REFUSED_IMAGES

BOUND = 1e-5


def off(logits: Any, true: Any) -> float:
    predicted = true > torch.finfo(true.dtype).min  # some models never predict the tokens of images
    logits, true = logits[predicted], true[predicted]
    return float((logits - true).detach().abs().max() / true.detach().abs().max())


NOT_AS_PADDED = {"emu3", "hunyuan_vl", "llama4", "minimax_m3_vl", "mistral_large4"}
"""Stock models whose padded batch is not each row alone: positions or a batch norm count the images of all rows,
or padding is among the blocks of keys that a layer picks from."""


@pytest.mark.sample(4)
@pytest.mark.parametrize("model_type", [name for name in LAYOUTS if name not in NOT_AS_PADDED])
def test_a_padded_batch_of_a_stock_model_is_each_row_alone(model_type: str) -> None:
    if model_type not in image_text_types() or not_built(model_type) is not None:
        pytest.skip("not in this release of transformers")
    model: Any = build_image_text(model_type).train()
    rows = samples(model)
    alone = [model(**row).logits[0] for row in rows]
    for side in ("right", "left"):
        batch = batch_of(model, rows, side)
        logits = model(**batch).logits
        for row, mask, true in zip(logits, batch["attention_mask"], alone, strict=True):
            assert off(row[mask.bool()], true) <= BOUND
    for row, true in zip(rows, alone, strict=True):  # control: other pixels, other logits
        moved = off(model(**other_pixels(row)).logits[0], true)
        assert moved > 0.02 if "pixel_values" in row else moved == 0


def test_a_flat_batch_has_every_row_and_positions_of_each_axis() -> None:
    for model_type, axes in (("llava", ()), ("qwen2_vl", (4,))):
        model = build_image_text(model_type)
        rows = samples(model)
        flat = flat_of(model, rows)
        tokens = sum(flat["packed_seq_lens"])
        assert flat["input_ids"].shape == (1, tokens)
        assert flat["position_ids"].shape == (*axes, 1, tokens)
        text = flat["position_ids"][0] if axes else flat["position_ids"]
        assert int((text == 0).sum()) == len(rows)
    starts = torch.tensor([0, *flat["packed_seq_lens"][:-1]]).cumsum(0)
    assert not flat["position_ids"][:, 0, starts].any()


def test_what_is_not_built_has_a_reason() -> None:
    for model_type in {*NOT_BUILT, *PACKAGES, *RELEASES} & {*image_text_types()}:
        if not_built(model_type) is None:
            continue
        with pytest.raises(ValueError, match="can't be built"):
            build_image_text(model_type)
    with pytest.raises(KeyError):
        build_image_text("no_such_type")


def test_every_type_has_a_layout_or_a_reason() -> None:
    """Names of the mapping that neither can be tried on images nor are refused by name."""
    known = {*LAYOUTS, *NOT_BUILT, *TEXT_ALONE, *REFUSED, *REFUSED_IMAGES}
    assert not {*image_text_types()} - known


def test_the_readme_counts_the_types() -> None:
    """The sweep (``gists/smoke.sh --all --modes images``) proves each type that has a layout."""
    decoders = [name for name in image_text_types() if NOT_BUILT.get(name) != NO_DECODER]
    if not {*LAYOUTS} <= {*decoders}:
        pytest.skip("this release of transformers lacks some of the names")
    tried = [name for name in decoders if name in LAYOUTS and (name in PACKAGES or not_built(name) is None)]
    readme = " ".join((Path(__file__).parent.parent.parent / "README.md").read_text().split())
    assert f"{len(tried)} of the {len(decoders)} decoders in its image-text mapping on images" in readme
