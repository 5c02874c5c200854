"""Backbones that put images in place of tokens themselves: each token gets its own image."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from text_models import text_model

import fastpack
from fastpack.errors import UnsupportedModelError
from fastpack.exactness.image_text import build_image_text

BOUND = 1e-5
IMAGE = 4
"""The tokens of an image."""


def chameleon() -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return a model, the ids ``[2, S]`` of two rows that are equal, and their images ``[2, C, h, w]``."""
    model = text_model("chameleon")
    ids = torch.tensor([5, 6, *[model.config.image_token_id] * IMAGE, 7, 8, 9]).repeat(2, 1)
    side = model.config.vq_config.resolution
    return model, ids, 4 * torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))


def error(result: torch.Tensor, alone: torch.Tensor) -> float:
    return float((result - alone).detach().abs().max() / alone.detach().abs().max())


def test_equal_ids_with_other_images_share_nothing() -> None:
    model, ids, images = chameleon()
    alone = torch.cat([model(input_ids=ids[:1], pixel_values=image[None]).last_hidden_state for image in images])
    text = model(input_ids=ids).last_hidden_state
    assert error(alone[:1], alone[1:]) > 0.05  # control: the images differ where the model reads them
    fastpack.patch(model, share_prefixes="auto")
    with_images = model(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=images).last_hidden_state
    assert error(with_images, alone) <= BOUND
    without = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    assert error(without, text) <= BOUND
    notes = "\n".join(fastpack.report(model).notes)
    assert "shared in 1 of 2 batches" in notes
    assert "images came with the batch" in notes


def test_a_backbone_takes_no_images_but_its_own() -> None:
    """Features of another kind are refused: Chameleon's row names ``pixel_values``, not ``image_embeds``."""
    model, ids, images = chameleon()
    fastpack.patch(model)
    with pytest.raises(UnsupportedModelError, match="image_embeds came with the batch"):
        model(input_ids=ids, image_embeds=images)


def test_verify_sees_a_leak_although_some_logits_are_the_lowest_number() -> None:
    """Chameleon's head sets the logits of images' codes so."""
    model = build_image_text("chameleon")
    assert (model(input_ids=torch.tensor([[5, 6]])).logits == torch.finfo(torch.float32).min).any()
    assert fastpack.verify(fastpack.patch(model)).passed
