"""The parts of a model: what find_parts finds inside composites."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from fastpack.exactness.tiny import build_tiny
from fastpack.model.unwrap import find_parts


def test_a_text_model_whose_class_names_no_backbone() -> None:
    """Llama 4's causal LM has the ``base_model_prefix`` of a composite, also inside one."""

    class Composite(nn.Module):
        base_model_prefix = ""
        config = SimpleNamespace()

        def __init__(self) -> None:
            super().__init__()
            self.language_model = build_tiny("llama4")

        @property
        def base_model(self) -> Any:
            return self

    model = Composite()
    text: Any = model.language_model
    assert text.base_model is text
    parts = find_parts(model)
    assert parts.composite is parts.head is model
    assert parts.backbone is text.model
    assert find_parts(text).backbone is text.model
