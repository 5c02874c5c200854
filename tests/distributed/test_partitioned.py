"""Weights that ZeRO-3 has partitioned: each module is called, which brings them, and no weight is read before.

A stand-in for DeepSpeed: at rest every weight is empty, and hooks before and behind each module fill and empty those
that it holds itself.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adapter_cases import with_lora
from oracle import FLOAT32_BOUND, INPUT_KINDS, make_sequences, relative
from tiny import VOCAB, tiny_model
from torch import Tensor, nn

import fastpack
from fastpack.layers.project import read_norm
from fastpack.layers.read_projection import read_projection


class Partition:
    """A stand-in for DeepSpeed's changes to a model in a forward."""

    def __init__(self, model: nn.Module) -> None:
        self.weights: dict[nn.Parameter, Tensor] = {}
        for number, weight in enumerate(model.parameters()):
            self.weights[weight] = weight.data
            weight.ds_id = number  # type: ignore[attr-defined]
            weight.data = torch.empty(0)
        for module in model.modules():
            module.register_forward_pre_hook(self.gather)
            module.register_forward_hook(self.release)

    def gather(self, module: nn.Module, args: Any) -> None:
        for weight in module.parameters(recurse=False):
            weight.data = self.weights[weight]

    def release(self, module: nn.Module, args: Any, output: Any) -> None:
        for weight in module.parameters(recurse=False):
            weight.data = torch.empty(0)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss"])
def test_modules_are_called(family: str, lora: bool, calls: dict[str, int]) -> None:
    model: Any = tiny_model(family)
    if lora:
        model = with_lora(model, target_modules=["q_proj", "v_proj"])
    batch = INPUT_KINDS["padded left"](make_sequences(VOCAB))
    with torch.no_grad():
        whole = fastpack.patch(model)(**batch).logits
        assert calls["project"] > 0, "where nothing is partitioned they are fused"
        Partition(model)
        calls.update(dict.fromkeys(calls, 0))
        assert relative(model(**batch).logits, whole) <= FLOAT32_BOUND
    assert calls == {"project": 0, "gated_mlp": 0, "add_updates": 0}
    report = fastpack.report(model)
    assert sum(report.as_modules.values()) == sum(report.projections.values())


def test_a_partitioned_weight_is_not_read_even_without_hooks() -> None:
    """A parent module may gather the weights of the modules inside it (DeepSpeed's leaf modules)."""
    model: Any = fastpack.patch(tiny_model("llama"))
    layer = model.model.layers[0]
    assert not isinstance(read_projection(layer.mlp.up_proj), str)
    assert read_norm(layer.input_layernorm) is not None
    for weight in layer.parameters():
        weight.ds_id = 0
    assert read_projection(layer.mlp.up_proj) == "its weight is partitioned"
    assert read_norm(layer.input_layernorm) is None
    assert fastpack.report(model).as_modules == {"its weight is partitioned": 7}
