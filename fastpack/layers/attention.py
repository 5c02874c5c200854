"""The fast forward of packed self-attention.

Shape suffixes: T tokens, H query heads, K key/value heads, D head size, E size of a value, R rotated elements of a
head.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastpack.attention_dispatch import AttentionCall, attend
from fastpack.backends.call import AttentionStore
from fastpack.families.spec import AnyAttentionSpec, AttentionSpec, LatentAttentionSpec, SharedAttentionSpec, Spec
from fastpack.layers import latent_attention, shared_attention
from fastpack.layers.project import project_modules
from fastpack.layers.rope import Tables, norm_place, normalise_and_rotate, position_scale, repeated
from fastpack.layers.runtime import Runtime
from fastpack.ops.autograd import as_row
from fastpack.ops.row_count import RowCount
from fastpack.packing.mask import require_packing
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.packing.two_way import TwoWay
from fastpack.utils.protocols import AttentionLike
from fastpack.utils.replacement import Replacement


def attention_forward(
    patched: Replacement[AnyAttentionSpec, Runtime],
    hidden_states: Tensor,
    position_embeddings: Tables | None = None,
    attention_mask: object = None,
    *,
    packed_seq_lens: PackedSeqLens | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend on packed ``[1, T, hidden]``, or run the stock forward if no sequence lengths are known."""
    module, spec, runtime = patched.owner, patched.spec, patched.runtime
    packed_seq_lens = runtime.packing_of(module, packed_seq_lens)
    require_packing(module, packed_seq_lens, attention_mask)
    if packed_seq_lens is None:
        return patched.stock(
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            **kwargs,
        )
    count = packed_seq_lens.row_count
    projected, _ = project_qkv(module, spec, runtime, hidden_states.squeeze(0), row_count=count)
    shared = kwargs.get("shared_kv_states")
    out = attend_heads(module, spec, runtime, projected, position_embeddings, packed_seq_lens, shared)
    (out,), _ = project_modules([getattr(module, spec.out)], out, runtime, row_count=count)
    return as_row(drop(module, spec.out_dropout, out)), None


