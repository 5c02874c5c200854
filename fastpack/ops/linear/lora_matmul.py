"""LoRA's low-rank updates of a group of projections: the thin products, forward and backward.

Definition, for each projection i: ``scale_i dropout_i(n) A_i^T B_i^T`` (Hu et al., "LoRA", arXiv:2106.09685, eq. 3).
A and B are brought to the activations' dtype, all of a group at once; where every update has the same scale and
no dropout, one product serves all A. The scale is part of that product. Where kernels gain by it, one launch expands
all updates of a group (and adds a residual), shrinks all its gradients, or makes the gradients of all its B
(:mod:`fastpack.ops.kernels.lora`); torch's products do the rest.

``flat`` is what :func:`fastpack.ops.linear.parts.tensors_of` makes, ``keep`` and ``kept`` hold what the backward
needs under names of their own.

Shape suffixes: T tokens, H size of the input, O of an output, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastpack.ops.implementation import KERNEL_DTYPES, Implementation, use_triton
from fastpack.ops.linear.parts import Settings
from fastpack.ops.row_count import rows_of


def thin_kernels_allowed(implementation: Implementation, large: Sequence[Tensor], thins: Sequence[Tensor]) -> bool:
    """True where kernels may run over ``large [T, ...]`` and thin factors ``[T, R]``."""
    dtype = thins[0].dtype
    if dtype not in KERNEL_DTYPES or not use_triton(implementation, thins[0]):
        return False
    return all(x.dtype == dtype and x.stride(-1) == 1 for x in large)


def _kernels(which: str, settings: Settings, large: Sequence[Tensor], thins: Sequence[Tensor]) -> Any | None:
    """The module of thin kernels where the one of this name serves, else None."""
    if not thins or not thin_kernels_allowed(settings.implementation, large, thins):
        return None
    from fastpack.ops.kernels import lora as kernels

    return kernels if kernels.serves(which, large, thins) else None


def expand_forward(
    n: Tensor, settings: Settings, flat: Sequence[Tensor | None], keep: dict[str, Tensor], *, prefix: str = ""
) -> dict[int, tuple[Tensor, Tensor]]:
    """The two factors of each projection's update: ``scale_i dropout_i(n) A_i^T [T, R_i]`` and ``B_i^T [R_i, O_i]``."""
    owners = settings.owners
    if not owners:
        return {}
    all_a, all_b = ([_present(flat[4 * i + place]) for i in owners] for place in (2, 3))
    stacked, wide = _brought_together(all_a, all_b, settings.dtype)
    ranks = [b.shape[1] for b in wide]
    together = torch.empty(len(n), sum(ranks), dtype=n.dtype, device=n.device)
    if settings.uniform:
        scaled_mm(n, stacked.t(), settings.scale(owners[0]), together)
    else:
        for i, a, t in zip(owners, stacked.split(ranks), together.split(ranks, 1), strict=True):
            dropped, dropout = n, settings.dropout(i)
            if dropout:
                dropped, keep[f"{prefix}mask{i}"] = torch.native_dropout(n, dropout, True)
            scaled_mm(dropped, a.t(), settings.scale(i), t)
    keep[f"{prefix}a"], keep[f"{prefix}t"] = stacked, together
    keep.update((f"{prefix}b{i}", b) for i, b in zip(owners, wide, strict=True))
    return factors(settings, keep, prefix=prefix)


def factors(settings: Settings, kept: dict[str, Tensor], *, prefix: str = "") -> dict[int, tuple[Tensor, Tensor]]:
    """What :func:`expand_forward` returned, from what it kept."""
    if not settings.owners:
        return {}
    wide = [kept[f"{prefix}b{i}"] for i in settings.owners]
    thin = kept[f"{prefix}t"].split([b.shape[1] for b in wide], 1)
    return {i: (t, b.t()) for i, t, b in zip(settings.owners, thin, wide, strict=True)}


def expanded(
    updates: dict[int, tuple[Tensor, Tensor]], bases: Sequence[Tensor | None], settings: Settings
) -> dict[int, Tensor]:
    """Each update's product ``[T, O_i]``, added to its base where there is one, in memory of its own.

    Args:
        updates: as :func:`expand_forward` returns them, by projection.
        bases: ``[T, O_i]`` or None, of every projection.
    """
    thins, wides = [thin for thin, _ in updates.values()], [wide for _, wide in updates.values()]
    added = [bases[i] for i in updates]
    kernels = _kernels("expand", settings, [base for base in added if base is not None], thins)
    if kernels is None:
        return {
            i: torch.mm(*pair) if base is None else torch.addmm(base, *pair)
            for (i, pair), base in zip(updates.items(), added, strict=True)
        }
    made = [thin.new_empty(len(thin), wide.shape[1]) for thin, wide in zip(thins, wides, strict=True)]
    kernels.expand(thins, wides, made, added)
    return dict(zip(updates, made, strict=True))


def shrink_backward(
    grads: Sequence[Tensor | None], settings: Settings, kept: dict[str, Tensor], *, prefix: str = ""
) -> Tensor | None:
    """``scale_i grad_i B_i`` side by side, ``[T, sum of R]``; None without LoRA."""
    owners = settings.owners
    if not owners:
        return None
    low = torch.empty_like(kept[f"{prefix}t"])
    present: list[tuple[Tensor, Tensor, float, Tensor]] = []
    for i, part in zip(owners, low.split(_ranks(settings, kept, prefix), 1), strict=True):
        grad = grads[i]
        if grad is None:
            part.zero_()
        else:
            present.append((grad, kept[f"{prefix}b{i}"], settings.scale(i), part))
    kernels = _kernels("shrink", settings, [entry[0] for entry in present], [entry[3] for entry in present])
    if kernels is None:
        for grad, b, scale, part in present:
            scaled_mm(grad, b, scale, part)
    else:
        kernels.shrink(*zip(*present, strict=True), rows=rows_of(settings.row_count))
    return low


