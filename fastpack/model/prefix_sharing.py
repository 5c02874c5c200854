"""Decide for each batch whether sequences share their common prefixes, and count the decisions for the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fastpack.families.spec import Family
from fastpack.layers.rope_tables import rotates_by_length
from fastpack.model.checks import MEDIA
from fastpack.model.per_token import PER_TOKEN, PER_VISUAL_TOKEN, Origin, token_fingerprints
from fastpack.packing.handover import EnteredBatch
from fastpack.packing.prefixes import Prefixes, common_prefixes, without_cut_blocks
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.utils.console import counted
from fastpack.utils.protocols import ModelLike
from fastpack.utils.signatures import shape_of

LEAST_SAVED = 0.05
"""The smallest share of a batch's tokens that sharing must save to be worth its cost.

With sharing, each layer copies queries, keys, values and results once more, in the forward and in the backward: about
10 (H + K) D values for each token (H heads, K heads of keys, D the head size). The layer's matmuls take 6 operations
for each weight and token. On a GPU with 500 TFLOP/s and 3 TB/s, in half precision, the copies take 1.3 % of the
matmuls' time in a layer of Llama 8B, and 4 % in a layer of Qwen 2.5 0.5B, which does not reach 500 TFLOP/s either. A
twentieth is more than both.
"""

_HARMLESS = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "shift_labels",
    "labels",
)
"""The per-token arguments that don't prevent sharing: the patch replaces them, or no backbone reads them."""
_COMPARED = ("inputs_embeds", *PER_TOKEN, *PER_VISUAL_TOKEN)
"""The arguments that don't prevent sharing in a composite, which makes them of ids and images: they are compared."""


@dataclass
class SharingStats:
    """Counts of batches and tokens since the patch.

    Attributes:
        batches: the number of forwards on real tokens.
        shared: the number of forwards that shared prefixes.
        tokens: the number of real tokens of all batches.
        saved: the number of these tokens that were not computed.
        whole: the number of forwards that shared nothing, by reason.
        images: the number of images of batches with equal images.
        images_saved: the number of these images that did not go through the tower.
    """

    batches: int = 0
    shared: int = 0
    tokens: int = 0
    saved: int = 0
    whole: Counter[str] = field(default_factory=Counter)
    images: int = 0
    images_saved: int = 0


