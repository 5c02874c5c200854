"""``share_prefixes="auto"`` with images: sequences share a prefix if their images are the same, not only their ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from composite_cases import Row, answers, off, results, text_tokens
from oracle import GPU_FLOAT32_BOUND
from prefix_cases import sharing

import fastpack
from fastpack.exactness.image_text import (
    batch_of,
    build_image_text,
    flat_of,
    layout_of,
    other_pixels,
    samples,
)
from fastpack.model import prefix_sharing
from fastpack.packing.fingerprints import fingerprints

MODELS = (
    "qwen3_vl",
    "qwen2_5_vl",
    "llava",
    "internvl",
    "smolvlm",
    "mistral3",
    "gemma3",
    "gemma4",
    "glm4v",
    "deepseek_vl_hybrid",
    "paddleocr_vl",
    "aria",
)
BOUND = 1e-5
GRADIENT_BOUND = 2e-4
"""Gradients that are 0 but for rounding, as those of towers' key biases, are up to 1e-4 off in stock batches too."""


def groups(model: Any) -> tuple[list[Row], int]:
    """Return rows, and the number of tokens that are to run: three prompts, of which two differ in the image alone."""
    image, several, text = samples(model)[0], samples(model)[3], samples(model)[2]
    first = answers(image, (4, 6, 5), 0)
    swapped = answers(other_pixels(image), (3, 5), 0)
    others = answers(several, (2, 4), 20) + answers(text, (6, 3), 30)
    rows = [first[0], *swapped, *others, *first[1:]]
    token = int(image["input_ids"].max())
    before_image = int((image["input_ids"][0] == token).nonzero()[0])
    prompts = [x["input_ids"].shape[1] for x in (image, several, text)]
    completions = sum((4, 6, 5, 3, 5, 2, 4, 6, 3))
    return rows, completions + sum(prompts) + prompts[0] - before_image


@pytest.mark.sample(3)
@pytest.mark.parametrize("model_type", MODELS)
def test_images_and_prompts_in_common_run_once(model_type: str) -> None:
    model = build_image_text(model_type).train()
    rows, nodes = groups(model)
    alone = results(model, rows)
    fastpack.patch(model, share_prefixes="auto")
    for batch in (batch_of(model, rows, "right"), batch_of(model, rows, "left"), flat_of(model, rows)):
        with text_tokens(model) as counts:
            logits, grads = off(results(model, [batch]), alone)
        assert logits <= BOUND
        assert grads <= GRADIENT_BOUND
        assert counts == [nodes]
    stats = sharing(model).stats
    assert (stats.batches, stats.shared) == (3, 3)
    assert stats.tokens - stats.saved == 3 * nodes
    if layout_of(model).per_row:  # rows are padded with images of zeros, so that it is unknown whose features are whose
        assert stats.images == 0
    else:
        assert (stats.images, stats.images_saved) == (3 * 9, 3 * 5)


def test_features_of_layers_in_a_dict() -> None:
    """Which image each of its tokens shows is not known, so nothing is shared from an image on."""
    try:
        model = build_image_text("granite4_vision").train()
    except ValueError as error:
        pytest.skip(str(error))
    rows, nodes = groups(model)
    alone = results(model, rows)
    fastpack.patch(model, share_prefixes="auto")
    with text_tokens(model) as counts:
        logits, grads = off(results(model, [batch_of(model, rows)]), alone)
    assert logits <= BOUND
    assert grads <= GRADIENT_BOUND
    assert nodes < counts[0] <= sum(row["input_ids"].numel() for row in rows)


LAST_BEHIND_TOWER = ("multi_modal_projector.linear_2.weight", "merger.linear_fc2.weight", "projection_weight")


