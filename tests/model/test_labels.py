"""Heads and labels: labels at padding, a user's own loss, and labels of some of the logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loss_cases import grads_of
from oracle import FLOAT32_BOUND, relative
from tiny import VOCAB, tiny_model
from torch import Tensor, nn
from torch.nn import functional

import fastpack
from fastpack.exactness.tiny import build_tiny, plain_tokens
from fastpack.model import head as head_module
from fastpack.model import loss as fused
from fastpack.packing.inputs import read_packing

END = 2
LENGTHS = (5, 9, 7, 12)
NAIVE_BOUND = 1e-3


def padded_with_the_end() -> dict[str, Tensor]:
    """Pad as Alpaca's own collator does, with a tokenizer whose end token pads.

    The end of each text is trained, and masked.
    """
    columns = max(LENGTHS) + 1
    ids = torch.full((len(LENGTHS), columns), END)
    labels = torch.full((len(LENGTHS), columns), -100)
    text = torch.randint(3, VOCAB, ids.shape, generator=torch.Generator().manual_seed(0))
    for row, length in enumerate(LENGTHS):
        ids[row, :length] = text[row, :length]
        labels[row, : length + 1] = ids[row, : length + 1]
    return {"input_ids": ids, "labels": labels, "attention_mask": ids.ne(END).long()}


def loss_and_grads(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), grads_of(model)


def off_by(model: nn.Module, batch: dict[str, Any], stock: tuple[Tensor, dict[str, Tensor]]) -> float:
    """Return the larger error of loss and gradients."""
    loss, grads = loss_and_grads(model, batch)
    assert grads.keys() == stock[1].keys()
    return max(relative(loss, stock[0]), *(relative(grads[name], stock[1][name]) for name in grads))


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "falcon"])
@pytest.mark.parametrize("loss", [None, "fused"])
@pytest.mark.parametrize("num_items", [None, 40])
def test_an_end_that_is_padding_too_is_learned(model_type: str, loss: Any, num_items: int | None) -> None:
    model = tiny_model(model_type) if model_type == "llama" else build_tiny(model_type)
    batch = {**padded_with_the_end(), "num_items_in_batch": num_items}
    stock = loss_and_grads(model, batch)
    fastpack.patch(model, loss=loss)
    assert off_by(model, batch, stock) <= FLOAT32_BOUND
    read = read_packing(tuple(batch["input_ids"].shape), torch.device("cpu"), attention_mask=batch["attention_mask"])
    rounded = read.bucketed()
    assert rounded.bucket_padding
    for packed in (read, rounded):
        assert off_by(model, {**batch, "packed_seq_lens": packed}, stock) <= FLOAT32_BOUND


def padded_to_the_maximum(ends: int = 4) -> dict[str, Tensor]:
    """Pad as tutorials do, with ``padding="max_length"`` and labels that copy the ids, padding included."""
    columns = max(LENGTHS) + ends
    real = torch.arange(columns) < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(3, VOCAB, real.shape, generator=torch.Generator().manual_seed(0)) * real
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": real.long()}


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@pytest.mark.parametrize("loss", [None, "fused"])
@pytest.mark.parametrize("steps", [1, 3])
def test_labels_at_padding_are_no_items(
    model_type: str, loss: Any, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ``Trainer`` counts labels at padding, which are dropped.

    The loss still is a mean over the trained labels, or its share of ``steps`` such batches.
    """
    model = tiny_model(model_type) if model_type == "llama" else build_tiny(model_type)
    batch = padded_to_the_maximum()
    real = batch["attention_mask"].bool()
    # the token after a text's last one is padding, and the last one learns its label (another test)
    trained = batch["labels"].masked_fill(~real & ~real.roll(1, 1), -100)
    stock = loss_and_grads(model, {**batch, "labels": trained})
    counts_column_0 = model_type == "gpt2"
    counted = batch["labels"][:, 0 if counts_column_0 else 1 :].numel()
    if counts_column_0:  # the Trainer counts first labels for such heads, with padding or without
        kept = int((trained != -100).sum())
        stock = (
            stock[0] * (kept - len(LENGTHS)) / kept,
            {n: g * (kept - len(LENGTHS)) / kept for n, g in stock[1].items()},
        )
    fastpack.patch(model, loss=loss)
    expected = (stock[0] / steps, {name: grad / steps for name, grad in stock[1].items()})
    assert off_by(model, {**batch, "num_items_in_batch": counted * steps}, expected) < FLOAT32_BOUND
    monkeypatch.setattr(
        head_module, "without_padding", lambda head, arguments, targets: arguments["num_items_in_batch"]
    )
    assert off_by(model, {**batch, "num_items_in_batch": counted * steps}, expected) > NAIVE_BOUND


