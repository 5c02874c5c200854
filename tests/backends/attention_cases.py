"""Helpers for the backend tests: cases, the formula in float64, plain torch's result, and measures of errors.

Shape suffixes: T tokens of all sequences, H query heads, K key/value heads, D head size, V value size.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpack.backends.call import AttentionCall
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.packing.two_way import TwoWay, TwoWayBlocks

FIXED_BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}
HALF_FACTOR = 1.5

LENGTHS: dict[str, tuple[int, ...]] = {
    "mixed": (7, 1, 19, 19, 33, 1),  # one token, equal neighbours, odd
    "long": (601, 1),  # longer than a block of queries of `reference` and `segments`
    "blocks": (128, 128, 130, 1),  # on and beside the edge of a block of FlexAttention
    "ones": (1, 1, 1),
    "alone": (1,),  # the call of a batch without tokens
}

FACTORS: dict[str, tuple[Any, ...]] = {
    "lengths": tuple(LENGTHS),
    "head_dim": (8, 64, 128),
    "groups": (1, 2, 4),
    "value_dim": ("same", "other"),
    "window": (None, 1, 7, 1000),
    "scale": (None, 0.3),
    "softcap": (None, 1.5),
    "sinks": (False, True),
}


@dataclass(frozen=True)
class Case:
    """The options of one call. ``value_dim`` "other" is twice the head size up to 16, and half of it above."""

    lengths: str = "mixed"
    head_dim: int = 64
    groups: int = 2
    value_dim: str = "same"
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    two_way: TwoWay | None = None

    def __str__(self) -> str:
        return "-".join(f"{name}={value}" for name, value in self.__dict__.items())

    def values(self) -> int:
        if self.value_dim == "same":
            return self.head_dim
        return 2 * self.head_dim if self.head_dim <= 16 else self.head_dim // 2

    def make(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", *, seed: int = 0, requires_grad: bool = True
    ) -> AttentionCall:
        """Return the call with random leaves. Values differ between devices and dtypes by rounding only."""
        generator = torch.Generator().manual_seed(seed)
        packed = PackedSeqLens.from_lengths(LENGTHS[self.lengths], device=device)
        if self.two_way is not None:
            numbers = torch.tensor([block_numbers(LENGTHS[self.lengths])], device=device)
            packed = replace(packed, two_way=TwoWayBlocks.of(packed, numbers))
        kv_heads = 1 if self.lengths == "long" else 2  # a T x T formula in float64 is costly
        total, heads = packed.total_tokens, kv_heads * self.groups

        def leaf(*shape: int) -> Tensor:
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            # representable in bfloat16 whatever the dtype, so that every run computes the same function
            return x.bfloat16().to(device, dtype).requires_grad_(requires_grad)

        return AttentionCall(
            q=leaf(total, heads, self.head_dim),
            k=leaf(total, kv_heads, self.head_dim),
            v=leaf(total, kv_heads, self.values()),
            packed=packed,
            scale=self.head_dim**-0.5 if self.scale is None else self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=leaf(heads) if self.sinks else None,
            two_way=self.two_way,
        )


def block_numbers(lengths: Iterable[int], seed: int = 0) -> list[int]:
    """Return numbers of random blocks, -1 for text.

    In every other sequence a block comes first, and in every other last. Neighbouring blocks of two sequences have the
    same number. Most blocks are longer than a window of 7 tokens.
    """
    draw, numbers, number = random.Random(seed), list[int](), 0
    for index, length in enumerate(lengths):
        sequence: list[int] = []
        while len(sequence) < length:
            text = draw.randint(0, 5) if sequence or index % 2 == 0 else 0
            size = draw.randint(2, 12) if length < 200 else draw.randint(2, 150)
            sequence += [-1] * text + [number] * size
            number += 1
        sequence = sequence[:length]
        if index % 2 == 0:
            sequence[-(1 + length // 4) :] = [number] * (1 + length // 4)
        elif numbers:
            sequence[: 1 + length // 5] = [numbers[-1]] * (1 + length // 5)
        numbers += sequence
        number += index % 2
    return numbers


def product(factors: Mapping[str, Iterable[Any]]) -> list[Case]:
    """Return every combination of the factors."""
    return [Case(**dict(zip(factors, values, strict=True))) for values in itertools.product(*factors.values())]


def pairwise(factors: Mapping[str, Iterable[Any]]) -> list[Case]:
    """Return a few combinations in which any two values of two factors meet: greedy, and the same in every run."""
    everything = product(factors)

    def pairs(case: Case) -> set[Any]:
        return set(itertools.combinations([(name, getattr(case, name)) for name in factors], 2))

    covers = [pairs(case) for case in everything]
    missing = set().union(*covers)
    chosen: list[Case] = []
    while missing:
        best = max(range(len(everything)), key=lambda index: len(covers[index] & missing))
        chosen.append(everything[best])
        missing -= covers[best]
    return chosen


def without(*names: str, **fixed: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    """Return the factors, with each of ``names`` fixed to its first value and ``fixed`` in place of others."""
    return {**FACTORS, **{name: FACTORS[name][:1] for name in names}, **fixed}


@dataclass
class Outcome:
    """The result of a forward, and the gradients of all of its inputs."""

    out: Tensor
    grads: dict[str, Tensor]


Run = Callable[[AttentionCall], Tensor]


def measure(run: Run, call: AttentionCall) -> Outcome:
    """Run forward and backward of ``run`` on new leaves, with a fixed cotangent."""
    named = {name: getattr(call, name) for name in ("q", "k", "v", "sinks")}
    leaves = {name: t.detach().clone().requires_grad_() for name, t in named.items() if t is not None}
    out = run(replace(call, **leaves))
    generator = torch.Generator().manual_seed(1)
    cotangent = torch.randn(out.shape, generator=generator, dtype=torch.float64).bfloat16()
    out.backward(cotangent.to(out.device, out.dtype))
    for name, leaf in leaves.items():
        assert leaf.grad is not None, f"{name} got no gradient"
    return Outcome(out.detach(), {name: leaf.grad for name, leaf in leaves.items()})


def formula(call: AttentionCall) -> Tensor:
    """Compute the definition in float64 with a T x T mask. It shares no code with any backend."""
    q, k, v = (t.double() for t in (call.q, call.k, call.v))
    sequence = torch.cat([torch.full((n,), i) for i, n in enumerate(call.packed.lengths)]).to(q.device)
    token = torch.arange(len(sequence), device=q.device)
    visible = (sequence[:, None] == sequence) & (token[:, None] >= token)
    in_window = True if call.window is None else token[:, None] - token < call.window
    together = _together(call)
    visible = visible & in_window | together if call.two_way == "whole" else (visible | together) & in_window
    head = torch.arange(q.shape[1], device=q.device) // (q.shape[1] // k.shape[1])
    scores = torch.einsum("qhd,khd->hqk", q, k[:, head]) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    weights = torch.where(visible, scores.exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    if call.sinks is not None:
        total = total + call.sinks.double().exp()[:, None, None]
    return torch.einsum("hqk,khv->qhv", weights / total, v[:, head])


def _together(call: AttentionCall) -> Tensor:
    """Return where two tokens are of one block, ``[T, T]``; without blocks nowhere."""
    blocks = call.packed.two_way
    if blocks is None or call.two_way is None:
        return torch.zeros(len(call.q), len(call.q), dtype=torch.bool, device=call.q.device)
    return blocks.first[:, None] == blocks.first


def _seen_alone(call: AttentionCall) -> Iterator[Tensor]:
    """Yield each sequence's mask, ``[L, L]``, as a stock model makes it."""
    together, begin = _together(call), 0
    for length in call.packed.lengths:
        block = together[begin : begin + length, begin : begin + length]
        seen = torch.ones_like(block).tril()
        if call.two_way == "in_window":
            seen |= block
        if call.window is not None:
            seen = seen.triu(1 - call.window)
        yield seen | block if call.two_way == "whole" else seen
        begin += length


