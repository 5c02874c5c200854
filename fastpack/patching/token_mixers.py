"""The modules of one model that mix tokens: what is said of them, anew each time, since a model may move."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn

from fastpack.families.spec import RUNGS, MixerSpec, Rung
from fastpack.layers.mixers.forward import mixer_notes, mixer_rung
from fastpack.patching.changes import carries_ours, contexts_of
from fastpack.patching.tiers import layer_rungs, unpadded_share


@dataclass(frozen=True)
class Mixing:
    """The modules of a backbone that mix tokens, in order.

    Attributes:
        modules: each with its rung, or with what decides it: the kernels that serve where its weights are.
    """

    backbone: nn.Module
    modules: tuple[tuple[nn.Module, Rung | MixerSpec], ...]

    def describe(self) -> dict[str, Any]:
        """What :class:`fastpack.patching.report.PatchReport` says of them: ``rung``, ``layers`` and ``unpadded``."""
        rungs = [(module, how if isinstance(how, str) else mixer_rung(module, how)) for module, how in self._now()]
        layers = layer_rungs(self.backbone, rungs)
        on_rows = [module for module, rung in rungs if rung.startswith("re-padded")]
        lowest = next((rung for rung in reversed(RUNGS) if rung in layers), "stock")
        return {"rung": lowest, "layers": layers, "unpadded": unpadded_share(self.backbone, on_rows)}

    def kinds(self) -> dict[str, int]:
        """How many mixers run packed, and on rows."""
        found: Counter[str] = Counter(mixer_rung(module, how) for module, how in self._mixers())
        return {name: found[rung] for rung, name in _KINDS.items() if found[rung]}

    def notes(self) -> tuple[str, ...]:
        """Which kernels run them, or why none do."""
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

    def _now(self) -> list[tuple[nn.Module, Rung | MixerSpec]]:
        """Those that are there still, and copies that were made of them since (PEFT's replicated layers)."""
        known = {id(module): how for module, how in self.modules}
        by_class = {type(module): how for module, how in self.modules}
        contexts = {None, *(context for module, _ in self.modules for context in contexts_of(module))}

        def runs_as_its_original(module: nn.Module) -> bool:
            """Where a context has to tell it the packing, that is this backbone's."""
            return carries_ours(module) and contexts.issuperset(contexts_of(module))

        return [
            (module, known.get(id(module), by_class[type(module)]))
            for module in self.backbone.modules()
            if id(module) in known or (type(module) in by_class and runs_as_its_original(module))
        ]


_KINDS: dict[str, str] = {"varlen": "packed mixer", "re-padded mixer": "re-padded mixer"}
