"""FlashAttention-2 for a stock transformers model: the best attention that a user could install today.

If flash-attn is installed, this is transformers' own ``flash_attention_2``. Otherwise it is torch's copy of the kernel,
registered at transformers' two extension points. In flattened batches it reads ``cu_seq_lens_q`` and ``max_length_q``
from TRL's collator, as flash-attn does, and so makes the host wait no more often. In padded batches each layer
un-pads queries, keys and values by the mask, as flash-attn does too.

Stock variants use it, and image towers, which stay stock; fastpack's backends are not involved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fastpack.backends.torch_varlen import grouped_heads
from fastpack.bench.shapes import TOWER
from fastpack.model.unwrap import find_parts

NAME, IN_TOWERS = "bench_varlen", "bench_flash_varlen"
"""Image towers hand the boundaries of images to an implementation with "flash" in its name. Models can't be built with
such a name, since transformers would look for a package."""


def implementation() -> tuple[str, str]:
    """Return a name for ``attn_implementation``, registered if needed, and a name to show."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask
    from transformers.utils.import_utils import is_flash_attn_2_available

    if is_flash_attn_2_available():
        return "flash_attention_2", "flash-attn 2"
    for name in (NAME, IN_TOWERS):
        AttentionInterface.register(name, varlen_forward)
        AttentionMaskInterface.register(name, flash_attention_mask)
    return NAME, "FA2 of torch"


def use_in_tower(model: Any) -> None:
    """Let the image tower of a composite attend by FlashAttention-2."""
    name, _ = implementation()
    tower = getattr(find_parts(model).composite, TOWER)
    tower.config._attn_implementation = IN_TOWERS if name == NAME else name


def varlen_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    is_causal: bool = True,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention over packed or padded sequences, with the signature that transformers calls.

    Args:
        module: the attention module.
        query: ``[B, H, S, D]``; B is 1 if boundaries are given.
        key: ``[B, K, S, D]``.
        value: ``[B, K, S, D]``.
        attention_mask: ``[B, S]``, 1 for real tokens; or None.
        cu_seq_lens_q: int32 ``[N + 1]``; None for a padded batch.
        cu_seq_lens_k: the same.
        max_length_q: the longest sequence; None for a padded batch.
        max_length_k: the same.
        scaling: the factor on the scores, or None for ``D ** -0.5``.
        sliding_window: the window, or None.
        dropout: 0.
        is_causal: whether a token sees no later ones.
        s_aux: None; learned attention sinks otherwise.
        **kwargs: further keywords of transformers, which are ignored.

    Returns:
        The output ``[B, S, H, D]``, with zeros at padding, and None for the attention weights.

    Raises:
        ValueError: there is dropout or there are sinks, which the kernel lacks.
    """
    from torch.nn.attention import varlen

    if dropout or s_aux is not None:
        raise ValueError("The benchmark's varlen attention has no dropout and no attention sinks.")
    tokens = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    rows, columns = query.shape[0], query.shape[2]
    real = None
    if cu_seq_lens_q is None or cu_seq_lens_k is None or max_length_q is None or max_length_k is None:
        mask = query.new_ones(rows, columns) if attention_mask is None else attention_mask
        lengths = mask.sum(1, dtype=torch.int32)
        cu_seq_lens_q = cu_seq_lens_k = functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        max_length_q = max_length_k = int(lengths.max())
        real = mask.flatten().nonzero()[:, 0]
        tokens = [x.index_select(0, real) for x in tokens]
    kernel: Any = varlen.varlen_attn
    ahead = 0 if is_causal else -1
    out = kernel(
        *tokens,
        cu_seq_lens_q,
        cu_seq_lens_k,
        max_length_q,
        max_length_k,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, ahead),
        **grouped_heads(query.shape[1] != key.shape[1]),
    )
    if real is not None:
        out = out.new_zeros(rows * columns, *out.shape[1:]).index_copy(0, real, out)
    return out.unflatten(0, (rows, columns)), None
