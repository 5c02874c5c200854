"""Fastpack's attention kernels on shared prefixes, each key stored once, against each sequence alone.

Through Triton's interpreter, and on a GPU for what only a GPU can show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import relative
from packed_kernels import ONE_LOOP, TWO_LOOPS, Cut, interpreted
from torch import Tensor

from fastpack.attention_dispatch import attend, attend_on_copies, choose_for_tree
from fastpack.backends import reference, triton_packed
from fastpack.backends.call import AttentionCall
from fastpack.ops.kernels import attention, attention_keys
from fastpack.packing.seqlens import PackedSeqLens

ROWS = (
    [[1, 2, 3] * 7, [*[1, 2, 3] * 7, 4], [1, 2, 3, 4], [*[1, 2, 3] * 6, *[5] * 19], [6], [1, 2, 3, 4, *[7] * 20]],
    [[1] * 35, [1] * 35, [1] * 35 + [2], [*[1] * 20, *[3] * 14]],  # one is a beginning of others, two are equal
    [[1, 2], [3, 4]],  # nothing in common
)
SETTINGS: list[dict[str, Any]] = [
    {},
    {"window": 5},
    {"window": 17, "softcap": 1.5},
    {"sinks": True},
    {"groups": 3},
]
TOLERANCE = 1e-5


def packed_tree(rows: Sequence[Sequence[int]], device: str = "cpu") -> PackedSeqLens:
    packed = PackedSeqLens.from_lengths([len(row) for row in rows], device=device)
    ids = torch.tensor([token for row in rows for token in row], device=device)
    return packed.share(packed.prefixes_in(ids[None]))


def make(packed: PackedSeqLens, *, groups: int = 2, sinks: bool = False, size: int = 8, **more: Any) -> AttentionCall:
    """Return a call on random heads of the kept tokens, with gradients."""
    assert packed.shared is not None
    generator = torch.Generator().manual_seed(groups)
    tokens, kv_heads = packed.shared.total_tokens, 2
    q, k, v = (
        torch.randn(tokens, heads, size, generator=generator).requires_grad_()
        for heads in (groups * kv_heads, kv_heads, kv_heads)
    )
    values = torch.randn(groups * kv_heads, generator=generator).requires_grad_() if sinks else None
    return AttentionCall(q, k, v, packed, size**-0.5, sinks=values, **more)


def alone(rows: Sequence[Sequence[int]], call: AttentionCall) -> Tensor:
    """Return the result of each kept token, computed in each sequence alone; no index of the tree is used."""
    tokens: dict[tuple[int, ...], int] = {}
    prefixes = call.packed.prefixes_in(torch.tensor([[token for row in rows for token in row]]))
    starts = dict(zip(prefixes.order, prefixes.shared, strict=True))
    for which, row in enumerate(rows):
        for at in range(starts[which], len(row)):
            tokens[tuple(row[: at + 1])] = len(tokens)
    results: dict[int, Tensor] = {}
    for row in rows:
        places = torch.tensor([tokens[tuple(row[: at + 1])] for at in range(len(row))])
        packed = PackedSeqLens.from_lengths([len(row)])
        part = replace(call, q=call.q[places], k=call.k[places], v=call.v[places], packed=packed)
        for place, result in zip(places.tolist(), reference.run(part), strict=True):
            results.setdefault(place, result)
    return torch.stack([results[place] for place in range(len(tokens))])


def errors(rows: Sequence[Sequence[int]], call: AttentionCall) -> list[float]:
    """Return the errors of the result and of all gradients."""
    leaves = [x for x in (call.q, call.k, call.v, call.sinks) if x is not None]
    ours, truth = triton_packed.run(call), alone(rows, call)
    grad = torch.randn(truth.shape, generator=torch.Generator().manual_seed(1))
    ours, truth = ([out, *torch.autograd.grad(out, leaves, grad)] for out in (ours, truth))
    floor = 0.1 * grad.abs().max()  # a query that sees one key has no gradient, but rounding
    return [float((a - b).abs().max() / torch.maximum(b.abs().max(), floor)) for a, b in zip(ours, truth, strict=True)]


@interpreted
@pytest.mark.sample(5)
@pytest.mark.parametrize("tile", [ONE_LOOP, TWO_LOOPS], ids=["one loop", "two loops"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("rows", ROWS, ids=["branches", "equal", "apart"])
def test_each_sequence_alone(rows: list[list[int]], settings: dict[str, Any], tile: Any, cut: Cut) -> None:
    cut(tile)
    call = make(packed_tree(rows), **settings)
    assert max(errors(rows, call)) <= TOLERANCE


@pytest.mark.slow
@interpreted
@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=24), min_size=2, max_size=6),
    st.sampled_from([None, 1, 4, 11]),
    st.booleans(),
)
def test_random_trees(rows: list[list[int]], window: int | None, sinks: bool) -> None:
    assert max(errors(rows, make(packed_tree(rows), window=window, sinks=sinks))) <= TOLERANCE


@interpreted
@pytest.mark.parametrize("window", [None, 6])
def test_long_walks_are_shared(window: int | None, cut: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a walk end inside a segment, between two, and between the edges of one."""
    cut(replace(ONE_LOOP, sharing=1000))
    monkeypatch.setattr(attention_keys, "LEAST_STEPS", 1)
    made: list[Tensor | None] = []
    arrivals = attention_keys.make_arrivals
    monkeypatch.setattr(attention_keys, "make_arrivals", lambda *args: made.append(arrivals(*args)) or made[-1])
    call = make(packed_tree(ROWS[0]), window=window)
    assert max(errors(ROWS[0], call)) <= TOLERANCE
    assert made[0] is not None
    assert made[0].max() > 1


