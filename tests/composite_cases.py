"""Runs of composite models on rows with images, compared with each row alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastpack.exactness.image_text import TOKEN_TYPES
from fastpack.model.unwrap import find_parts

Row = dict[str, Tensor]
CAUSAL = ["qwen3_vl", "qwen2_5_vl", "llava", "internvl", "mistral3", "qwen3_5", "smolvlm", "idefics3", "lfm2_vl"]
"""Composites whose text model sees an image as it sees text, and has a row."""
BOUND = 1e-5
GRADIENT_BOUND = 1e-4


def results(model: Any, batches: list[dict[str, Any]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits of all real tokens, and the gradients of a fixed sum of them."""
    model.zero_grad()
    outs = []
    for batch in batches:
        logits, mask = model(**batch).logits, batch.get("attention_mask")
        outs.append(logits.flatten(0, 1) if mask is None else logits[mask.bool()])
    joined = torch.cat(outs)
    weights = torch.randn(joined.shape, generator=torch.Generator().manual_seed(0))
    (joined * weights.to(joined)).sum().backward()
    return joined.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def off(one: tuple[Tensor, Mapping[str, Tensor]], other: tuple[Tensor, Mapping[str, Tensor]]) -> tuple[float, float]:
    """Return the relative errors of logits and of the worst gradient, with a floor of 1e-3 of the largest gradient."""
    assert one[1].keys() == other[1].keys()
    assert all(bool(x.isfinite().all()) for x in (*one[1].values(), *other[1].values())), "else max() may skip it"
    floor = 1e-3 * max(grad.abs().max() for grad in other[1].values())
    grads = [(one[1][n] - g).abs().max() / g.abs().max().clamp(min=floor) for n, g in other[1].items()]
    return ((one[0] - other[0]).abs().max() / other[0].abs().max()).item(), max(grads).item()


@contextmanager
def text_tokens(model: Any) -> Iterator[list[int]]:
    """Record the number of tokens that reach the text model's first layer."""
    counts: list[int] = []
    layer = find_parts(model).backbone.layers[0]
    handle = layer.register_forward_pre_hook(lambda _, args: counts.append(args[0].shape[0] * args[0].shape[1]))
    with handle:
        yield counts


def answers(row: Row, lengths: Sequence[int], seed: int) -> list[Row]:
    """Return a row several times, each with another completion of the given length."""
    rows = []
    for at, length in enumerate(lengths):
        completion = torch.randint(10, 90, (1, length), generator=torch.Generator().manual_seed(seed + at))
        completion[0, 0] = 3 + at + seed
        more = {name: torch.zeros_like(completion) for name in TOKEN_TYPES} | {"input_ids": completion}
        rows.append({name: torch.cat([x, more[name]], 1) if name in more else x for name, x in row.items()})
    return rows
