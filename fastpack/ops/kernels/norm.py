"""Normalisation kernels: a row, or several narrow ones, held in the registers of one program.

The forward reads each tensor once and writes each result once; so does the backward. If the weight is trained, a fixed
number of programs walk over all rows. Each has its own sum for the weight, and the sums are added afterwards in a fixed
order: the same bits in every run. All loads come before the first store, since the compiler may not move a load across
a store.

Everything is computed in float32. Offsets are int64. Kernels are never specialised on the number of tokens, so a new
number compiles nothing. Arguments that are None are constants to Triton: their code is left out.

Suffixes: T tokens, N heads with a weight of their own (1 except for Cohere's q and k norms), H width.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.kernels.launch import early, in_rows, on_device, processors, rows_that_count, wait_for_inputs
from fastpack.ops.kernels.row_sums import sum_rows

if TYPE_CHECKING:
    from fastpack.ops.kinds import NormKind

FEW_ROWS = 1024
"""With fewer rows, the programs that walk over rows have little to do."""


@triton.jit
def _rows(heads: tl.constexpr, first, tokens, counted, ROWS: tl.constexpr):
    """Return the rows ``[ROWS]`` of this program's head for ``ROWS`` tokens from ``first`` on, and two masks of them.

    The first mask says which rows exist, the second which belong to the first ``counted`` tokens. The other rows are
    not read, and zeros are written to them.
    """
    token = first + tl.arange(0, ROWS)
    return token.to(tl.int64) * heads + tl.program_id(0) % heads, token < tokens, token < counted


@triton.jit
def _load(X, stride, row, column, mask):
    return tl.load(X + row[:, None] * stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def _load_weight(WEIGHT, column, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    at = tl.program_id(0) % HEADS * WIDTH + column
    return tl.load(WEIGHT + at, mask=column < WIDTH, other=0.0)[None, :]


@triton.jit
def _scale(weight, ROUND_BEFORE: tl.constexpr, UNIT_OFFSET: tl.constexpr):
    """Return the factor w of the definitions, rounded like the weight if it is multiplied in the weight's dtype."""
    scale = weight.to(tl.float32)
    if UNIT_OFFSET:
        scale += 1.0
        if ROUND_BEFORE:
            scale = scale.to(weight.dtype).to(tl.float32)
    return scale


@triton.jit
def _weighted(normed, scale, dtype: tl.constexpr, ROUND_BEFORE: tl.constexpr):
    if ROUND_BEFORE:
        normed = normed.to(dtype).to(tl.float32)
    return normed * scale