@pytest.mark.slow
@interpreted
def test_a_group_in_two_parts() -> None:
    """A program takes at most 16 heads of a group."""
    rows = [[1, 2], [3, 4], [1, 2, 5, 6]]
    assert max(errors(rows, make(packed_tree(rows), groups=17))) <= TOLERANCE


@interpreted
@pytest.mark.parametrize("what", ["paths", "branches"])
def test_a_lost_edge_is_noticed(what: str) -> None:
    """Negative control: the last edge has one key less."""
    packed = packed_tree(ROWS[0])
    assert packed.shared is not None
    edges = getattr(packed.shared.tree, what)
    edges.table[-1, 1] -= 1
    assert max(errors(ROWS[0], make(packed))) > 100 * TOLERANCE


@interpreted
def test_attend_takes_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernels serve, keys are not copied; where they don't, or don't pay, they are."""
    monkeypatch.setattr(triton_packed, "rejects", lambda shape: None)
    launched: list[bool] = []
    forward = attention.forward
    monkeypatch.setattr(
        attention, "forward", lambda *a, **k: launched.append(k["paths"][0] is not None) or forward(*a, **k)
    )
    call = make(packed_tree(ROWS[0]))
    shared = call.packed.shared
    assert shared is not None
    ours = attend(call, "triton_packed")
    copied = attend_on_copies(call, shared, "triton_packed")
    assert launched == [True, False]
    assert relative(ours, copied) <= TOLERANCE
    assert choose_for_tree(call.shape, shared) == "triton_packed"
    assert choose_for_tree(call.shape, shared, "segments") is None
    assert shared.tree.pairs_alone < 1.5 * shared.tree.pairs
    monkeypatch.setattr("fastpack.attention_dispatch.choose", lambda shape, attention="auto": "flash_attn")
    assert choose_for_tree(call.shape, shared) is None
    many = packed_tree([[*[1] * 40, *[which] * 2] for which in range(2, 9)])
    assert many.shared is not None
    assert choose_for_tree(make(many).shape, many.shared) == "triton_packed"
    with_blocks = replace(call.shape, visibility=replace(call.shape.visibility, two_way="in_window"))
    assert choose_for_tree(with_blocks, shared) is None


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(14, 2, 64), (32, 8, 128), (8, 1, 256)])
@pytest.mark.parametrize("settings", [{}, {"window": 200}, {"softcap": 30.0}])
def test_on_a_gpu(heads: int, kv_heads: int, size: int, settings: dict[str, Any]) -> None:
    """In bfloat16 against copies in float32, within 1.5 times the error of the same kernels on copies."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(9, (count,), generator=generator).tolist() for count in (700, 41)]
    rows = [[*prompt, 10 + which, *[3] * (37 * which)] for prompt in prompts for which in range(7)]
    packed = packed_tree(rows, "cuda")
    assert packed.shared is not None
    tokens = packed.shared.total_tokens
    wide = [torch.randn(tokens, count, size, device="cuda") for count in (heads, kv_heads, kv_heads, heads)]
    half = [x.to(torch.bfloat16) for x in wide]
    results = []
    for tensors, run in (
        ([x.float() for x in half], lambda call: attend_on_copies(call, call.packed.shared, "reference")),
        (half, triton_packed.run),
        (half, lambda call: attend_on_copies(call, call.packed.shared, "triton_packed")),
    ):
        *qkv, grad = (x.detach().clone().requires_grad_() for x in tensors)
        call = AttentionCall(*qkv, packed, size**-0.5, **settings)
        out = run(call)
        results.append([out, *torch.autograd.grad(out, qkv, grad.to(out.dtype))])
    again = [triton_packed.run(call), *torch.autograd.grad(triton_packed.run(call), qkv, grad)]
    for truth, ours, copied, repeated in zip(*results, again, strict=True):
        size_of = torch.linalg.vector_norm
        assert relative(ours, truth, size=size_of) <= 1.5 * relative(copied, truth, size=size_of)
        assert torch.equal(ours, repeated)  # no atomics' noise
