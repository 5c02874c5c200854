"""LoRA's low-rank updates, added to outputs that other code computed (LLM.int8 or an offloaded layer).

Definition, for each projection i with the output y_i of its base weight: ``y_i + scale_i dropout_i(n) A_i^T B_i^T``.
The matmuls are those of :mod:`fastpack.ops.linear.projections`.

Shape suffixes: T tokens, H size of the input, O of an output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastpack.ops.autograd import differentiable_once
from fastpack.ops.implementation import Implementation
from fastpack.ops.linear.lora_matmul import expand_backward, expand_forward, expand_updates, shrink_backward
from fastpack.ops.linear.operands import Lora, ProjectionSettings, product_dtype
from fastpack.ops.linear.projections import backward_to_weights, needs_input_again


def add_updates(
    n: Tensor, bases: Sequence[Tensor], loras: Sequence[Lora | None], implementation: Implementation = "auto"
) -> list[Tensor]:
    """Return the outputs of a group of projections with their LoRA updates added.

    The updates are computed in the dtype of the first base, or in autocast's if it is on. The sum of an update and a
    base of another dtype has the promoted dtype.

    Args:
        n: ``[T, H]``, the group's input.
        bases: ``[T, O_i]`` each, the outputs of the base weights.
        loras: the update of each output, or None.
        implementation: ``auto`` runs LoRA kernels if :func:`use_triton` allows it and they support the tensors.
    """
    dtype = product_dtype(bases[0], bases[0].dtype)
    settings = ProjectionSettings.of_updates(dtype, loras, (None,) * len(loras), implementation)
    flat = [tensor for lora in loras for tensor in (None, None, lora and lora.a, lora and lora.b)]
    outputs: tuple[Tensor, ...] = _AddUpdates.apply(settings, n, *bases, *flat)
    return list(outputs)


class _AddUpdates(torch.autograd.Function):
    """The autograd Function of :func:`add_updates`."""

    @staticmethod
    def forward(ctx: Any, settings: ProjectionSettings, n: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        count = len(settings.loras)
        bases, flat = tensors[:count], tensors[count:]
        saved: dict[str, Tensor] = {"x": n}
        outputs: list[Tensor] = []
        with torch.autocast(n.device.type, enabled=False):
            updates = expand_forward(n.to(settings.dtype), settings, flat, saved)
            same_dtype = [base if base is not None and base.dtype == settings.dtype else None for base in bases]
            sums = expand_updates(updates, same_dtype, settings)
            for i, base in enumerate(bases):
                assert base is not None
                if i not in sums:
                    outputs.append(base.view_as(base))
                else:
                    outputs.append(sums[i] if same_dtype[i] is not None else base + sums[i])
        ctx.settings, ctx.names = settings, tuple(saved)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved.values())
        return tuple(outputs)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        saved = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        settings: ProjectionSettings = ctx.settings
        needs = ctx.needs_input_grad[2 + len(grads) :]
        with torch.autocast(saved["x"].device.type, enabled=False):
            update_grads = [
                None if grad is None or i not in settings.owners else grad.to(settings.dtype)
                for i, grad in enumerate(grads)
            ]
            low = shrink_backward(update_grads, settings, saved)
            dn = expand_backward(low, settings, saved) if low is not None and ctx.needs_input_grad[1] else None
            n = saved["x"].to(settings.dtype) if needs_input_again(needs) else None
            weights = backward_to_weights(update_grads, low, n, settings, saved, needs)
        return None, dn if dn is None else dn.to(saved["x"].dtype), *grads, *weights
