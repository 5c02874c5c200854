"""Blocks of tokens that see each other in both directions, on every backend that serves them.

The oracle is the formula of ``attention_cases.py``, which masks token by token in float64.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
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
    measure,
    pairwise,
    plain,
    truth_of,
)
from block_masks import Largest, assert_same_block_mask
from machines import BF16, DOUBLE, FLOAT, shape
from torch import Tensor

from fastpack.attention_dispatch import BACKENDS, attend, choose, explain
from fastpack.backends import custom_op as opaque
from fastpack.backends import flex, reference, segments
from fastpack.backends.call import AttentionCall, Visibility
from fastpack.cuda_graphs.recorder import no_synchronisation
from fastpack.errors import BackendUnavailableError
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.packing.two_way import TwoWay, TwoWayBlocks

TWO_WAY = {**FACTORS, "two_way": ("in_window", "whole"), "head_dim": (8, 64), "lengths": ("mixed", "long", "blocks")}
EVERYTHING = pairwise(TWO_WAY)
PLAIN = pairwise({**TWO_WAY, "softcap": (None,), "sinks": (False,)})
SERVING = ("flex", "triton_packed", "segments", "reference")
CONTROLS = [
    Case(two_way=two_way, window=window, head_dim=8) for two_way in ("in_window", "whole") for window in (None, 7)
]


def with_blocks(lengths: list[int], two_way: TwoWay, seed: int = 0, **settings: Any) -> AttentionCall:
    """Return a call on random heads, with random blocks."""
    packed = PackedSeqLens.from_lengths(lengths)
    numbers = torch.tensor([block_numbers(lengths, seed)])
    packed = replace(packed, two_way=TwoWayBlocks.of(packed, numbers))
    q, k, v = torch.randn(sum(lengths), 2, 8), torch.randn(sum(lengths), 1, 8), torch.randn(sum(lengths), 1, 8)
    return AttentionCall(q, k, v, packed, 0.3, two_way=two_way, **settings)


# --- exact ------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", EVERYTHING, ids=str)
def test_plain_torch_and_the_formula_agree(case: Case) -> None:
    """The two yardsticks of these tests are independent, and so are their gradients."""
    result = errors(measure(plain, case.make(DOUBLE)), truth_of(case, "cpu"))
    assert max(result.values()) < 1e-12, result


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", [DOUBLE, FLOAT, BF16], ids=str)
@pytest.mark.parametrize("case", EVERYTHING, ids=str)
def test_reference(case: Case, dtype: torch.dtype) -> None:
    assert_exact(reference.run, case, dtype)


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", [DOUBLE, FLOAT, BF16], ids=str)
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_segments(case: Case, dtype: torch.dtype) -> None:
    assert_exact(segments.run, case, dtype)


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", pairwise({**TWO_WAY, "head_dim": (16, 64)}), ids=str)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_forward(case: Case, eager_flex: None) -> None:
    out = flex.run(case.make(DOUBLE, requires_grad=False))
    truth = truth_of(case, "cpu").out
    assert float((out - truth).abs().max() / truth.abs().max()) < 1e-12


@pytest.mark.parametrize("case", CONTROLS, ids=str)
def test_causal_attention_fails_the_same_check(case: Case) -> None:
    """Negative control. So does the other way to use the blocks, if there is a window."""
    call = case.make(FLOAT)
    others: list[TwoWay | None] = (
        [None] if case.window is None else [None, "whole" if case.two_way == "in_window" else "in_window"]
    )
    for other in others:
        result = errors(measure(reference.run, replace(call, two_way=other)), truth_of(case, "cpu"))
        assert all(result[name] > 3 * bound for name, bound in bounds(case, FLOAT, "cpu").items()), (other, result)
        assert min(result.values()) > 0.1, result


@pytest.mark.parametrize("backend", ["reference", "segments"])
def test_a_layer_that_ignores_blocks_is_causal(backend: str) -> None:
    """Equal to the bit, as a batch without blocks is for a layer that uses them."""
    call = Case(two_way="whole", window=7).make(FLOAT)
    expected = attend(replace(call, two_way=None, packed=replace(call.packed, two_way=None)), backend)
    assert torch.equal(attend(replace(call, two_way=None), backend), expected)
    assert torch.equal(attend(replace(call, packed=replace(call.packed, two_way=None)), backend), expected)
    assert not torch.equal(attend(call, backend), expected)


def test_the_two_ways_are_one_without_a_window() -> None:
    call = Case(two_way="whole").make(FLOAT)
    assert torch.equal(attend(call), attend(replace(call, two_way="in_window")))
    assert torch.equal(attend(call), attend(replace(call, window=1000)))
    assert not torch.equal(attend(replace(call, window=7)), attend(replace(call, window=7, two_way="in_window")))


@pytest.mark.parametrize("backend", ["reference", "segments"])
@pytest.mark.parametrize("two_way", ["in_window", "whole"])
def test_a_sequence_is_not_moved_by_its_neighbours(backend: str, two_way: TwoWay) -> None:
    """Blocks at the end of a sequence and at the beginning of the next have the same number, and are apart."""
    call = Case(two_way=two_way, window=7).make(FLOAT)
    begin, end = call.packed.cu_seqlens[2:4].tolist()
    numbers = block_numbers(LENGTHS["mixed"])
    assert numbers[end - 1] == numbers[end] != -1
    spoilt = [t.detach().clone() for t in (call.q, call.k, call.v)]
    for tensor in spoilt:
        tensor[begin:end] = float("nan")
    before, after = attend(call, backend), attend(call.with_qkv(*spoilt), backend)
    assert torch.isnan(after[begin:end]).all()
    assert torch.equal(after[:begin], before[:begin])
    assert torch.equal(after[end:], before[end:])


# --- which backend ----------------------------------------------------------------------------------------------------


def test_causal_kernels_refuse_blocks(capable_cpu: Any) -> None:
    capable_cpu(9, 0)
    requested = shape("cpu", visibility=Visibility(two_way="whole"))
    reasons = explain(requested)
    for name, reason in reasons.items():
        assert (reason is not None and reason.startswith("is causal")) == (name not in SERVING), name
    assert all(not str(reason).startswith("is causal") for reason in explain(shape("cpu")).values())
    assert "image blocks" in requested.describe()
    assert "image blocks" not in shape("cpu").describe()
    with pytest.raises(BackendUnavailableError, match=r"'torch_varlen' can't serve .*image blocks: is causal"):
        choose(requested, "torch_varlen")


def test_a_batch_alone_decides() -> None:
    call = Case(two_way="whole", window=7).make(FLOAT)
    assert call.visibility == Visibility(7, two_way="whole")
    assert replace(call, two_way=None).visibility == Visibility(7)
    assert replace(call, packed=replace(call.packed, two_way=None)).visibility == Visibility(7)
    assert Visibility(7, two_way="whole") != Visibility(7, two_way="in_window")


@pytest.mark.parametrize(("backend", "more"), [("segments", {"window": 7}), ("reference", {"softcap": 2.0})])
def test_the_compiled_operator(backend: str, more: dict[str, Any]) -> None:
    call = with_blocks([31, 1, 36], "in_window", **more)
    leaves = [t.requires_grad_() for t in (call.q, call.k, call.v)]
    expected = BACKENDS[backend].run(call)
    result = opaque.run(backend, call)
    assert torch.equal(result, expected)
    grad = torch.randn_like(result)
    for ours, theirs in zip(*(torch.autograd.grad(x, leaves, grad) for x in (result, expected)), strict=True):
        assert (ours - theirs).abs().max() <= 1e-6
    assert not torch.equal(result, opaque.run(backend, replace(call, two_way=None)))


# --- costs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["segments", "reference"])
@pytest.mark.parametrize("window", [None, 300])
def test_nothing_of_size_t_by_t(backend: str, window: int | None) -> None:
    call = with_blocks([100] * 20 + [67, 133] * 5, "in_window", window=window)
    with Largest() as largest:
        measure(partial(attend, attention=backend), call)
    assert 0 < largest.elements < 3000 * 3000 // 4, largest.operation


def test_ranges_are_computed_once_a_batch() -> None:
    call = with_blocks([7, 9], "whole", window=3)
    assert call.seen_ranges is not None
    assert replace(call).seen_ranges is call.seen_ranges
    assert replace(call, window=2).seen_ranges is not call.seen_ranges
    assert replace(call, two_way="in_window").seen_ranges is not call.seen_ranges
    assert replace(call, two_way=None).seen_ranges is None


@pytest.mark.sample(5)
@pytest.mark.parametrize("two_way", ["in_window", "whole"])
@pytest.mark.parametrize("window", [None, 1, 7, 129])
@pytest.mark.parametrize("lengths", [[1], [129], [384], [100, 28, 130, 1, 125], [513, 1, 200], [3] * 100], ids=str)
def test_block_mask_is_what_torch_makes(lengths: list[int], window: int | None, two_way: TwoWay) -> None:
    call = with_blocks(lengths, two_way, window=window)
    packed, ranges, blocks = call.packed, call.seen_ranges, call.packed.two_way
    assert blocks is not None
    with Largest() as largest:
        mine = flex.block_mask(packed, window, ranges)
    assert largest.elements <= 2 * packed.total_tokens, largest.operation
    sequence = packed.seq_idx[0]

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_window = query - key < (10**6 if window is None else window)
        together, causal = blocks.first[query] == blocks.first[key], key <= query
        seen = causal & in_window | together if two_way == "whole" else (causal | together) & in_window
        return seen & (sequence[query] == sequence[key])

    assert_same_block_mask(mine, visible, sum(lengths))


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("two_way", ["in_window", "whole"])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("backend", SERVING)
def test_no_layer_waits_for_the_gpu(backend: str, window: int | None, two_way: TwoWay) -> None:
    """This holds in both passes, for the first layer of a batch (which computes ranges) and for the next."""
    case = Case(window=window, two_way=two_way)
    for _ in range(2):
        measure(partial(attend, attention=backend), case.make(BF16, "cuda"))
    call = case.make(BF16, "cuda", seed=3)
    numbers = torch.tensor([block_numbers(LENGTHS["mixed"])], device="cuda")
    cotangent = torch.ones_like(call.v).repeat_interleave(call.groups, 1)
    torch.cuda.synchronize()
    with no_synchronisation():
        call = replace(call, packed=replace(call.packed, two_way=TwoWayBlocks.of(call.packed, numbers)))
        for _ in range(2):
            attend(call, backend).backward(cotangent)
    assert call.q.grad is not None
