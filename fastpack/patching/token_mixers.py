"""The modules of one model that mix tokens: what is said of them, anew each time, since a model may move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fastpack.families.spec import TIERS, MixerSpec, Tier
from fastpack.layers.mixers.forward import mixer_notes, mixer_tier
from fastpack.layers.read_projection import linear_sizes
from fastpack.patching.changes import carries_ours, contexts_of
from fastpack.utils.protocols import ConfigLike


@dataclass(frozen=True)
class Mixing:
    """The modules of a backbone that mix tokens, in order.

    Attributes:
        modules: each with its tier, or with what decides it: the kernels that serve where its weights are.
    """

    backbone: nn.Module
    modules: tuple[tuple[nn.Module, Tier | MixerSpec], ...]

    def describe(self) -> dict[str, Any]:
        """Return ``tier``, ``layers`` and ``unpadded`` of :class:`fastpack.patching.report.PatchReport`."""
        tiers = [(module, how if isinstance(how, str) else mixer_tier(module, how)) for module, how in self._now()]
        named = {id(module): name for name, module in self.backbone.named_modules()}
        layers: dict[str, tuple[str, ...]] = {}
        for tier in TIERS:
            names = tuple(named[id(module)] or type(module).__name__ for module, its in tiers if its == tier)
            if names:
                layers[tier] = names
        on_rows = [module for module, tier in tiers if tier.startswith("re-padded")]
        return {
            "tier": next(reversed(layers), "stock"),
            "layers": layers,
            "unpadded": unpadded_share(self.backbone, on_rows),
        }

    def kinds(self) -> dict[str, int]:
        """Count the mixers that run packed, and on rows."""
        found: Counter[str] = Counter(mixer_tier(module, how) for module, how in self._mixers())
        return {name: found[tier] for tier, name in _KINDS.items() if found[tier]}

    def notes(self) -> tuple[str, ...]:
        """Name the kernels that run them, or say why none do."""
        return tuple(dict.fromkeys(note for module, how in self._mixers() for note in mixer_notes(module, how)))

    def strangers(self) -> tuple[tuple[str, str], ...]:
        """Modules of these classes that were put into the model since and are no part of the patch."""
        known = {id(module) for module, _ in self._now()}
        classes = {type(module) for module, _ in self.modules}
        found = Counter(
            type(module).__name__
            for module in self.backbone.modules()
            if type(module) in classes and id(module) not in known
        )
        why = "put into the model after the patch, where packed batches are not right: patch(unpatch(model))"
        return tuple((name, f"{count} {why}") for name, count in found.items())

    def _mixers(self) -> list[tuple[nn.Module, MixerSpec]]:
        return [(module, how) for module, how in self._now() if isinstance(how, MixerSpec)]

    def _now(self) -> list[tuple[nn.Module, Tier | MixerSpec]]:
        """The ones that are there still, and copies that were made of them since (PEFT's replicated layers)."""
        known = {id(module): how for module, how in self.modules}
        by_class = {type(module): how for module, how in self.modules}
        contexts = {None, *(context for module, _ in self.modules for context in contexts_of(module))}

        def runs_as_its_original(module: nn.Module) -> bool:
            """True unless another context than this backbone's is to tell it the packing."""
            return carries_ours(module) and contexts.issuperset(contexts_of(module))

        return [
            (module, known.get(id(module), by_class[type(module)]))
            for module in self.backbone.modules()
            if id(module) in known or (type(module) in by_class and runs_as_its_original(module))
        ]


_KINDS: dict[str, str] = {"varlen": "packed mixer", "re-padded mixer": "re-padded mixer"}


def unpadded_share(backbone: Any, on_rows: Sequence[nn.Module]) -> float:
    """The share of a backbone's products with weights that runs on real tokens alone: from 0 to 1.

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
    """The number of experts that each token takes, and of all; 1 and 0 where there are none."""
    taken = ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "num_experts_per_token")
    all_of_them = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
    found = [next((getattr(config, n) for n in names if getattr(config, n, None)), 0) for names in (taken, all_of_them)]
    return (int(found[0]), int(found[1])) if all(isinstance(x, int) and x for x in found) else (1, 0)
