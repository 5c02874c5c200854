"""Kernels of gated units: elementwise, each element read once and written once.

Where every tensor is contiguous, blocks are cut from ``[T * I]``; where one has rows of its own distance, such as the
halves of one ``[T, 2 I]`` tensor, from each row. Everything is computed in float32. Offsets of blocks are int64. The
number of tokens is never specialised on: a new one compiles nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.kernels.launch import early, in_rows, on_device, wait_for_inputs

if TYPE_CHECKING:
    from fastpack.ops.kinds import ActivationKind

BLOCK, WARPS = 1024, 4
"""Elements of a program, and its warps."""


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)) in half as many instructions as ``tl.sigmoid``, whose exponential and division also serve
    numbers below 1e-38, which no share of x needs."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))  # log2(e)
    return root * root


@triton.jit
def _share(x, KIND: tl.constexpr):
    """activation(x) / x."""
    if KIND == "silu":
        share = _sigmoid(x)
    elif KIND == "gelu":
        share = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)  # 1 / sqrt(2)
    else:
        share = _sigmoid(x * (1.0 + 0.044715 * x * x) * 1.5957691216057308)  # 2 sqrt(2 / pi)
    return share


@triton.jit
def activate(x, KIND: tl.constexpr):
    """activation(x), of float32."""
    return x * _share(x, KIND)


@triton.jit
def activate_and_slope(x, KIND: tl.constexpr):
    """activation(x) and its derivative, of float32."""
    share = _share(x, KIND)
    if KIND == "silu":
        slope = share + x * share * (1.0 - share)
    elif KIND == "gelu":
        slope = share + x * tl.exp(-0.5 * x * x) * 0.3989422804014327  # 1 / sqrt(2 pi)
    else:
        slope = share + x * share * (1.0 - share) * (1.0 + 0.134145 * x * x) * 1.5957691216057308
    return x * share, slope


@triton.jit
def _place(tokens, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr):
    """This program's row, its first column there, and how many elements there are from it on."""
    if FLAT:
        row = 0
        column = tl.program_id(0).to(tl.int64) * BLOCK
        left = tokens.to(tl.int64) * WIDTH - column
    else:
        blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
        row = (tl.program_id(0) // blocks).to(tl.int64)
        column = tl.program_id(0) % blocks * BLOCK
        left = WIDTH - column
    return row, column, left


@triton.jit(do_not_specialize=["tokens"])
def _forward_kernel(
    GATE,
    UP,
    OUT,
    tokens,
    gate_stride,
    up_stride,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    row, column, left = _place(tokens, WIDTH, BLOCK, FLAT)
    inside = tl.arange(0, BLOCK)
    mask = inside < left
    gate = tl.load(GATE + (row * gate_stride + column) + inside, mask=mask, other=0.0)
    up = tl.load(UP + (row * up_stride + column) + inside, mask=mask, other=0.0)
    out = activate(gate.to(tl.float32), KIND) * up.to(tl.float32)
    tl.store(OUT + (row * WIDTH + column) + inside, out.to(OUT.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _backward_kernel(
    GRAD,
    GATE,
    UP,
    DGATE,
    DUP,
    H,
    tokens,
    grad_stride,
    gate_stride,
    up_stride,
    dgate_stride,
    dup_stride,
    h_stride,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """H, where it is not None, may be GRAD itself."""
    wait_for_inputs(EARLY)
    row, column, left = _place(tokens, WIDTH, BLOCK, FLAT)
    inside = tl.arange(0, BLOCK)
    mask = inside < left
    gate = tl.load(GATE + (row * gate_stride + column) + inside, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(UP + (row * up_stride + column) + inside, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(GRAD + (row * grad_stride + column) + inside, mask=mask, other=0.0).to(tl.float32)
    activated, slope = activate_and_slope(gate, KIND)
    dgate, dup = grad * up * slope, grad * activated
    tl.store(DGATE + (row * dgate_stride + column) + inside, dgate.to(DGATE.dtype.element_ty), mask=mask)
    tl.store(DUP + (row * dup_stride + column) + inside, dup.to(DUP.dtype.element_ty), mask=mask)
    if H is not None:
        tl.store(H + (row * h_stride + column) + inside, (activated * up).to(H.dtype.element_ty), mask=mask)


def forward(gate: Tensor, up: Tensor, kind: ActivationKind) -> Tensor:
    """``activation(gate) * up``, contiguous, of the dtype that the two promote to."""
    width = gate.shape[-1]
    out = torch.empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype), device=gate.device)
    gate, gate_stride = in_rows(gate, width)
    up, up_stride = in_rows(up, width)
    flat = gate_stride == up_stride == width
    tokens = out.numel() // width
    with on_device(gate):
        _forward_kernel[(_programs(tokens, width, flat),)](
            gate, up, out, tokens, gate_stride, up_stride, width, kind, flat, BLOCK, num_warps=WARPS, **early(gate)
        )
    return out


def backward(
    grad: Tensor, gate: Tensor, up: Tensor, kind: ActivationKind, out: tuple[Tensor, Tensor], recompute: bool
) -> None:
    """Gradients of gate and up into ``out``, and with ``recompute`` the forward's result over ``grad``.

    Raises:
        ValueError: ``out``, or a ``grad`` to be overwritten, has no rows at an even distance.
    """
    width = gate.shape[-1]
    for tensor in (*out, grad) if recompute else out:
        if in_rows(tensor, width)[0].data_ptr() != tensor.data_ptr():
            raise ValueError(f"A result can't be written to strides {tensor.stride()}: rows must lie evenly.")
    rows, strides = zip(*(in_rows(tensor, width) for tensor in (grad, gate, up, *out)), strict=True)
    flat = all(stride == width for stride in strides)
    tokens = gate.numel() // width
    with on_device(gate):
        _backward_kernel[(_programs(tokens, width, flat),)](
            *(*rows, rows[0] if recompute else None, tokens, *strides, strides[0]),
            *(width, kind, flat, BLOCK),
            num_warps=WARPS,
            **early(gate),
        )


def _programs(tokens: int, width: int, flat: bool) -> int:
    return triton.cdiv(tokens * width, BLOCK) if flat else tokens * triton.cdiv(width, BLOCK)