def expand_backward(low: Tensor, settings: Settings, kept: dict[str, Tensor], *, prefix: str = "") -> Tensor:
    """The updates' share of the input's gradient, ``[T, H]``, from what :func:`shrink_backward` returned."""
    stacked = kept[f"{prefix}a"]
    if settings.uniform:
        return torch.mm(low, stacked)
    ranks = _ranks(settings, kept, prefix)
    shares = [
        _dropped(torch.mm(part, a), settings, i, kept, prefix)
        for i, part, a in zip(settings.owners, low.split(ranks, 1), stacked.split(ranks), strict=True)
    ]
    for share in shares[1:]:
        shares[0].add_(share)
    return shares[0]


def update_gradients(
    grads: Sequence[Tensor | None],
    low: Tensor | None,
    n: Tensor | None,
    settings: Settings,
    kept: dict[str, Tensor],
    needs: Sequence[bool],
    made: list[Tensor | None],
    *,
    prefix: str = "",
) -> None:
    """The gradients of every A and B that needs one into ``made``, flat as the tensors are.

    Sums are float32, rounded once to the dtype that all A and B have; where they differ, whoever takes them does it.
    """
    owners = settings.owners
    if not owners:
        return
    assert low is not None
    ranks = _ranks(settings, kept, prefix)
    of_b = {
        4 * i + 3: (grad, t)
        for i, t in zip(owners, kept[f"{prefix}t"].split(ranks, 1), strict=True)
        if needs[4 * i + 3] and (grad := grads[i]) is not None
    }
    for place, gradient in zip(of_b, _products_over_tokens(list(of_b.values()), settings), strict=True):
        made[place] = gradient
    if not any(needs[4 * i + 2] for i in owners):
        return
    assert n is not None
    if settings.uniform:
        found: Sequence[Tensor] = _over_tokens(low.t(), n, settings).split(ranks)
    else:
        found = [
            _over_tokens(part.t(), _dropped(n.clone(), settings, i, kept, prefix), settings)
            for i, part in zip(owners, low.split(ranks, 1), strict=True)
        ]
    for i, gradient in zip(owners, found, strict=True):
        made[4 * i + 2] = gradient if needs[4 * i + 2] else None


def scaled_mm(a: Tensor, b: Tensor, scale: float, out: Tensor) -> Tensor:
    """``scale * a @ b`` into ``out``, in one product."""
    return torch.addmm(out, a, b, beta=0, alpha=scale, out=out)


def _brought_together(all_a: list[Tensor], all_b: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Every A under each other, ``[sum of R, H]``, and every B, in ``dtype``; in two launches where it is another."""
    if all(t.dtype == dtype for t in (*all_a, *all_b)):
        return torch.cat(all_a) if len(all_a) > 1 else all_a[0], all_b
    flat = torch.cat([t.flatten() for t in (*all_a, *all_b)]).to(dtype)
    stacked, *wide = flat.split([sum(a.numel() for a in all_a), *(b.numel() for b in all_b)])
    return stacked.view(-1, all_a[0].shape[1]), [piece.view(b.shape) for piece, b in zip(wide, all_b, strict=True)]


def _ranks(settings: Settings, kept: dict[str, Tensor], prefix: str) -> list[int]:
    return [kept[f"{prefix}b{i}"].shape[1] for i in settings.owners]


def _dropped(x: Tensor, settings: Settings, i: int, kept: dict[str, Tensor], prefix: str) -> Tensor:
    """``x`` with projection i's dropout applied again, in place."""
    mask, dropout = kept.get(f"{prefix}mask{i}"), settings.dropout(i)
    if mask is None:
        return x
    return x.mul_(mask).mul_(1 / (1 - dropout) if dropout < 1 else 0.0)


def _products_over_tokens(pairs: Sequence[tuple[Tensor, Tensor]], settings: Settings) -> list[Tensor]:
    """``x [T, O]^T @ thin [T, R]`` of each, summed in float32."""
    xs, thins = [x for x, _ in pairs], [thin for _, thin in pairs]
    kernels = _kernels("reduce", settings, xs, thins) if len(pairs) > 1 else None
    if kernels is None:
        return [_over_tokens(x.t(), thin, settings) for x, thin in pairs]
    dtype = settings.lora_dtype or torch.float32
    found = [x.new_empty(x.shape[1], thin.shape[1], dtype=dtype) for x, thin in pairs]
    kernels.reduce(xs, thins, found, rows_of(settings.row_count))
    return found


def _over_tokens(a: Tensor, b: Tensor, settings: Settings) -> Tensor:
    """:func:`_mm_float32`, rounded once to the dtype that all A and B have."""
    found = _mm_float32(a, b)
    return found if settings.lora_dtype is None else found.to(settings.lora_dtype)


def _mm_float32(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in float32: a sum over tokens, whose rounding the optimizer would see."""
    if a.dtype == torch.float64:
        return torch.mm(a, b)
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b).float()


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
