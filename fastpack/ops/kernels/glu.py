"""Kernels of gated units: elementwise, each element read once and written once.

If every tensor is contiguous, blocks are cut from ``[T * I]``. If the rows of one are further apart, such as those of a
half of a ``[T, 2 I]`` tensor, blocks are cut from each row. Everything is computed in float32. Offsets of blocks are
int64. Kernels are never specialised on the number of tokens, so a new number compiles nothing.
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
"""The elements and the warps of a program."""


@triton.jit
def _sigmoid(x):
    """Return 1 / (1 + exp(-x)) in half as many instructions as ``tl.sigmoid``.

    The exponential and division of ``tl.sigmoid`` are exact even below 1e-38, which the activations don't need.
    """
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))  # log2(e)
    return root * root


@triton.jit
def _share(x, KIND: tl.constexpr):
    """Return activation(x) / x."""
    if KIND == "silu":
        share = _sigmoid(x)
    elif KIND == "gelu":
        share = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)  # 1 / sqrt(2)
    else:
        share = _sigmoid(x * (1.0 + 0.044715 * x * x) * 1.5957691216057308)  # 2 sqrt(2 / pi)
    return share


@triton.jit
def activate(x, KIND: tl.constexpr):
    """Return activation(x), for float32."""
    return x * _share(x, KIND)


@triton.jit
def activate_and_slope(x, KIND: tl.constexpr):
    """Return activation(x) and its derivative, for float32."""
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
    """Return this program's row, its first column there, and how many elements are left from there on."""
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
    """Write both gradients, and the forward's result to H if it isn't None; H may be GRAD itself."""
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
    """Return ``activation(gate) * up``, contiguous, in the dtype that gate and up promote to."""
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
    """Write the gradients of gate and up into ``out``; ``recompute`` writes the forward's result over ``grad``.

    Raises:
        ValueError: ``out``, or a ``grad`` to be overwritten, has rows that aren't evenly spaced.
    """
    width = gate.shape[-1]
    for tensor in (*out, grad) if recompute else out:
        if in_rows(tensor, width)[0].data_ptr() != tensor.data_ptr():
            raise ValueError(f"A result can't be written to strides {tensor.stride()}: rows must be evenly spaced.")
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
