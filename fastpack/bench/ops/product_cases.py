"""What comes of a linear head, and attention: bound by matrix products."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpack.attention_dispatch import AttentionCall, attend, explain
from fastpack.bench.ops.case import OURS, PLAIN, Case, Maker, Run, Work, packed_lengths, with_liger
from fastpack.ops.linear_cross_entropy import linear_cross_entropy
from fastpack.ops.sequence_log_probs import sequence_log_probs
from fastpack.packing.seqlens import PackedSeqLens


def _loss_inputs(make: Maker, *, trained: bool) -> list[Any]:
    size = make.sizes
    hidden = make.tensor(make.tokens, size.hidden)
    weight = make.tensor(size.vocabulary, size.hidden, scale=size.hidden**-0.5, grad=trained)
    device = make.generator.device
    labels = torch.randint(size.vocabulary, (make.tokens,), generator=make.generator, device=device)
    return [hidden, weight, labels]


def _plain_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)


def _liger_loss() -> Run:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return lambda hidden, weight, labels: LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, labels)[0]


def _loss_runs(inputs: Sequence[Any]) -> dict[str, Run]:
    runs: dict[str, Run] = {PLAIN: _plain_loss, OURS: functools.partial(linear_cross_entropy, reduction="mean")}
    return with_liger(runs, inputs[0].device, _liger_loss)


def _packed(make: Maker) -> PackedSeqLens:
    return PackedSeqLens.from_lengths(packed_lengths(make), device=make.generator.device)


def _log_probs_inputs(make: Maker) -> list[Any]:
    return [*_loss_inputs(make, trained=False), _packed(make)]


def _plain_log_probs(hidden: Tensor, weight: Tensor, labels: Tensor, packed: PackedSeqLens) -> Tensor:
    logits = F.linear(hidden, weight)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    of_tokens = wide.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    offsets = packed.cu_seqlens.long()
    owner = torch.repeat_interleave(offsets.diff(), output_size=len(hidden))
    return of_tokens.new_zeros(packed.num_sequences).index_add(0, owner, of_tokens)


def _log_probs_runs(inputs: Sequence[Any]) -> dict[str, Run]:
    return {PLAIN: _plain_log_probs, OURS: sequence_log_probs}


def _loss_work(make: Maker, *, products: int) -> Work:
    return Work(flops=products * 2 * make.tokens * make.sizes.vocabulary * make.sizes.hidden)


def _logits(make: Maker) -> int:
    return make.tokens * make.sizes.vocabulary * make.dtype.itemsize


def _attention_inputs(make: Maker) -> list[Any]:
    size = make.sizes
    heads = (size.heads, size.kv_heads, size.kv_heads)
    q, k, v = (make.tensor(make.tokens, count, size.head_dim) for count in heads)
    return [q, k, v, _packed(make)]


def _attend(q: Tensor, k: Tensor, v: Tensor, packed: PackedSeqLens, *, backend: str) -> Tensor:
    return attend(AttentionCall(q, k, v, packed, scale=q.shape[-1] ** -0.5), backend)


def _attention_runs(inputs: Sequence[Any]) -> dict[str, Run]:
    q, k, v, packed = inputs
    shape = AttentionCall(q, k, v, packed, scale=1.0).shape
    serving = [name for name, reason in explain(shape).items() if reason is None and name != "reference"]
    # torch's own attention, one run of equally long sequences after the other
    serving.sort(key=lambda name: name != "segments")
    return {PLAIN if name == "segments" else name: functools.partial(_attend, backend=name) for name in serving}


def _attention_work(make: Maker, *, products: int) -> Work:
    pairs = sum(length * (length + 1) // 2 for length in packed_lengths(make))
    return Work(flops=products * 2 * pairs * make.sizes.heads * make.sizes.head_dim)


CASES = [
    Case(
        "linear_cross_entropy",
        "the loss on a frozen head",
        functools.partial(_loss_inputs, trained=False),
        _loss_runs,
        functools.partial(_loss_work, products=1),
        functools.partial(_loss_work, products=1),
        avoided=_logits,
    ),
    Case(
        "linear_cross_entropy_trained",
        "the loss on a head that trains",
        functools.partial(_loss_inputs, trained=True),
        _loss_runs,
        functools.partial(_loss_work, products=1),
        functools.partial(_loss_work, products=2),
        avoided=_logits,
    ),
    Case(
        "sequence_log_probs",
        "the log-probability of each sequence, on a frozen head",
        _log_probs_inputs,
        _log_probs_runs,
        functools.partial(_loss_work, products=1),
        functools.partial(_loss_work, products=1),
        avoided=_logits,
        packed=True,
    ),
    Case(
        "attention",
        "causal attention over packed sequences",
        _attention_inputs,
        _attention_runs,
        functools.partial(_attention_work, products=2),
        functools.partial(_attention_work, products=5),
        functools.partial(_attend, backend="reference"),
        packed=True,
    ),
]