@dataclass(eq=False)
class PrefixSharing:
    """The sharing of prefixes in one patched model, for as long as the patch lasts.

    A copy or a pickle starts with empty counts.

    Attributes:
        least_saved: the share of tokens that sharing must save, from 0 to 1.
        never: why no batch can share prefixes, only images; None if batches can.
        stats: the counts for the report.
        knows_features: whether the layout of a composite's image features is known; None before the first batch
            with equal images.
    """

    least_saved: float = LEAST_SAVED
    never: str | None = None
    stats: SharingStats = field(default_factory=SharingStats)
    knows_features: bool | None = None
    _probabilities: dict[type, tuple[str, ...]] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the settings alone."""
        return PrefixSharing, (self.least_saved, self.never)

    def serve(
        self,
        backbone: ModelLike,
        arguments: Mapping[str, Any],
        packed: PackedSeqLens,
        entered: EnteredBatch | None = None,
        images: Sequence[list[int] | None] = (),
    ) -> PackedSeqLens:
        """Return ``packed`` with its prefixes shared, or unchanged if sharing is not exact or does not pay.

        In a composite, equal ids may stand for different images, and positions of several axes may differ between equal
        ids. Then tokens are the same if all that the text model gets for them is equal (embeddings, positions of every
        axis and features of images), and where that comes from: ids and images, to which the gradients go.

        The host waits for the device once if prefixes were not found with the lengths, that is, if a collator made
        ``packed_seq_lens`` without ids; and once more to compare what equal ids stand for.

        Args:
            backbone: the backbone.
            arguments: the backbone's arguments, before they are un-padded.
            packed: the batch's packing.
            entered: the batch of the composite around the backbone, or None.
            images: the images that its tokens show (:class:`fastpack.packing.handover.Handover`).
        """
        of_composite = None if entered is None else entered.ids
        positions = arguments.get("position_ids")
        compares = of_composite is not None or (positions is not None and positions.ndim == 3)
        reason = self._why_not(backbone, arguments, packed, compared=() if of_composite is None else _COMPARED)
        if reason is None:
            ids = arguments["input_ids"] if of_composite is None else of_composite
            prefixes = packed.prefixes_in(packed.unpad(ids))
            if compares and self._pays(prefixes, packed):
                origin = None
                if of_composite is not None:
                    origin = Origin(of_composite, backbone.get_input_embeddings(), images)
                prefixes = common_prefixes(packed.lengths, token_fingerprints(arguments, packed, origin).cpu())
                if packed.two_way is not None:
                    blocks = torch.stack([packed.two_way.first, packed.two_way.end]).tolist()
                    prefixes = without_cut_blocks(prefixes, packed.lengths, *blocks)
            if not self._pays(prefixes, packed):
                reason = f"less than {100 * self.least_saved:.3g}% of the tokens repeat a prefix of another sequence"
        self.stats.batches += 1
        self.stats.tokens += 0 if packed.padding.is_empty else packed.real_tokens
        if reason is not None:
            self.stats.whole[reason] += 1
            return packed
        self.stats.shared += 1
        self.stats.saved += prefixes.saved
        return packed.share(prefixes)

    def shares_images(self, composite: ModelLike) -> bool:
        """Return whether equal images of a batch have equal features."""
        return next(self._random(composite), None) is None

    def _pays(self, prefixes: Prefixes, packed: PackedSeqLens) -> bool:
        """Return whether these prefixes save enough tokens."""
        return self.saves_enough(prefixes.saved, packed.real_tokens)

    def saves_enough(self, saved: int, tokens: int) -> bool:
        """Return whether prefixes are shared in a batch of ``tokens`` real tokens that repeats ``saved`` of them."""
        return saved >= max(1, self.least_saved * tokens)

    def why_never(self, backbone: ModelLike) -> str | None:
        """Return why the model shares no prefix, whatever the batch, or None; modules may change this."""
        if self.never is not None:
            return self.never
        random = next(self._random(backbone), None)
        return None if random is None else f"{random} is random, and differs between copies of a token"

    def _why_not(
        self, backbone: ModelLike, arguments: Mapping[str, Any], packed: PackedSeqLens, compared: Sequence[str]
    ) -> str | None:
        """Return why this batch can't share prefixes, or None; ``compared`` arguments are no reason."""
        never = self.why_never(backbone)
        if never is not None:
            return never
        if packed.num_sequences - len(packed.bucket_padding) < 2:
            return "there is one sequence"
        if packed.two_way is not None and not compared:
            return "tokens of images see later ones, so that equal beginnings may differ"
        if any(arguments.get(name) is not None for name in MEDIA):
            return "images came with the batch, and may differ between equal ids"
        columns = shape_of(arguments)[1]
        for name, value in arguments.items():
            each = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            several = any(isinstance(item, Tensor) for item in each)
            per_token = isinstance(value, Tensor) and columns in value.shape
            if name not in (*_HARMLESS, *compared) and (per_token or several):
                return f"{name} came with the batch, and may differ between equal ids"
        return None

    def _random(self, backbone: ModelLike) -> Iterator[str]:
        """Yield the name of each setting that makes a module draw random numbers for tokens at the moment."""
        embedding = backbone.get_input_embeddings()
        if embedding.training and getattr(embedding, "neftune_noise_alpha", None) is not None:
            yield "NEFTune's noise"
        by_class = self._probabilities
        waiting: list[Any] = [backbone]
        while waiting:  # modules() takes several times longer
            module = waiting.pop()
            cls = type(module)
            waiting += () if module is None else module._modules.values()
            for name in by_class[cls] if cls in by_class else self._find_probabilities(module):
                value = vars(module).get(name)
                if module.training and isinstance(value, int | float) and value > 0:
                    yield f"{cls.__name__}.{name}={value:g}"

    def _find_probabilities(self, module: nn.Module) -> tuple[str, ...]:
        """Return the attributes of a module's class whose names are those of probabilities or amounts of noise."""
        names = () if module is None else vars(module)
        # layerdrop leaves out whole layers, for all tokens alike
        probabilities = tuple(name for name in names if ("drop" in name and name != "layerdrop") or "jitter" in name)
        self._probabilities[type(module)] = ("p",) if isinstance(module, _DropoutNd) else probabilities
        return self._probabilities[type(module)]

    def describe(self) -> str:
        """Return the line for the report."""
        stats = self.stats
        parts = ["on"]
        if stats.batches:
            batches = counted(stats.batches, "batch", "es")
            parts = [f"shared in {stats.shared} of {batches}, {stats.saved:,} of {stats.tokens:,} tokens saved"]
        if stats.images:
            parts.append(f"{stats.images_saved:,} of {stats.images:,} images repeat others")
        parts += [f"nothing shared in {count}: {why}" for why, count in stats.whole.most_common()]
        return f"prefixes: {'; '.join(parts)}"


def sharing_rejects(backbone: nn.Module, family: Family) -> str | None:
    """Return why no batch of a model can share prefixes; None if batches can."""
    if family.repadded:
        return f"{family.model_type} runs on rows of equal length, each with all of its tokens"
    if family.mixers:
        names = ", ".join(family.mixers)
        return f"{names} mix tokens too, or count positions, over whole sequences; only attention can share prefixes"
    if rotates_by_length(backbone):
        return (
            "its rotary frequencies depend on the length of each sequence, so that the keys of a common prefix differ"
        )
    return None
