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
from fastpack.packing.two_way import SeenRanges
from fastpack.utils.compile import compile_often

SERVES = ("window", "two_way")
LIMITS = Limits("a GPU from Ampere on, compiled", ("softcap", "sinks", "image blocks"), "comes with torch")

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

    window, ranges = call.visibility.window, call.seen_ranges
    q, k, v = (t.transpose(0, 1)[None] for t in (call.q, call.k, call.v))
    keywords: dict[str, Any] = {
        "score_mod": None if call.softcap is None else _softcap(call, call.softcap),
        "block_mask": call.packed.memo(
            ("flex", window, call.visibility.two_way), lambda: block_mask(call.packed, window, ranges)
        ),
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


def block_mask(packed: PackedSeqLens, window: int | None, ranges: SeenRanges | None = None) -> Any:
    """Build the ``BlockMask`` of packed attention by comparing ``(T / 128)^2`` blocks, never T x T tokens.

    A query block sees key blocks from the first key that its first token sees to the last key that its last token sees.
    A key block is full (it needs no mask) if it lies between the first key that the query block's last token sees and
    the last key that its first token sees.

    Args:
        packed: where sequences begin.
        window: how many tokens a query sees up to itself, or None.
        ranges: the keys that each query sees, if the batch has blocks that see ahead; else attention is causal.
    """
    from torch.nn.attention.flex_attention import BlockMask

    device = packed.cu_seqlens.device
    total = packed.total_tokens
    blocks = -(-total // BLOCK)
    if ranges is None:
        token = torch.arange(total, device=device)
        first_key, end_key = packed.cu_seqlens[:-1].long()[packed.seq_idx[0].long()], token + 1
        if window is not None:
            first_key = torch.maximum(first_key, token - window + 1)
        mask_mod = _mask_mod(packed.seq_idx[0], window)
    else:
        first_key, end_key = ranges.first_key, ranges.end_key
        mask_mod = _range_mask_mod(first_key, end_key)
    # neither end of the range falls from one token to the next
    edge = torch.arange(blocks, device=device) * BLOCK
    last_token = (edge + BLOCK - 1).clamp(max=total - 1)
    whole = edge + BLOCK <= total  # the last block may hold fewer tokens, and is then never full
    column = torch.arange(blocks, device=device)[None]
    lowest, highest = first_key[edge] // BLOCK, (end_key[last_token] - 1) // BLOCK
    seen = (column >= lowest[:, None]) & (column <= highest[:, None])
    after_first, before_end = (
        column * BLOCK >= first_key[last_token][:, None],
        (column + 1) * BLOCK <= end_key[edge][:, None],
    )
    full = after_first & before_end & whole[:, None]
    fields: dict[str, Any] = {}
    for kind, blocks_of_kind in (("", seen & ~full), ("full_", full)):
        # from_kv_blocks would transpose the blocks with vmap, which does not work inside an operator
        fields |= _ordered(f"{kind}kv", blocks_of_kind) | _ordered(f"{kind}q", blocks_of_kind.T)
    return BlockMask(**fields, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=mask_mod, seq_lengths=(total, total))


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


def _range_mask_mod(first_key: Tensor, end_key: Tensor) -> Callable[..., Tensor]:
    def in_range(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first_key[query]) & (key < end_key[query])

    return in_range


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
