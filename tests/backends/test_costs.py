"""The costs that no backend may have: anything of size T x T, two masks of one batch, or a dtype not autocast's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import Case, measure
from block_masks import Largest, assert_same_block_mask
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from fastpack.attention_dispatch import attend
from fastpack.backends import flex, reference, segments
from fastpack.backends.call import AttentionCall
from fastpack.packing.seqlens import PackedSeqLens


def make(lengths: list[int], *, value_dim: int = 8, **settings: Any) -> AttentionCall:
    total = sum(lengths)
    q, k, v = torch.randn(total, 2, 8), torch.randn(total, 1, 8), torch.randn(total, 1, value_dim)
    return AttentionCall(q, k, v, PackedSeqLens.from_lengths(lengths), 0.3, **settings)


MANY = [100] * 20 + [67, 133] * 5
LONG = [4096]


@pytest.mark.parametrize(
    ("attention", "call"),
    [
        ("segments", make(MANY)),
        ("segments", make(MANY, window=20)),
        ("segments", make(LONG, window=300)),
        ("segments", make(LONG)),
        ("segments", make(LONG, value_dim=16)),  # torch has no fused kernel for these two
        ("segments", make(LONG, dropout=0.1)),
        ("reference", make(MANY)),
        ("reference", make(MANY, softcap=1.0, sinks=torch.randn(2))),
        ("reference", make(LONG, window=300)),
        ("reference", make(LONG)),
    ],
)
def test_nothing_of_size_t_by_t(attention: str, call: AttentionCall) -> None:
    """Forward and backward run on 3000 tokens in 30 sequences, and on one long sequence."""
    total = call.packed.total_tokens
    assert total in (3000, 4096)
    with Largest() as largest:
        measure(lambda fresh: attend(fresh, attention), call)
    assert 0 < largest.elements < total * total, largest.operation
    if call.packed.num_sequences > 1 or call.window is not None:
        assert largest.elements < total * total // 4, largest.operation


@pytest.mark.parametrize(("lengths", "window"), [(MANY, None), (MANY, 20), (LONG, 300), (LONG, None)])
def test_a_block_mask_is_made_of_blocks(lengths: list[int], window: int | None) -> None:
    packed = PackedSeqLens.from_lengths(lengths)
    with Largest() as largest:
        flex.block_mask(packed, window)
    assert largest.elements <= 2 * packed.total_tokens, largest.operation


def test_the_meter_sees_a_mask_of_size_t_by_t() -> None:
    """Negative control: the measure detects the stock mask."""
    packed = PackedSeqLens.from_lengths(MANY)
    with Largest() as largest:
        create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 3000, 3000, device="cpu")
    assert largest.elements >= 3000 * 3000
    with Largest() as largest:
        assert (packed.seq_idx[0][:, None] == packed.seq_idx[0]).any()
    assert largest.elements == 3000 * 3000


@pytest.mark.parametrize("window", [None, 1, 7, 128, 129, 300, 5000])
@pytest.mark.parametrize(
    "lengths",
    [
        [1],
        [127],
        [128],
        [129],
        [1, 1, 1],
        [384],  # full blocks below the diagonal
        [128, 128, 128],
        [100, 28, 130, 1, 125],  # boundaries on and off the edges of blocks
        [513, 1, 200],
        [7, 640],
        [3] * 100,
    ],
    ids=str,
)
def test_block_mask_is_what_torch_makes(lengths: list[int], window: int | None) -> None:
    packed = PackedSeqLens.from_lengths(lengths)
    mine = flex.block_mask(packed, window)
    sequence = packed.seq_idx[0]

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (sequence[query] == sequence[key]) & (key <= query)
        return seen if window is None else seen & (key > query - window)

    assert_same_block_mask(mine, visible, sum(lengths))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_block_mask_is_built_once_a_batch(eager_flex: None, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[int, int | None]] = []
    build = flex.block_mask

    def counted(packed: PackedSeqLens, window: int | None, ranges: object) -> BlockMask:
        built.append((packed.total_tokens, window))
        assert ranges is None
        return build(packed, window)

    monkeypatch.setattr(flex, "block_mask", counted)
    call = Case(head_dim=64, window=7).make(torch.float32, requires_grad=False)
    layers = [call, replace(call, window=None), call, replace(call, window=None), replace(call, window=1000)]
    for layer in layers:
        flex.run(layer)
    # a window longer than every sequence is none
    assert built == [(80, 7), (80, None)]
    flex.run(Case(head_dim=64, window=7).make(torch.float32, requires_grad=False))
    assert built[2:] == [(80, 7)], "another batch has a mask of its own"


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_autocast_reaches_the_backend(softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """RoPE's float32 tables promote q and k; the kernel still gets autocast's dtype, as in transformers' flash path."""
    seen: list[set[torch.dtype]] = []

    def spied(run: Callable[[AttentionCall], Tensor]) -> Callable[[AttentionCall], Tensor]:
        def spy(call: AttentionCall) -> Tensor:
            seen.append({call.q.dtype, call.k.dtype, call.v.dtype, call.shape.dtype})
            return run(call)

        return spy

    for backend in (segments, reference):
        monkeypatch.setattr(backend, "run", spied(backend.run))
    call = replace(Case().make(torch.float32), softcap=softcap)
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(call)
        mixed = attend(call.with_qkv(call.q, call.k, call.v.detach().bfloat16()))
    assert seen == [{torch.bfloat16}, {torch.bfloat16}]
    assert out.dtype == mixed.dtype == torch.bfloat16
    assert torch.equal(out, mixed)
    out.float().sum().backward()
    assert call.q.grad is not None
    assert call.q.grad.dtype == torch.float32

    seen.clear()
    assert attend(call).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert attend(call).dtype == torch.float32
    assert seen == [{torch.float32}] * 2


def test_the_reference_computes_in_float32_under_autocast() -> None:
    """Autocast must not lower the dtype of its matmuls, since others are measured against it."""
    call = Case().make(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        under = attend(call, "reference")
    assert torch.equal(under, attend(call, "reference"))
