"""Multi-head latent attention: from latents to heads.

Shape suffixes: T tokens, H heads, N elements of a head without positions, R rotated elements, E size of a value, C size
of the latent of keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastpack.layers.project import project_modules
from fastpack.layers.rope import repeated
from fastpack.layers.runtime import Runtime
from fastpack.ops.rope import apply_rope
from fastpack.utils.protocols import AttentionLike


def first_projections(module: AttentionLike) -> tuple[str, str]:
    """Return the names of the two input projections: to queries or their latent, and to the key/value latent."""
    return ("q_proj" if module.q_lora_rank is None else "q_a_proj"), "kv_a_proj_with_mqa"


def heads(
    module: Any, runtime: Runtime, projected: list[Tensor], tables: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys ``[T, H, N + R]`` and values ``[T, H, E]``.

    Args:
        module: the attention module.
        runtime: settings of the patched model.
        projected: queries ``[T, H (N + R)]`` or their latent; and ``[T, C + R]``, the latent of keys and values with
            the key's rotated elements, which all heads share.
        tables: cos and sin, ``[1, T, R]``; None if nothing is rotated.
    """
    q, latent = projected
    if module.q_lora_rank is not None:
        (q,), _ = project_modules([module.q_b_proj], q, runtime, norm=module.q_a_layernorm)
    size, rotated = module.qk_nope_head_dim, module.qk_rope_head_dim
    q = q.unflatten(-1, (-1, size + rotated))
    shared = latent[:, module.kv_lora_rank :].unsqueeze(1)
    (kv,), _ = project_modules(
        [module.kv_b_proj], latent[:, : module.kv_lora_rank], runtime, norm=module.kv_a_layernorm
    )
    kv = kv.unflatten(-1, (-1, size + module.v_head_dim))
    if tables is None:
        return q, torch.cat([kv[..., :size], shared.expand(-1, kv.shape[1], -1)], -1), kv[..., size:]
    cos, sin = tables[0][0], tables[1][0]
    interleaved = module.config.rope_interleave
    if interleaved:
        # transformers also reorders the elements of pairs, in queries and keys alike, which does not change the scores
        cos, sin = repeated(cos), repeated(sin)
    rotated_q, shared = apply_rope(
        q[..., size:],
        shared,
        cos,
        sin,
        layout="interleaved" if interleaved else "half",
        implementation=runtime.kernels,
    )
    k = torch.cat([kv[..., :size], shared.expand(-1, kv.shape[1], -1)], -1)
    return torch.cat([q[..., :size], rotated_q], -1), k, kv[..., size:]