@pytest.mark.parametrize("model_type", ["llava", "qwen3_vl", "gemma3"])
def test_equal_embeddings_from_elsewhere_share_nothing(model_type: str) -> None:
    """Two ids have the same row, and two images the same features: each gets its own gradient."""
    model = build_image_text(model_type).train()
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[7] = embedding[6]
        for name, parameter in model.named_parameters():  # the last layer behind the tower
            if name.endswith(
                ("multi_modal_projector.linear_2.weight", "merger.linear_fc2.weight", "projection_weight")
            ):
                parameter.zero_()
    rows = samples(model, 0, ((5, (2, 2), 6),))
    twin = {name: value.clone() for name, value in rows[0].items()}
    rows[0]["input_ids"][0, 2] = twin["input_ids"][0, 2] = 6
    rows[0]["input_ids"][0, -3], twin["input_ids"][0, -3] = 6, 7
    rows += [twin, other_pixels(rows[0])]
    alone = results(model, rows)
    fastpack.patch(model, share_prefixes="auto")
    logits, grads = off(results(model, [batch_of(model, rows)]), alone)
    assert logits <= BOUND
    assert grads <= GRADIENT_BOUND
    assert fastpack.report(model).notes, "prefixes are looked for"


def prefixed(prefix: int, answer: int, seed: int) -> Row:
    """Return a text row of PaliGemma, whose prefix is one block; all prefixes begin alike."""
    ids = torch.randint(10, 90, (1, prefix + answer), generator=torch.Generator().manual_seed(seed))
    ids[0, :prefix] = torch.arange(20, 20 + prefix)
    return {"input_ids": ids, "token_type_ids": (torch.arange(prefix + answer) >= prefix).long()[None]}


def test_a_block_is_shared_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_image_text("paligemma").train()
    rows = [prefixed(6, 3, 1), prefixed(4, 5, 2), prefixed(6, 2, 3)]
    alone = results(model, rows)
    fastpack.patch(model, share_prefixes="auto")
    with text_tokens(model) as counts:
        assert max(off(results(model, [batch_of(model, rows)]), alone)) <= BOUND
    assert counts == [26 - 6], "the shorter prefix ends in another's block"
    monkeypatch.setattr(prefix_sharing, "without_cut_blocks", lambda prefixes, *_: prefixes)
    with text_tokens(model) as counts:
        assert off(results(model, [batch_of(model, rows)]), alone)[0] > 3 * BOUND
    assert counts == [26 - 6 - 4]


def test_by_ids_alone_the_comparison_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_image_text("qwen3_vl").train()
    rows, _ = groups(model)
    alone = results(model, rows)
    batch = flat_of(model, rows)
    monkeypatch.setattr(prefix_sharing, "token_fingerprints", lambda *_: fingerprints(batch["input_ids"][0]))
    fastpack.patch(model, share_prefixes="auto")
    assert off(results(model, [batch]), alone)[0] > 3 * BOUND


def test_prefixes_that_a_collator_found_by_ids_are_a_promise_only() -> None:
    model = build_image_text("qwen3_vl").train()
    rows, nodes = groups(model)
    alone = results(model, rows)
    fastpack.patch(model, share_prefixes="auto")
    batch = fastpack.with_packed_seq_lens(lambda batch: batch)(batch_of(model, rows))
    assert batch["packed_seq_lens"].prefixes.saved > batch["packed_seq_lens"].total_tokens - nodes
    with text_tokens(model) as counts:
        assert off(results(model, [batch]), alone)[0] <= BOUND
    assert counts == [nodes]


def test_text_in_a_composite_shares_too() -> None:
    model = build_image_text("qwen3_vl").train()
    text = samples(model)[2]
    rows = answers(text, (4, 6, 5), 0)
    alone = results(model, rows)
    fastpack.patch(model, share_prefixes="auto")
    with text_tokens(model) as counts:
        assert max(off(results(model, [batch_of(model, rows, "left")]), alone)) <= BOUND
    assert counts == [text["input_ids"].shape[1] + 15]


