"""Arguments beside ids, mask and labels: un-padded with the tokens, run by the stock forward, or refused."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import FLOAT32_BOUND, relative

import fastpack
from fastpack.exactness.tiny import build_tiny, plain_tokens
from fastpack.packing.two_way import TwoWayBlocks

IDS = plain_tokens(3, 12, seed=0)
MASK = (torch.arange(12) < torch.tensor([[12], [7], [3]])).long()
NUMBERS = torch.randint(0, 2, IDS.shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("model_type", "name", "config"),
    [
        ("bert", "token_type_ids", {}),
        ("ernie", "task_type_ids", {"use_task_id": True}),
        ("roc_bert", "input_shape_ids", {}),
        ("roc_bert", "input_pronunciation_ids", {}),
        ("xlm", "langs", {"n_langs": 2, "use_lang_emb": True}),
    ],
)
def test_per_token(model_type: str, name: str, config: dict[str, Any]) -> None:
    model = build_tiny(model_type, **config).eval()
    batch = {"input_ids": IDS, "attention_mask": MASK, name: NUMBERS}
    with torch.no_grad():
        stock = model(**batch).logits
        other = model(**{**batch, name: 1 - NUMBERS}).logits
        result = fastpack.patch(model)(**batch).logits
    real = MASK.bool()
    assert relative(result[real], stock[real]) <= FLOAT32_BOUND
    assert relative(other[real], stock[real]) > 1e-2, "the check can fail"


@pytest.mark.parametrize(
    ("model_type", "name", "value"),
    [
        ("xmod", "lang_ids", torch.zeros(3, dtype=torch.long)),
        ("xlm", "lengths", torch.tensor([12, 7, 3])),
        ("xlnet", "perm_mask", torch.zeros(3, 12, 12)),
        ("xlnet", "input_mask", 1.0 - MASK),
        ("blt", "patch_lengths", torch.ones(3, 12, dtype=torch.long)),
    ],
)
def test_what_is_about_rows_is_refused(model_type: str, name: str, value: torch.Tensor) -> None:
    model = fastpack.patch(build_tiny(model_type))
    with pytest.raises(fastpack.UnsupportedModelError, match=f"{name} came with the batch: that describes its rows"):
        model(input_ids=IDS, **{name: value})


def embedded(model: Any) -> dict[str, Any]:
    """Return a batch of embeddings, and the arguments that the model would otherwise derive from ids."""
    backbone = getattr(model.base_model, "language_model", model.base_model)
    embeds = backbone.get_input_embeddings()(IDS)
    if hasattr(backbone, "reverse_embedding"):
        return {"inputs_embeds": embeds, "ple_input_ids": IDS}
    further = (embeds,) if "inputs_embeds" in inspect.signature(backbone.get_per_layer_inputs).parameters else ()
    return {"inputs_embeds": embeds, "per_layer_inputs": backbone.get_per_layer_inputs(IDS, *further)}


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4", "gemma4_text", "qwen4_exp_text"])
def test_what_layers_read_of_ids_beside_embeddings(model_type: str, labels: bool) -> None:
    model = build_tiny(model_type).eval()
    further = {"labels": IDS.masked_fill(MASK == 0, -100)} if labels else {}
    with torch.no_grad():
        batch = {**embedded(model), "attention_mask": MASK, **further}
        stock = model(**batch, use_cache=False)
        name = "ple_input_ids" if "ple_input_ids" in batch else "per_layer_inputs"
        other = model(**{**batch, name: batch[name].flip(1)}, use_cache=False).logits
        result = fastpack.patch(model)(**batch)
    real = MASK.bool()
    assert relative(result.logits[real], stock.logits[real]) <= FLOAT32_BOUND
    assert relative(other[real], stock.logits[real]) > 1e-3, "the check can fail"
    if labels:
        assert abs(float(result.loss - stock.loss)) <= FLOAT32_BOUND


@pytest.mark.parametrize(
    ("model_type", "media"),
    [
        ("phi4_multimodal", {"image_pixel_values": torch.zeros(3, 1, 3, 8, 8)}),
        ("phi4_multimodal", {"audio_input_features": torch.zeros(3, 4, 8)}),
        ("mllama", {"cross_attention_states": torch.zeros(3, 5, 64)}),
    ],
)
def test_media_are_refused(model_type: str, media: dict[str, Any]) -> None:
    model = fastpack.patch(build_tiny(model_type))
    for batch in ({"input_ids": IDS, "attention_mask": MASK}, {"input_ids": IDS[:1], "packed_seq_lens": [5, 7]}):
        with pytest.raises(fastpack.UnsupportedModelError, match=f"{', '.join(media)} came with the batch: .*images"):
            model(**batch, **media)


@pytest.mark.parametrize(
    ("model_type", "name", "attends"),
    [
        ("gemma3", "token_type_ids", False),
        ("gemma4", "mm_token_type_ids", "vision"),
        ("gemma4_unified", "mm_token_type_ids", "vision"),
        ("hrm_text", "token_type_ids", None),
    ],
)
def test_tokens_that_attend_in_both_directions(model_type: str, name: str, attends: Any) -> None:
    """Gemma marks images, and HRM prompts. Processors send the argument with text too, all zeros."""
    model = build_tiny(model_type).eval()
    if attends is not None:
        model.config.get_text_config().use_bidirectional_attention = attends
    causal = {"input_ids": IDS, "attention_mask": MASK, name: torch.zeros_like(IDS)}
    marked = {**causal, name: (torch.arange(12) < 3).long().expand(3, -1)}
    real = MASK.bool()
    with torch.no_grad():
        stock = [model(**batch).logits[real] for batch in (causal, marked)]
        fastpack.patch(model)
        result = [model(**batch).logits[real] for batch in (causal, marked)]
    for ours, theirs in zip(result, stock, strict=True):
        assert relative(ours, theirs) <= FLOAT32_BOUND
    assert relative(*stock) > 1e-2, "the check can fail"


def test_prompts_with_a_gap_are_refused() -> None:
    """The stock mask lets both runs see each other."""
    model = fastpack.patch(build_tiny("hrm_text"))
    gap = torch.tensor([1, 1, 0, 1] + [0] * 8).expand(3, -1)
    with pytest.raises(fastpack.UnsupportedModelError, match="token_type_ids marks tokens of one sequence with others"):
        model(input_ids=IDS, token_type_ids=gap)
    assert model(input_ids=IDS[:1], token_type_ids=gap[:1], packed_seq_lens=[3, 9]).logits.isfinite().all()


def test_blocks_for_causal_layers_are_refused() -> None:
    packed = fastpack.PackedSeqLens.from_lengths([12])
    blocks = TwoWayBlocks.of(packed, torch.zeros(1, 12, dtype=torch.long))
    with pytest.raises(fastpack.UnsupportedModelError, match="the layers of LlamaModel are causal"):
        fastpack.patch(build_tiny("llama"))(input_ids=IDS[:1], packed_seq_lens=replace(packed, two_way=blocks))


@pytest.mark.parametrize(
    ("model_type", "name", "settings"),
    [("gemma4", "mm_token_type_ids", {}), ("hrm_text", "token_type_ids", {"prefix_lm": False})],
)
def test_marks_that_no_mask_reads(model_type: str, name: str, settings: dict[str, Any]) -> None:
    model = build_tiny(model_type, **settings).eval()
    batch = {"input_ids": IDS, "attention_mask": MASK, name: torch.ones_like(IDS)}
    with torch.no_grad():
        stock = model(**batch).logits
        result = fastpack.patch(model)(**batch).logits
    assert relative(result[MASK.bool()], stock[MASK.bool()]) <= FLOAT32_BOUND


@pytest.mark.slow
def test_marks_are_read_while_compiling_too() -> None:
    torch.compiler.reset()
    model = fastpack.patch(build_tiny("gemma3"))
    compiled = torch.compile(model, backend="eager")
    batch = {"input_ids": IDS, "attention_mask": MASK}
    real, results = MASK.bool(), []
    for marks in (torch.zeros_like(IDS), MASK):
        results.append(model(**batch, token_type_ids=marks).logits[real])
        assert relative(compiled(**batch, token_type_ids=marks).logits[real], results[-1]) <= FLOAT32_BOUND
    assert relative(*results) > 1e-2, "the check can fail"


def test_xlnet_generates_as_stock() -> None:
    model = build_tiny("xlnet").eval()
    settings = {"max_new_tokens": 4, "do_sample": False}
    stock = model.generate(IDS[:1], **settings)
    assert torch.equal(fastpack.patch(model).generate(IDS[:1], **settings), stock)


def test_positions_may_skip_beside_lengths() -> None:
    """PoSE trains long contexts this way, in rows of real tokens only (Zhu et al., arXiv:2309.10400)."""
    model = build_tiny("llama").eval()
    positions = torch.cat([torch.arange(6), torch.arange(6) + 20]).expand(3, -1)
    with torch.no_grad():
        stock = model(input_ids=IDS, position_ids=positions, attention_mask=torch.ones_like(IDS)).logits
        fastpack.patch(model)
        result = model(input_ids=IDS, position_ids=positions, packed_seq_lens=[12] * 3).logits
        plain = model(input_ids=IDS).logits
    assert relative(result, stock) <= FLOAT32_BOUND
    assert relative(plain, stock) > 1e-2
    with pytest.raises(fastpack.PackingError, match="jump by 15"):
        model(input_ids=IDS, position_ids=positions)
