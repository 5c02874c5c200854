"""Sums of matmuls over the real rows only, whose number is read on the device.

Definition, for x_i ``[T, K_i]`` and m_i ``[K_i, N]`` of one dtype, summed in float32 and rounded once:

    out = base + bias + x_1 m_1 + x_2 m_2 + ...

A number on the device says how many of the first rows are real. The results of the other rows (bucket padding) need
only be finite, and zero if every x_i, the base and the bias are zero, so the kernel may leave out their matmuls. A CUDA
graph that was recorded for more rows than a batch has then takes little longer than the batch's rows need; with a
library's matmul it would always take the time of all recorded rows.

Shape suffixes: T rows, K inner dimension, N columns.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from fastpack.ops.implementation import KERNEL_DTYPES, Implementation, use_triton
from fastpack.ops.row_count import MatmulSum, RowCount

NARROWEST = 3584
"""The smallest K, and the smallest number of columns of all outputs of a launch, for which the kernel runs. From here
on the chip reaches its power limit, and the kernel is as fast as a library's matmul. Below it the library is up to
twice as fast, since it has more tile shapes."""
FEWEST_TILES = 2
"""The fewest tiles for each processor for which the kernel runs. The output is taken to be as wide as
the smaller of K and the number of columns."""


def serves(
    implementation: Implementation,
    count: RowCount | None,
    x: Tensor,
    columns: Sequence[int],
    operands: Sequence[Tensor | None],
) -> bool:
    """Return whether :func:`sum_of_matmuls` or :func:`sums_of_matmuls` may be called for these operands.

    On a GPU this is so if the kernel is as fast as a library's matmul over all rows: on Hopper, in half precision, with
    large weights and many rows.

    Args:
        implementation: as for :func:`fastpack.ops.linear.projections.project`.
        count: the number of real rows, or None if all rows are real; the result is then False.
        x: ``[T, K]``, the first factor.
        columns: the number of columns of each sum.
        operands: all other factors and addends, with the strides that they have in memory.
    """
    if count is None or not use_triton(implementation, x) or not _has_descriptors():
        return False
    from fastpack.ops.kernels import row_limited_mm as kernels
    from fastpack.ops.kernels.launch import capability, processors

    if x.is_cuda:
        if x.dtype not in (torch.bfloat16, torch.float16) or capability(x.device)[0] != 9:
            return False
        narrow = min(x.shape[1], sum(columns))
        if narrow < NARROWEST or kernels.tiles(len(x), narrow) < FEWEST_TILES * processors(x.device):
            return False
    elif x.dtype not in KERNEL_DTYPES:
        return False
    # the result's tensor descriptor, too, needs a row stride that is a multiple of 16 bytes
    if any(width * x.element_size() % 16 for width in columns):
        return False
    return all(t.dtype == x.dtype and kernels.is_aligned(t) for t in (x, *operands) if t is not None)


def sum_of_matmuls(
    terms: Sequence[tuple[Tensor, Tensor]],
    count: RowCount,
    *,
    base: Tensor | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute one sum of matmuls; not differentiable.

    Args:
        terms: each term's x ``[T, K_i]`` and m ``[K_i, N]``; m may be a transposed view.
        count: the number of real rows.
        base: ``[T, N]`` in the terms' dtype, or None.
        bias: ``[N]``, or None.
        out: memory for the result, which may be ``base`` itself; allocated by default.

    Returns:
        The sum, ``[T, N]``.
    """
    matmuls = MatmulSum(terms, bias)
    out = matmuls.new_output() if out is None else out
    _run([matmuls], count, base, [out])
    return out


def sums_of_matmuls(sums: Sequence[MatmulSum], count: RowCount) -> list[Tensor]:
    """Compute several sums, ``[T, N_i]`` each, in one launch; not differentiable. Requires :func:`go_together`."""
    outs = [matmuls.new_output() for matmuls in sums]
    _run(sums, count, None, outs)
    return outs


def go_together(sums: Sequence[MatmulSum]) -> bool:
    """Return whether one launch can compute all ``sums``; :func:`serves` must accept each of them."""
    from fastpack.ops.kernels import row_limited_mm as kernels

    return kernels.go_together(sums)


def _run(sums: Sequence[MatmulSum], count: RowCount, base: Tensor | None, outs: Sequence[Tensor]) -> None:
    from fastpack.ops.kernels.row_limited_mm import sum_matmuls

    count.launches += 1
    count.work += sum(2 * m.numel() for matmuls in sums for _, m in matmuls.terms)
    sum_matmuls(sums, count, base, outs)


@functools.cache
def _has_descriptors() -> bool:
    return importlib.util.find_spec("triton.tools.tensor_descriptor") is not None
