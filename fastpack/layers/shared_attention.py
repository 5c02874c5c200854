"""Attention whose later layers take the keys and values of an earlier layer.

Shape suffixes: T tokens, H query heads, K key/value heads, D head size, R rotated elements of a head.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from torch import Tensor

from fastpack.families.spec import AttentionSpec
from fastpack.layers.rope import normalise_and_rotate
from fastpack.layers.runtime import Runtime
from fastpack.utils.protocols import AttentionLike

SharedStates = MutableMapping[str, tuple[Tensor, Tensor]]
"""Keys and values ``[1, K, T, D]`` by kind of layer, as in transformers."""
_HEADS = AttentionSpec(qk_norm="head")
_QUERIES = AttentionSpec(qk_norm="head", norms=("q_norm", "q_norm"))  # there are no keys for the second norm


def projections(module: AttentionLike) -> tuple[str, ...]:
    """Return the names of a layer's projections: to queries, and to keys and values if it has its own."""
    if module.is_kv_shared_layer:
        return ("q_proj",)
    return ("q_proj", "k_proj") if module.v_proj is None else ("q_proj", "k_proj", "v_proj")


def heads(
    module: AttentionLike,
    runtime: Runtime,
    projected: list[Tensor],
    tables: tuple[Tensor, Tensor],
    shared: SharedStates,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries ``[T, H, D]``, keys and values ``[T, K, D]``.

    Args:
        module: the attention module.
        runtime: settings of the patched model.
        projected: the outputs of :func:`projections`, ``[T, heads * D]`` each.
        tables: cos and sin, ``[1, T, R]``.
        shared: keys and values of other layers. Layers that share theirs write them here; layers without any read them.
    """
    cos, sin = tables[0][0], tables[1][0]
    q, *rest = (x.unflatten(-1, (-1, module.head_dim)) for x in projected)
    if module.is_kv_shared_layer:
        q, _ = normalise_and_rotate(module, _QUERIES, runtime, q, q.detach()[:, :0], (cos, sin))
        k, v = (x.squeeze(0).transpose(0, 1).to(q.device) for x in shared[module.layer_type])
        return q, k, v
    k, v = rest[0], module.v_norm(rest[-1])
    q, k = normalise_and_rotate(module, _HEADS, runtime, q, k, (cos, sin))
    if module.store_full_length_kv:
        shared[module.layer_type] = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    return q, k, v
