"""The places where recordings are cut, so that a device starts the first piece while the host submits the next."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adapter_cases import with_lora
from recording import SMALL, FakeRecorder, check, graphed, hidden, runner, step
from tiny import tiny_model
from torch import nn

import fastpack
from fastpack.cuda_graphs.pieces import CUTS, cut_between
from fastpack.exactness.tiny import build_tiny
from fastpack.utils.modules import decoder_layers

pytestmark = pytest.mark.usefixtures("varlen")


def cuts(model: Any) -> tuple[int, int]:
    """Return the cuts of the forward and of the backward that were recorded last."""
    recorder = runner(model).recorder
    assert isinstance(recorder, FakeRecorder)
    return recorder.cuts.count("forward"), recorder.cuts.count("backward")


@pytest.mark.parametrize(("layers", "count"), [(1, 0), (2, 1), (3, 2), (6, 2), (12, 4)])
def test_near_both_ends(layers: int, count: int) -> None:
    models = [tiny_model("llama", num_hidden_layers=layers) for _ in range(2)]
    plain, model = fastpack.patch(models[0]), graphed(models[1])
    check(step(model), step(plain))
    assert cuts(model) == (count, count)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_with_checkpointing(lora: bool, reentrant: bool) -> None:
    """A layer that runs again in the backward is not cut once more."""
    models = [tiny_model("llama", num_hidden_layers=4) for _ in range(2)]
    for place, model in enumerate(models):
        models[place] = model = with_lora(model) if lora else model
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    plain, model = fastpack.patch(models[0]), graphed(models[1])
    check(step(model), step(plain))
    assert cuts(model) == (2, 2)


def test_where_nothing_before_has_a_gradient() -> None:
    """The backward ends at the first trained parameters."""
    model = tiny_model("llama", num_hidden_layers=4).requires_grad_(False)
    model.base_model.layers[2].requires_grad_(True)
    graphed(model)
    hidden(model).sum().backward()
    assert cuts(model) == (2, 1)


def test_no_hook_is_left_behind() -> None:
    model = graphed(tiny_model("llama"))
    step(model)
    assert not any(module._forward_pre_hooks for module in model.base_model.layers.modules())
    with pytest.raises(ZeroDivisionError), cut_between([nn.Identity(), nn.Identity()], lambda: None):
        raise ZeroDivisionError
    layers = [nn.Identity() for _ in range(2)]
    calls: list[int] = []
    with cut_between(layers, lambda: calls.append(1)):
        layers[1](torch.zeros(1))
        assert calls == [1]
    layers[1](torch.zeros(1))
    assert calls == [1]
    assert not layers[1]._forward_pre_hooks


def test_places_are_counted_from_both_ends() -> None:
    cut_places: list[int] = []
    layers = [nn.Linear(1, 1) for _ in range(8)]
    place = 0
    with cut_between(layers, lambda: cut_places.append(place)):
        x = torch.ones(1)
        for place, layer in enumerate(layers):  # noqa: B007
            x = layer(x)
    assert cut_places == sorted({*CUTS, *(len(layers) - count for count in CUTS)})


def test_a_layer_that_is_in_several_places_is_cut_once_a_call() -> None:
    calls: list[int] = []
    layers = [nn.Identity()] * 8
    with cut_between(layers, lambda: calls.append(1)):
        for layer in layers:
            layer(torch.zeros(1))
    assert len(calls) == len(layers)


def test_not_with_copies_on_another_stream() -> None:
    """Offloading's copies go on across layers, so a capture can't end there."""
    model = tiny_model("llama", num_hidden_layers=4)
    fastpack.patch(model, graphs="auto", offload="checkpoints")
    runner(model).recorder = FakeRecorder()
    hidden(model, lengths=SMALL).sum().backward()
    assert runner(model).stats.recordings == 1
    assert cuts(model) == (0, 0)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "opt", "qwen3_next"])
def test_layers_are_found(family: str) -> None:
    model = build_tiny(family)
    assert len(decoder_layers(model.base_model)) == model.config.num_hidden_layers
