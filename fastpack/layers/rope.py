"""Normalise the heads of queries and keys, and rotate them by their positions: all kinds of attention share this.

Shape suffixes: T tokens, H query heads, K key/value heads, D head size, R rotated elements of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastpack.families.spec import AttentionSpec
from fastpack.layers.project import read_norm
from fastpack.layers.runtime import Runtime
from fastpack.ops.linear.operands import Norm
from fastpack.ops.rope import apply_rope, norm_rope
from fastpack.packing.seqlens import PackedSeqLens

Tables = tuple[Tensor, Tensor]
"""cos and sin: ``[1, T, R]`` from a backbone, or ``[T, R]`` for the ops."""


def normalise_and_rotate(
    module: nn.Module, spec: AttentionSpec, runtime: Runtime, q: Tensor, k: Tensor, tables: Tables | None
) -> tuple[Tensor, Tensor]:
    """Normalise each head of q and k if the family does so, and apply rotary positions.

    Args:
        module: the attention module.
        spec: the attention's spec in its family's row.
        runtime: settings of the patched model.
        q: ``[T, H, D]``.
        k: ``[T, K, D]``; K may be 0.
        tables: cos and sin, ``[T, R]``; None for a layer without positions.
    """
    settings: dict[str, Any] = {
        "layout": spec.rope_layout,
        "compute_in_float32": spec.rope_in_float32,
        "implementation": runtime.kernels,
    }
    first, second = (getattr(module, name, None) for name in spec.norms)
    if norm_place(module, spec) == "head" and first is not None and second is not None:
        norm, other = read_norm(first), read_norm(second)
        if norm is not None and other is not None and tables is not None and _share_a_launch(norm, other):
            how: dict[str, Any] = {"rounding": norm.rounding, "unit_offset": norm.unit_offset}
            return norm_rope(q, k, norm.weight, other.weight, norm.eps, tables[0], tables[1], **how, **settings)
        q, k = _each(first, q), _each(second, k)
    if tables is not None:
        q, k = apply_rope(q, k, *tables, **settings)
    if spec.qk_norm == "rotated" and first is not None and second is not None:
        q, k = _each(first, q), _each(second, k)
    return q, k


def position_scale(module: Any, packed: PackedSeqLens) -> Tensor:
    """Return the factor ``[T]`` on each query: 1, and more from the length on beyond which positions are scaled.

    This is the temperature of Llama 4's attention: the factor is ``1 + beta log(1 + floor(position / length))``.
    """
    rope = module.config.rope_parameters
    positions = packed.position_ids if packed.kept is None else packed.kept.position_ids
    lengths = torch.floor(positions[0] / rope["original_max_position_embeddings"])
    factor: Tensor = 1 + rope["llama_4_scaling_beta"] * torch.log(1 + lengths)
    return factor


def norm_place(module: nn.Module, spec: AttentionSpec) -> str | None:
    """Return where a module's norms of queries and keys act, as in :attr:`AttentionSpec.qk_norm`."""
    is_flat = spec.flat_if is not None and getattr(module, spec.flat_if[0]) == spec.flat_if[1]
    return "flat" if is_flat else spec.qk_norm


def _each(norm: nn.Module, x: Tensor) -> Tensor:
    """Return the norm of x ``[T, heads, D]``; without heads, x itself."""
    return norm(x) if x.shape[1] else x


def _share_a_launch(norm: Norm, other: Norm) -> bool:
    """Return whether two norms can share a launch: one weight per head element, and equal settings."""
    if not norm.weight.ndim == other.weight.ndim == 1:
        return False
    return (norm.eps, norm.rounding, norm.unit_offset) == (other.eps, other.rounding, other.unit_offset)


def repeated(table: Tensor) -> Tensor:
    """Return a table ``[T, R]`` that repeats each angle of the first half for both elements of a pair."""
    return table[..., : table.shape[-1] // 2].repeat_interleave(2, -1)
