"""Which rung each layer is on, and how much of a model runs without padding."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from torch import nn

from fastpack.families.spec import RUNGS, Rung
from fastpack.layers.read_projection import linear_sizes
from fastpack.utils.protocols import ConfigLike

WORDS: dict[str, str] = {
    "fast": "fastpack's own forwards: packed attention, the family's norms, gated MLPs",
    "varlen": "packed attention, and norms and MLPs that are known; the rest is the stock model, on real tokens only",
    "re-padded mixer": "what mixes tokens and knows no boundaries runs on one row a sequence; attention is packed, and "
    "the rest runs on real tokens only",
    "re-padded model": "the stock model on rows of equal length: exact, no faster",
}
"""What each rung means, for people."""


def layer_rungs(backbone: nn.Module, modules: Iterable[tuple[nn.Module, Rung]]) -> dict[str, tuple[str, ...]]:
    """Names of the modules that mix tokens, by rung, the highest first.

    Args:
        modules: of the backbone, each with its rung.
    """
    named = {id(module): name for name, module in backbone.named_modules()}
    found: dict[str, list[str]] = {rung: [] for rung in RUNGS}
    for module, rung in modules:
        found[rung].append(named[id(module)] or type(module).__name__)
    return {rung: tuple(names) for rung, names in found.items() if names}


def unpadded_share(backbone: Any, on_rows: Sequence[nn.Module]) -> float:
    """How much of a backbone's products with weights runs on real tokens alone: from 0 to 1.

    Of experts, as many count as each token takes; a module that is run several times counts once. Attention's scores
    and recurrences have no weights and don't count.

    Args:
        on_rows: the modules that run on padded rows.
    """
    config = backbone.config.get_text_config(decoder=True)
    padded = {id(inner) for module in on_rows for inner in module.modules()}
    whole = sum(_products(module, config) for module in backbone.modules())
    rows = sum(_products(module, config) for module in backbone.modules() if id(module) in padded)
    return 1 - rows / whole if whole else 1.0


def _products(module: nn.Module, config: ConfigLike) -> float:
    """Multiplications a token with the weights that a module itself holds."""
    if isinstance(module, nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return 0
    sizes = linear_sizes(module)
    if sizes is not None:
        return float(sizes[0] * sizes[1])  # in 4 bits, a weight's own size is another
    taken, experts = _experts(config)
    total = 0.0
    for name, weight in module._parameters.items():
        if weight is None or not ("weight" in name or "proj" in name):
            continue
        share = taken / experts if weight.ndim == 3 and len(weight) == experts else 1
        total += weight.numel() * share if weight.ndim > 1 else 0
    return total


def _experts(config: ConfigLike) -> tuple[int, int]:
    """How many each token takes, and how many there are; 1 and 0 where there are none."""
    taken = ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "num_experts_per_token")
    all_of_them = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
    found = [next((getattr(config, n) for n in names if getattr(config, n, None)), 0) for names in (taken, all_of_them)]
    return (int(found[0]), int(found[1])) if all(isinstance(x, int) and x for x in found) else (1, 0)


def describe(names: Sequence[str]) -> str:
    """``self_attn of 4 layers: 3, 7, 11, 15`` for ``layers.3.self_attn`` and the others; a kind a line."""
    split = [_split(name) for name in names]
    lines = []
    for tail in dict.fromkeys(tail for _, tail in split):
        at = [index for index, other in split if other == tail and index is not None]
        if not at:
            lines.append(tail)
        else:
            lines.append(f"{tail} of {len(at)} layer{'s' if len(at) > 1 else ''}: {_ranges(at)}")
    return "\n".join(lines)


def _split(name: str) -> tuple[int | None, str]:
    """The index of the layer, and what of it; None where the name has no index."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    if found is None:
        return None, name
    return int(found[1]), name[found.end() :] or name[: found.start()]


def _ranges(at: Iterable[int]) -> str:
    """``0-2, 4`` for 0, 1, 2 and 4."""
    runs = [[i for _, i in run] for _, run in groupby(enumerate(sorted(set(at))), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
