"""The modules of one model that mix tokens: what is said of them, anew each time, since a model may move."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fastpack.families import RUNGS, Rung
from fastpack.families.spec import MixerSpec
from fastpack.layers.mixer import mixer_notes, mixer_rung
from fastpack.report import PatchReport
from fastpack.rungs import layer_rungs, unpadded_share

NOTE = "mixers:"


@dataclass(frozen=True)
class Mixing:
    """The modules of a backbone that mix tokens, in order.

    Attributes:
        modules: each with its rung, or with what decides it: the kernels that serve where its weights are.
    """

    backbone: nn.Module
    modules: tuple[tuple[nn.Module, Rung | MixerSpec], ...] = field(default=())

    def describe(self) -> dict[str, Any]:
        """What :class:`fastpack.report.PatchReport` says of them: ``rung``, ``layers`` and ``unpadded``."""
        rungs = [(module, how if isinstance(how, str) else mixer_rung(module, how)) for module, how in self.modules]
        layers = layer_rungs(self.backbone, rungs)
        on_rows = [module for module, rung in rungs if rung.startswith("re-padded")]
        lowest = next(rung for rung in reversed(RUNGS) if rung in layers)
        return {"rung": lowest, "layers": layers, "unpadded": unpadded_share(self.backbone, on_rows)}

    def kinds(self) -> dict[str, int]:
        """How many mixers run packed, and on rows."""
        found: Counter[str] = Counter(mixer_rung(module, how) for module, how in self._mixers())
        return {name: found[rung] for rung, name in _KINDS.items() if found[rung]}

    def notes(self) -> tuple[str, ...]:
        """Which kernels run them, or why none do."""
        return tuple(dict.fromkeys(note for module, how in self._mixers() for note in mixer_notes(module, how)))

    def refreshed(self, report: PatchReport) -> dict[str, Any]:
        """All of this, with what else the report counts and notes."""
        others = {kind: count for kind, count in report.swapped.items() if kind not in _KINDS.values()}
        notes = tuple(note for note in report.notes if not note.startswith(NOTE))
        return {**self.describe(), "swapped": {**others, **self.kinds()}, "notes": (*notes, *self.notes())}

    def _mixers(self) -> list[tuple[nn.Module, MixerSpec]]:
        return [(module, how) for module, how in self.modules if isinstance(how, MixerSpec)]


_KINDS: dict[str, str] = {"varlen": "packed mixer", "re-padded mixer": "re-padded mixer"}
