"""Queries and keys that the gated delta rule divides by their lengths, and their gradients.

Suffixes: T tokens, H heads of values, K size of a key.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.kernels.delta_rule_parts import block_of, readable, strides
from fastpack.ops.kernels.launch import early, on_device, wait_for_inputs

TILE = 2048
"""The elements that a program takes."""


@triton.jit(do_not_specialize=["rows"])
def _unit_kernel(
    X, OUT, INVERSE_LENGTH, rows, token, head, eps,
    HEADS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write X ``[T, heads, K]`` with each row divided by its length, and one over these lengths ``[T, heads]``."""
    wait_for_inputs(EARLY)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    mask = (row < rows)[:, None] & (column < K)[None, :]
    at = (row // HEADS).to(tl.int64) * token + (row % HEADS).to(tl.int64) * head
    x = tl.load(X + at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1) + eps)
    tl.store(INVERSE_LENGTH + row, inverse, mask=row < rows)
    out = (x * inverse[:, None]).to(OUT.dtype.element_ty)
    tl.store(OUT + row.to(tl.int64)[:, None] * K + column[None, :], out, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _key_gradients_kernel(
    GRAD, X, INVERSE_LENGTH, OUT, rows, token, head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Add up GRAD ``[T, H, K]`` over the heads of a group: OUT ``[T, heads, K]``.

    If there is an INVERSE_LENGTH, X ``[T, heads, K]`` has rows of length 1, and OUT is the gradient before normalising.
    """
    wait_for_inputs(EARLY)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    mask = (row < rows)[:, None] & (column < K)[None, :]
    GRAD += row.to(tl.int64)[:, None] * (GROUP * K) + column[None, :]
    grad = tl.zeros((ROWS, BLOCK_K), dtype=tl.float32)
    for member in tl.static_range(GROUP):
        grad += tl.load(GRAD + member * K, mask=mask, other=0.0).to(tl.float32)
    if INVERSE_LENGTH is not None:
        at = (row // HEADS).to(tl.int64) * token + (row % HEADS).to(tl.int64) * head
        x = tl.load(X + at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        inverse = tl.load(INVERSE_LENGTH + row, mask=row < rows, other=0.0)
        grad = (grad - x * tl.sum(grad * x, 1)[:, None]) * inverse[:, None]
    tl.store(OUT + row.to(tl.int64)[:, None] * K + column[None, :], grad.to(OUT.dtype.element_ty), mask=mask)


def to_unit_length(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return rows ``[T, heads, K]`` divided by their lengths, and one over these, float32 ``[T, heads]``."""
    tokens, heads, size = x.shape
    x = readable(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inverse = torch.empty(tokens, heads, dtype=torch.float32, device=x.device)
    block = block_of(size, x.dtype)
    rows = max(1, TILE // block)
    with on_device(x):
        _unit_kernel[(triton.cdiv(tokens * heads, rows),)](
            x, out, inverse, tokens * heads, *strides(x), eps, heads, size, block, rows, **early(x)
        )
    return out, inverse


def gradient_of_keys(grad: Tensor, x: Tensor, inverse_lengths: Tensor | None) -> Tensor:
    """Return the gradient of q or k ``[T, heads, K]`` from that of each head of values ``[T, H, K]``."""
    if inverse_lengths is None and grad.shape == x.shape:
        return grad
    tokens, heads, size = x.shape
    block = block_of(size, x.dtype)
    rows = max(1, TILE // block)
    out = x.new_empty(x.shape)
    _key_gradients_kernel[(triton.cdiv(tokens * heads, rows),)](
        grad, x, inverse_lengths, out, tokens * heads, *strides(x), heads, grad.shape[1] // heads, size, block, rows,
        **early(x),
    )  # fmt: skip
    return out
