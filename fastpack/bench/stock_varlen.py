"""FlashAttention-2 for a stock transformers model: the best attention that a user could install today.

If flash-attn is installed, this is transformers' own ``flash_attention_2``. Otherwise it is torch's copy of the kernel,
registered at transformers' two extension points. It reads ``cu_seq_lens_q`` and ``max_length_q`` from TRL's collator,
as flash-attn does, and so makes the host wait no more often.

Only the stock variants use it, in their own process; fastpack's backends are not involved.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastpack.backends.torch_varlen import grouped_heads

NAME = "bench_varlen"


def implementation() -> tuple[str, str]:
    """Return a name for ``attn_implementation``, registered if needed, and a name to show."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask
    from transformers.utils.import_utils import is_flash_attn_2_available

    if is_flash_attn_2_available():
        return "flash_attention_2", "flash-attn 2"
    AttentionInterface.register(NAME, varlen_forward)
    AttentionMaskInterface.register(NAME, flash_attention_mask)
    return NAME, "FA2 of torch"


def varlen_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int,
    max_length_k: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention over packed sequences, with the signature that transformers calls.

    Args:
        module: the attention module.
        query: ``[1, H, T, D]``.
        key: ``[1, K, T, D]``.
        value: ``[1, K, T, D]``.
        attention_mask: None.
        cu_seq_lens_q: int32 ``[N + 1]``.
        cu_seq_lens_k: int32 ``[N + 1]``.
        max_length_q: the longest sequence.
        max_length_k: the same.
        scaling: the factor on the scores, or None for ``D ** -0.5``.
        sliding_window: the window, or None.
        dropout: 0.
        **kwargs: further keywords of transformers, which are ignored.

    Returns:
        The output ``[1, T, H, D]``, and None for the attention weights.

    Raises:
        ValueError: there is dropout, which the kernel lacks, or the batch is padded.
    """
    from torch.nn.attention import varlen

    if dropout or attention_mask is not None:
        raise ValueError("The benchmark's varlen attention takes flattened batches, without dropout or a mask.")
    q, k, v = (t.transpose(1, 2).squeeze(0) for t in (query, key, value))
    kernel: Any = varlen.varlen_attn
    out = kernel(
        q,
        k,
        v,
        cu_seq_lens_q,
        cu_seq_lens_k,
        max_length_q,
        max_length_k,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        **grouped_heads(q.shape[1] != k.shape[1]),
    )
    return out.unsqueeze(0), None
