"""Long walks over queries that several programs share, in the gradients of keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import Case, assert_exact
from oracle import relative
from packed_kernels import (
    FLOAT,
    ONE_LOOP,
    TILED,
    WIDE,
    Cut,
    all_and_arrivals,
    all_of,
    interpreted,
    offsets,
    on_gpu,
    same,
)
from torch import Tensor

from fastpack.backends import triton_packed
from fastpack.ops.kernels import attention, attention_keys
from fastpack.ops.kernels.attention import AttentionTile

# case, tile, the most pieces of a walk, the fewest steps of a piece
SHARED = [(case, tile, 4, 1) for case, tile in TILED]
SHARED += [(Case(groups=4, head_dim=8), ONE_LOOP, 3, 1), (Case(groups=4, head_dim=8), ONE_LOOP, 4, 2)]


@pytest.mark.slow
@interpreted
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@pytest.mark.parametrize(("case", "tile", "most", "least"), SHARED, ids=str)
def test_shared_walks(
    case: Case, tile: AttentionTile, most: int, least: int, cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several programs add up the gradients of long walks' tiles of keys; each other tile has one program."""
    cut(replace(tile, sharing=1000))
    monkeypatch.setattr(attention_keys, "MOST_PIECES", most)
    monkeypatch.setattr(attention_keys, "LEAST_STEPS", least)
    kept = record_arrivals(monkeypatch)
    assert_exact(triton_packed.run, case, FLOAT)
    call = case.make(FLOAT, requires_grad=False)
    lengths, starts = call.packed.lengths, call.packed.cu_seqlens.tolist()
    part, parts = attention.parts_of(case.groups)
    for counted in (len(lengths), len(lengths) - 2):  # one walk of the last two sequences is shared
        if counted < len(lengths):
            rows = offsets(starts[counted])
            kept.append(all_and_arrivals(call, call.packed.cu_seqlens, torch.ones_like(call.q), rows)[1])
        arrivals = kept.pop()
        assert arrivals is not None
        done = arrivals.view(-1, call.k.shape[1])[:, 0].tolist()
        expected = [0] * len(done)
        for i, (begin, length) in enumerate(zip(starts[:counted], lengths, strict=False)):
            for first in range(0, length, tile.keys):
                reach = length - first if case.window is None else min(length - first, tile.keys + case.window - 1)
                pieces = min(most, -(-reach // (tile.rows // part)) * parts // least)
                expected[begin // tile.keys + i + first // tile.keys] = pieces if pieces > 1 else 0
        assert done == expected
        assert max(done) > 1
        assert 0 in done


@interpreted
def test_walks_are_not_shared_where_counters_would_not_be_zeroed(cut: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of 32 rows of one head has more tokens than a tile of 16 keys, so the first kernel has fewer programs."""
    cut(replace(WIDE, sharing=1000))
    kept = record_arrivals(monkeypatch)
    assert_exact(triton_packed.run, Case(groups=1, head_dim=8), FLOAT)
    assert kept == [None]


def record_arrivals(monkeypatch: pytest.MonkeyPatch) -> list[Tensor | None]:
    """Return a list to which the ``arrivals`` of each launch of the keys' kernel are added."""
    kept: list[Tensor | None] = []
    keys = attention_keys.keys

    def recorded(*args: Any, arrivals: Tensor | None, **kwargs: Any) -> tuple[Tensor, Tensor]:
        kept.append(arrivals)
        return keys(*args, arrivals=arrivals, **kwargs)

    monkeypatch.setattr(attention_keys, "keys", recorded)
    return kept


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(14, 2, 64), (16, 2, 128)])
def test_shared_walks_are_what_one_program_makes(
    heads: int, kv_heads: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the order of float32 sums differs; in any order of arrival the bits are the same."""
    lengths = [441, 33, 370, 60, 112, 1, 122, 85]
    call = on_gpu(lengths, heads, kv_heads, size)
    rows = torch.tensor([sum(lengths[:-1])], dtype=torch.int32, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    grad = torch.randn(call.q.shape, generator=generator, device="cuda", dtype=call.q.dtype)
    result, arrivals = all_and_arrivals(call, call.packed.cu_seqlens, grad, rows)
    assert arrivals is not None
    assert arrivals.max() == attention_keys.MOST_PIECES
    assert all(same(result, all_of(call, call.packed.cu_seqlens, grad, rows)) for _ in range(20))
    monkeypatch.setattr(attention_keys, "MOST_PIECES", 1)
    alone, arrivals = all_and_arrivals(call, call.packed.cu_seqlens, grad, rows)
    assert arrivals is None
    assert same(result[:3], alone[:3])
    for shared, other in zip(result[3:], alone[3:], strict=True):
        assert relative(shared, other) <= 2**-7  # a step of bfloat16
        assert not shared[rows.item() :].any()
