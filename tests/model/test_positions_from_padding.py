"""RoBERTa-like models count positions from the padding id: batches may pass those, or 0, 1, 2, ...; no others.

The oracle is the stock model on each sequence alone, without positions.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import FLOAT32_BOUND, Result, compare, make_sequences, padded, relative, run_alone
from tiny import VOCAB
from transformers import DataCollatorWithFlattening

import fastpack
from fastpack.errors import PackingError
from fastpack.exactness.tiny import build_tiny, model_types
from fastpack.families.mixers import MIXER_FAMILIES
from fastpack.families.registry import FAMILIES

PADDING = 1
SEQUENCES = make_sequences(VOCAB, (7, 1, 19, 12))
LENGTHS = [len(s) for s in SEQUENCES]
COUNTING = [
    f.model_type
    for f in MIXER_FAMILIES
    if f.model_type in model_types() and any(spec.counts_from for spec in f.mixers.values())
]
"""Causal language models; text models of composites count too, but are built with their composite."""


def build(model_type: str) -> Any:
    return build_tiny(model_type, pad_token_id=PADDING).train()


def flattened(start: int, **further: Any) -> dict[str, Any]:
    """Flatten a batch as transformers' collator does."""
    collate = DataCollatorWithFlattening(return_tensors="pt", position_ids_start=start, **further)
    return dict(collate([{"input_ids": s.tolist()} for s in SEQUENCES]))


def run(model: Any, batch: dict[str, Any]) -> Result:
    model.zero_grad(set_to_none=True)
    out = model(**batch, num_items_in_batch=sum(n - 1 for n in LENGTHS))
    out.loss.backward()
    grads = {name: p.grad.clone().float() for name, p in model.named_parameters() if p.grad is not None}
    return Result(list(out.logits[0].detach().split(LENGTHS)), out.loss.detach(), grads)


def test_which_families_count() -> None:
    roberta_like = {"camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"}
    assert set(COUNTING) == {*roberta_like, "xmod"}
    for model_type in COUNTING:
        source = type(build(model_type).base_model.embeddings)
        assert hasattr(source, "create_position_ids_from_input_ids")


@pytest.mark.parametrize("start", [0, PADDING + 1])
@pytest.mark.parametrize("model_type", COUNTING)
def test_both_starts_are_exact(model_type: str, start: int) -> None:
    model = build(model_type)
    alone = run_alone(model, SEQUENCES)
    stock = run(model, flattened(PADDING + 1, return_seq_idx=True))
    assert compare(stock, alone).worst > 1e3 * FLOAT32_BOUND, "stock tells no sequences apart"
    fastpack.patch(model)
    for further in ({}, {"return_seq_idx": True}, {"return_flash_attn_kwargs": True}):
        assert compare(run(model, flattened(start, **further)), alone).worst <= FLOAT32_BOUND


@pytest.mark.parametrize("start", [PADDING, PADDING + 2, 5])
@pytest.mark.parametrize("model_type", ["roberta", "xmod"])
def test_other_starts_are_refused(model_type: str, start: int) -> None:
    model = fastpack.patch(build(model_type))
    with pytest.raises(PackingError, match=r"do not count 0, 1, 2, \.\.\. \(or 2, 3, \.\.\., past ids of padding\)"):
        model(**flattened(start))
    batch = flattened(start)
    del batch["position_ids"]
    model(**batch, packed_seq_lens=LENGTHS)  # as the message says


def test_one_start_for_all() -> None:
    model = fastpack.patch(build("roberta"))
    batch = flattened(PADDING + 1)
    batch["position_ids"][:, : LENGTHS[0]] -= PADDING + 1
    with pytest.raises(PackingError, match="do not count"):
        model(**batch, packed_seq_lens=LENGTHS)


def test_others_take_no_such_start() -> None:
    """Modules that count from 0 themselves accept only 0, 1, 2, ..."""
    model = fastpack.patch(build("big_bird"))
    with pytest.raises(PackingError, match=r"do not count 0, 1, 2, \.\.\. in each sequence, and its family"):
        model(**flattened(PADDING + 1))
    assert FAMILIES["big_bird"].repadded


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_with_the_positions_that_the_model_makes(side: str) -> None:
    model = build("roberta")
    batch = padded(SEQUENCES, side)
    real = batch["attention_mask"] == 1
    batch["input_ids"] = batch["input_ids"].masked_fill(~real, PADDING)
    positions = type(model.base_model.embeddings).create_position_ids_from_input_ids(batch["input_ids"], PADDING)
    alone = run_alone(model, SEQUENCES)
    logits = fastpack.patch(model)(**batch, position_ids=positions).logits
    assert relative(logits[real], torch.cat(alone.logits)) <= FLOAT32_BOUND


def test_embeddings_and_ids_of_padding_among_the_tokens() -> None:
    """The model skips padding ids in its count, and counts every embedding."""
    model = build("roberta")
    ids = SEQUENCES[2].clone()
    ids[4] = PADDING
    built = type(model.base_model.embeddings).create_position_ids_from_input_ids(ids[None], PADDING)
    assert built[0, 3:6].tolist() == [5, PADDING, 6]
    counted = torch.arange(len(ids))[None] + PADDING + 1
    alone = model(input_ids=ids[None], use_cache=False).logits
    embeddings = model.get_input_embeddings()(ids[None]).detach()
    of_embeddings = model(inputs_embeds=embeddings, use_cache=False).logits
    fastpack.patch(model)
    packed = {"packed_seq_lens": [len(ids)]}
    assert relative(model(input_ids=ids[None], **packed).logits, alone) <= FLOAT32_BOUND
    result = model(inputs_embeds=embeddings, position_ids=counted, **packed).logits
    assert relative(result, of_embeddings) <= FLOAT32_BOUND
    with pytest.raises(PackingError, match="past ids of padding"):
        model(input_ids=ids[None], position_ids=counted, **packed)
