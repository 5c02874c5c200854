"""Matmuls of rows with the weights of their experts, and sums of outer products over each expert's rows.

Definition, for a row of expert e, summed in float32 and rounded once:

    out = scale x W_e + bias_e + low F_e                     grouped_matmul
    out_e = sum over the rows of e of x^T y                  grouped_outer

``low F_e`` is the update of a low-rank adapter, which is added inside the same sum.

Shape suffixes: R rows, E experts, I inner dimension, O columns, M columns of the first factor of an outer product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastpack.ops.expert_operands import Routing, Stack
from fastpack.ops.implementation import KERNEL_DTYPES


def grouped_matmul(
    x: Tensor,
    stack: Stack,
    routing: Routing,
    *,
    scale: float = 1.0,
    bias: Tensor | None = None,
    update: tuple[Tensor, Stack] | None = None,
) -> Tensor:
    """Multiply each row with its expert's matrix; not differentiable.

    Args:
        x: ``[R, I]``.
        stack: the matrices, of x's dtype.
        routing: the rows.
        scale: the factor on the product.
        bias: ``[E, O]`` of x's dtype, or None.
        update: the low-rank activations ``[R, rank]`` and their matrices, or None.

    Returns:
        ``[R, O]``. Rows of no expert are undefined.
    """
    if routing.for_kernels:
        from fastpack.ops.kernels.grouped_matmul import grouped_matmul as kernel

        return kernel(x, stack, routing, scale=scale, bias=bias, update=update)
    out = x.new_zeros(len(x), stack.columns)
    for expert, (first, end) in enumerate(routing.bounds()):
        if first == end:
            continue
        product = x[first:end] @ stack.of(expert) * scale
        if bias is not None:
            product += bias[expert]
        if update is not None:
            low, factors = update
            product += low[first:end] @ factors.of(expert)
        out[first:end] = product
    return out


def grouped_outer(x: Tensor, y: Tensor, routing: Routing, out: Tensor) -> Tensor:
    """Sum the outer products of each expert's rows; not differentiable.

    Args:
        x: ``[R, M]``.
        y: ``[R, O]`` of x's dtype, finite also in as many rows of no expert as a tile has.
        routing: the rows.
        out: the memory for the result, ``[E, M', O]`` of any dtype and strides, for the first M' columns of x.

    Returns:
        ``out``; zeros for an expert without rows.
    """
    if routing.for_kernels:
        from fastpack.ops.kernels.grouped_matmul import grouped_outer as kernel

        return kernel(x, y, routing, out)
    out.zero_()
    for expert, (first, end) in enumerate(routing.bounds()):
        if first < end:
            out[expert] = x[first:end, : out.shape[1]].t() @ y[first:end]
    return out


def kernel_rejects(dtype: torch.dtype, widths: Sequence[int], weights: Sequence[Tensor]) -> str | None:
    """Return why the kernels can't multiply rows of these widths, or read these weights; or None."""
    if dtype not in KERNEL_DTYPES:
        return f"{dtype}, but supports float32, bfloat16 and float16"
    odd = [width for width in widths if width * dtype.itemsize % 16]
    if odd:
        return f"rows of {odd[0]} {dtype}, but needs multiples of 16 bytes"
    if any(weight.data_ptr() % 16 for weight in weights):
        return "weights whose address is not a multiple of 16 bytes"
    return None