def plain(call: AttentionCall) -> Tensor:
    """Compute what a stock model's eager attention does in q's dtype, one sequence at a time."""
    dtype, heads = call.q.dtype, call.q.shape[1]
    k, v = (t.repeat_interleave(call.groups, 1) for t in (call.k, call.v))
    sizes = list(call.packed.lengths)
    out: list[Tensor] = []
    for seen, q_, k_, v_ in zip(_seen_alone(call), call.q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
        scores = torch.matmul(q_.transpose(0, 1), k_.permute(1, 2, 0)) * call.scale
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        scores = scores.masked_fill(~seen, torch.finfo(dtype).min)
        if call.sinks is not None:
            sinks = call.sinks.to(dtype).view(heads, 1, 1).expand(-1, len(q_), 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
        out.append(torch.matmul(weights[..., : len(q_)], v_.transpose(0, 1)).transpose(0, 1))
    return torch.cat(out)


def alone(call: AttentionCall) -> Tensor:
    """Compute each sequence alone with torch's fused attention, as a stock model's SDPA does."""
    sizes, pieces = list(call.packed.lengths), []
    for seen, *qkv in zip(
        _seen_alone(call), call.q.split(sizes), call.k.split(sizes), call.v.split(sizes), strict=True
    ):
        q, k, v = (t.transpose(0, 1)[None] for t in qkv)
        causal = call.two_way is None and (call.window is None or call.window >= len(seen))
        band = None if causal else seen
        settings: dict[str, Any] = {"scale": call.scale, "enable_gqa": call.groups > 1}
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=band, is_causal=band is None, **settings)
        pieces.append(out[0].transpose(0, 1))
    return torch.cat(pieces)


def errors(outcome: Outcome, truth: Outcome) -> dict[str, float]:
    """Return max|difference| / max|truth| of the output and of each gradient.

    Some gradients are measured against the largest gradient. They may vanish, like those of q and k if each query sees
    one key, or they are sums over all tokens that may cancel, like a sink's.
    """
    assert outcome.grads.keys() == truth.grads.keys()
    largest = max(float(g.abs().max()) for g in truth.grads.values())
    result = {"out": _error(outcome.out, truth.out, float(truth.out.abs().max()))}
    for name, grad in truth.grads.items():
        own = float(grad.abs().max())
        may_vanish = name == "sinks" or own < 1e-6 * largest
        result[name] = _error(outcome.grads[name], grad, largest if may_vanish else own)
    return result


def _error(value: Tensor, truth: Tensor, scale: float) -> float:
    assert value.shape == truth.shape
    error = float((value.double() - truth.double()).abs().max()) / scale
    return float("inf") if error != error else error


@functools.cache
def truth_of(case: Case, device: str, seed: int = 0) -> Outcome:
    """Return the formula's outcome for a case, whose values are the same in every dtype."""
    return measure(formula, case.make(torch.float64, device, seed=seed))


@functools.cache
def bounds(case: Case, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Return the largest allowed error against the formula for each result: 1e-5 in float32.

    In half precision it is 1.5 times plain torch's own error, but at least one rounding of the result. Torch's error is
    the largest of three draws, since a maximum over few numbers is a noisy measure.
    """
    names = ["out", *truth_of(case, device).grads]
    if dtype in FIXED_BOUNDS:
        return dict.fromkeys(names, FIXED_BOUNDS[dtype])
    yardsticks: list[Run] = [plain]
    if case.softcap is None and not case.sinks and device == "cpu":
        yardsticks.append(alone)  # torch's own CPU kernel rounds its sums to bfloat16 block by block
    own = [
        errors(measure(run, case.make(dtype, device, seed=seed)), truth_of(case, device, seed))
        for run in yardsticks
        for seed in range(3)
    ]
    return {name: max(HALF_FACTOR * max(e[name] for e in own), torch.finfo(dtype).eps / 2) for name in names}


def assert_exact(run: Run, case: Case, dtype: torch.dtype, device: str = "cpu") -> None:
    """Check the forward and every gradient of ``run`` against the formula, within the dtype's bounds."""
    outcome = measure(run, case.make(dtype, device))
    assert outcome.out.dtype == dtype
    assert all(grad.dtype == dtype for grad in outcome.grads.values())
    result, allowed = errors(outcome, truth_of(case, device)), bounds(case, dtype, device)
    too_far = {name: (error, allowed[name]) for name, error in result.items() if not error <= allowed[name]}
    assert not too_far, f"error and what is allowed: {too_far}"
