"""What a rank does for ``test_merges_on_two_ranks.py``."""

from __future__ import annotations

from typing import Any

import torch
from rank_work import Case, build, wrap
from torch import Tensor

import fastpack

MERGES = 20


def shards(model: Any) -> dict[str, Tensor]:
    """Return copies of this rank's parts of the base weights."""
    return {
        name: (weight.to_local() if hasattr(weight, "to_local") else weight).detach().clone()
        for name, weight in model.named_parameters()
        if "lora" not in name
    }


def merged_and_unmerged(kind: str, *, exact: bool) -> dict[str, Any]:
    """Merge adapters of a wrapped half-precision model many times; return how many weights changed, and when.

    ``sharded`` counts the weights of which this rank holds a part.
    """
    case = Case(kind, lora=True)
    model = build(case).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:  # zero at the start, so that a merge would change nothing
            weight.data.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    fastpack.patch(model)
    wrap(model, case)
    if exact:
        fastpack.exact_merges(model)
    before = shards(model)
    model.merge_adapter()
    merged = shards(model)
    model.unmerge_adapter()
    for _ in range(MERGES):
        model.merge_adapter()
        model.unmerge_adapter()
    after = shards(model)
    return {
        "sharded": sum(hasattr(weight, "placements") for weight in model.parameters()),
        "merged": sum(not torch.equal(before[name], merged[name]) for name in before),
        "drifted": sum(not torch.equal(before[name], after[name]) for name in before),
    }