@pytest.mark.parametrize("loss", [None, "fused"])
def test_negative_control(loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny_model("llama"), padded_with_the_end()
    stock = loss_and_grads(model, batch)
    dropped = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    for module in (head_module, fused):
        plain = module.targets_of
        monkeypatch.setattr(
            module, "targets_of", lambda packed, _, ignored, plain=plain: plain(packed, dropped, ignored)
        )
    fastpack.patch(model, loss=loss)
    assert off_by(model, batch, stock) > NAIVE_BOUND


def mean_of_rows(logits: Tensor, labels: Tensor, vocab_size: int, *, weight: Tensor | None = None, **_: Any) -> Tensor:
    """Return the mean of each row's mean."""
    targets = functional.pad(labels, (0, 1), value=-100)[:, 1:]
    each = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    each = each if weight is None else each * weight
    return (each.sum(1) / (targets != -100).sum(1)).mean()


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_loss_of_ones_own_gets_the_padded_batch(model_type: str, weighted: bool, when: str) -> None:
    model = build_tiny(model_type)
    batch: dict[str, Any] = padded_with_the_end()
    if weighted:
        batch["weight"] = torch.rand(batch["input_ids"].shape, generator=torch.Generator().manual_seed(1))
    plain = loss_and_grads(model, {name: value for name, value in batch.items() if name != "weight"})
    model.loss_function = mean_of_rows
    stock = loss_and_grads(model, batch)
    assert relative(stock[0], plain[0]) > NAIVE_BOUND
    if when == "after":
        del model._loss_function
    fastpack.patch(model)
    model.loss_function = mean_of_rows
    assert off_by(model, batch, stock) <= FLOAT32_BOUND


def unshifted(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """Return the loss of labels that a collator has shifted."""
    return functional.cross_entropy(logits.reshape(-1, vocab_size).float(), labels.flatten(), ignore_index=-100)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("loss", [None, "fused"])
@pytest.mark.parametrize("whose", ["own", "ForMaskedLM"])
def test_first_labels_count_for_a_loss_that_does_not_shift(whose: str, loss: Any, masked: bool) -> None:
    model = tiny_model("llama")
    if whose == "own":
        model.loss_function = unshifted
    else:
        model.loss_type = whose
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids.flip(1)}
    if masked:
        mask = torch.ones_like(ids)
        mask[1, 6:] = 0
        batch = {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}
    stock = loss_and_grads(model, batch)
    fastpack.patch(model, loss=loss)
    assert [what for what, _ in fastpack.report(model).skipped] == ([] if loss is None else ["loss"])
    assert off_by(model, batch, stock) < FLOAT32_BOUND
    without = {**batch, "labels": batch["labels"].index_fill(1, torch.tensor([0]), -100)}
    assert off_by(model, without, stock) > NAIVE_BOUND


@pytest.mark.parametrize("model_type", ["xlm", "xlnet", "cpmant"])
def test_first_labels_count_where_nothing_shifts(model_type: str) -> None:
    model = build_tiny(model_type).eval()
    ids = plain_tokens(2, 9, seed=0)
    labels = torch.where(torch.arange(9) == 0, ids, -100)  # only first labels
    with torch.no_grad():
        stock = model(input_ids=ids, labels=labels).loss
        fastpack.patch(model)
        assert relative(model(input_ids=ids, labels=labels).loss, stock) <= FLOAT32_BOUND
    assert stock.isfinite()


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("loss", [None, "fused"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts_are_balanced_over_tokens_whatever_their_segments_number(
    model_type: str, loss: Any, padded: bool, labels: bool
) -> None:
    model = fastpack.patch(tiny_model(model_type, output_router_logits=True), loss=loss)
    ids = plain_tokens(2, 12, seed=0)
    segments = torch.tensor([[1] * 3 + [2] * 4 + [3] * 5, [1] * 2 + [2] * 10])
    if padded:
        segments[0, 9:] = 0
    lengths = [count for row in segments for number in (1, 2, 3) if (count := int((row == number).sum()))]
    kwargs = {"labels": ids} if labels else {}
    numbered = model(input_ids=ids, attention_mask=segments, **kwargs)
    with_lengths = model(input_ids=ids, attention_mask=(segments > 0).long(), packed_seq_lens=lengths, **kwargs)
    assert relative(numbered.aux_loss, with_lengths.aux_loss) <= FLOAT32_BOUND
    if labels:
        assert relative(numbered.loss, with_lengths.loss) <= FLOAT32_BOUND


@pytest.mark.parametrize("keep", [4, torch.tensor([1, 5, 6, 8])])
def test_labels_of_some_of_the_logits(keep: int | Tensor) -> None:
    model = tiny_model("llama").eval()
    ids = plain_tokens(2, 9, seed=0)
    places = keep if isinstance(keep, Tensor) else torch.arange(9)[-keep:]
    batch = {"input_ids": ids, "labels": ids[:, places], "logits_to_keep": keep}
    with torch.no_grad():
        stock = model(**batch)
        result = fastpack.patch(model)(**batch)
    assert relative(result.loss, stock.loss) <= FLOAT32_BOUND
    assert relative(result.logits, stock.logits) <= FLOAT32_BOUND


@pytest.mark.parametrize("keep", [1, 5, torch.tensor([10, 11])])
def test_layers_that_share_keys_run_on_every_token(keep: int | Tensor) -> None:
    """Gemma 4's backbone drops the tokens without requested logits from such layers."""
    model = build_tiny("gemma4_text").eval()
    assert model.config.num_kv_shared_layers
    ids = plain_tokens(3, 12, seed=0)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1, :7] = 0
    kept = mask[:, -keep:] if isinstance(keep, int) else mask[:, keep]
    with torch.no_grad():
        stock = model(input_ids=ids, attention_mask=mask, logits_to_keep=keep, use_cache=False).logits
        result = fastpack.patch(model)(input_ids=ids, attention_mask=mask, logits_to_keep=keep).logits
    assert relative(result[kept.bool()], stock[kept.bool()]) <= FLOAT32_BOUND
