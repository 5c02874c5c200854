"""The modules of a model that mix tokens, and their tiers, which change if the model moves to another device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fastpack.families.mixer_spec import MixerSpec
from fastpack.families.spec import TIERS, Tier
from fastpack.layers.mixers.forward import mixer_notes, mixer_tier
from fastpack.layers.read_projection import linear_sizes
from fastpack.patching.changes import carries_ours, contexts_of
from fastpack.patching.recognise import Recognised, own_class
from fastpack.utils.modules import share_per_token
from fastpack.utils.protocols import ConfigLike


@dataclass(frozen=True)
class Mixing:
    """The modules of a backbone that mix tokens, in order.

    Attributes:
        backbone: The backbone that holds them.
        modules: Each module with its tier, or with a spec: then the tier depends on the kernels for its device.
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
        """Count the mixers that run packed and the mixers that run on rows."""
        return dict(Counter(_KINDS[mixer_tier(module, how)] for module, how in self._mixers()))

    def notes(self) -> tuple[str, ...]:
        """Return notes on the kernels that run the mixers, or why none does."""
        return tuple(dict.fromkeys(note for module, how in self._mixers() for note in mixer_notes(module, how)))

    def unknown_modules(self) -> tuple[tuple[str, str], ...]:
        """Return notes on modules of these classes that were added after the patch, and that it does not cover."""
        known = {id(module) for module, _ in self._now()}
        classes = {type(module) for module, _ in self.modules}
        unpatched = Counter(
            type(module).__name__
            for module in self.backbone.modules()
            if type(module) in classes and id(module) not in known
        )
        why = "put into the model after the patch, and wrong for packed batches: call patch(unpatch(model))"
        return tuple((name, f"{count} {why}") for name, count in unpatched.items())

    def _mixers(self) -> list[tuple[nn.Module, MixerSpec]]:
        return [(module, how) for module, how in self._now() if isinstance(how, MixerSpec)]

    def _now(self) -> list[tuple[nn.Module, Tier | MixerSpec]]:
        """Return the modules that are still there, and later copies of them (PEFT's replicated layers)."""
        known = {id(module): how for module, how in self.modules}
        by_class = {type(module): how for module, how in self.modules}
        contexts = {None, *(context for module, _ in self.modules for context in contexts_of(module))}

        def runs_as_its_original(module: nn.Module) -> bool:
            """Return whether the module gets its packing only from this backbone's contexts."""
            return carries_ours(module) and contexts.issuperset(contexts_of(module))

        return [
            (module, known.get(id(module), by_class[type(module)]))
            for module in self.backbone.modules()
            if id(module) in known or (type(module) in by_class and runs_as_its_original(module))
        ]


_KINDS: dict[str, str] = {"fast": "packed mixer", "varlen": "packed mixer", "re-padded mixer": "re-padded mixer"}


def unpadded_share(backbone: Any, on_rows: Sequence[nn.Module]) -> float:
    """Return the share of a backbone's matmuls with weights that runs on real tokens alone, from 0 to 1.

    Of a layer's experts, only the number that each token takes counts. A module that runs several times counts once.
    Attention scores and recurrences have no weights, and don't count.

    Args:
        backbone: The model's backbone.
        on_rows: The modules that run on padded rows.
    """
    config = backbone.config.get_text_config(decoder=True)
    padded = {id(inner) for module in on_rows for inner in module.modules()}
    whole = sum(_multiplications(module, config) for module in backbone.modules())
    rows = sum(_multiplications(module, config) for module in backbone.modules() if id(module) in padded)
    return 1 - rows / whole if whole else 1.0


def _multiplications(module: nn.Module, config: ConfigLike) -> float:
    """Return the number of multiplications with a module's own weights for each token."""
    if isinstance(module, nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return 0
    sizes = linear_sizes(module)
    if sizes is not None:
        return float(sizes[0] * sizes[1])  # a 4-bit weight tensor has another size
    total = 0.0
    for name, weight in module._parameters.items():
        if weight is None or not ("weight" in name or "proj" in name):
            continue
        total += weight.numel() * share_per_token(weight, config) if weight.ndim > 1 else 0
    return total


def mixer_tiers(recognised: Recognised) -> dict[Tier, list[str]]:
    """Return the tiers of the backbone's mixers, as they are before the patch, each with notes for the report."""
    family = recognised.family
    own = ((module, own_class(module, family) or "") for module in recognised.backbone.modules())
    tiers: dict[Tier, list[str]] = {}
    for module, spec in ((module, family.mixers[name]) for module, name in own if name in family.mixers):
        notes = tiers.setdefault(mixer_tier(module, spec), [])
        notes += [note for note in mixer_notes(module, spec) if note not in notes]
    return tiers


def packs_mixers(recognised: Recognised) -> bool:
    """Return whether recurrences and convolutions, all on packed tokens, are all that reads the packing context."""
    family = recognised.family
    others = family.drops_packing or family.repadded or recognised.replaced_layers
    return family.packs_mixers and not others and "re-padded mixer" not in mixer_tiers(recognised)
