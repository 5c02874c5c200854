"""Gated units with a low-rank update of gate, of up, and of the gradient that reaches them.

Definition, each update the product of two thin factors ``[T, R] [R, I]`` (LoRA's, see
:mod:`fastpack.ops.projections`):

    h = activation(gate + update_gate) * (up + update_up)

No graph: for use inside :mod:`fastpack.ops.gated_mlp`, which keeps gate and up as the base products gave them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastpack.ops.glu import ActivationKind, gated_backward, gated_forward
from fastpack.ops.implementation import Implementation
from fastpack.ops.products import RowCount, rows_of
from fastpack.ops.updates import thin_kernels_allowed

Factors = tuple[Tensor, Tensor] | None
"""``[T, R]`` and ``[R, I]``, in any strides, or None for no update."""


def updated_forward(
    gate: Tensor,
    up: Tensor,
    kind: ActivationKind,
    of_gate: Factors,
    of_up: Factors,
    *,
    row_count: RowCount | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """``h``, ``[T, I]``; gate and up may be the halves of one ``[T, 2 I]`` tensor.

    Args:
        row_count: how many of the first rows count: the others may be left out.
    """
    if _kernel_serves(implementation, gate, of_gate, of_up):
        from fastpack.ops.kernels import updated_glu as kernels

        return kernels.forward(gate, up, kind, of_gate, of_up, rows_of(row_count))
    return gated_forward(_add(gate, of_gate), _add(up, of_up), kind, implementation=implementation)


def updated_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    kind: ActivationKind,
    of_gate: Factors,
    of_up: Factors,
    of_grad: Factors,
    *,
    out: tuple[Tensor, Tensor],
    recompute: bool,
    sums: Sequence[tuple[int, torch.dtype]] | None = None,
    row_count: RowCount | None = None,
    implementation: Implementation = "auto",
) -> tuple[Tensor | None, list[Tensor]]:
    """Gradients of gate and up, ``[T, I]`` each, into ``out``, which may be gate and up themselves.

    Args:
        grad: ``[T, I]``, of h, to which the update ``of_grad`` belongs too; the caller gives it up.
        recompute: compute h once more, over ``grad``.
        sums: compute sums over tokens too, where :func:`sums_on_the_way`, in float32, rounded once: how many of the
            numbers, which lie one behind the other, are to be one tensor, and its dtype.
        row_count: as of :func:`updated_forward`.

    Returns:
        h, or None where it was not asked for; and the sums, flat: the gradients of the second factors of gate and of
        up, ``[I, R]`` each, and ``[R, I]``, the product of ``of_grad``'s first factor with h.
    """
    if _kernel_serves(implementation, gate, of_gate, of_up, of_grad):
        from fastpack.ops.kernels import updated_glu as kernels
        from fastpack.ops.kernels.row_sums import sum_rows

        parts = None if sums is None else kernels.make_parts(gate, of_gate, of_up, of_grad)
        kernels.backward(grad, gate, up, kind, of_gate, of_up, of_grad, out, recompute, rows_of(row_count), parts)
        found: list[Tensor] = []
        if parts is not None and sums is not None:
            found = sum_rows(parts.split([size for size, _ in sums], 1), [dtype for _, dtype in sums])
        return grad if recompute else None, found
    assert sums is None
    if of_grad is not None:
        grad = grad.addmm_(*of_grad)
    gated_backward(
        grad, _add(gate, of_gate), _add(up, of_up), kind, out=out, recompute=recompute, implementation=implementation
    )
    return grad if recompute else None, []


def sums_on_the_way(
    implementation: Implementation, gate: Tensor, of_gate: Factors, of_up: Factors, of_grad: Factors
) -> bool:
    """Whether :func:`updated_backward` gives sums over tokens, each for one pass over ``[T, I]`` less."""
    if not len(gate) or not _kernel_serves(implementation, gate, of_gate, of_up, of_grad):
        return False
    from fastpack.ops.kernels import updated_glu as kernels

    return kernels.sums(gate, of_gate, of_up, of_grad)


def _kernel_serves(implementation: Implementation, gate: Tensor, *updates: Factors) -> bool:
    thins = [pair[0] for pair in updates if pair is not None]
    if not thins or not thin_kernels_allowed(implementation, [gate], thins):
        return False  # without an update the plain op has the leaner kernel
    from fastpack.ops.kernels import updated_glu as kernels

    return bool(kernels.stages(3, *updates))


def _add(base: Tensor, update: Factors) -> Tensor:
    return base if update is None else torch.addmm(base, *update)
