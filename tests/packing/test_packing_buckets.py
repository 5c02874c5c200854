"""Batches rounded up to buckets: sizes repeat, and bucket padding changes nothing."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import FLOAT32_BOUND, make_sequences, relative
from packing_cases import filled_up
from tiny import VOCAB, tiny_model

import fastpack
from fastpack import PackedSeqLens, PackingError
from fastpack.attention_dispatch import BACKENDS, attend
from fastpack.backends.call import AttentionCall
from fastpack.data.packed_collators import PackedSFTCollator
from fastpack.packing.buckets import Bucket
from fastpack.packing.inputs import read_packing

lists_of_lengths = st.lists(st.integers(1, 700), min_size=1, max_size=40)


@given(lists_of_lengths)
@settings(deadline=None)
def test_a_bucket_holds_its_batch(lengths: list[int]) -> None:
    bucket, total = Bucket.of(lengths), sum(lengths)
    padding = bucket.padding(lengths)
    assert total + sum(padding) == bucket.tokens
    assert bucket.tokens % 64 == 0
    assert max(lengths) <= bucket.max_seqlen
    assert all(1 <= n <= bucket.max_seqlen for n in padding)
    assert len(lengths) + len(padding) <= bucket.sequences
    assert bucket.tokens - total < 64 or bucket.tokens <= 1.0625 * total
    assert bucket.max_seqlen in (2 ** (bucket.max_seqlen.bit_length() - 1), bucket.tokens)
    assert bucket.sequences <= max(16, 1.25 * (len(lengths) + max(len(padding), 1)))
    assert bucket.max_seqlen <= bucket.tokens, "kernels refuse a length beyond the batch"


@given(lists_of_lengths)
@settings(deadline=None)
def test_a_bucket_holds_what_it_was_made_for_when_less_comes(lengths: list[int]) -> None:
    """The bucket is that of every batch which rounds up to the same sizes, whether it needs padding or not."""
    bucket = Bucket.of(lengths)
    filled = [*lengths, *bucket.padding(lengths)]
    assert Bucket.of(filled).tokens == bucket.tokens
    assert bucket.padding(filled) == ()


def test_waste_and_number_of_buckets() -> None:
    """What the docstring promises: 2.2 % on average, and no more than sixteen sizes between two powers of two."""
    waste, sizes = [], set()
    for total in (round(1024 * 1.01**i) for i in range(round(math.log(64, 1.01)))):
        tokens = Bucket.of([total]).tokens
        waste.append(tokens / total - 1)
        sizes.add(tokens)
    assert max(waste) <= 0.0625
    assert sum(waste) / len(waste) == pytest.approx(0.022, abs=2e-3)
    assert len(sizes) <= 6 * 16 + 1


def test_number_of_sequences() -> None:
    """Four values between two powers of two."""
    result = {Bucket.of([1] * count).sequences for count in range(1, 255)}
    assert result == {16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256}


@given(lists_of_lengths)
@settings(deadline=None)
def test_attributes_agree(lengths: list[int]) -> None:
    packed = PackedSeqLens.from_lengths(lengths)
    bucketed = packed.bucketed()
    bucket = bucketed.bucket
    assert bucket == Bucket.of(lengths)
    assert bucketed.lengths == (*lengths, *bucketed.bucket_padding)
    assert sum(bucketed.lengths) == bucket.tokens
    assert bucketed.total_tokens == bucket.tokens
    assert bucketed.real_tokens == packed.total_tokens
    assert bucketed.max_seqlen == bucket.max_seqlen
    assert bucketed.num_sequences == len(bucketed.lengths)
    assert bucketed.cu_seqlens.shape == (bucket.sequences + 1,)
    assert bucketed.cu_seqlens.dtype == torch.int32
    sizes = bucketed.cu_seqlens.diff().tolist()
    assert sizes[: len(bucketed.lengths)] == list(bucketed.lengths)
    assert not any(sizes[len(bucketed.lengths) :])
    assert torch.equal(bucketed.position_ids[0], torch.cat([torch.arange(n) for n in bucketed.lengths]))
    assert torch.equal(bucketed.position_ids[:, : packed.total_tokens], packed.position_ids)
    assert torch.equal(bucketed.seq_idx[:, : packed.total_tokens], packed.seq_idx)
    assert bucketed.seq_idx.shape == (1, bucket.tokens)
    assert sum(count * length for count, length in bucketed.runs) == bucket.tokens


@st.composite
def masks(draw: Any) -> torch.Tensor:
    """``[B, S]`` with at least one token, padded anywhere outside one run a row."""
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 90))
    mask = torch.zeros(rows, columns, dtype=torch.long)
    for row in range(rows):
        begin = draw(st.integers(0, columns))
        mask[row, begin : draw(st.integers(begin, columns))] = 1
    return mask


@given(masks())
@settings(deadline=None)
def test_bucket_padding_comes_and_goes(mask: torch.Tensor) -> None:
    """``unpad`` makes it of the first token, ``repad`` drops it; labels and gradients never see it."""
    packed = read_packing(tuple(mask.shape), mask.device, attention_mask=mask)
    bucketed = packed.bucketed()
    x = torch.randn(*mask.shape, 3, requires_grad=True)
    flat, plain = bucketed.unpad(x), packed.unpad(x)
    assert flat.shape == (1, bucketed.total_tokens, 3)
    assert torch.equal(flat[:, : packed.total_tokens], plain)
    assert torch.equal(flat[:, packed.total_tokens :], plain[:, :1].expand(-1, sum(bucketed.bucket_padding), -1))
    y = torch.randn_like(flat)
    y[:, packed.total_tokens :] = float("nan")
    assert torch.equal(bucketed.repad(y), packed.repad(y[:, : packed.total_tokens]))
    assert torch.equal(bucketed.padding.repad_flat(y[0]), packed.padding.repad_flat(y[0, : packed.total_tokens]))
    weights = torch.randn_like(x)
    (ours,) = torch.autograd.grad((bucketed.repad(flat * flat) * weights).sum(), x)
    (want,) = torch.autograd.grad((packed.repad(plain * plain) * weights).sum(), x)
    assert torch.equal(ours, want)
    labels = torch.arange(mask.numel()).reshape(mask.shape)
    assert torch.equal(bucketed.mask_first_labels(labels), packed.mask_first_labels(labels))


def test_lengths_alone_and_several_pieces() -> None:
    packed = PackedSeqLens.from_lengths([200, 57])
    bucketed = packed.bucketed(Bucket(tokens=1024, sequences=16, max_seqlen=256))
    assert bucketed.bucket_padding == (256, 256, 255)
    x = torch.randn(1, 257, 2)
    assert bucketed.unpad(x).shape == (1, 1024, 2)
    assert torch.equal(bucketed.repad(bucketed.unpad(x)), x)
    row = bucketed.flattened()
    assert row.padding.batch_shape == (1, 1024)
    assert row.real_tokens == 1024
    assert row.unpad(x := torch.randn(1, 1024)) is not None
    assert torch.equal(row.repad(x), x)
    moved = copy.deepcopy(bucketed).to("cpu")
    assert moved.bucket == bucketed.bucket
    assert moved.bucket_padding == bucketed.bucket_padding
    assert moved.real_tokens == 257


@pytest.mark.parametrize(
    ("lengths", "bucket"),
    [
        ([200, 57], Bucket(256, 16, 256)),
        ([200, 57], Bucket(320, 16, 128)),
        ([200, 57], Bucket(320, 2, 256)),
    ],
    ids=["too many tokens", "too long", "no room for padding"],
)
def test_what_does_not_fit_raises(lengths: list[int], bucket: Bucket) -> None:
    with pytest.raises(PackingError, match="don't fit"):
        PackedSeqLens.from_lengths(lengths).bucketed(bucket)
    with pytest.raises(PackingError, match="already"):
        PackedSeqLens.from_lengths(lengths).bucketed().bucketed()


@pytest.mark.parametrize("attention", ["segments", "reference"])
@pytest.mark.parametrize("window", [None, 5])
def test_attention_of_a_bucket(attention: str, window: int | None) -> None:
    """Real tokens get what they get without bucket padding, forward and backward."""
    packed = PackedSeqLens.from_lengths([7, 1, 19, 19, 33])
    bucketed = packed.bucketed()
    assert bucketed.bucket_padding
    q, k, v = (torch.randn(1, packed.total_tokens, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    results = []
    for lens in (packed, bucketed):
        call = AttentionCall(*(lens.unpad(x)[0] for x in (q, k, v)), lens, scale=0.3, window=window)
        assert call.shape.num_sequences == lens.cu_seqlens.numel() - 1
        out = lens.repad(attend(call, attention)[None])
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for ours, want in zip(*reversed(results), strict=True):
        assert relative(ours, want) <= FLOAT32_BOUND


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2"])
def test_a_model_runs_a_bucket_that_it_is_given(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``packed_seq_lens=`` of a padded batch, in a bucket: the same logits and gradients, from the bucket's tokens."""
    model = fastpack.patch(tiny_model(model_type))
    tokens: list[int] = []
    for backend in BACKENDS.values():
        run = backend.run
        monkeypatch.setattr(backend, "run", lambda call, run=run: tokens.append(call.q.shape[0]) or run(call))
    sequences = make_sequences(VOCAB)
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(s) for s in sequences], batch_first=True)
    packed = read_packing(tuple(ids.shape), ids.device, attention_mask=mask)
    results = []
    for lens in (packed, packed.bucketed()):
        model.zero_grad()
        tokens.clear()
        hidden = model.base_model(input_ids=ids, packed_seq_lens=lens).last_hidden_state
        assert set(tokens) == {lens.total_tokens}
        hidden.square().sum().backward()
        results.append([hidden.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    floor = max(float(g.abs().max()) for g in results[0][1:])
    for ours, want in zip(*reversed(results), strict=True):
        assert float((ours - want).abs().max()) <= FLOAT32_BOUND * max(floor, float(want.abs().max()))


def longer(kind: str, sequences: list[torch.Tensor]) -> dict[str, Any]:
    """The same sequences as a batch with tokens behind them, put there by a collator or on the way into the model."""
    total = sum(map(len, sequences))
    sizes = {"filled up": total + 9, "filled up, full": total}
    if kind in sizes:
        batch = PackedSFTCollator()([{"input_ids": ids} for ids in sequences])
        return filled_up(batch, sizes[kind])
    ids = torch.cat(sequences)[None]
    packed = PackedSeqLens.from_lengths([len(sequence) for sequence in sequences]).bucketed()
    if kind == "a bucket":
        return {"input_ids": ids, "labels": ids, "packed_seq_lens": packed}
    if kind == "a bucket's row":
        labels = packed.unpad(packed.mask_first_labels(ids))
        return {"input_ids": packed.unpad(ids), "labels": labels, "packed_seq_lens": packed.flattened()}
    rows = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(s) for s in sequences], batch_first=True)
    labels = rows.masked_fill(mask == 0, -100)
    read = read_packing(tuple(rows.shape), rows.device, attention_mask=mask).bucketed()
    return {"input_ids": rows, "attention_mask": mask, "labels": labels, "packed_seq_lens": read}


