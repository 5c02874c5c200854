"""Blocks of tokens that see each other in both directions, in fastpack's own attention kernels.

``test_two_way_attention.py`` tests other backends; the compiled kernels are measured in ``test_backends_gpu.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import (
    FACTORS,
    LENGTHS,
    Case,
    assert_exact,
    block_numbers,
    bounds,
    errors,
    formula,
    measure,
    pairwise,
    truth_of,
)
from packed_kernels import FLOAT, HALF, ONE_LOOP, TWO_LOOPS, WIDE, Cut, interpreted
from torch import Tensor

from fastpack.attention_dispatch import attend
from fastpack.backends import triton_packed
from fastpack.backends.call import AttentionCall
from fastpack.ops.kernels import attention, attention_keys, attention_queries
from fastpack.ops.kernels.attention import AttentionTile
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.packing.two_way import TwoWay, TwoWayBlocks

TWO_WAY = {**FACTORS, "two_way": ("in_window", "whole"), "lengths": ("mixed", "ones"), "groups": (1, 4, 7)}
CASES = pairwise({**TWO_WAY, "head_dim": (8, 64)})
EVERY = [(case, FLOAT) for case in CASES] + [(case, HALF) for case in CASES[::3]]
# tiles of keys and of rows that lie inside of a block, hold several, or begin in one
TILED = [
    (Case(groups=7, head_dim=8, two_way="whole"), ONE_LOOP),
    (Case(groups=7, head_dim=8, two_way="whole", window=7), WIDE),
    (Case(groups=1, head_dim=8, two_way="whole"), TWO_LOOPS),
    (Case(groups=4, head_dim=8, two_way="in_window"), TWO_LOOPS),
    (Case(groups=1, head_dim=8, two_way="in_window", window=7), TWO_LOOPS),
    (Case(groups=1, head_dim=8, two_way="whole", window=2), ONE_LOOP),
    (Case(groups=4, head_dim=8, two_way="whole", softcap=1.5, sinks=True), TWO_LOOPS),
    (Case(groups=3, head_dim=8, two_way="in_window", window=17, sinks=True), ONE_LOOP),
    (Case(groups=17, head_dim=8, two_way="in_window"), WIDE),
]


@pytest.mark.sample(4)
@interpreted
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@pytest.mark.parametrize(("case", "dtype"), EVERY, ids=str)
def test_exact(case: Case, dtype: torch.dtype) -> None:
    assert_exact(triton_packed.run, case, dtype)


@pytest.mark.sample(4)
@interpreted
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")  # in rows that are not stored
@pytest.mark.parametrize("sharing", [0, 1000])
@pytest.mark.parametrize(("case", "tile"), TILED, ids=str)
def test_many_tiles(case: Case, tile: AttentionTile, sharing: int, cut: Cut) -> None:
    """With sharing, several programs walk over the queries that see a tile of keys, which may begin before the tile."""
    cut(replace(tile, sharing=sharing))
    assert_exact(triton_packed.run, case, FLOAT)


@pytest.mark.sample(3)
@interpreted
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@pytest.mark.parametrize("two_way", ["in_window", "whole"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("seed", range(4))
def test_random_blocks(seed: int, window: int | None, two_way: TwoWay, cut: Cut) -> None:
    cut((ONE_LOOP, TWO_LOOPS)[seed % 2])
    call = Case(head_dim=8, groups=(1, 3)[seed % 2], window=window, two_way=two_way).make(FLOAT)
    lengths = LENGTHS["mixed"]
    numbers = torch.tensor([block_numbers(lengths, seed + 1)])
    call = replace(call, packed=replace(call.packed, two_way=TwoWayBlocks.of(call.packed, numbers), _memo={}))
    truth = measure(formula_of, call)
    assert max(errors(measure(triton_packed.run, call), truth).values()) <= 1e-5


def formula_of(call: AttentionCall) -> Tensor:
    return formula(call.with_qkv(*(t.double() for t in (call.q, call.k, call.v))))


@interpreted
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_causal_attention_fails_the_same_check() -> None:
    """Negative control."""
    case = Case(two_way="whole", head_dim=8)
    result = errors(measure(triton_packed.run, replace(case.make(FLOAT), two_way=None)), truth_of(case, "cpu"))
    assert all(result[name] > 3 * bound for name, bound in bounds(case, FLOAT, "cpu").items()), result
    assert min(result.values()) > 0.1, result


@interpreted
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_blocks_of_one_token_are_causal_to_the_bit(cut: Cut) -> None:
    """So are all blocks in a layer that ignores them, whose kernels get no ranges."""
    cut(TWO_LOOPS)
    call = Case(two_way="whole", head_dim=8).make(FLOAT)
    single = TwoWayBlocks.of(call.packed, torch.full((1, call.packed.total_tokens), -1))
    causal = measure(triton_packed.run, replace(call, packed=replace(call.packed, two_way=None)))
    for other in (replace(call, packed=replace(call.packed, two_way=single, _memo={})), replace(call, two_way=None)):
        outcome = measure(triton_packed.run, other)
        assert torch.equal(outcome.out, causal.out)
        assert all(torch.equal(outcome.grads[name], grad) for name, grad in causal.grads.items())
    assert not torch.equal(triton_packed.run(call), causal.out)


@interpreted
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@pytest.mark.parametrize("two_way", ["in_window", "whole"])
def test_a_sequence_is_not_moved_by_its_neighbours(two_way: TwoWay, cut: Cut) -> None:
    """NaN in a sequence or its gradient reaches no other one, in blocks at the edges of both."""
    cut(ONE_LOOP)
    call = Case(two_way=two_way, window=7, head_dim=8).make(FLOAT, requires_grad=False)

    def run(changed: AttentionCall, grad: Tensor) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (changed.q, changed.k, changed.v)]
        out = triton_packed.run(changed.with_qkv(*leaves))
        return [out, *torch.autograd.grad(out, leaves, grad)]

    grad = torch.randn(call.q.shape)
    before = run(call, grad)
    begin, end = call.packed.cu_seqlens[2:4].tolist()
    spoilt = [t.clone() for t in (call.q, call.k, call.v, grad)]
    for tensor in spoilt:
        tensor[begin:end] = float("nan")
    after = run(call.with_qkv(*spoilt[:3]), spoilt[3])
    assert all(torch.isnan(t[begin:end]).all() for t in after)
    for mine, theirs in zip(after, before, strict=True):
        assert torch.equal(mine[:begin], theirs[:begin])
        assert torch.equal(mine[end:], theirs[end:])


def test_every_kernel_gets_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them it would compute causal attention silently; a layer without blocks gets none."""
    seen: dict[str, bool] = {}

    def stand_in(name: str, results: int) -> Callable[..., tuple[Tensor, ...]]:
        def run(*args: Any, seen_keys: Any = (), seeing_queries: Any = (), **_: Any) -> tuple[Tensor, ...]:
            ranges = [*seen_keys, *seeing_queries]
            assert len(ranges) == 2
            seen[name] = all(isinstance(x, Tensor) for x in ranges)
            return tuple(torch.zeros_like(args[0]) for _ in range(results))

        return run

    for module, name in ((attention, "forward"), (attention_queries, "queries"), (attention_keys, "keys")):
        monkeypatch.setattr(module, name, stand_in(name, 2))
    monkeypatch.setattr(attention_keys, "make_arrivals", lambda *_: None)
    call = Case(two_way="whole", groups=1).make(FLOAT)
    for case, expected in ((call, True), (replace(call, two_way=None), False)):
        triton_packed.run(case).sum().backward()
        assert seen == dict.fromkeys(("forward", "queries", "keys"), expected)
        seen.clear()


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("two_way", ["in_window", "whole"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(14, 2, 64), (16, 2, 128), (8, 4, 256), (8, 1, 256)])
def test_images_of_hundreds_of_tokens(
    heads: int, kv_heads: int, size: int, window: int | None, two_way: TwoWay
) -> None:
    """They cross many tiles; the result in bfloat16 is as near to float32's as flex's is, and the same each time."""
    lengths = [441, 33, 670, 60, 256, 1, 300]
    packed = PackedSeqLens.from_lengths(lengths, device="cuda")
    numbers = torch.tensor([block_numbers(lengths)], device="cuda")
    packed = replace(packed, two_way=TwoWayBlocks.of(packed, numbers))
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(sum(lengths), count, size, generator=generator, device="cuda").bfloat16().requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    )
    call = AttentionCall(q, k, v, packed, size**-0.5, window=window, two_way=two_way)
    truth = measure(lambda each: attend(each, "reference"), call.with_qkv(q.float(), k.float(), v.float()))
    ours, flex, causal = (
        measure(lambda each, name=name: attend(each, name), each)
        for name, each in (("triton_packed", call), ("flex", call), ("triton_packed", replace(call, two_way=None)))
    )
    result, allowed, control = (errors(each, truth) for each in (ours, flex, causal))
    assert all(error <= 1.5 * allowed[name] for name, error in result.items()), (result, allowed)
    assert all(error > 3 * 1.5 * allowed[name] for name, error in control.items()), (control, allowed)
    again = measure(lambda each: attend(each, "triton_packed"), call)
    assert torch.equal(again.out, ours.out)
    assert all(torch.equal(again.grads[name], grad) for name, grad in ours.grads.items())
