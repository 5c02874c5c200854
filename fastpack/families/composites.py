"""Composite models that do more than embed images and call their text model.

A composite is recognised by its structure (:func:`fastpack.model.unwrap.find_parts`), and most need no row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from fastpack.utils.classes import stock_class


@dataclass(frozen=True)
class CompositeSpec:
    """The particulars of a composite that concern packing.

    Attributes:
        model_type: the name of the composite's sub-package in transformers.
        name: the class name of the module that calls the text model.
        refused_inputs: the arguments that a patched composite can't take, each with the reason.
    """

    model_type: str = ""
    name: str = ""
    refused_inputs: Mapping[str, str] = field(default_factory=dict)

    @property
    def module(self) -> str:
        """The dotted name of the upstream module that defines the class."""
        return f"transformers.models.{self.model_type}.modeling_{self.model_type}"


_PLAIN = CompositeSpec()
_CROSS_ATTENTION = "its text model attends to the images of a row in other layers, which is not covered"
_TWO_WAY = "tokens of its prefix attend in both directions, which is not covered yet"
COMPOSITES: tuple[CompositeSpec, ...] = (
    CompositeSpec(
        "mllama",
        "MllamaModel",
        refused_inputs={"pixel_values": _CROSS_ATTENTION, "cross_attention_states": _CROSS_ATTENTION},
    ),
    CompositeSpec(
        "paligemma", "PaliGemmaModel", refused_inputs=dict.fromkeys(("pixel_values", "token_type_ids"), _TWO_WAY)
    ),
)
"""The composites that have a row."""


def composite_spec(composite: nn.Module) -> CompositeSpec:
    """Return the row of exactly this class, or an empty row."""
    cls = stock_class(composite)
    return next((row for row in COMPOSITES if cls.__name__ == row.name and cls.__module__ == row.module), _PLAIN)
