"""The report says of every class of experts whether fastpack's forward runs, and if not, why."""

from __future__ import annotations

from typing import Any

import pytest
from text_models import text_model

import fastpack
from fastpack.exactness.tiny import build_tiny, model_types

WITHOUT_SPEC = {
    "dbrx": "DbrxExperts",
    "inkling_text": "InklingSharedExperts",
    "jetmoe": "JetMoeParallelExperts",
    "llama4_text": "Llama4TextExperts",
    "longcat_flash": "LongcatFlashExperts",
    "muse_spark_text": "MuseSparkExperts",
}


def notes_on_experts(model: Any) -> dict[str, str]:
    return {what: why for what, why in fastpack.report(model).skipped if what.endswith("Experts")}


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", WITHOUT_SPEC)
def test_experts_of_another_kind_are_named(model_type: str) -> None:
    model = fastpack.patch(build_tiny(model_type) if model_type in model_types() else text_model(model_type))
    assert notes_on_experts(model) == {
        WITHOUT_SPEC[model_type]: "fastpack has no forward for experts of this kind: their own runs"
    }


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_fast_experts_and_dense_models_have_no_note(model_type: str) -> None:
    model = fastpack.patch(build_tiny(model_type))
    assert notes_on_experts(model) == {}
    assert ("experts" in fastpack.report(model).swapped) is (model_type == "mixtral")


@pytest.mark.parametrize("name", ["eager", "batched_mm"])
def test_an_implementation_that_was_chosen_by_name_runs(name: str) -> None:
    model = build_tiny("mixtral")
    model.set_experts_implementation(name)
    fastpack.patch(model)
    assert "experts" not in fastpack.report(model).swapped
    assert notes_on_experts(model) == {
        "MixtralExperts": f"experts_implementation={name!r} was chosen by name, and runs"
    }


def test_a_forward_that_other_code_has_replaced_runs() -> None:
    model = build_tiny("mixtral")
    experts = model.model.layers[0].mlp.experts
    experts.forward = lambda hidden_states, *_: hidden_states
    fastpack.patch(model)
    assert fastpack.report(model).swapped["experts"] == 1  # the other layer's
    assert notes_on_experts(model) == {"MixtralExperts": "other code had already replaced its forward: left alone"}
