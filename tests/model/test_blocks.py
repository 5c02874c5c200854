"""Composites whose text model sees whole images, or a prefix, in both directions."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from oracle import FLOAT32_BOUND, relative
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import fastpack
from fastpack.backends import segments
from fastpack.exactness import tiny
from fastpack.exactness.image_text import (
    batch_of,
    build_image_text,
    flat_of,
    image_text_class,
    image_text_config,
    samples,
)

TYPES = {
    "gemma3": "token_type_ids",
    "gemma4": "mm_token_type_ids",
    "paligemma": "token_type_ids",
    "paligemma2": "token_type_ids",
}
"""The argument that marks blocks."""
NEIGHBOURS = ((3, (2, 2)), ((2, 2), 4), ((2, 1),), ((2, 2), (2, 2)))
"""Rows of which one ends with an image, and the next begins with one."""


def build(model_type: str) -> Any:
    return over_text("paligemma", "gemma2", True) if model_type == "paligemma2" else build_image_text(model_type)


def over_text(model_type: str, text_type: str, both_ways: bool) -> Any:
    """Return a tiny composite over another text model than its own."""
    config = image_text_config(model_type)
    config.text_config = tiny.tiny_config(text_type)
    config.text_config.use_bidirectional_attention = both_ways
    return tiny.build(image_text_class(model_type)._from_config, config, 0, head_dim=tiny.HEAD_DIM, dtype=torch.float32)


def logits(model: Any, batch: dict[str, Any]) -> Tensor:
    """Return the logits of the real tokens of a batch, without gradients."""
    with torch.no_grad():
        out, mask = model.train()(**batch).logits, batch.get("attention_mask")
    return out.flatten(0, 1) if mask is None else out[mask.bool()]


@pytest.mark.parametrize("model_type", TYPES)
def test_blocks_end_at_the_ends_of_sequences(model_type: str) -> None:
    model, name = build(model_type), TYPES[model_type]
    rows = samples(model, 0, NEIGHBOURS)
    alone = torch.cat([logits(model, row) for row in rows])
    causal = torch.cat([logits(model, {**row, name: torch.full_like(row[name], "pali" in name)}) for row in rows])
    fastpack.patch(model)
    for batch in (flat_of(model, rows), batch_of(model, rows, "left"), batch_of(model, rows, "right")):
        assert relative(logits(model, batch), alone) <= FLOAT32_BOUND
    assert relative(causal, alone) > 1e-2, "the check can fail"
    joined = {k: v for k, v in flat_of(model, rows).items() if k not in ("packed_seq_lens", "position_ids")}
    if "pali" not in model_type:  # the prefixes of joined sequences are no single run, and refused
        assert relative(logits(model, joined), alone) > 1e-2, "the check can fail"


def shapes(model: Any, batch: dict[str, Any]) -> set[tuple[int, ...]]:
    """Return the shapes of all tensors that operators get while a batch runs."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        logits(model, batch)
    return {tuple(shape) for event in profiler.events() for shape in event.input_shapes if isinstance(shape, list)}


@pytest.mark.parametrize("model_type", TYPES)
def test_no_mask_of_a_text_model_is_built(model_type: str) -> None:
    model = build(model_type)
    batch = batch_of(model, samples(model, 0), "left")
    rows, columns = batch["input_ids"].shape
    stock = shapes(model, batch)
    ours = shapes(fastpack.patch(model), batch)
    assert (rows, 1, columns, columns) in stock, "the check can fail"
    assert not any(shape[:1] + shape[-2:] == (rows, columns, columns) for shape in ours)


def test_text_alone_has_no_blocks() -> None:
    """Backends that are causal serve it, and CUDA graphs record it."""
    model = build("gemma3")
    batch = batch_of(model, samples(model, 0, ((4,), (7,))), "left")
    expected = logits(model, batch)
    fastpack.patch(model)
    seen: list[Any] = []
    with model.model.language_model.layers[0].register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(kwargs["packed_seq_lens"].two_way), with_kwargs=True
    ):
        assert relative(logits(model, batch), expected) <= FLOAT32_BOUND
    assert seen == [None]


def test_token_types_that_a_prefix_needs() -> None:
    model = fastpack.patch(build("paligemma"))
    row = samples(model, 0)[0]
    with pytest.raises(fastpack.UnsupportedModelError, match="the batch came without token_type_ids: without it the"):
        model(**{**row, "token_type_ids": None})


def test_a_prefix_in_two_parts_is_refused() -> None:
    model = fastpack.patch(build("paligemma"))
    row = samples(model, 0)[0]
    parts = torch.ones_like(row["token_type_ids"])
    parts[:, [0, 3]] = 0
    with pytest.raises(fastpack.UnsupportedModelError, match="token_type_ids marks tokens of one sequence"):
        model(**{**row, "token_type_ids": parts})


def test_a_composite_over_causal_layers_is_refused() -> None:
    model = over_text("gemma3", "llama", False)
    with pytest.raises(fastpack.UnsupportedModelError, match="the layers of LlamaModel are causal when patched"):
        fastpack.patch(model)


def test_the_report_says_which_backend_takes_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that is causal serves text alone, and is refused at once where each batch has a prefix."""
    monkeypatch.setattr(segments, "SERVES", ("window",))
    notes = "\n".join(fastpack.report(fastpack.patch(build("gemma3"), attention="segments")).notes)
    assert "attention='segments' is refused for batches with images, since it is causal, and does not" in notes
    assert "attention: reference in batches with images" in "\n".join(
        fastpack.report(fastpack.patch(build("gemma3"))).notes
    )
    with pytest.raises(fastpack.BackendUnavailableError, match="is causal, and does not support image blocks"):
        fastpack.patch(build("paligemma"), attention="segments")
    for model_type, images in (("gemma4", True), ("llava", False)):
        notes = "\n".join(fastpack.report(fastpack.patch(build(model_type))).notes)
        assert ("in batches with images" in notes) == images


def test_a_prefixs_text_model_alone_is_refused() -> None:
    """The stock one attends in both directions."""
    model = fastpack.patch(build("paligemma"))
    with pytest.raises(
        fastpack.UnsupportedModelError, match="GemmaModel was called without the PaliGemmaModel around it"
    ):
        model.model.language_model(input_ids=torch.tensor([[5, 6, 7]]))


def test_threads_restore_the_config() -> None:
    """A composite that makes masks has another config while it runs packed, which no other thread may see."""
    model = build("gemma3").eval()
    batch, row = batch_of(model, samples(model, 0), "left"), samples(model, 0)[0]
    config = model.model.config
    with torch.no_grad():
        expected, cached = model(**batch).logits, model(**row, use_cache=True).logits
    fastpack.patch(model)
    errors: list[float] = []

    def packed() -> None:
        real = batch["attention_mask"].bool()
        with torch.no_grad():
            errors.extend(relative(model(**batch).logits[real], expected[real]) for _ in range(10))

    def stock() -> None:
        with torch.no_grad():
            errors.extend(relative(model(**row, use_cache=True).logits, cached) for _ in range(10))

    threads = [threading.Thread(target=each) for each in (packed, stock, packed, stock)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert model.model.config is config
    assert len(errors) == 40
    assert max(errors) <= FLOAT32_BOUND
