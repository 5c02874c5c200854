"""FlexAttention, compiled, with a block mask that is built once per batch from the offsets.

Sources: Dong et al., "Flex Attention", arXiv:2412.05496 (invisible blocks are skipped, and fully visible blocks run
without a mask). Attention sinks are applied as in gpt-oss, through the log-sum-exp: ``out * sigmoid(lse - sink)``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastpack.backends.call import AttentionCall, AttentionShape
from fastpack.backends.limits import FLOAT_DTYPES, Limits, lacks, needs_cuda, wrong_dtype, wrong_sizes
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.utils.compile import compile_often

SERVES = ("window",)
LIMITS = Limits("a GPU from Ampere on, compiled", ("softcap", "sinks"), "comes with torch")

BLOCK = 128


def rejects(shape: AttentionShape) -> str | None:
    """Return why FlexAttention can't compute this, or None."""
    why = needs_cuda(shape, (8, 0))
    if why is not None:
        return f"{why} (its compiled backward is written for GPUs)"
    return lacks(shape, "FlexAttention", "dropout") or wrong_dtype(shape, FLOAT_DTYPES) or wrong_sizes(shape, least=16)


def run(call: AttentionCall) -> Tensor:
    """Return ``[T, H, V]``; the kernel reads grouped key/value heads without repeating them."""
    from torch.nn.attention.flex_attention import AuxRequest

    window = call.visibility.window
    q, k, v = (t.transpose(0, 1)[None] for t in (call.q, call.k, call.v))
    keywords: dict[str, Any] = {
        "score_mod": None if call.softcap is None else _softcap(call, call.softcap),
        "block_mask": call.packed.memo(("flex", window), lambda: block_mask(call.packed, window)),
        "scale": call.scale,
        "enable_gqa": call.groups > 1,
        "kernel_options": {"BACKEND": "TRITON"},  # else torch picks its decoding kernel for short batches
    }
    if call.sinks is None:
        out: Tensor = _compiled()(q, k, v, **keywords)
    else:
        out, aux = _compiled()(q, k, v, **keywords, return_aux=AuxRequest(lse=True))
        out = out * torch.sigmoid(aux.lse - call.sinks.to(aux.lse.dtype)[:, None])[..., None].to(out.dtype)
    return out[0].transpose(0, 1)


def block_mask(packed: PackedSeqLens, window: int | None) -> Any:
    """Build the ``BlockMask`` of packed causal attention by comparing ``(T / 128)^2`` blocks, never T x T tokens.

    A query block sees key blocks from the first key that its first token sees up to its own block. A key block is full
    (it needs no mask) if it begins at or after the first key that the query block's last token sees.
    """
    from torch.nn.attention.flex_attention import BlockMask

    device = packed.cu_seqlens.device
    total = packed.total_tokens
    blocks = -(-total // BLOCK)
    # the first key that each token may see: its sequence's first token, or the window's edge
    sequence_start = packed.cu_seqlens[:-1].long()[packed.seq_idx[0].long()]
    first_key = sequence_start
    if window is not None:
        first_key = torch.maximum(first_key, torch.arange(total, device=device) - window + 1)
    edge = torch.arange(blocks, device=device) * BLOCK
    lowest = first_key[edge] // BLOCK  # first_key never falls from one token to the next
    last_token = (edge + BLOCK - 1).clamp(max=total - 1)
    whole = edge + BLOCK <= total  # the last block may hold fewer tokens, and is then never full
    row, column = torch.arange(blocks, device=device)[:, None], torch.arange(blocks, device=device)[None]
    seen = (column >= lowest[:, None]) & (column <= row)
    full = (column < row) & (column * BLOCK >= first_key[last_token][:, None]) & whole[:, None]
    fields: dict[str, Any] = {}
    for kind, blocks_of_kind in (("", seen & ~full), ("full_", full)):
        # from_kv_blocks would transpose the blocks with vmap, which does not work inside an operator
        fields |= _ordered(f"{kind}kv", blocks_of_kind) | _ordered(f"{kind}q", blocks_of_kind.T)
    return BlockMask(
        **fields, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=_mask_mod(packed.seq_idx[0], window), seq_lengths=(total, total)
    )


def _ordered(side: str, blocks: Tensor) -> dict[str, Tensor]:
    """Return the number of blocks that each row of blocks sees ``[1, 1, Q]``, and their indices ``[1, 1, Q, K]``."""
    count = blocks.sum(-1, dtype=torch.int32)
    order = torch.argsort(blocks.to(torch.int32), dim=-1, descending=True, stable=True).to(torch.int32)
    return {f"{side}_num_blocks": count[None, None], f"{side}_indices": order[None, None].contiguous()}


def _mask_mod(seq_idx: Tensor, window: int | None) -> Callable[..., Tensor]:
    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (seq_idx[query] == seq_idx[key])

    if window is None:
        return visible
    limit = window

    def visible_in_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible(batch, head, query, key) & (query - key < limit)

    return visible_in_window


def _softcap(call: AttentionCall, limit: float) -> Callable[..., Tensor]:
    # The limit is a tensor because torch.compile would make a float symbolic, and inductor refuses that in a score_mod.
    heads = call.q.shape[1]
    limits = call.packed.memo(("flex softcap", limit, heads), lambda: call.q.new_full((heads,), limit).float())

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return limits[head] * torch.tanh(score / limits[head])

    return score_mod


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # dynamic: lengths change with every batch. fullgraph: if dynamo can't compile, or has compiled too often, it raises
    # rather than run eagerly with T x T scores. Each window, softcap, dtype and head count compiles again, so
    # several models in one process would exceed dynamo's limit of 8.
    return compile_often(flex_attention, 64, dynamic=True, fullgraph=True)
