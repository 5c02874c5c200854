"""RoPE, alone and behind a norm of each head: bound by the memory that they read and write.

The plain formulas are those of transformers' own Llama and Qwen 3.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastpack.bench.ops.case import OURS, PLAIN, Case, Maker, Run, Work, packed_lengths, with_liger
from fastpack.bench.ops.elementwise_cases import EPS, norm_weight, plain_norm
from fastpack.ops.rope import apply_rope, norm_rope

POSITIONS = 4096
"""Rows of the tables that positions look into, at least."""


def _heads(make: Maker) -> list[Tensor]:
    """q and k."""
    size = make.sizes
    return [make.tensor(make.tokens, count, size.head_dim) for count in (size.heads, size.kv_heads)]


def _tables(make: Maker, positions: int) -> list[Tensor]:
    """cos and sin."""
    size, device = make.sizes.head_dim, make.generator.device
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2, device=device) / size)
    angles = torch.arange(positions, device=device)[:, None] * frequencies
    return [table.repeat(1, 2).to(make.dtype) for table in (angles.cos(), angles.sin())]


def _rope_inputs(make: Maker) -> list[Any]:
    return [*_heads(make), *_tables(make, make.tokens)]


def _plain_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos[:, None], sin[:, None]

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return rotate(q), rotate(k)


def _liger_rope() -> Run:
    from liger_kernel.ops.rope import LigerRopeFunction

    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        # heads first, as transformers hands them over; it works on the memory below, in place
        q, k = LigerRopeFunction.apply(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
        return q[0].transpose(0, 1), k[0].transpose(0, 1)

    return run


def _rope_runs(inputs: Sequence[Any]) -> dict[str, Run]:
    runs: dict[str, Run] = {
        PLAIN: _plain_rope,
        OURS: functools.partial(apply_rope, in_place=True),
        f"{OURS}, copying": apply_rope,
    }
    return with_liger(runs, inputs[0].device, _liger_rope)


def _bytes_of_heads(make: Maker) -> int:
    """Of q and k."""
    size = make.sizes
    return make.tokens * make.dtype.itemsize * (size.heads + size.kv_heads) * size.head_dim


def _rope_work(make: Maker, *, passes: int = 2) -> Work:
    """So many passes over q and k, and one over the tables, half of which holds all of each."""
    return Work(passes * _bytes_of_heads(make) + make.tokens * make.dtype.itemsize * make.sizes.head_dim)


def _indexed_inputs(make: Maker) -> list[Any]:
    """Positions begin again with each sequence; tables go as far as the longest of those that people train on."""
    positions = [torch.arange(length, device=make.generator.device) for length in packed_lengths(make)]
    return [*_heads(make), *_tables(make, max(make.tokens, POSITIONS)), torch.cat(positions)]


def _indexed_runs(inputs: Sequence[Any]) -> dict[str, Run]:
    def ours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rope(q, k, cos, sin, positions=positions, in_place=True)

    return {PLAIN: lambda q, k, cos, sin, at: _plain_rope(q, k, cos[at], sin[at]), OURS: ours}


def _indexed_work(make: Maker) -> Work:
    """Two passes over q and k, and the positions: the rows of the tables that are read stay in the cache."""
    return Work(2 * _bytes_of_heads(make) + make.tokens * torch.int64.itemsize)


def _norm_rope_inputs(make: Maker) -> list[Any]:
    weights = [norm_weight(make, make.sizes.head_dim, grad=True) for _ in range(2)]
    return [*_heads(make), *weights, *_tables(make, make.tokens)]


def _norm_rope_runs(inputs: Sequence[Any]) -> dict[str, Run]:
    def plain(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return _plain_rope(plain_norm(q, q_weight), plain_norm(k, k_weight), cos, sin)

    def ours(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return norm_rope(q, k, q_weight, k_weight, EPS, cos, sin)

    return {PLAIN: plain, OURS: ours}


CASES = [
    Case(
        "rope",
        "rotary embedding of q and k",
        _rope_inputs,
        _rope_runs,
        _rope_work,
        _rope_work,
    ),
    Case(
        "rope_indexed",
        "the same, each token's row of the tables looked up by its position",
        _indexed_inputs,
        _indexed_runs,
        _indexed_work,
        _indexed_work,
        packed=True,
    ),
    Case(
        "norm_rope",
        "rotary embedding of q and k behind a norm of each head, whose weights train",
        _norm_rope_inputs,
        _norm_rope_runs,
        _rope_work,
        functools.partial(_rope_work, passes=3),
    ),
]
