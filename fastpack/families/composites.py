"""Composite models that do more than embed images and call their text model.

A composite is recognised by its structure (:func:`fastpack.model.unwrap.find_parts`), and most need no row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from fastpack.families.refused import REFUSED_IMAGES
from fastpack.families.spec import BlockSpec
from fastpack.utils.classes import stock_class


@dataclass(frozen=True)
class CompositeSpec:
    """The particulars of a composite that concern packing.

    Attributes:
        model_type: the name of the composite's sub-package in transformers.
        name: the class name of the module that calls the text model.
        refused_inputs: the arguments that a patched composite can't take, each with the reason.
        blocks: how a batch marks the tokens that see each other in both directions; None if all are causal.
        counts_images: whether positions count the images of all rows, so that a row's depend on the rows before it.
            Those of each row alone are computed instead.
    """

    model_type: str = ""
    name: str = ""
    refused_inputs: Mapping[str, str] = field(default_factory=dict)
    blocks: BlockSpec | None = None
    counts_images: bool = False

    @property
    def module(self) -> str:
        """The dotted name of the upstream module that defines the class."""
        return f"transformers.models.{self.model_type}.modeling_{self.model_type}"


_PLAIN = CompositeSpec()
_PREFIX = (
    "without it the stock model attends in both directions if no row is padded, and is causal otherwise. Pass "
    "token_type_ids, 0 in the prefix (images and prompt) and 1 behind it, as its processor does with a suffix."
)
_VISION = ("use_bidirectional_attention", "vision")
COMPOSITES: tuple[CompositeSpec, ...] = (
    CompositeSpec("gemma3", "Gemma3Model", blocks=BlockSpec("token_type_ids")),
    CompositeSpec("gemma4", "Gemma4Model", blocks=BlockSpec("mm_token_type_ids", (1, 2), _VISION)),
    CompositeSpec("gemma4_unified", "Gemma4UnifiedModel", blocks=BlockSpec("mm_token_type_ids", (1, 2), _VISION)),
    CompositeSpec("hunyuan_vl", "HunYuanVLModel", counts_images=True),
    CompositeSpec(
        "mllama",
        "MllamaModel",
        refused_inputs=dict.fromkeys(("pixel_values", "cross_attention_states"), REFUSED_IMAGES["mllama"]),
    ),
    CompositeSpec("molmo2", "Molmo2Model", blocks=BlockSpec("mm_token_type_ids", one_each=True)),
    CompositeSpec(
        "paligemma", "PaliGemmaModel", blocks=BlockSpec("token_type_ids", (0,), one_each=True, required=_PREFIX)
    ),
)
"""The composites that have a row."""


def composite_spec(composite: nn.Module) -> CompositeSpec:
    """Return the row of exactly this class, or an empty row."""
    cls = stock_class(composite)
    return next((row for row in COMPOSITES if cls.__name__ == row.name and cls.__module__ == row.module), _PLAIN)