@pytest.mark.parametrize("loss", [None, "fused"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("kind", ["filled up", "filled up, full", "a bucket", "a bucket's row", "padded, in a bucket"])
def test_experts_are_not_balanced_over_what_fills_up(kind: str, model_type: str, loss: Any) -> None:
    """Loss and gradients are those of the stock model on a padded batch, whose mask says what counts."""
    traits = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    sequences = make_sequences(VOCAB)
    padded = longer("padded", sequences)
    del padded["packed_seq_lens"]
    results = []
    for model, batch in (
        (tiny_model(model_type, **traits), padded),
        (fastpack.patch(tiny_model(model_type, **traits), loss=loss), longer(kind, sequences)),
    ):
        out = model(**batch, use_cache=False)
        out.loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([out.loss.detach(), out.aux_loss.detach(), *grads])
    floor = max(float(g.abs().max()) for g in results[0][2:])
    for want, ours in zip(*results, strict=True):
        assert float((ours - want).abs().max()) <= FLOAT32_BOUND * max(floor, float(want.abs().max()))


def test_a_row_keeps_where_its_bucket_padding_begins() -> None:
    row = PackedSeqLens.from_lengths([200, 57]).bucketed(Bucket(tokens=1024, sequences=16, max_seqlen=256)).flattened()
    for packed in (row, copy.deepcopy(row), row.flattened()):
        mask = packed.padding.mask()
        assert mask.shape == packed.padding.batch_shape
        assert int(mask.sum()) == 257
        assert bool(mask[0, :257].all())
    assert row.bucket_padding == (256, 256, 255)
    assert row.to("meta").padding.mask().device.type == "meta"
    full = PackedSeqLens.from_lengths([64]).bucketed().flattened()
    assert full.bucket_padding == ()
    assert bool(full.padding.mask().all()), "whether a bucket needs padding must not decide what is there"
    assert PackedSeqLens.from_lengths([64]).flattened().padding.mask() is None
