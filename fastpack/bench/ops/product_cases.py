"""What comes of a linear head, and attention: bound by matrix products."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpack.attention_dispatch import AttentionCall, attend, explain
from fastpack.bench.ops.case import OURS, PLAIN, Case, Inputs, Maker, Run
from fastpack.ops.loss.linear_cross_entropy import linear_cross_entropy
from fastpack.packing.seqlens import PackedSeqLens


def _loss_inputs(make: Maker, *, trained: bool) -> Inputs:
    size = make.sizes
    hidden = make.tensor(make.tokens, size.hidden)
    weight = make.tensor(size.vocabulary, size.hidden, scale=size.hidden**-0.5, grad=trained)
    return [hidden, weight, make.integers(size.vocabulary, make.tokens)]


def _plain_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)


def _loss_runs(_: Inputs) -> dict[str, Run]:
    return {PLAIN: _plain_loss, OURS: functools.partial(linear_cross_entropy, reduction="mean")}


def _liger_loss(_: Inputs) -> Run:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return lambda hidden, weight, labels: LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, labels)[0]


def _loss_flops(make: Maker, products: int) -> int:
    return products * 2 * make.tokens * make.sizes.vocabulary * make.sizes.hidden


def _packed(make: Maker) -> PackedSeqLens:
    return PackedSeqLens.from_lengths(make.sequence_lengths(), device=make.generator.device)


def _attention_inputs(make: Maker) -> Inputs:
    size = make.sizes
    heads = (size.heads, size.kv_heads, size.kv_heads)
    return [*(make.tensor(make.tokens, count, size.head_dim) for count in heads), _packed(make)]


def _attend(q: Tensor, k: Tensor, v: Tensor, packed: PackedSeqLens, *, backend: str) -> Tensor:
    return attend(AttentionCall(q, k, v, packed, scale=q.shape[-1] ** -0.5), backend)


def _attention_runs(inputs: Inputs) -> dict[str, Run]:
    q, k, v, packed = inputs
    shape = AttentionCall(q, k, v, packed, scale=1.0).shape
    serving = [name for name, reason in explain(shape).items() if reason is None and name != "reference"]
    # torch's own attention, one run of equally long sequences after the other
    serving.sort(key=lambda name: name != "segments")
    return {PLAIN if name == "segments" else name: functools.partial(_attend, backend=name) for name in serving}


def _attention_flops(make: Maker) -> int:
    """Two products forward and five backward of what is below the diagonal."""
    pairs = sum(length * (length + 1) // 2 for length in make.sequence_lengths())
    return 7 * 2 * pairs * make.sizes.heads * make.sizes.head_dim


CASES = [
    Case(
        "linear_cross_entropy",
        "the loss on a frozen head",
        functools.partial(_loss_inputs, trained=False),
        _loss_runs,
        lambda make: _loss_flops(make, 2),
        "flops",
        liger=_liger_loss,
    ),
    Case(
        "linear_cross_entropy_trained",
        "the loss on a head that trains",
        functools.partial(_loss_inputs, trained=True),
        _loss_runs,
        lambda make: _loss_flops(make, 3),
        "flops",
        liger=_liger_loss,
    ),
    Case(
        "attention",
        "causal attention over packed sequences",
        _attention_inputs,
        _attention_runs,
        _attention_flops,
        "flops",
        packed=True,
    ),
]
