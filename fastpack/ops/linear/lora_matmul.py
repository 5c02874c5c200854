"""LoRA's low-rank updates of a group of projections: their matmuls, forward and backward.

Definition, for each projection i: ``scale_i dropout_i(n) A_i^T B_i^T`` (Hu et al., "LoRA", arXiv:2106.09685, eq. 3).
All A and B of a group are cast to the activations' dtype at once. If every update has the same scale and no dropout,
one matmul computes ``scale n A_i^T`` for all of them. Where it is faster, one kernel launch expands all updates of a
group (and adds a residual), shrinks all its gradients, or computes the gradients of all its B
(:mod:`fastpack.ops.kernels.lora`); torch's matmuls compute the rest.

In all functions ``flat`` is the list that :func:`fastpack.ops.linear.operands.tensors_of` returns, and ``saved`` holds
the tensors that the backward needs, by name. ``prefix`` is put before those names.

Shape suffixes: T tokens, H size of the input, O of an output, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastpack.ops.implementation import KERNEL_DTYPES, Implementation, use_triton
from fastpack.ops.linear.operands import ProjectionSettings
from fastpack.ops.row_count import rows_of


def lora_kernels_allowed(implementation: Implementation, large: Sequence[Tensor], lows: Sequence[Tensor]) -> bool:
    """Return whether LoRA kernels may run on ``large [T, ...]`` and low-rank factors ``lows [T, R]``."""
    dtype = lows[0].dtype
    if dtype not in KERNEL_DTYPES or not use_triton(implementation, lows[0]):
        return False
    return all(x.dtype == dtype and x.stride(-1) == 1 for x in large)


def _kernels(name: str, settings: ProjectionSettings, large: Sequence[Tensor], lows: Sequence[Tensor]) -> Any | None:
    """Return the module of LoRA kernels if its kernel ``name`` supports these tensors, else None."""
    if not lows or not lora_kernels_allowed(settings.implementation, large, lows):
        return None
    from fastpack.ops.kernels import lora as kernels

    return kernels if kernels.serves(name, large, lows) else None


def expand_forward(
    n: Tensor,
    settings: ProjectionSettings,
    flat: Sequence[Tensor | None],
    saved: dict[str, Tensor],
    *,
    prefix: str = "",
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return the two factors of each update, by projection.

    They are ``scale_i dropout_i(n) A_i^T [T, R_i]`` and ``B_i^T [R_i, O_i]``.
    """
    owners = settings.owners
    if not owners:
        return {}
    all_a, all_b = ([_present(flat[4 * i + place]) for i in owners] for place in (2, 3))
    stacked_a, all_b = _stack_and_cast(all_a, all_b, settings.dtype)
    ranks = [b.shape[1] for b in all_b]
    lows = torch.empty(len(n), sum(ranks), dtype=n.dtype, device=n.device)
    if settings.uniform:
        scaled_mm(n, stacked_a.t(), settings.scale(owners[0]), lows)
    else:
        for i, a, low in zip(owners, stacked_a.split(ranks), lows.split(ranks, 1), strict=True):
            dropped, dropout = n, settings.dropout(i)
            if dropout:
                dropped, saved[f"{prefix}mask{i}"] = torch.native_dropout(n, dropout, True)
            scaled_mm(dropped, a.t(), settings.scale(i), low)
    saved[f"{prefix}a"], saved[f"{prefix}t"] = stacked_a, lows
    saved.update((f"{prefix}b{i}", b) for i, b in zip(owners, all_b, strict=True))
    return factors(settings, saved, prefix=prefix)


