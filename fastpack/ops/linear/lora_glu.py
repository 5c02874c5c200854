"""LoRA GLU: a gated linear unit that adds the low-rank updates of gate and up, and of the gradient in the backward.

Definition, with each update the product of two low-rank factors ``[T, R] @ [R, I]`` (LoRA's, see
:mod:`fastpack.ops.linear.projections`):

    h = activation(gate + gate_update) * (up + up_update)

The functions build no graph. :mod:`fastpack.ops.linear.gated_mlp` calls them and saves gate and up without the updates.

Shape suffixes: T tokens, I width of gate and of up, R rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastpack.ops.glu import gated_backward, gated_forward
from fastpack.ops.implementation import Implementation
from fastpack.ops.kinds import ActivationKind
from fastpack.ops.linear.lora_matmul import lora_kernels_allowed
from fastpack.ops.row_count import RowCount, rows_of

Factors = tuple[Tensor, Tensor] | None
"""The factors of an update, ``[T, R]`` and ``[R, I]`` with any strides, or None for no update."""


def lora_glu_forward(
    gate: Tensor,
    up: Tensor,
    kind: ActivationKind,
    gate_update: Factors,
    up_update: Factors,
    *,
    row_count: RowCount | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """Compute ``h``.

    Args:
        gate: ``[T, I]``, without its update.
        up: ``[T, I]``, without its update; gate and up may be the halves of one tensor.
        kind: the activation.
        gate_update: the factors of gate's update.
        up_update: the factors of up's update.
        row_count: how many of the first rows are real; the kernel may skip the others.
        implementation: as for :func:`fastpack.ops.glu.gated`.

    Returns:
        ``h``, ``[T, I]``.
    """
    if _kernel_serves(implementation, gate, gate_update, up_update):
        from fastpack.ops.kernels import lora_glu as kernels

        return kernels.forward(gate, up, kind, gate_update, up_update, rows_of(row_count))
    return gated_forward(_add(gate, gate_update), _add(up, up_update), kind, implementation=implementation)


def lora_glu_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    kind: ActivationKind,
    gate_update: Factors,
    up_update: Factors,
    grad_update: Factors,
    *,
    out: tuple[Tensor, Tensor],
    recompute: bool,
    row_count: RowCount | None = None,
    implementation: Implementation = "auto",
) -> Tensor | None:
    """Write the gradients of gate and up into ``out``.

    Args:
        grad: ``[T, I]``, the gradient of h without ``grad_update``; it may be overwritten.
        gate: ``[T, I]``, as in the forward.
        up: ``[T, I]``, as in the forward.
        kind: the activation.
        gate_update: the factors of gate's update.
        up_update: the factors of up's update.
        grad_update: the factors of an update of ``grad``.
        out: the memory for the two gradients, ``[T, I]`` each, which may be gate and up themselves.
        recompute: compute h again, in the memory of ``grad``.
        row_count: as for :func:`lora_glu_forward`.
        implementation: as for :func:`lora_glu_forward`.

    Returns:
        h if ``recompute``, else None.
    """
    if _kernel_serves(implementation, gate, gate_update, up_update, grad_update):
        from fastpack.ops.kernels import lora_glu as kernels

        kernels.backward(grad, gate, up, kind, gate_update, up_update, grad_update, out, recompute, rows_of(row_count))
        return grad if recompute else None
    if grad_update is not None:
        grad = grad.addmm_(*grad_update)
    gated_backward(
        grad,
        _add(gate, gate_update),
        _add(up, up_update),
        kind,
        out=out,
        recompute=recompute,
        implementation=implementation,
    )
    return grad if recompute else None


def _kernel_serves(implementation: Implementation, gate: Tensor, *updates: Factors) -> bool:
    lows = [pair[0] for pair in updates if pair is not None]
    if not lows or not lora_kernels_allowed(implementation, [gate], lows):
        return False  # without an update the plain GLU's kernel does less work
    from fastpack.ops.kernels import lora_glu as kernels

    return bool(kernels.stages(3, *updates))


def _add(base: Tensor, update: Factors) -> Tensor:
    return base if update is None else torch.addmm(base, *update)
