"""Cases of a linear head with its loss, and of attention: bound by matmuls."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpack.attention_dispatch import AttentionCall, AttentionShape, attend, attend_on_copies, explain
from fastpack.bench.ops.case import LIGER, OURS, PLAIN, Case, Inputs, Maker, Run, liger_run
from fastpack.ops.loss.linear_cross_entropy import linear_cross_entropy
from fastpack.packing.pairs import count_pairs
from fastpack.packing.prefixes import Prefixes
from fastpack.packing.seqlens import PackedSeqLens


def _loss_case(name: str, what: str, *, trained: bool) -> Case:
    """Return the case of a head that trains, or of a frozen one, which needs one matmul less."""

    def inputs(make: Maker) -> Inputs:
        size = make.sizes
        weight = make.tensor(size.vocab_size, size.hidden_size, scale=size.hidden_size**-0.5, grad=trained)
        labels = torch.randint(size.vocab_size, (make.tokens,), generator=make.generator, device=make.generator.device)
        return [make.tensor(make.tokens, size.hidden_size), weight, labels]

    return Case(
        name,
        what,
        inputs,
        lambda _: {
            PLAIN: _plain_loss,
            OURS: functools.partial(linear_cross_entropy, reduction="mean"),
            LIGER: _liger_loss,
        },
        lambda make: (2 + trained) * 2 * make.tokens * make.sizes.vocab_size * make.sizes.hidden_size,
        "flops",
    )


def _plain_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)


def _liger_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Any:
    """Return the loss alone; Liger's Function returns more."""
    run = liger_run("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")
    return run(hidden, weight, labels)[0]


def _attention_inputs(make: Maker) -> Inputs:
    size = make.sizes
    heads = (size.num_attention_heads, size.num_key_value_heads, size.num_key_value_heads)
    packed = PackedSeqLens.from_lengths(make.sequence_lengths(), device=make.generator.device)
    return [*(make.tensor(make.tokens, count, size.head_dim) for count in heads), packed]


def _attend(q: Tensor, k: Tensor, v: Tensor, packed: PackedSeqLens, *, backend: str) -> Tensor:
    return attend(AttentionCall(q, k, v, packed, scale=q.shape[-1] ** -0.5), backend)


def _attention_runs(inputs: Inputs) -> dict[str, Run]:
    """Return the available backends; plain is torch's own attention on each run of equally long sequences."""
    return {
        PLAIN: functools.partial(_attend, backend="segments"),
        **{name: functools.partial(_attend, backend=name) for name in _available(_shape(inputs))},
    }


def _shape(inputs: Inputs) -> AttentionShape:
    q, k, v, packed = inputs
    return AttentionCall(q, k, v, packed, scale=1.0).shape


def _available(shape: AttentionShape) -> list[str]:
    """Return the backends that can serve a shape, but for the slow ones of a CPU."""
    names = [name for name, reason in explain(shape).items() if reason is None]
    return [name for name in names if name not in ("reference", "segments")]


def _attention_flops(make: Maker) -> int:
    """Count two matmuls forward and five backward, below the diagonal."""
    return 7 * 2 * count_pairs(make.sequence_lengths()) * make.sizes.num_attention_heads * make.sizes.head_dim


PROMPT, COMPLETIONS = 8192, range(500, 2001, 100)
"""Tokens of a shared prompt and of its completions; other T have the same shares."""
MORE_PAIRS = 3.4
"""How many times as many pairs of a query and a key there are if each completion has its own copy of the prompt."""


def _tree_lengths(tokens: int) -> tuple[int, list[int]]:
    """Return the tokens of a prompt and of each completion, which sum to T."""
    ends = [*itertools.accumulate(COMPLETIONS, initial=PROMPT)]
    prompt, *others = (max(1, round(tokens * end / ends[-1])) for end in ends)
    return prompt, [end - begin for begin, end in itertools.pairwise([prompt, *others])]


def _tree_inputs(make: Maker) -> Inputs:
    prompt, completions = _tree_lengths(make.tokens)
    prefixes = Prefixes(tuple(range(len(completions))), (0, *[prompt] * (len(completions) - 1)))
    lengths = [prompt + completion for completion in completions]
    packed = PackedSeqLens.from_lengths(lengths, device=make.generator.device).share(prefixes)
    return [*_attention_inputs(make)[:3], packed]


def _tree_runs(inputs: Inputs) -> dict[str, Run]:
    """Return the available backends: each with copies of the prompt, and those that serve segments without."""
    tree = _shape(inputs)
    on_copies = replace(tree, visibility=replace(tree.visibility, segments=False))
    return {
        PLAIN: functools.partial(_attend_on_copies, backend="segments"),
        **{f"{name}, copies": functools.partial(_attend_on_copies, backend=name) for name in _available(on_copies)},
        **{name: functools.partial(_attend, backend=name) for name in _available(tree)},
    }


def _attend_on_copies(q: Tensor, k: Tensor, v: Tensor, packed: PackedSeqLens, *, backend: str) -> Tensor:
    assert packed.shared is not None
    return attend_on_copies(AttentionCall(q, k, v, packed, scale=q.shape[-1] ** -0.5), packed.shared, backend)


def _tree_flops(make: Maker) -> int:
    """Count two matmuls forward and five backward, over the pairs of the tree."""
    tree = _tree_inputs(replace(make, generator=torch.Generator()))[3].shared.tree
    pairs: int = tree.pairs
    return 7 * 2 * pairs * make.sizes.num_attention_heads * make.sizes.head_dim


CASES = [
    _loss_case("linear_cross_entropy", "the loss on a frozen head", trained=False),
    _loss_case("linear_cross_entropy_trained", "the loss on a head that trains", trained=True),
    Case(
        "attention",
        "causal attention over packed sequences",
        _attention_inputs,
        _attention_runs,
        _attention_flops,
        "flops",
    ),
    Case(
        "attention_tree",
        f"16 completions of one prompt, T tokens in all; with copies of it there are {MORE_PAIRS} x as many pairs",
        _tree_inputs,
        _tree_runs,
        _tree_flops,
        "flops",
    ),
]