@triton.jit(do_not_specialize=["tokens"])
def _forward_kernel(
    X, WEIGHT, OUT, MEAN, RSTD, COUNT, tokens, x_stride, eps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROUND_BEFORE: tl.constexpr, UNIT_OFFSET: tl.constexpr,
    HAS_RSTD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Normalise rows: centred if there is a MEAN, with the caller's RSTD if HAS_RSTD."""
    wait_for_inputs(EARLY)
    counted = rows_that_count(COUNT, tokens)
    row, there, counts = _rows(HEADS, tl.program_id(0) // HEADS * ROWS, tokens, counted, ROWS)
    column = tl.arange(0, BLOCK)
    mask = counts[:, None] & (column < WIDTH)[None, :]
    stored = there[:, None] & (column < WIDTH)[None, :]
    x = _load(X, x_stride, row, column, mask)
    weight = _load_weight(WEIGHT, column, HEADS, WIDTH)
    wide = x.to(tl.float32)

    if HAS_RSTD:
        rstd = tl.load(RSTD + row, mask=counts, other=0.0)
    else:
        if MEAN is not None:
            mean = tl.sum(wide, 1) / WIDTH
            tl.store(MEAN + row, mean, mask=there)
            wide = tl.where(mask, wide - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)
        tl.store(RSTD + row, rstd, mask=there)

    normed = wide * tl.where(counts, rstd, 0.0)[:, None]  # one over the root of zero is infinite
    normed = _weighted(normed, _scale(weight, ROUND_BEFORE, UNIT_OFFSET), x.dtype, ROUND_BEFORE)
    tl.store(OUT + row[:, None] * WIDTH + column[None, :], normed.to(OUT.dtype.element_ty), mask=stored)


@triton.jit
def _load_rows(
    GRAD, X, GRAD_SUM, MEAN, RSTD, grad_stride, x_stride, grad_sum_stride, row, counts,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Load the inputs of these rows' gradient; another tensor is passed in place of a missing GRAD_SUM or MEAN."""
    column = tl.arange(0, BLOCK)
    mask = counts[:, None] & (column < WIDTH)[None, :]
    x = _load(X, x_stride, row, column, mask)
    grad = _load(GRAD, grad_stride, row, column, mask)
    direct = grad
    if GRAD_SUM is not None:
        direct = _load(GRAD_SUM, grad_sum_stride, row, column, mask)
    rstd = tl.load(RSTD + row, mask=counts, other=0.0)
    mean = rstd
    if MEAN is not None:
        mean = tl.load(MEAN + row, mask=counts, other=0.0)
    return x, grad, direct, mean, rstd


@triton.jit
def _gradient_of_rows(
    x, grad, direct, mean, rstd, DX, NORMED, scale, row, there,
    CENTRED: tl.constexpr, ADDED: tl.constexpr, ROUND_BEFORE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write dx of these rows, and the forward's result if there is a NORMED.

    Return the rows' gradient, zero outside, and the normalised x: the weight's gradient needs both.
    """
    column = tl.arange(0, BLOCK)
    stored = there[:, None] & (column < WIDTH)[None, :]
    grad = grad.to(tl.float32)
    wide = x.to(tl.float32)
    if CENTRED:
        wide -= mean[:, None]
    normed = wide * rstd[:, None]
    if DX is not None:
        weighted = grad * scale
        dx = weighted - normed * (tl.sum(weighted * normed, 1) / WIDTH)[:, None]
        if CENTRED:
            dx -= (tl.sum(weighted, 1) / WIDTH)[:, None]
        dx *= rstd[:, None]
        if ADDED:
            dx += direct.to(tl.float32)
        tl.store(DX + row[:, None] * WIDTH + column[None, :], dx.to(DX.dtype.element_ty), mask=stored)
    if NORMED is not None:
        again = _weighted(normed, scale, x.dtype, ROUND_BEFORE).to(NORMED.dtype.element_ty)
        tl.store(NORMED + row[:, None] * WIDTH + column[None, :], again, mask=stored)
    return grad, normed


@triton.jit(do_not_specialize=["tokens"])
def _backward_kernel(
    GRAD, X, WEIGHT, GRAD_SUM, DX, NORMED, MEAN, RSTD, COUNT, tokens, grad_stride, x_stride, grad_sum_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROUND_BEFORE: tl.constexpr, UNIT_OFFSET: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    counted = rows_that_count(COUNT, tokens)
    row, there, counts = _rows(HEADS, tl.program_id(0) // HEADS * ROWS, tokens, counted, ROWS)
    scale = _scale(_load_weight(WEIGHT, tl.arange(0, BLOCK), HEADS, WIDTH), ROUND_BEFORE, UNIT_OFFSET)
    x, grad, direct, mean, rstd = _load_rows(
        GRAD, X, GRAD_SUM, MEAN, RSTD, grad_stride, x_stride, grad_sum_stride, row, counts, WIDTH, BLOCK
    )
    _gradient_of_rows(
        x, grad, direct, mean, rstd, DX, NORMED, scale, row, there, MEAN is not None, GRAD_SUM is not None,
        ROUND_BEFORE, WIDTH, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _backward_weight_kernel(
    GRAD, X, WEIGHT, GRAD_SUM, DX, NORMED, MEAN, RSTD, DWEIGHT, COUNT, tokens, grad_stride, x_stride, grad_sum_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROUND_BEFORE: tl.constexpr, UNIT_OFFSET: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the same as :func:`_backward_kernel` over many groups of rows, and DWEIGHT ``[programs, H]``.

    The next group is loaded while the current one is computed.
    """
    wait_for_inputs(EARLY)
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    scale = _scale(_load_weight(WEIGHT, column, HEADS, WIDTH), ROUND_BEFORE, UNIT_OFFSET)
    counted = rows_that_count(COUNT, tokens)
    dweight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    begin, step = program // HEADS * ROWS, tl.num_programs(0) // HEADS * ROWS
    row, there, counts = _rows(HEADS, begin, tokens, counted, ROWS)
    x, grad, direct, mean, rstd = _load_rows(
        GRAD, X, GRAD_SUM, MEAN, RSTD, grad_stride, x_stride, grad_sum_stride, row, counts, WIDTH, BLOCK
    )
    for first in range(begin, tokens, step):
        row, there, _ = _rows(HEADS, first, tokens, counted, ROWS)
        row_after, _, counts = _rows(HEADS, first + step, tokens, counted, ROWS)
        x_after, grad_after, direct_after, mean_after, rstd_after = _load_rows(
            GRAD, X, GRAD_SUM, MEAN, RSTD, grad_stride, x_stride, grad_sum_stride, row_after, counts, WIDTH, BLOCK
        )
        wide, normed = _gradient_of_rows(
            x, grad, direct, mean, rstd, DX, NORMED, scale, row, there, MEAN is not None, GRAD_SUM is not None,
            ROUND_BEFORE, WIDTH, BLOCK,
        )  # fmt: skip
        dweight += wide * normed
        x, grad, direct, mean, rstd = x_after, grad_after, direct_after, mean_after, rstd_after
    tl.store(DWEIGHT + program * WIDTH + column, tl.sum(dweight, 0), mask=column < WIDTH)


def forward(
    x: Tensor, weight: Tensor, eps: float, kind: NormKind, rstd: Tensor | None = None, count: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return normalised x, its mean ``[T]`` (None unless centred) and its rstd ``[T]``.

    Args:
        x: ``[..., H]``.
        weight: ``[H]`` or ``[N, H]``.
        eps: added to the variance.
        kind: the kind of norm.
        rstd: float32; if it isn't None, it is used and not computed.
        count: int32 ``[1]``, how many of the first tokens count, or None for all. The others' results are zeros.
    """
    device, width = x.device, x.shape[-1]
    dtype = torch.promote_types(x.dtype, weight.dtype) if kind.round_before else x.dtype
    out = torch.empty(x.shape, dtype=dtype, device=device)
    has_rstd = rstd is not None
    if rstd is None:
        rstd = torch.empty(x.numel() // width, dtype=torch.float32, device=device)
    mean = torch.empty_like(rstd) if kind.centred else None
    rows, x_stride = in_rows(x, width)
    heads = weight.numel() // width
    tokens = rstd.numel() // heads
    tile, block, warps = tile_of(width)
    with on_device(x):
        _forward_kernel[(triton.cdiv(tokens, tile) * heads,)](
            *(rows, weight.contiguous(), out, mean, rstd, count, tokens, x_stride, eps),
            *(heads, width, kind.round_before, kind.unit_offset, has_rstd, tile, block),
            num_warps=warps,
            **early(x),
        )
    return out, mean, rstd


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    grad_summed: Tensor | None,
    kind: NormKind,
    needed: tuple[bool, bool],
    count: Tensor | None = None,
    normed: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and weight, each None unless ``needed``.

    Args:
        grad: the gradient of the result.
        x: the input of :func:`forward`.
        weight: the weight of :func:`forward`.
        mean: the mean that :func:`forward` returned.
        rstd: the rstd that :func:`forward` returned.
        grad_summed: a gradient to add to that of x, or None.
        kind: the kind of norm.
        needed: whether x and weight need gradients.
        count: as in :func:`forward`.
        normed: contiguous; :func:`forward`'s result is written to it again. It may be ``grad``.
    """
    device, width = x.device, x.shape[-1]
    heads = weight.numel() // width
    tokens = rstd.numel() // heads
    dx = torch.empty(x.shape, dtype=x.dtype, device=device) if needed[0] else None
    grad, grad_stride = in_rows(grad, width)
    x, x_stride = in_rows(x, width)
    grad_summed, grad_sum_stride = (None, width) if grad_summed is None else in_rows(grad_summed, width)
    tensors = (grad, x, weight.contiguous(), grad_summed, dx, normed, mean, rstd)
    strides = (grad_stride, x_stride, grad_sum_stride)
    constants = (heads, width, kind.round_before, kind.unit_offset)
    if not needed[1]:
        tile, block, warps = tile_of(width)
        with on_device(x):
            _backward_kernel[(triton.cdiv(tokens, tile) * heads,)](
                *tensors, count, tokens, *strides, *constants, tile, block, num_warps=warps, **early(x)
            )
        return dx, None
    tile, block, warps, each = backward_weight_tile(width, tokens < FEW_ROWS)
    walks = triton.cdiv(tokens, tile * max(1, each * processors(device) // heads))
    groups = max(1, triton.cdiv(tokens, tile * max(1, walks)))  # no more programs than these walks need
    dweight = torch.empty(groups, weight.numel(), dtype=torch.float32, device=device)
    with on_device(x):
        _backward_weight_kernel[(groups * heads,)](
            *tensors, dweight, count, tokens, *strides, *constants, tile, block, num_warps=warps, **early(x)
        )  # fmt: skip
    return dx, sum_rows([dweight], [weight.dtype])[0].view(weight.shape)


@functools.cache
def tile_of(width: int) -> tuple[int, int, int]:
    """Return the rows and columns of a program's block, and its warps.

    A thread takes 16 elements, which are two loads of 16 bytes.
    """
    block = triton.next_power_of_2(width)
    rows = max(1, 1024 // block)
    return rows, block, min(16, rows * block // 512)


@functools.cache
def backward_weight_tile(width: int, few: bool) -> tuple[int, int, int, int]:
    """Return :func:`tile_of` for a trained weight, and the number of programs for each multiprocessor.

    Programs walk over the rows. The fewest that keep the device busy are best: each adds a row to the last sum.
    Measured on an H200 for ``few`` rows and for many.
    """
    rows, block, warps = tile_of(width)
    if block < 1024:
        return 4 * 1024 // block, block, 8, 2
    if block == 1024:
        return 2, block, 4, 3
    if block == 2048:
        return rows, block, 8, 3
    if block > 4096 or few:
        return rows, block, 16, 1
    return rows, block, warps, 2
