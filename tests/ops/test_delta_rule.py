"""The gated delta rule's definition, against the plain recurrence, token by token in float64."""

from __future__ import annotations

import inspect
from itertools import accumulate, pairwise

import pytest
import torch
from delta_cases import HEADS, LENGTHS, chunks_of, errors, gradients_of, make_inputs
from op_checks import relative
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next

from fastpack.ops.delta_rule import gated_delta_rule

BOUND = 1e-11


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: list[int], *, normalised: bool
) -> Tensor:
    if normalised:
        q, k = (modeling_qwen3_next.l2norm(x) for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q * q.shape[-1] ** -0.5, k))
    decay = (g if g.ndim == 3 else g[..., None]).exp()[..., None]
    out = []
    for begin, end in pairwise(accumulate(lengths, initial=0)):
        state = v.new_zeros(*k.shape[1:], v.shape[2])
        for t in range(begin, end):
            state = state * decay[t]
            seen = torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - seen))
            out.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(out)


@pytest.mark.parametrize("by_channel", [False, True], ids=["per head", "per channel"])
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_definition(lengths: list[int], normalised: bool, by_channel: bool) -> None:
    inputs = make_inputs(sum(lengths), by_channel=by_channel, dtype=torch.float64)
    if not normalised:
        inputs[:2] = [x / 4 for x in inputs[:2]]  # longer keys than 1 make the recurrence explode
    want = gradients_of(lambda *xs: recurrence(*xs, lengths, normalised=normalised), inputs)
    for spare in (0, 3):
        chunks = chunks_of(lengths, 16, spare)
        got = gradients_of(lambda *xs: gated_delta_rule(*xs, chunks, normalised=normalised), inputs)  # noqa: B023
        assert max(errors(got, want)) <= BOUND


@pytest.mark.parametrize("by_channel", [False, True], ids=["per head", "per channel"])
def test_a_dropped_boundary_is_caught(by_channel: bool) -> None:
    lengths, wrong = [20, 30, 7], [50, 7]
    inputs = make_inputs(57, by_channel=by_channel, dtype=torch.float64)
    got = gated_delta_rule(*inputs, chunks_of(lengths, 16), normalised=True)
    parts = zip(*(x.split(lengths) for x in inputs), strict=True)
    alone = [gated_delta_rule(*part, chunks_of([len(part[0])], 16), normalised=True) for part in parts]
    assert relative(got, torch.cat(alone)) <= BOUND
    control = gated_delta_rule(*inputs, chunks_of(wrong, 16), normalised=True)
    assert relative(control, torch.cat(alone)) > 1e-2


@pytest.mark.parametrize("by_channel", [False, True], ids=["per head", "per channel"])
@pytest.mark.parametrize("decay", [-30.0, -1e-6, 0.0, "mixed"])
def test_extreme_decays(decay: float | str, by_channel: bool) -> None:
    """In float32 as in float64: no product of decays overflows on its way to a small result."""
    lengths = [70, 3]
    inputs = make_inputs(73, by_channel=by_channel, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    mixed = -30.0 * (torch.rand(inputs[3].shape, generator=generator, dtype=torch.float64) < 0.3)
    inputs[3] = mixed if decay == "mixed" else torch.full_like(inputs[3], float(decay))
    want = gradients_of(lambda *xs: recurrence(*xs, lengths, normalised=True), inputs)
    chunks = chunks_of(lengths, 64)
    narrow = [x.float() for x in inputs]
    got = gradients_of(lambda *xs: gated_delta_rule(*xs, chunks, normalised=True), narrow)
    assert max(errors(got, want)) <= 1e-5


@pytest.mark.parametrize("lengths", [[1], [64], [7, 1, 65, 130]], ids=str)
def test_float32_rounds_as_in_transformers(lengths: list[int]) -> None:
    """A model then differs from its sequences alone by less than its own rounding, however badly conditioned."""
    inputs = make_inputs(sum(lengths), dtype=torch.float32, sizes=(16, 16))
    parts = zip(*(x[None].split(lengths, 1) for x in inputs), strict=True)
    upstream = inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule)
    alone = [upstream(*part, use_qk_l2norm_in_kernel=True)[0][0] for part in parts]
    assert relative(gated_delta_rule(*inputs, chunks_of(lengths, 64), normalised=True), torch.cat(alone)) <= 2e-7


def test_autocast_changes_nothing() -> None:
    inputs = make_inputs(40, dtype=torch.float32)
    chunks = chunks_of([30, 10], 16)
    want = gated_delta_rule(*inputs, chunks, normalised=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(gated_delta_rule(*inputs, chunks, normalised=True), want)


def test_the_result_is_in_the_dtype_of_values() -> None:
    inputs = make_inputs(40, dtype=torch.float32)
    inputs[:3] = [x.bfloat16() for x in inputs[:3]]
    out = gated_delta_rule(*inputs, chunks_of([40], 16), normalised=True)
    assert out.dtype == torch.bfloat16
    wide = gated_delta_rule(*(x.double() for x in inputs), chunks_of([40], 16), normalised=True)
    assert out.shape == (40, HEADS, inputs[2].shape[2])
    assert relative(out, wide) <= 4e-3
