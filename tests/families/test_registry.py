"""The families' names: a composite has its text model's family."""

from __future__ import annotations

import pytest

from fastpack.exactness.tiny import model_types
from fastpack.families.registry import FAMILIES, family_named
from fastpack.testing.record import Setting
from fastpack.testing.worker import row_of


def test_a_composite_has_the_family_of_its_text_model() -> None:
    for name, text in (("llama4", "llama4_text"), ("llava", "llama"), ("qwen3_vl", "qwen3_vl_text")):
        assert name not in FAMILIES
        assert family_named(name) is FAMILIES[text]
    assert family_named("qwen2") is FAMILIES["qwen2"]
    assert family_named("no_such_family") is None
    assert family_named("reformer") is None


@pytest.mark.parametrize(
    ("name", "row"), [("llama4", "llama4_text"), ("sarvam_moe", "glm4_moe"), ("mixtral", "mixtral")]
)
def test_the_sweep_takes_the_row_of_the_backbone_that_was_built(name: str, row: str) -> None:
    if name not in model_types():
        pytest.skip("not in this release of transformers")
    assert row_of(name, Setting()) is FAMILIES[row]
