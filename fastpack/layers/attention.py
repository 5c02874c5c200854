"""Packed self-attention: the fast forward, and the interface for families whose own forward is kept.

Shape suffixes: T tokens, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import functools
import sys
from operator import attrgetter
from typing import Any

from torch import Tensor

from fastpack.attention_dispatch import AttentionCall, attend
from fastpack.errors import PatchError
from fastpack.families.spec import AttentionSpec
from fastpack.layers.projections import project_modules, read_norm
from fastpack.layers.scope import PackingScope
from fastpack.layers.stock import Forward, call_stock, require_packing
from fastpack.ops.rope import apply_rope, norm_rope
from fastpack.options import PatchOptions
from fastpack.packing import PackedSeqLens

INTERFACE_PREFIX = "fastpack_"
"""Our names in transformers' ``AttentionInterface`` are this and the name of the backend asked for."""


def attention_forward(
    module: Any,
    spec: AttentionSpec,
    options: PatchOptions,
    stock: Forward | None,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Any = None,
    past_key_values: Any = None,
    packed_seq_lens: PackedSeqLens | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Self-attention on ``[1, T, hidden]``; the stock forward where no lengths came."""
    require_packing(module, packed_seq_lens, attention_mask)
    if packed_seq_lens is None:
        result: tuple[Tensor, Tensor | None] = call_stock(
            module,
            stock,
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
        return result
    projected, _ = project_qkv(module, spec, options, hidden_states.squeeze(0))
    out = attend_heads(module, spec, options, projected, position_embeddings, packed_seq_lens)
    (out,), _ = project_modules([module.o_proj], out, options)
    return out.unsqueeze(0), None


def project_qkv(
    module: Any, spec: AttentionSpec, options: PatchOptions, x: Tensor, norm: Any = None
) -> tuple[list[Tensor], Tensor]:
    """The projections of ``norm(x)``, x ``[T, hidden]``: those to queries, keys and values ``[T, heads * D]``, or the
    one to all; and x to go on with."""
    names = ("q_proj", "k_proj", "v_proj") if spec.qkv is None else (spec.qkv,)
    return project_modules([getattr(module, name) for name in names], x, options, norm=norm)


def attend_heads(
    module: Any,
    spec: AttentionSpec,
    options: PatchOptions,
    projected: list[Tensor],
    position_embeddings: tuple[Tensor, Tensor] | None,
    packed: PackedSeqLens,
) -> Tensor:
    """From what :func:`project_qkv` gave to the heads' results side by side, ``[T, H * D]``."""
    q, k, v = _heads(module, spec, projected)
    tables = position_embeddings if spec.rope_switch is None or getattr(module, spec.rope_switch) else None
    q, k = _normalise_and_turn(module, spec, options, q, k, tables)
    call = AttentionCall(
        q,
        k,
        v,
        packed,
        scale=module.scaling,
        window=_read(module, spec.window),
        softcap=_read(module, spec.softcap) or None,
        dropout=module.attention_dropout if module.training else 0.0,
    )
    return attend(call, options.attention).flatten(1)


def _heads(module: Any, spec: AttentionSpec, projected: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[T, H, D]``, keys and values ``[T, K, D]``, normalised where the family does so."""
    head_dim = module.head_dim
    if spec.qkv is not None:
        fused = projected[0].unflatten(-1, (-1, head_dim))
        groups = module.num_key_value_groups
        kv_heads = fused.shape[1] // (groups + 2)
        q, k, v = fused.split((groups * kv_heads, kv_heads, kv_heads), 1)
        return q, k, v
    q, k, v = projected
    normalised = spec.qk_norm if hasattr(module, "q_norm") else None
    if normalised == "flat":
        q, k = module.q_norm(q), module.k_norm(k)
    q, k, v = (x.unflatten(-1, (-1, head_dim)) for x in (q, k, v))
    return q, k, v


def _normalise_and_turn(
    module: Any, spec: AttentionSpec, options: PatchOptions, q: Tensor, k: Tensor, tables: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """q ``[T, H, D]`` and k ``[T, K, D]``, each head normalised where the family does so, and at their positions."""
    settings: dict[str, Any] = {
        "layout": spec.rope_layout,
        "compute_in_float32": spec.rope_in_float32,
        "implementation": options.kernels,
    }
    if spec.qk_norm == "head" and hasattr(module, "q_norm"):
        norm, other = read_norm(module.q_norm), read_norm(module.k_norm)
        if norm is not None and other is not None and tables is not None and norm.weight.ndim == other.weight.ndim == 1:
            how: dict[str, Any] = {"rounding": norm.rounding, "unit_offset": norm.unit_offset}
            return norm_rope(q, k, norm.weight, other.weight, norm.eps, tables[0][0], tables[1][0], **how, **settings)
        q, k = module.q_norm(q), module.k_norm(k)
    if tables is None:
        return q, k
    return apply_rope(q, k, tables[0][0], tables[1][0], **settings)


def _read(module: Any, name: str | None) -> Any:
    return None if name is None else attrgetter(name)(module)


def packed_interface(
    attention: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packed_seq_lens: PackedSeqLens | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """An implementation in transformers' ``AttentionInterface``: what the varlen rung's attention calls.

    Args:
        attention: the backend asked for, or ``auto``.
        query, key, value: ``[1, heads, T, dim]``.
        attention_mask: the stand-in (:func:`fastpack.layers.stock.mask_stand_in`) or None.
        sliding_window, softcap, s_aux: transformers' names for window, softcap and sinks.

    Returns:
        ``[1, T, heads, dim]`` and None, as transformers' own implementations do.
    """
    scope: PackingScope | None = module.config._fastpack_scope
    if packed_seq_lens is None and scope is not None:
        packed_seq_lens = scope.required(module)
    require_packing(module, packed_seq_lens, attention_mask)
    if packed_seq_lens is None:
        stock = stock_interface(module)
        modifiers = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        given = {name: what for name, what in modifiers.items() if what is not None}
        result: tuple[Tensor, Tensor | None] = stock(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **given, **kwargs
        )
        return result
    unknown = [name for name in ("position_bias", "cache") if kwargs.get(name) is not None]
    if unknown or kwargs.get("is_causal") is False:
        raise PatchError(
            f"{type(module).__name__} asks for {unknown or ['bidirectional']} attention, which packed attention does "
            "not compute. fastpack.unpatch(model) restores the stock model; please report the family."
        )
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    out = attend(
        AttentionCall(
            q,
            k,
            v,
            packed_seq_lens,
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=sliding_window,
            softcap=softcap or None,
            sinks=s_aux,
            dropout=dropout,
        ),
        attention,
    )
    return out.contiguous()[None], None  # as stock implementations return it: AFMoE takes a view of it


def stock_interface(module: Any) -> Forward:
    """The attention implementation that ``module`` would use if it were not patched."""
    from transformers import AttentionInterface

    name = module.config._fastpack_stock_attention
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None and name in (None, "eager"):
        raise PatchError(f"{type(module).__name__} has no eager attention; load it with attn_implementation='sdpa'.")
    found: Forward = AttentionInterface().get_interface(name, eager)  # type: ignore[arg-type]  # None for no eager
    return found


def interface_name(attention: str) -> str:
    """Our name for this choice of backend in transformers' ``AttentionInterface``."""
    return INTERFACE_PREFIX + attention


def register_interface(attention: str) -> None:
    """Register our implementation under its name, through transformers' own extension point. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(interface_name(attention), functools.partial(packed_interface, attention))