def test_equal_ids_at_other_positions_are_other_tokens() -> None:
    """A text model alone gets positions of several axes from its user."""
    model: Any = build_image_text("qwen3_vl").train().model.language_model
    ids = torch.randint(3, 90, (1, 12), generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    text = torch.arange(12).repeat(2)
    axes = torch.stack([text, text, text])
    axes[1:, 16:] += torch.tensor([[1], [2]])  # as behind an image
    positions = torch.cat([text[None], axes])[:, None]
    alone = torch.cat(
        [
            model(input_ids=ids[:, part], position_ids=positions[1:, :, part])[0][0]
            for part in (slice(12), slice(12, 24))
        ]
    )
    fastpack.patch(model, share_prefixes="auto")
    out = model(input_ids=ids, position_ids=positions, packed_seq_lens=[12, 12])[0][0]
    assert (out - alone).abs().max() <= BOUND * alone.abs().max()
    assert sharing(model).stats.saved == 4


def embedded(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch of embeddings that a user has made."""
    ids = batch.pop("input_ids")
    return {**batch, "inputs_embeds": model.get_input_embeddings()(ids).detach()}


def test_what_may_differ_or_trains_is_not_shared() -> None:
    model = build_image_text("llava").train()
    rows, _ = groups(model)
    stock = results(model, rows)
    fastpack.patch(model, share_prefixes="auto")
    trained = batch_of(model, rows)
    trained["pixel_values"] = trained["pixel_values"].clone().requires_grad_()
    assert off(results(model, [trained]), stock)[0] <= BOUND
    text = batch_of(model, answers(samples(model)[2], (4, 6, 5), 0))
    results(model, [embedded(model, text)])
    stats = sharing(model).stats
    assert stats.shared == 0
    assert stats.whole == {"inputs_embeds came with the batch, and may differ between equal ids": 2}


def test_a_tower_with_dropout_makes_other_features_of_each_image() -> None:
    model = build_image_text("llava").train()
    rows = answers(samples(model)[0], (4, 6, 5), 0)
    before_image = int((rows[0]["input_ids"][0] == rows[0]["input_ids"].max()).nonzero()[0])
    for layer in model.model.vision_tower.encoder.layers:
        layer.self_attn.dropout = 0.5
    fastpack.patch(model, share_prefixes="auto")
    torch.manual_seed(0)
    results(model, [batch_of(model, rows)])
    assert sharing(model).stats.saved == 2 * before_image


def test_checkpointing_and_lora_on_both_parts() -> None:
    from test_composite_training import prepared

    model, _ = prepared("qwen3_vl", "LoRA on both")
    rows, nodes = groups(build_image_text("qwen3_vl"))
    alone = results(model, rows)
    fastpack.patch(model, share_prefixes="auto")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with text_tokens(model) as counts:
        assert max(off(results(model, [batch_of(build_image_text("qwen3_vl"), rows)]), alone)) <= BOUND
    assert counts[0] == nodes


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["qwen3_vl", "internvl", "gemma3"])
def test_on_a_gpu(model_type: str, dtype: torch.dtype) -> None:
    """Features of one image are the same bits in every row, so that as many tokens are saved as on the host."""
    host = build_image_text(model_type).train()
    rows, nodes = groups(host)
    model = build_image_text(model_type, dtype=dtype).train().cuda()
    on_device = [{name: x.cuda() for name, x in row.items()} for row in rows]
    batch = {name: x.cuda() for name, x in batch_of(host, rows).items()}
    with torch.no_grad():
        alone = torch.cat([model(**row).logits[0] for row in on_device])
    fastpack.patch(model, share_prefixes="auto")
    with text_tokens(model) as counts:
        logits = model(**batch).logits[batch["attention_mask"].bool()]
    assert counts == [nodes]
    assert (logits - alone).norm() <= (GPU_FLOAT32_BOUND if dtype == torch.float32 else 2e-2) * alone.norm()
    logits.float().square().mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
