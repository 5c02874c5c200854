"""Gated units with a low-rank update of gate, of up, and of the gradient that reaches them.

Definition, each update the product of two thin factors ``[T, R] [R, I]`` (LoRA's, see
:mod:`fastpack.ops.linear.projections`):

    h = activation(gate + update_gate) * (up + update_up)

No graph: for use inside :mod:`fastpack.ops.linear.gated_mlp`, which keeps gate and up as the base products gave them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastpack.ops.glu import gated_backward, gated_forward
from fastpack.ops.implementation import Implementation
from fastpack.ops.kinds import ActivationKind
from fastpack.ops.linear.lora_matmul import thin_kernels_allowed
from fastpack.ops.row_count import RowCount, rows_of

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
        from fastpack.ops.kernels import lora_glu as kernels

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
    row_count: RowCount | None = None,
    implementation: Implementation = "auto",
) -> Tensor | None:
    """Gradients of gate and up, ``[T, I]`` each, into ``out``, which may be gate and up themselves.

    Args:
        grad: ``[T, I]``, of h, to which the update ``of_grad`` belongs too; the caller gives it up.
        recompute: compute h once more, over ``grad``.
        row_count: as of :func:`updated_forward`.

    Returns:
        h, or None where it was not asked for.
    """
    if _kernel_serves(implementation, gate, of_gate, of_up, of_grad):
        from fastpack.ops.kernels import lora_glu as kernels

        kernels.backward(grad, gate, up, kind, of_gate, of_up, of_grad, out, recompute, rows_of(row_count))
        return grad if recompute else None
    if of_grad is not None:
        grad = grad.addmm_(*of_grad)
    gated_backward(
        grad, _add(gate, of_gate), _add(up, of_up), kind, out=out, recompute=recompute, implementation=implementation
    )
    return grad if recompute else None


def _kernel_serves(implementation: Implementation, gate: Tensor, *updates: Factors) -> bool:
    thins = [pair[0] for pair in updates if pair is not None]
    if not thins or not thin_kernels_allowed(implementation, [gate], thins):
        return False  # without an update the plain op has the leaner kernel
    from fastpack.ops.kernels import lora_glu as kernels

    return bool(kernels.stages(3, *updates))


def _add(base: Tensor, update: Factors) -> Tensor:
    return base if update is None else torch.addmm(base, *update)
