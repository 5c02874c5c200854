"""LoRA's low-rank updates alone, added to products that somebody else computed (LLM.int8's, an offloaded layer's).

Definition, for each i: ``y_i + scale_i dropout_i(n) A_i^T B_i^T``; see :mod:`fastpack.ops.linear.projections`, which
this shares its products with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastpack.ops.autograd import differentiable_once
from fastpack.ops.implementation import Implementation
from fastpack.ops.linear.lora_matmul import expand_backward, expand_forward, expanded, shrink_backward
from fastpack.ops.linear.parts import Lora, Settings, product_dtype
from fastpack.ops.linear.projections import backward_to_weights, needs_input_again


def add_updates(
    n: Tensor, bases: Sequence[Tensor], loras: Sequence[Lora | None], implementation: Implementation = "auto"
) -> list[Tensor]:
    """The outputs of a group with its updates added.

    The updates are computed in the dtype of the first base, or in autocast's where it is on; added to a base of
    another dtype, they are promoted with it.

    Args:
        n: ``[T, H]``, the group's input.
        bases: ``[T, O_i]``, products with the base weights.
        loras: the update of each, or None.
        implementation: of the casts and the thin products.
    """
    dtype = product_dtype(bases[0], bases[0].dtype)
    settings = Settings.of_updates(dtype, loras, (None,) * len(loras), implementation)
    flat = [tensor for lora in loras for tensor in (None, None, lora and lora.a, lora and lora.b)]
    made: tuple[Tensor, ...] = _AddUpdates.apply(settings, n, *bases, *flat)
    return list(made)


class _AddUpdates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: Settings, n: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        count = len(settings.loras)
        bases, flat = tensors[:count], tensors[count:]
        keep: dict[str, Tensor] = {"x": n}
        outputs: list[Tensor] = []
        with torch.autocast(n.device.type, enabled=False):
            updates = expand_forward(n.to(settings.dtype), settings, flat, keep)
            alike = [base if base is not None and base.dtype == settings.dtype else None for base in bases]
            ready = expanded(updates, alike, settings)
            for i, base in enumerate(bases):
                assert base is not None
                if i not in ready:
                    outputs.append(base.view_as(base))
                else:
                    outputs.append(ready[i] if alike[i] is not None else base + ready[i])
        ctx.settings, ctx.names = settings, tuple(keep)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*keep.values())
        return tuple(outputs)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        kept = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        settings: Settings = ctx.settings
        needs = ctx.needs_input_grad[2 + len(grads) :]
        with torch.autocast(kept["x"].device.type, enabled=False):
            given = [
                None if grad is None or i not in settings.owners else grad.to(settings.dtype)
                for i, grad in enumerate(grads)
            ]
            low = shrink_backward(given, settings, kept)
            dn = expand_backward(low, settings, kept) if low is not None and ctx.needs_input_grad[1] else None
            n = kept["x"].to(settings.dtype) if needs_input_again(needs) else None
            weights = backward_to_weights(given, low, n, settings, kept, needs)
        return None, dn if dn is None else dn.to(kept["x"].dtype), *grads, *weights
