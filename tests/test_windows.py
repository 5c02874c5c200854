"""Layers that were moved: stock goes by their places, packed attention by what each was built for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from oracle import make_sequences, run_alone
from patch_checks import check_exact, fingerprint
from peft import LoraConfig, get_peft_model
from tiny import VOCAB
from torch import nn

import fastpack
from fastpack.errors import PatchError
from fastpack.smoke.tiny import build_tiny

WINDOWED = ["gemma2", "gemma3", "qwen2_moe", "modernbert-decoder"]


def owner_of(model: Any) -> Any:
    return getattr(model.base_model, "language_model", model.base_model)


def cut(model: Any) -> Any:
    """Without its first layer, as those do who prune."""
    owner = owner_of(model)
    owner.layers = nn.ModuleList(list(owner.layers)[1:])
    model.config.get_text_config().num_hidden_layers -= 1
    return model


def replicate(model: Any) -> Any:
    adapter = LoraConfig(r=2, target_modules=["q_proj"], layer_replication=[(0, 2), (0, 2)], init_lora_weights=False)
    return get_peft_model(model, adapter)


@pytest.mark.parametrize(
    ("model_type", "move"), [*((name, cut) for name in WINDOWED), ("gemma3_text", replicate), ("afmoe", replicate)]
)
def test_a_patch_refuses_layers_with_other_windows(model_type: str, move: Any) -> None:
    model = move(build_tiny(model_type))
    before = fingerprint(model)
    with pytest.raises(PatchError, match=r"layers\.\d.*was built for .* config.layer_types\[\d\].* set config.layer_"):
        fastpack.patch(model)
    assert fingerprint(model) == before


@pytest.mark.parametrize("model_type", WINDOWED)
def test_a_config_that_says_what_the_layers_are(model_type: str) -> None:
    model = cut(build_tiny(model_type)).train()
    config = model.config.get_text_config()
    config.layer_types = config.layer_types[1:]
    for place, layer in enumerate(owner_of(model).layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = place
    alone = run_alone(model, make_sequences(VOCAB))
    check_exact(fastpack.patch(model), alone)


@pytest.mark.parametrize(("model_type", "move"), [("llama", cut), ("llama", replicate), ("gemma2", replicate)])
def test_moved_layers_with_the_windows_of_their_places(model_type: str, move: Any) -> None:
    stock = build_tiny(model_type).train()
    model = move(fastpack.patch(copy.deepcopy(stock)))
    assert not fastpack.report(model).skipped
    moved = fastpack.unpatch(copy.deepcopy(model))
    alone = run_alone(moved, make_sequences(VOCAB))
    check_exact(model, alone)
    check_exact(fastpack.patch(moved), alone)


@pytest.mark.parametrize(
    ("model_type", "move"), [*((name, cut) for name in WINDOWED), ("gemma3_text", replicate), ("afmoe", replicate)]
)
def test_what_was_moved_since_is_in_the_report_and_refused(model_type: str, move: Any) -> None:
    model = fastpack.patch(build_tiny(model_type))
    assert not fastpack.report(model).skipped
    said = [why for what, why in fastpack.report(move(model)).skipped if what == "layers"]
    assert said
    assert all("moved after the patch, and refused when it runs" in why for why in said)
    for _ in range(2):
        with pytest.raises(
            PatchError, match=r"layers were moved after the patch: .*layers\.\d.* set config.layer_types"
        ):
            model(input_ids=torch.full((1, 9), 5))