def project_qkv(
    module: AttentionLike,
    spec: AnyAttentionSpec,
    runtime: Runtime,
    x: Tensor,
    norm: nn.Module | None = None,
    row_count: RowCount | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Project ``norm(x)``, where x is ``[T, hidden]``.

    Returns:
        The outputs of the first projections, and x for the residual addition. The outputs are queries, keys and values
        ``[T, heads * D]``; one output for all three if the family fuses them; or latents in latent attention.
    """
    names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    if isinstance(spec, LatentAttentionSpec):
        names = latent_attention.first_projections(module)
    elif isinstance(spec, SharedAttentionSpec):
        names = shared_attention.projections(module)
    else:
        names = names if spec.qkv is None else (spec.qkv,)
        names += () if spec.gate is None else (spec.gate,)
    return project_modules([getattr(module, name) for name in names], x, runtime, norm=norm, row_count=row_count)


def attend_heads(
    module: AttentionLike,
    spec: AnyAttentionSpec,
    runtime: Runtime,
    projected: list[Tensor],
    position_embeddings: Tables | None,
    packed: PackedSeqLens,
    shared: shared_attention.SharedStates | None = None,
    store: AttentionStore | None = None,
) -> Tensor:
    """Attend, and return the heads' results side by side, ``[T, H * E]``.

    Args:
        module: the attention module.
        spec: the attention's spec in its family's row.
        runtime: settings of the patched model.
        projected: the outputs of :func:`project_qkv`.
        position_embeddings: cos and sin, ``[1, T, R]``, or None.
        packed: the lengths of the sequences.
        shared: keys and values that layers share, in families that share them.
        store: stores the result between a checkpointed forward and its backward, or None.
    """
    modifiers: dict[str, Any] = {"two_way": two_way_of(module, spec)}
    gate, scale = None, module.scaling
    if isinstance(spec, LatentAttentionSpec):
        assert not spec.rotates or position_embeddings is not None, "its queries and keys are rotated"
        q, k, v = latent_attention.heads(module, runtime, projected, position_embeddings if spec.rotates else None)
    elif isinstance(spec, SharedAttentionSpec):
        assert position_embeddings is not None
        assert shared is not None
        q, k, v = shared_attention.heads(module, runtime, projected, position_embeddings, shared)
        modifiers["window"] = module.sliding_window
    else:
        q, k, v, gate = _heads(module, spec, projected)
        q, k = normalise_and_rotate(module, spec, runtime, q, k, _tables(module, spec, position_embeddings))
        scale *= 1.0 if spec.query_scale is None else getattr(module, spec.query_scale)
        if spec.window_if is None or getattr(module, spec.window_if):
            modifiers["window"] = _read(module, spec.window)
        modifiers |= {"softcap": _read(module, spec.softcap) or None, "sinks": _read(module, spec.sinks)}
    if not isinstance(spec, SharedAttentionSpec) and spec.scales_by_position:
        q = q * position_scale(module, packed).to(q.dtype)[:, None, None]
    dropout = 0.0 if spec.dropout is None or not module.training else getattr(module, spec.dropout)
    call = AttentionCall(q, k, v, packed, scale=scale, dropout=dropout, store=store, **modifiers)
    out = attend(call, runtime.attention)
    if gate is None:
        return out.flatten(1)
    gate = gate[..., None] if gate.shape[-1] == out.shape[1] else gate.reshape(out.shape)
    return (out * torch.sigmoid(gate)).flatten(1)


def two_way_of(module: Any, spec: Spec | None) -> TwoWay | None:
    """Return how an attention module uses a batch's blocks, or None if it is causal in any batch."""
    if isinstance(spec, SharedAttentionSpec) and spec.two_way_if and getattr(module, spec.two_way_if) is None:
        return None
    return spec.two_way if isinstance(spec, (AttentionSpec, SharedAttentionSpec)) else None


def drop(module: nn.Module, name: str | None, x: Tensor) -> Tensor:
    """Apply dropout with the probability in the module's attribute ``name``, if it has one and the module trains."""
    return F.dropout(x, getattr(module, name)) if drops(module, name) else x  # type: ignore[arg-type]


def drops(module: nn.Module, name: str | None) -> bool:
    """Return whether :func:`drop` changes anything."""
    return name is not None and bool(module.training and getattr(module, name))


def _heads(
    module: AttentionLike, spec: AttentionSpec, projected: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Split projections into queries ``[T, H, D]``, keys and values ``[T, K, D]``, and a gate or None.

    The gate is ``[T, H * D]``, or ``[T, H]`` if it is one number for each head.

    Queries and keys are already normalised if the family normalises the whole projection.
    """
    head_dim = module.head_dim
    gate: Tensor | None = None
    if spec.gate is not None:
        *projected, gate = projected
    if spec.qkv is not None:
        fused = projected[0].unflatten(-1, (-1, head_dim))
        groups = module.num_key_value_groups
        kv_heads = fused.shape[1] // (groups + 2)
        q, k, v = fused.split((groups * kv_heads, kv_heads, kv_heads), 1)
        return q, k, v, gate
    q, k, v = projected
    if spec.gated:
        both = q.unflatten(-1, (-1, 2 * head_dim))
        q, gate = both[..., :head_dim], both[..., head_dim:].flatten(1)
    if norm_place(module, spec) == "flat" and hasattr(module, spec.norms[0]):
        q, k = (getattr(module, name)(x) for name, x in zip(spec.norms, (q, k), strict=True))
    q, k, v = (x if x.ndim == 3 else x.unflatten(-1, (-1, head_dim)) for x in (q, k, v))
    return q, k if spec.key_scale is None else k * getattr(module, spec.key_scale), v, gate


def _tables(module: nn.Module, spec: AttentionSpec, tables: Tables | None) -> Tables | None:
    """Return cos and sin in the ops' layout, ``[T, R]``, or None for a layer without positions."""
    if tables is None or (spec.rope_if and not any(_holds(module, name) for name in spec.rope_if)):
        return None
    cos, sin = tables[0][0], tables[1][0]
    if spec.rope_tables == "repeated":
        return repeated(cos), repeated(sin)
    if spec.rope_tables == "once":
        return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    return cos, sin


def _holds(module: nn.Module, name: str) -> bool:
    return not getattr(module, name[1:]) if name.startswith("!") else bool(getattr(module, name))


def _read(module: nn.Module, name: str | None) -> Any:
    return None if name is None else attrgetter(name)(module)
