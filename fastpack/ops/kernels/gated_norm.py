"""Gated normalisation kernels: the groups of one or several tokens, held in the registers of one program.

The forward reads each tensor once and writes its result once; so does the backward, which computes n again. If the
weight is trained, a fixed number of programs walk over all tokens. Each has its own sum for the weight, and the sums
are added afterwards in a fixed order: the same bits in every run.

Everything is computed in float32. Offsets are int64. Arguments that are None are constants to Triton.

Suffixes: T tokens, H width of a token, G width of a group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.kernels.launch import early, in_rows, on_device, processors, wait_for_inputs
from fastpack.ops.kernels.norm import FEW_ROWS, backward_weight_tile, tile_of
from fastpack.ops.kernels.row_sums import sum_rows
from fastpack.ops.kinds import GatedNormKind


@triton.jit
def _load(X, token, tokens, stride, column, GROUP: tl.constexpr):
    """Load this program's group of these tokens in float32, ``[ROWS, BLOCK]``, with zeros outside of X."""
    at = token.to(tl.int64)[:, None] * stride + (tl.program_id(1) * GROUP + column)[None, :]
    return tl.load(X + at, mask=(token < tokens)[:, None] & (column < GROUP)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _store(X, x, token, tokens, stride, column, GROUP: tl.constexpr):
    at = token.to(tl.int64)[:, None] * stride + (tl.program_id(1) * GROUP + column)[None, :]
    tl.store(X + at, x.to(X.dtype.element_ty), mask=(token < tokens)[:, None] & (column < GROUP)[None, :])


@triton.jit
def _load_weight(WEIGHT, column, GROUP: tl.constexpr):
    weight = tl.load(WEIGHT + tl.program_id(1) * GROUP + column, mask=column < GROUP, other=0.0)
    return weight.to(tl.float32)[None, :]


@triton.jit
def _activated(z, SIGMOID: tl.constexpr):
    """Return the activation and its slope."""
    s = tl.sigmoid(z)
    if SIGMOID:
        return s, s * (1.0 - s)
    return z * s, s * (1.0 + z * (1.0 - s))


@triton.jit(do_not_specialize=["tokens"])
def _forward_kernel(
    X, GATE, WEIGHT, OUT, RSTD, tokens, x_stride, gate_stride, eps,
    GROUP: tl.constexpr, FIRST: tl.constexpr, SIGMOID: tl.constexpr, ROUND_BEFORE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    token, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    y = _load(X, token, tokens, x_stride, column, GROUP)
    active, _ = _activated(_load(GATE, token, tokens, gate_stride, column, GROUP), SIGMOID)
    weight = _load_weight(WEIGHT, column, GROUP)
    if FIRST:
        y *= active
    rstd = tl.rsqrt(tl.sum(y * y, 1) / GROUP + eps)
    out = y * rstd[:, None]
    if ROUND_BEFORE:
        out = out.to(X.dtype.element_ty).to(tl.float32)
    out *= weight
    if not FIRST:
        if ROUND_BEFORE and X.dtype.element_ty == WEIGHT.dtype.element_ty:
            out = out.to(X.dtype.element_ty).to(tl.float32)  # the product of both
        out *= active
    groups = tl.num_programs(1)
    tl.store(RSTD + token * groups + tl.program_id(1), rstd, mask=token < tokens)
    _store(OUT, out, token, tokens, groups * GROUP, column, GROUP)


@triton.jit(do_not_specialize=["tokens"])
def _backward_kernel(
    GRAD, X, GATE, WEIGHT, RSTD, DX, DGATE, DWEIGHT, tokens, grad_stride, x_stride, gate_stride,
    GROUP: tl.constexpr, FIRST: tl.constexpr, SIGMOID: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write DX and DGATE, and this program's sum for the weight, in DWEIGHT ``[programs, H]``, if there is one."""
    wait_for_inputs(EARLY)
    column, groups = tl.arange(0, BLOCK), tl.num_programs(1)
    weight = _load_weight(WEIGHT, column, GROUP)
    dweight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for first in range(tl.program_id(0) * ROWS, tokens, tl.num_programs(0) * ROWS):
        token = first + tl.arange(0, ROWS)
        grad = _load(GRAD, token, tokens, grad_stride, column, GROUP)
        x = _load(X, token, tokens, x_stride, column, GROUP)
        active, slope = _activated(_load(GATE, token, tokens, gate_stride, column, GROUP), SIGMOID)
        rstd = tl.load(RSTD + token * groups + tl.program_id(1), mask=token < tokens, other=0.0)[:, None]
        if FIRST:
            n = x * active * rstd
            dgate = x * slope
        else:
            n = x * rstd
            dgate = grad * n * weight * slope
            grad *= active
        if DWEIGHT is not None:
            dweight += grad * n
        grad *= weight
        dx = rstd * (grad - n * (tl.sum(grad * n, 1) / GROUP)[:, None])
        if FIRST:
            dgate *= dx
            dx *= active
        _store(DX, dx, token, tokens, groups * GROUP, column, GROUP)
        _store(DGATE, dgate, token, tokens, groups * GROUP, column, GROUP)
    if DWEIGHT is not None:
        at = (tl.program_id(0) * groups + tl.program_id(1)) * GROUP + column
        tl.store(DWEIGHT + at, tl.sum(dweight, 0), mask=column < GROUP)


def forward(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, kind: GatedNormKind, group: int
) -> tuple[Tensor, Tensor]:
    """Return the result ``[..., H]``, and float32 ``[T, H / G]``: one over each group's root mean square.

    Args:
        x: ``[..., H]``.
        gate: ``[..., H]``.
        weight: ``[H]``.
        eps: added to the mean square.
        kind: the kind of norm.
        group: G.
    """
    width = x.shape[-1]
    mixed = torch.promote_types(x.dtype, weight.dtype)
    out = torch.empty(x.shape, dtype=mixed if kind.gate_first and kind.round_before else x.dtype, device=x.device)
    (rows, x_stride), (gates, gate_stride) = in_rows(x, width), in_rows(gate, width)
    tokens, groups = x.numel() // width, width // group
    rstd = torch.empty(tokens, groups, dtype=torch.float32, device=x.device)
    tile, block, warps = tile_of(group)
    with on_device(x):
        _forward_kernel[triton.cdiv(tokens, tile), groups](
            *(rows, gates, weight.contiguous(), out, rstd, tokens, x_stride, gate_stride, eps),
            *(group, kind.gate_first, kind.activation == "sigmoid", kind.round_before, tile, block),
            num_warps=warps,
            **early(x),
        )
    return out, rstd


def backward(
    grad: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    rstd: Tensor,
    kind: GatedNormKind,
    group: int,
    *,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of x, of the gate, and of the weight or None; see :func:`forward` for the arguments."""
    width = x.shape[-1]
    tokens, groups = rstd.shape
    dx, dgate = (torch.empty(each.shape, dtype=each.dtype, device=x.device) for each in (x, gate))
    (grad, grad_stride), (x, x_stride), (gate, gate_stride) = (in_rows(each, width) for each in (grad, x, gate))
    tile, block, warps = tile_of(group)
    programs, dweight = triton.cdiv(tokens, tile), None
    if need_weight:
        tile, block, warps, each = backward_weight_tile(group, tokens < FEW_ROWS)
        programs = min(triton.cdiv(tokens, tile), max(1, each * processors(x.device) // groups))
        dweight = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    with on_device(x):
        _backward_kernel[programs, groups](
            *(grad, x, gate, weight.contiguous(), rstd, dx, dgate, dweight, tokens, grad_stride, x_stride, gate_stride),
            *(group, kind.gate_first, kind.activation == "sigmoid", tile, block),
            num_warps=warps,
            **early(x),
        )
    return dx, dgate, None if dweight is None else sum_rows([dweight], [weight.dtype])[0].view(weight.shape)
