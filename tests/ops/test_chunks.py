"""Chunks of packed sequences."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch

from fastpack.ops.chunks import Chunks

SIZE = 4


@pytest.mark.parametrize("lengths", [[1], [3, 4, 5], [1] * 9, [17, 1, 8]])
@pytest.mark.parametrize("spare", [0, 5])
def test_each_token_is_in_one_chunk_of_its_sequence(lengths: list[int], spare: int) -> None:
    offsets = list(accumulate(lengths, initial=0))
    want = [(begin, min(begin + SIZE, end)) for first, end in pairwise(offsets) for begin in range(first, end, SIZE)]
    counts = [-(-length // SIZE) for length in lengths]
    cu_seqlens = torch.tensor(offsets + [offsets[-1]] * spare, dtype=torch.int32)
    chunks = Chunks.of(cu_seqlens, SIZE, len(want) + spare)
    assert list(zip(chunks.begin.tolist(), chunks.end.tolist(), strict=True)) == want + [(offsets[-1],) * 2] * spare
    assert chunks.cu_chunks.tolist() == list(accumulate(counts + [0] * spare, initial=0))
    assert {x.dtype for x in (chunks.begin, chunks.end, chunks.cu_chunks)} == {torch.int32}

    x = torch.randn(offsets[-1], 3, dtype=torch.float64, requires_grad=True)
    gathered = chunks.gather(x)
    for (begin, end), chunk in zip(want, gathered, strict=False):
        assert torch.equal(chunk[: end - begin], x[begin:end])
        assert not chunk[end - begin :].any()
    assert not gathered[len(want) :].any()
    back = chunks.scatter(gathered, len(x))
    assert torch.equal(back, x)
    assert torch.equal(torch.autograd.grad(back.sum(), x)[0], torch.ones_like(x))


def test_steps_go_through_all_sequences_at_once() -> None:
    """Sequences of 1, 5, 0 and 2 chunks: each step has the next chunk of those that have one, the longest first."""
    offsets = torch.tensor([0, 3, 20, 20, 26], dtype=torch.int32)
    order, counts = Chunks.of(offsets, SIZE, 9).steps
    assert counts == [3, 2, 1, 1, 1]
    assert order.tolist() == [1, 6, 0, 2, 7, 3, 4, 5]
