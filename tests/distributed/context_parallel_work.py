"""The work of each rank for sequences spread over two ranks: the stock model's loss, and a patched model's error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from rank_work import device
from tiny import VOCAB
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import _cp_options
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import fastpack
from fastpack.exactness.tiny import build_tiny

S = 16
CALLS: list[str] = []


def whole_batch() -> dict[str, Tensor]:
    """Return two rows of S tokens each, and their targets."""
    ids = torch.randint(3, VOCAB, (2, S), generator=torch.Generator().manual_seed(0)).to(device())
    targets = nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    positions = torch.arange(S, device=device()).expand(2, S).contiguous()
    return {"input_ids": ids, "targets": targets, "position_ids": positions}


def shard() -> dict[str, Tensor]:
    """Return this rank's part of each row."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return {name: x.chunk(world, 1)[rank].contiguous() for name, x in whole_batch().items()}


def loss_of(model: Any, batch: dict[str, Tensor], **more: Any) -> float:
    """Return the sum over a batch, and over both ranks if each has a part of it."""
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False, **more).logits
    result = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten(), reduction="sum")
    if batch["input_ids"].shape[1] < S:
        dist.all_reduce(result)
    return float(result)


def all_to_all_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    """Compute Ulysses attention: all tokens of some heads on each rank, then all heads of its tokens."""
    CALLS.append("all to all")
    world = dist.get_world_size()

    def exchange(x: Tensor, split: int, joined: int) -> Tensor:
        parts = torch.stack(x.chunk(world, split)).contiguous()
        return torch.cat(all_to_all_single(torch.empty_like(parts), parts).unbind(0), joined)

    q, k, v = (exchange(x, 1, 2) for x in (query, key, value))
    out, _ = sdpa_attention_forward(module, q, k, v, None, **{**kwargs, "is_causal": True})
    return exchange(out, 1, 2), None


def hidden_exchange(*args: Any, **kwargs: Any) -> Any:
    """Call :func:`all_to_all_attention`; this function itself names no collective."""
    return all_to_all_attention(*args, **kwargs)


@contextlib.contextmanager
def in_the_table(how: str, name: str = "sdpa") -> Iterator[None]:
    """Put the all-to-all attention in transformers' table for the block."""
    before = ALL_ATTENTION_FUNCTIONS[name]
    if how == "assigned":
        ALL_ATTENTION_FUNCTIONS[name] = hidden_exchange
    else:
        AttentionInterface.register(name, hidden_exchange)
    try:
        yield
    finally:
        if how == "assigned":
            del ALL_ATTENTION_FUNCTIONS[name]
        else:
            AttentionInterface.register(name, before)


def build(family: str = "llama") -> Any:
    return build_tiny(family, attn_implementation="sdpa").to(device()).train()


def said_by(function: Any, *args: Any, **kwargs: Any) -> str:
    """Return the message of the PatchError that a call raises, or its result if it raises none."""
    try:
        result = function(*args, **kwargs)
    except fastpack.errors.PatchError as error:
        return str(error)
    return f"nothing, and returned {result}"


def ulysses(how: str, when: str, family: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the errors and losses with all-to-all attention that is registered before a patch, or after it."""
    model = build(family)
    result: dict[str, Any] = {"whole": loss_of(model, whole_batch())}
    if when == "after":
        fastpack.patch(model, **options)
    CALLS.clear()
    with in_the_table(how):
        result["said"] = said_by(loss_of if when == "after" else fastpack.patch, model, *[shard()][: when == "after"])
        result["calls"] = len(CALLS)
        fastpack.unpatch(model)
        result["stock"] = loss_of(model, shard())
        result["calls of stock"] = len(CALLS)
    fastpack.patch(model, **options)
    result["afterwards"] = loss_of(model, whole_batch())
    return result


def torchs(balanced: bool, mask: bool, labels: bool) -> dict[str, Any]:
    """Run torch's own context parallelism around a patched model."""
    model = build()
    result: dict[str, Any] = {"whole": loss_of(model, whole_batch())}
    fastpack.patch(model, attention="reference")
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))

    @contextlib.contextmanager
    def spread() -> Iterator[dict[str, Tensor]]:
        batch = whole_batch()
        before, _cp_options.enable_load_balance = _cp_options.enable_load_balance, balanced
        try:
            buffers = list(batch.values())
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers)):
                yield batch
        finally:
            _cp_options.enable_load_balance = before

    more: dict[str, Any] = {}
    with spread() as batch:
        if mask:
            more["attention_mask"] = torch.ones_like(batch["input_ids"])
        if labels:
            more["labels"] = batch["input_ids"]
        result["said"] = said_by(loss_of, model, batch, **more)
        result["patching"] = said_by(fastpack.patch, build())
    fastpack.unpatch(model)
    return result
