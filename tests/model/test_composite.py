"""Composite models: the text model inside runs packed, on text and on images, and the rest stays stock."""

from inspect import signature
from typing import Any

import pytest
import torch
from composite_cases import BOUND, CAUSAL, GRADIENT_BOUND, off, results, text_tokens
from transformers.masking_utils import create_causal_mask

import fastpack
from fastpack.exactness.image_text import batch_of, build_image_text, flat_of, samples
from fastpack.model.composite import composite_forward, masks_off
from fastpack.model.unwrap import find_parts
from fastpack.utils.replacement import replaces


@pytest.mark.sample(3)
@pytest.mark.parametrize("model_type", CAUSAL)
def test_images_are_exact_in_padded_and_flat_batches(model_type: str) -> None:
    model = build_image_text(model_type).train()
    rows = samples(model, 0)
    alone = results(model, rows)
    fastpack.patch(model)
    composite = find_parts(model).composite
    assert replaces(composite.__dict__["forward"], composite_forward)
    real = sum(row["input_ids"].numel() for row in rows)
    for batch in (batch_of(model, rows, "right"), batch_of(model, rows, "left"), flat_of(model, rows)):
        with text_tokens(model) as counts:
            logits, grads = off(results(model, [batch]), alone)
        assert logits <= BOUND
        assert grads <= GRADIENT_BOUND
        assert counts == [real], "padding reached the text model"


def test_without_boundaries_the_comparison_fails() -> None:
    model = build_image_text("llava").train()
    rows = samples(model, 0)
    alone = results(model, rows)
    batch = {k: v for k, v in flat_of(model, rows).items() if k not in ("packed_seq_lens", "position_ids")}
    fastpack.patch(model)
    assert off(results(model, [batch]), alone)[0] > 3 * BOUND


def test_unpatch_restores_the_composite_and_its_config() -> None:
    model = build_image_text("internvl")
    before, config = dict(model.model.__dict__), model.model.config
    fastpack.patch(model)
    model(**batch_of(model, samples(model, 0), "left"))
    assert model.model.config is config
    fastpack.unpatch(model)
    assert model.model.__dict__.keys() == before.keys()
    assert "forward" not in model.model.__dict__


def test_packing_keywords_do_not_reach_the_tower() -> None:
    model = fastpack.patch(build_image_text("internvl"))
    seen: list[str] = []
    calls: list[object] = []
    tower = model.model.vision_tower

    def watch(_: object, args: object, kwargs: dict[str, Any]) -> None:
        calls.append(args)
        seen.extend(kwargs)

    with tower.register_forward_pre_hook(watch, with_kwargs=True):
        model(**flat_of(model, samples(model, 0)))
    assert calls
    assert "packed_seq_lens" not in seen


def test_positions_do_not_reach_a_tower_that_takes_every_keyword() -> None:
    """The forward names no ``position_ids``, and passes what it doesn't name to the Q-Former."""
    model = build_image_text("instructblipvideo").train()
    rows = samples(model, 0)
    alone = results(model, rows)
    fastpack.patch(model)
    logits, grads = off(results(model, [flat_of(model, rows)]), alone)
    assert logits <= BOUND
    assert grads <= GRADIENT_BOUND


def test_images_in_a_flat_batch_need_positions_of_several_axes() -> None:
    model = build_image_text("qwen3_5")
    batch = flat_of(model, samples(model, 0))
    fastpack.patch(model)
    one_axis = batch["position_ids"][0]
    for positions in (None, one_axis):
        with pytest.raises(fastpack.PackingError, match=r"\[4, B, S\]"):
            model(**{**batch, "position_ids": positions})


def test_a_composite_builds_no_mask_for_its_text_model() -> None:
    model = build_image_text("llava").model

    def mask() -> Any:
        config = model.config.get_text_config()
        padded = torch.tensor([[1, 1, 0]])
        cache = "cache" if "cache" in signature(create_causal_mask).parameters else "past_key_values"
        given = {"config": config, "inputs_embeds": torch.zeros(1, 3, 8), "attention_mask": padded, cache: None}
        return create_causal_mask(**given)

    assert mask() is not None
    with masks_off(model, "auto"):
        assert mask() is None
    assert mask() is not None


def test_generation_runs_stock() -> None:
    model = build_image_text("internvl")
    row = samples(model, 0)[0]
    tokens = model.generate(**row, max_new_tokens=4, do_sample=False)
    fastpack.patch(model)
    assert torch.equal(model.generate(**row, max_new_tokens=4, do_sample=False), tokens)


def test_a_composite_of_other_code_that_makes_masks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastpack.families.composites.COMPOSITES", ())
    with pytest.raises(fastpack.UnsupportedModelError, match="Gemma3Model makes the masks of its text model itself"):
        fastpack.patch(build_image_text("gemma3"))


def test_a_mask_of_a_composites_own_is_refused() -> None:
    model = build_image_text("llava")
    batch = batch_of(model, samples(model, 0), "right")
    text = model.model.language_model

    def masked(_: object, args: object, kwargs: dict[str, Any]) -> tuple[object, dict[str, Any]]:
        rows, columns = batch["input_ids"].shape
        return args, {**kwargs, "attention_mask": torch.ones(rows, 1, columns, columns).bool()}

    fastpack.patch(model)
    with (
        text.register_forward_pre_hook(masked, with_kwargs=True),
        pytest.raises(fastpack.UnsupportedModelError, match="the model around LlamaModel made a mask of its own"),
    ):
        model(**batch)