def factors(
    settings: ProjectionSettings, saved: dict[str, Tensor], *, prefix: str = ""
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return the factors that :func:`expand_forward` returned, from the tensors that it saved."""
    if not settings.owners:
        return {}
    all_b = [saved[f"{prefix}b{i}"] for i in settings.owners]
    lows = saved[f"{prefix}t"].split([b.shape[1] for b in all_b], 1)
    return {i: (low, b.t()) for i, low, b in zip(settings.owners, lows, all_b, strict=True)}


def expand_updates(
    updates: dict[int, tuple[Tensor, Tensor]], bases: Sequence[Tensor | None], settings: ProjectionSettings
) -> dict[int, Tensor]:
    """Multiply the factors of each update and add its base, if there is one, in new memory.

    Args:
        updates: the factors of each update, as :func:`expand_forward` returns them.
        bases: ``[T, O_i]`` or None for every projection.
        settings: the group's settings.

    Returns:
        ``[T, O_i]`` for each projection that has an update, by projection.
    """
    lows, transposed_b = [low for low, _ in updates.values()], [b for _, b in updates.values()]
    addends = [bases[i] for i in updates]
    kernels = _kernels("expand", settings, [base for base in addends if base is not None], lows)
    if kernels is None:
        return {
            i: torch.mm(*pair) if base is None else torch.addmm(base, *pair)
            for (i, pair), base in zip(updates.items(), addends, strict=True)
        }
    outputs = [low.new_empty(len(low), b.shape[1]) for low, b in zip(lows, transposed_b, strict=True)]
    kernels.expand(lows, transposed_b, outputs, addends)
    return dict(zip(updates, outputs, strict=True))


def shrink_backward(
    grads: Sequence[Tensor | None], settings: ProjectionSettings, saved: dict[str, Tensor], *, prefix: str = ""
) -> Tensor | None:
    """Return ``scale_i grad_i B_i`` of all updates side by side, ``[T, sum of R]``, or None without LoRA."""
    owners = settings.owners
    if not owners:
        return None
    low = torch.empty_like(saved[f"{prefix}t"])
    present: list[tuple[Tensor, Tensor, float, Tensor]] = []
    for i, part in zip(owners, low.split(_ranks(settings, saved, prefix), 1), strict=True):
        grad = grads[i]
        if grad is None:
            part.zero_()
        else:
            present.append((grad, saved[f"{prefix}b{i}"], settings.scale(i), part))
    kernels = _kernels("shrink", settings, [entry[0] for entry in present], [entry[3] for entry in present])
    if kernels is None:
        for grad, b, scale, part in present:
            scaled_mm(grad, b, scale, part)
    else:
        kernels.shrink(*zip(*present, strict=True), rows=rows_of(settings.row_count))
    return low


def expand_backward(low: Tensor, settings: ProjectionSettings, saved: dict[str, Tensor], *, prefix: str = "") -> Tensor:
    """Return the updates' share of the input's gradient, ``[T, H]``; ``low`` comes from :func:`shrink_backward`."""
    stacked_a = saved[f"{prefix}a"]
    if settings.uniform:
        return torch.mm(low, stacked_a)
    ranks = _ranks(settings, saved, prefix)
    shares = [
        _drop_again(torch.mm(part, a), settings, i, saved, prefix)
        for i, part, a in zip(settings.owners, low.split(ranks, 1), stacked_a.split(ranks), strict=True)
    ]
    for share in shares[1:]:
        shares[0].add_(share)
    return shares[0]


def update_gradients(
    grads: Sequence[Tensor | None],
    low: Tensor | None,
    n: Tensor | None,
    settings: ProjectionSettings,
    saved: dict[str, Tensor],
    needs: Sequence[bool],
    gradients: list[Tensor | None],
    *,
    prefix: str = "",
) -> None:
    """Write the gradient of every A and B that needs one into ``gradients``, at the tensor's place in ``flat``.

    They are summed in float32 and rounded once, to the dtype of all A and B. If those have several dtypes, the
    gradients stay in float32 and autograd rounds them.
    """
    owners = settings.owners
    if not owners:
        return
    assert low is not None
    ranks = _ranks(settings, saved, prefix)
    b_operands = {
        4 * i + 3: (grad, low_n)
        for i, low_n in zip(owners, saved[f"{prefix}t"].split(ranks, 1), strict=True)
        if needs[4 * i + 3] and (grad := grads[i]) is not None
    }
    for place, gradient in zip(b_operands, _sum_all_over_tokens(list(b_operands.values()), settings), strict=True):
        gradients[place] = gradient
    if not any(needs[4 * i + 2] for i in owners):
        return
    assert n is not None
    if settings.uniform:
        a_gradients: Sequence[Tensor] = _sum_over_tokens(low.t(), n, settings).split(ranks)
    else:
        a_gradients = [
            _sum_over_tokens(part.t(), _drop_again(n.clone(), settings, i, saved, prefix), settings)
            for i, part in zip(owners, low.split(ranks, 1), strict=True)
        ]
    for i, gradient in zip(owners, a_gradients, strict=True):
        gradients[4 * i + 2] = gradient if needs[4 * i + 2] else None


def scaled_mm(a: Tensor, b: Tensor, scale: float, out: Tensor) -> Tensor:
    """Write ``scale * a @ b`` into ``out`` in one matmul, and return it."""
    return torch.addmm(out, a, b, beta=0, alpha=scale, out=out)


def _stack_and_cast(all_a: list[Tensor], all_b: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Return all A stacked, ``[sum of R, H]``, and every B, in ``dtype``. A cast takes two launches for all of them."""
    if all(t.dtype == dtype for t in (*all_a, *all_b)):
        return torch.cat(all_a) if len(all_a) > 1 else all_a[0], all_b
    flat = torch.cat([t.flatten() for t in (*all_a, *all_b)]).to(dtype)
    stacked_a, *cast_b = flat.split([sum(a.numel() for a in all_a), *(b.numel() for b in all_b)])
    return stacked_a.view(-1, all_a[0].shape[1]), [cast.view(b.shape) for cast, b in zip(cast_b, all_b, strict=True)]


def _ranks(settings: ProjectionSettings, saved: dict[str, Tensor], prefix: str) -> list[int]:
    return [saved[f"{prefix}b{i}"].shape[1] for i in settings.owners]


def _drop_again(x: Tensor, settings: ProjectionSettings, i: int, saved: dict[str, Tensor], prefix: str) -> Tensor:
    """Apply projection i's dropout to ``x`` again, in place, with the mask of the forward."""
    mask, dropout = saved.get(f"{prefix}mask{i}"), settings.dropout(i)
    if mask is None:
        return x
    return x.mul_(mask).mul_(1 / (1 - dropout) if dropout < 1 else 0.0)


def _sum_all_over_tokens(pairs: Sequence[tuple[Tensor, Tensor]], settings: ProjectionSettings) -> list[Tensor]:
    """Return ``x [T, O]^T @ low [T, R]`` for each pair, summed in float32 and rounded to the dtype of all A and B."""
    xs, lows = [x for x, _ in pairs], [low for _, low in pairs]
    kernels = _kernels("reduce", settings, xs, lows) if len(pairs) > 1 else None
    if kernels is None:
        return [_sum_over_tokens(x.t(), low, settings) for x, low in pairs]
    dtype = settings.lora_dtype or torch.float32
    gradients = [x.new_empty(x.shape[1], low.shape[1], dtype=dtype) for x, low in pairs]
    kernels.reduce(xs, lows, gradients, rows_of(settings.row_count))
    return gradients


def _sum_over_tokens(a: Tensor, b: Tensor, settings: ProjectionSettings) -> Tensor:
    """Return ``a @ b``, summed in float32 and rounded once, to the dtype of all A and B."""
    gradient = _mm_float32(a, b)
    return gradient if settings.lora_dtype is None else gradient.to(settings.lora_dtype)


def _mm_float32(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` in float32, so that the optimizer gets a sum over tokens without further rounding."""
    if a.dtype == torch.float64:
        return torch.mm(a, b)
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b).float()


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
