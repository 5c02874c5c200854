"""Deciding, batch by batch, whether sequences share what they have in common; and what the report says of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fastpack.families.spec import Family
from fastpack.layers.rope_tables import LENGTH_DEPENDENT
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.utils.console import counted
from fastpack.utils.protocols import ModelLike
from fastpack.utils.signatures import shape_of

LEAST_SAVED = 0.05
"""The share of a batch's tokens that has to be saved, so that sharing pays.

Each layer moves queries, keys, values and results once more, there and back: some 10 (H + K) D values for each token,
while its products take 6 operations for each weight. Reckoned for a GPU that does 500 TFLOP/s and moves 3 TB/s, in half
precision (H heads, K of keys, D a head's size), that is 1.3 % of the products' time for a layer of Llama 8B and 4 % for
one of Qwen 2.5 0.5B, which does not reach 500 TFLOP/s either. A twentieth is more than both.
"""

_KNOWN = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "shift_labels",
    "labels",
)
"""Per token, and no matter: what the door replaces itself, and what heads hand on and no backbone reads."""


@dataclass
class SharingStats:
    """Counts of what happened so far.

    Attributes:
        batches: forwards on real tokens; shared: those of them in which prefixes were.
        tokens: real tokens of all of these batches; saved: how many of them were not computed.
        whole: forwards that shared nothing, by reason.
    """

    batches: int = 0
    shared: int = 0
    tokens: int = 0
    saved: int = 0
    whole: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False)
class PrefixSharing:
    """Sharing for one patched model; lives as long as the patch. A copy or a pickle of it starts empty.

    Attributes:
        least_saved: the share of tokens that has to be saved, from 0 to 1.
    """

    least_saved: float = LEAST_SAVED
    stats: SharingStats = field(default_factory=SharingStats)
    _probabilities: dict[type, tuple[str, ...]] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the settings alone."""
        return PrefixSharing, (self.least_saved,)

    def serve(self, backbone: ModelLike, arguments: Mapping[str, Any], packed: PackedSeqLens) -> PackedSeqLens:
        """Return ``packed`` with its prefixes shared, or unchanged if sharing is not exact or does not pay.

        The host waits for the device once if prefixes were not found with the lengths, that is, if a collator made
        ``packed_seq_lens`` without ids.

        Args:
            backbone: the backbone.
            arguments: the backbone's arguments, with tokens as they came.
            packed: the batch's packing.
        """
        reason = self._why_not(backbone, arguments, packed)
        if reason is None:
            prefixes = packed.prefixes_in(packed.unpad(arguments["input_ids"]))
            if prefixes.saved < max(1, self.least_saved * packed.real_tokens):
                reason = f"less than {100 * self.least_saved:.3g}% of the tokens are in prefixes that come twice"
        self.stats.batches += 1
        self.stats.tokens += 0 if packed.padding.is_empty else packed.real_tokens
        if reason is not None:
            self.stats.whole[reason] += 1
            return packed
        self.stats.shared += 1
        self.stats.saved += prefixes.saved
        return packed.share(prefixes)

    def _why_not(self, backbone: ModelLike, arguments: Mapping[str, Any], packed: PackedSeqLens) -> str | None:
        """Say why this batch can't share anything, or None."""
        if packed.num_sequences - len(packed.bucket_padding) < 2:
            return "there is one sequence"
        columns = shape_of(arguments)[1]
        for name, value in arguments.items():
            if name not in _KNOWN and isinstance(value, Tensor) and columns in value.shape:
                return f"{name} came with the batch, and may differ where ids are the same"
        random = next(self._random(backbone), None)
        return None if random is None else f"{random} is random, and copies of a token have each their own"

    def _random(self, backbone: ModelLike) -> Iterator[str]:
        """Name all that draws a number for each token in training, as it is set now."""
        embedding = backbone.get_input_embeddings()
        if embedding.training and getattr(embedding, "neftune_noise_alpha", None) is not None:
            yield "NEFTune's noise"
        known = self._probabilities
        waiting: list[Any] = [backbone]
        while waiting:  # modules() takes several times as long
            module = waiting.pop()
            cls = type(module)
            waiting += () if module is None else module._modules.values()
            for name in known[cls] if cls in known else self._find_probabilities(module):
                value = vars(module).get(name)
                if module.training and isinstance(value, int | float) and value > 0:
                    yield f"{cls.__name__}.{name}={value:g}"

    def _find_probabilities(self, module: nn.Module) -> tuple[str, ...]:
        """Attributes of a module, as of all of its class, that are probabilities or amounts of noise by their names."""
        names = () if module is None else vars(module)
        # layerdrop leaves whole layers out, for all tokens alike
        found = tuple(name for name in names if ("drop" in name and name != "layerdrop") or "jitter" in name)
        self._probabilities[type(module)] = ("p",) if isinstance(module, _DropoutNd) else found
        return self._probabilities[type(module)]

    def describe(self) -> str:
        """One line for a report."""
        stats = self.stats
        parts = ["on"]
        if stats.batches:
            batches = counted(stats.batches, "batch", "es")
            parts = [f"shared in {stats.shared} of {batches}, {stats.saved:,} of {stats.tokens:,} tokens saved"]
        parts += [f"{count} whole: {why}" for why, count in stats.whole.most_common()]
        return f"prefixes: {'; '.join(parts)}"


def sharing_rejects(backbone: nn.Module, family: Family) -> str | None:
    """Say, beforehand, why sequences of a model can't share what they have in common, whatever the batch; or None."""
    if family.repadded:
        return f"{family.model_type} runs on rows of equal length, each with all of its tokens"
    if family.mixers:
        names = ", ".join(family.mixers)
        return f"{names} mix tokens too, or count positions, in rows of their own; sharing is for attention alone"
    if any(getattr(module, "rope_type", None) in LENGTH_DEPENDENT for module in backbone.modules()):
        return "its rotary frequencies depend on how long each sequence is, so that a common prefix has different keys"
    return None
