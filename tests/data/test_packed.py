"""Collators of packed batches: every token once, boundaries where they are."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import FLOAT32_BOUND, Result, compare, relative
from tiny import VOCAB, tiny_model
from torch import Tensor

import fastpack
from fastpack import PackedSeqLens, PackingError
from fastpack.data.packed_collators import PackedPreferenceCollator, PackedSFTCollator
from fastpack.ops.loss import IGNORE_INDEX
from fastpack.packing import reading

Example = dict[str, Any]

some_tokens = st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=40)
supervised = st.lists(some_tokens.flatmap(lambda ids: st.tuples(st.just(ids), st.integers(1, len(ids)))), min_size=1)
pairs = st.lists(st.tuples(some_tokens, some_tokens, some_tokens), min_size=1)


def examples_of(lengths: tuple[int, ...], seed: int = 0) -> list[Example]:
    """A third of each example is prompt."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    return [{"input_ids": x, "completion_mask": [int(i >= len(x) // 3) for i in range(len(x))]} for x in ids]


def pairs_of(*lengths: tuple[int, int, int], seed: int = 0) -> list[Example]:
    """Prompts and completions of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    columns = ("prompt_ids", "chosen_ids", "rejected_ids")
    return [
        {
            column: torch.randint(3, VOCAB, (n,), generator=generator).tolist()
            for column, n in zip(columns, triple, strict=True)
        }
        for triple in lengths
    ]


def check(batch: Example, expected: list[tuple[list[int], list[int]]]) -> None:
    """That a batch holds these ids and labels, one sequence each."""
    packed = batch["packed_seq_lens"]
    ids, labels, positions = (batch[key] for key in ("input_ids", "labels", "position_ids"))
    assert isinstance(packed, PackedSeqLens)
    assert ids.shape == labels.shape == positions.shape == packed.padding.batch_shape == (1, packed.total_tokens)
    assert all(x.dtype == torch.int64 for x in (ids, labels, positions))
    assert packed.total_tokens == sum(len(x) for x, _ in expected)
    assert packed.lengths == tuple(len(x) for x, _ in expected)
    for (want_ids, want_labels), (start, stop) in zip(expected, pairwise(packed.cu_seqlens.tolist()), strict=True):
        assert ids[0, start:stop].tolist() == want_ids
        assert labels[0, start:stop].tolist() == [IGNORE_INDEX, *want_labels[1:]]
        assert positions[0, start:stop].tolist() == list(range(len(want_ids)))


@given(supervised)
@settings(deadline=None)
def test_every_token_once(rows: list[tuple[list[int], int]]) -> None:
    masks = [[0] * (len(ids) - kept) + [1] * kept for ids, kept in rows]
    examples = [{"input_ids": ids, "completion_mask": mask} for (ids, _), mask in zip(rows, masks, strict=True)]
    labels = [
        [i if m else IGNORE_INDEX for i, m in zip(ids, mask, strict=True)]
        for (ids, _), mask in zip(rows, masks, strict=True)
    ]
    check(PackedSFTCollator()(examples), [(ids, want) for (ids, _), want in zip(rows, labels, strict=True)])


@given(pairs)
@settings(deadline=None)
def test_every_token_of_pairs_once(rows: list[tuple[list[int], ...]]) -> None:
    examples = [{"prompt_ids": p, "chosen_ids": c, "rejected_ids": r} for p, c, r in rows]
    expected = [
        (p + x, [IGNORE_INDEX] * len(p) + x) for kind in (1, 2) for p, x in ((row[0], row[kind]) for row in rows)
    ]
    batch = PackedPreferenceCollator()(examples)
    check(batch, expected)
    with pytest.raises(AssertionError):
        check(batch, expected[::-1] if expected[0] != expected[-1] else [])


@given(pairs, st.data())
@settings(deadline=None)
def test_padding_in_between_belongs_to_no_sequence(rows: list[tuple[list[int], ...]], data: st.DataObject) -> None:
    """Prompts, chosen and rejected come padded on any side, as rows cut from padded tensors do."""
    plain, padded = [], []
    for row in rows:
        plain.append(dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), row, strict=True)))
        padded.append({})
        for kind, ids in zip(("prompt", "chosen", "rejected"), row, strict=True):
            left, right = data.draw(st.tuples(st.integers(0, 5), st.integers(0, 5)))
            padded[-1][f"{kind}_input_ids"] = torch.tensor([0] * left + ids + [0] * right)
            padded[-1][f"{kind}_attention_mask"] = torch.tensor([0] * left + [1] * len(ids) + [0] * right)
    want, result = PackedPreferenceCollator()(plain), PackedPreferenceCollator()(padded)
    assert result["packed_seq_lens"].lengths == want["packed_seq_lens"].lengths
    assert all(torch.equal(result[key], want[key]) for key in ("input_ids", "labels", "position_ids"))


def test_what_examples_may_hold() -> None:
    ids, labels = [5, 6, 7, 8], [IGNORE_INDEX, 6, IGNORE_INDEX, 8]
    collate = PackedSFTCollator()
    for given_as in (list, tuple, np.array, torch.tensor):
        example = {"input_ids": given_as(ids), "labels": given_as(labels)}
        assert collate([example])["labels"].tolist() == [labels]
    assert collate([{"input_ids": ids}])["labels"].tolist() == [[IGNORE_INDEX, 6, 7, 8]]
    both = {"input_ids": ids, "labels": labels, "completion_mask": [0, 0, 1, 1]}
    assert collate([both])["labels"].tolist() == [[IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX, 8]]
    padded = {"input_ids": [0, *ids, 0], "labels": [1, *labels, 2], "attention_mask": [0, 1, 1, 1, 1, 0]}
    batch = collate([padded, padded])
    assert batch["labels"].tolist() == [labels * 2]
    assert batch["packed_seq_lens"].lengths == (4, 4)


def test_labels_and_ids_of_examples_stay_as_they_were() -> None:
    ids = torch.arange(3, 9)
    example = {"input_ids": ids, "labels": ids}
    assert PackedSFTCollator()([example, {"input_ids": [5]}])["labels"][0, 0] == IGNORE_INDEX
    assert torch.equal(example["labels"], torch.arange(3, 9))


def test_log_probabilities_of_a_reference_go_along() -> None:
    examples = pairs_of((2, 3, 1), (1, 1, 4))
    for number, example in enumerate(examples):
        example |= {"ref_chosen_logps": -1.5 - number, "ref_rejected_logps": torch.tensor(-7.0 * number)}
    batch = PackedPreferenceCollator()(examples)
    assert batch["ref_chosen_logps"].tolist() == [-1.5, -2.5]
    assert batch["ref_rejected_logps"].tolist() == [0, -7]
    assert batch["ref_rejected_logps"].dtype == torch.float64
    del examples[1]["ref_chosen_logps"]
    with pytest.raises(PackingError, match="example 1 of the batch has no ref_chosen_logps"):
        PackedPreferenceCollator()(examples)


PAIR = {"prompt_ids": [3, 4], "chosen_ids": [5, 6], "rejected_ids": [7]}
GOOD = {"input_ids": [3, 4, 5]}
BAD_SFT: dict[str, tuple[Example, str]] = {
    "labels of another length": ({"labels": [3, 4]}, "2 entries in labels and 3 ids"),
    "a mask of another length": ({"completion_mask": [1] * 4}, "4 entries in completion_mask"),
    "an empty completion": ({"completion_mask": [0, 0, 0]}, "empty completion"),
    "no token": ({"input_ids": []}, "has no token"),
    "only padding": ({"attention_mask": [0, 0, 0]}, "has no token"),
    "a hole": ({"attention_mask": [1, 0, 1]}, "attention_mask of example 1 .* has a hole"),
    "two dimensions": ({"input_ids": [[3, 4, 5]]}, r"input_ids of example 1 .* have shape \(1, 3\)"),
    "fractions": ({"labels": [0.5, 1.0, 2.0]}, "labels of example 1 .* torch.float32"),
    "words": ({"input_ids": ["a"]}, "input_ids of example 1 .* not numbers"),
}
BAD_PAIRS: dict[str, tuple[Example, str]] = {
    "no chosen token": ({"chosen_ids": []}, "an empty completion as chosen"),
    "no rejected token": ({"rejected_ids": []}, "an empty completion as rejected"),
    "nothing predicts it": ({"prompt_ids": []}, "a single token without a prompt as rejected"),
    "ragged": ({"prompt_ids": [[3], [4, 5]]}, "prompt_ids of example 1 .* not numbers"),
    "a mask of another length": ({"chosen_attention_mask": [1]}, "1 entries in chosen_attention_mask and 2 ids"),
}


@pytest.mark.parametrize("bad", BAD_SFT)
def test_a_bad_example_is_named(bad: str) -> None:
    change, message = BAD_SFT[bad]
    PackedSFTCollator()([GOOD, GOOD])
    with pytest.raises(PackingError, match=message) as caught:
        PackedSFTCollator()([GOOD, {**GOOD, **change}])
    assert "example 1" in str(caught.value)


@pytest.mark.parametrize("bad", BAD_PAIRS)
def test_a_bad_pair_is_named(bad: str) -> None:
    change, message = BAD_PAIRS[bad]
    PackedPreferenceCollator()([PAIR, PAIR])
    with pytest.raises(PackingError, match=message) as caught:
        PackedPreferenceCollator()([PAIR, {**PAIR, **change}])
    assert "example 1" in str(caught.value)


def test_missing_columns() -> None:
    with pytest.raises(PackingError, match="example 1 of the batch has no input_ids, only text"):
        PackedSFTCollator()([GOOD, {"text": "a"}])
    with pytest.raises(
        PackingError, match=r"example 0 of the batch has no rejected_ids .* only prompt_ids, chosen_ids"
    ):
        PackedPreferenceCollator()([{"prompt_ids": [3], "chosen_ids": [4]}])
    for collator in (PackedSFTCollator(), PackedPreferenceCollator()):
        with pytest.raises(PackingError, match="no example"):
            collator([])


def run(function: Any, model: Any, batch: Example) -> Result:
    model.zero_grad(set_to_none=True)
    out = function(**batch)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Result([out.logits.detach()], out.loss.detach(), grads)


def stock_padded(examples: list[Example]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the stock model on the padded batch."""
    width = max(len(e["input_ids"]) for e in examples)
    ids, mask, kept = torch.zeros(3, len(examples), width, dtype=torch.long)
    for row, example in enumerate(examples):
        ids[row, : len(example["input_ids"])] = torch.tensor(example["input_ids"])
        mask[row, : len(example["input_ids"])] = 1
        kept[row, : len(example["input_ids"])] = torch.tensor(example["completion_mask"])
    model = tiny_model("llama", attn_implementation="sdpa")
    labels = ids.masked_fill(kept == 0, IGNORE_INDEX)
    result = run(model, model, {"input_ids": ids, "attention_mask": mask, "labels": labels})
    return result.loss, result.grads


