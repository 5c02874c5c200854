"""Sums of products with weights, on as many rows as the device says.

Definition, x_i ``[T, K_i]`` and m_i ``[K_i, N]`` of one dtype, the sum in float32 and rounded once:

    out = base + bias + x_1 m_1 + x_2 m_2 + ...

Only the first rows count, as many as a number on the device says. Of the others nothing is asked but that they be
finite, and zero where every x_i, base and bias is; the kernel may leave out their products. So a recording that was
made for more rows takes little longer than the rows of a batch do, where a library's product takes as long as it was
recorded with.

Shape suffixes: T rows, K summed over, N columns.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from fastpack.ops.implementation import KERNEL_DTYPES, Implementation, use_triton
from fastpack.ops.row_count import RowCount, Sum

NARROWEST = 3584
"""Columns, of all outputs of a launch, and terms of a sum, from which on a chip works at its limit of power, where the
kernel is as fast as a library's products. Below it, these are up to twice as fast: they have tiles of more shapes."""
FEWEST_TILES = 2
"""Tiles for each processor, of an output as wide as the narrower of the two, below which the same is so."""


def serves(
    implementation: Implementation,
    count: RowCount | None,
    x: Tensor,
    columns: Sequence[int],
    operands: Sequence[Tensor | None],
) -> bool:
    """True where :func:`sum_of_products` may be called for ``x [T, K]`` and so many columns, of one sum or of several.

    On a GPU: where its kernel is as fast as a library's on all rows, which is on Hopper, in half precision, for large
    weights and many rows.

    Args:
        operands: all other factors and what they are added to, as they lie in memory.
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
    # a descriptor of the result, too, wants its rows apart by a multiple of 16 bytes
    if any(width * x.element_size() % 16 for width in columns):
        return False
    return all(t.dtype == x.dtype and kernels.is_aligned(t) for t in (x, *operands) if t is not None)


def sum_of_products(
    terms: Sequence[tuple[Tensor, Tensor]],
    count: RowCount,
    *,
    base: Tensor | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The sum, ``[T, N]``; not differentiable.

    Args:
        terms: x and m of each; m may be a transposed view.
        count: of rows.
        base: ``[T, N]`` of the terms' dtype.
        bias: ``[N]``.
        out: where it goes, also ``base`` itself; new memory by default.
    """
    one = Sum(terms, bias)
    out = one.new_output() if out is None else out
    _run([one], count, base, [out])
    return out


def sums_of_products(sums: Sequence[Sum], count: RowCount) -> list[Tensor]:
    """Each sum, ``[T, N_i]``, in one launch, where :func:`go_together` says that there is one; not differentiable."""
    outs = [one.new_output() for one in sums]
    _run(sums, count, None, outs)
    return outs


def go_together(sums: Sequence[Sum]) -> bool:
    """Whether :func:`sums_of_products` may be called, of sums each of whose factors :func:`serves` has seen."""
    from fastpack.ops.kernels import row_limited_mm as kernels

    return kernels.go_together(sums)


def _run(sums: Sequence[Sum], count: RowCount, base: Tensor | None, outs: Sequence[Tensor]) -> None:
    from fastpack.ops.kernels.row_limited_mm import sum_products

    count.products += 1
    count.work += sum(2 * m.numel() for one in sums for _, m in one.terms)
    sum_products(sums, count, base, outs)


@functools.cache
def _has_descriptors() -> bool:
    return importlib.util.find_spec("triton.tools.tensor_descriptor") is not None