def test_the_loss_is_that_of_the_padded_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = examples_of((7, 2, 19, 33, 5))
    loss, grads = stock_padded(examples)
    batch = PackedSFTCollator()(examples)
    model = fastpack.patch(tiny_model("llama"))

    def read(*_: Any) -> Any:
        raise AssertionError("the batch was read again")

    monkeypatch.setattr(reading, "_to_host", read)
    result = run(model, model, batch)
    assert compare(Result(result.logits, result.loss, result.grads), Result(result.logits, loss, grads)).worst <= (
        FLOAT32_BOUND
    )
    batch["labels"][0, 12] = 5  # the control: a prompt's token, were it trained, shows
    assert relative(run(model, model, batch).loss, loss) > 1e-3


def test_workers_can_be_handed_them() -> None:
    for collator, examples in ((PackedSFTCollator(), [GOOD]), (PackedPreferenceCollator(), [PAIR])):
        again = pickle.loads(pickle.dumps(collator))
        assert again == collator
        loader: Any = torch.utils.data.DataLoader(examples, collate_fn=again, num_workers=1)
        batch = next(iter(loader))
        assert torch.equal(batch["input_ids"], collator(examples)["input_ids"])
        assert batch["packed_seq_lens"].lengths == collator(examples)["packed_seq_lens"].lengths
