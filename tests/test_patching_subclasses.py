"""Classes of a user's own, and parametrizations, over a family's: as exact as the family's, or refused, or named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import make_sequences, run_alone
from patch_checks import check_exact
from tiny import VOCAB, tiny_model
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.models.llama import modeling_llama as llama

import fastpack
from fastpack.classes import changes_of, stock_class
from fastpack.errors import PatchError
from fastpack.smoke.tiny import build_tiny


class Louder(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1.2


def subclassed(module: nn.Module, **own: Any) -> None:
    """One of a user's own in its place, with what is given."""
    module.__class__ = type(f"My{type(module).__name__}", (type(module),), {**own, "__module__": __name__})


def vocabulary(model: Any) -> int:
    return min(VOCAB, model.get_input_embeddings().num_embeddings)


MIXERS = {
    "mamba2": ("backbone.layers.0.mixer", "A_log"),
    "bamba": ("model.layers.0.mamba", "A_log"),
    "qwen3_next": ("model.layers.0.linear_attn", "A_log"),
    "gpt_oss": ("model.layers.1.self_attn", "sinks"),
}


@pytest.mark.parametrize("how", ["parametrized", "subclass"])
@pytest.mark.parametrize("model_type", MIXERS)
def test_mixers_of_another_class(model_type: str, how: str) -> None:
    """Whose class is another by name alone: left stock, recurrent ones ran over all sequences as over one."""
    path, name = MIXERS[model_type]
    model = build_tiny(model_type).train()
    module = model.get_submodule(path)
    if how == "parametrized":
        parametrize.register_parametrization(module, name, Louder())
    else:
        subclassed(module)
    alone = run_alone(model, make_sequences(vocabulary(model)))
    fastpack.patch(model)
    check_exact(model, alone)
    fastpack.verify(model)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("which", ["self_attn", "mlp", "input_layernorm", None])
def test_subclasses_that_change_nothing_are_fast(which: str | None, attention: str) -> None:
    model = tiny_model("llama", attn_implementation=attention)
    layer = model.model.layers[1]
    subclassed(layer if which is None else layer.get_submodule(which), note="nothing of the base's")
    alone = run_alone(model, make_sequences(VOCAB))
    whole = fastpack.report(fastpack.patch(tiny_model("llama"))).swapped
    fastpack.patch(model, strict=True)
    assert fastpack.report(model).swapped == whole
    check_exact(model, alone)


@pytest.mark.parametrize(
    ("model_type", "path"),
    [
        ("llama", "model.layers.1.self_attn"),
        ("bamba", "model.layers.0.mamba"),
        ("opt", "model.decoder.layers.0.self_attn"),
    ],
)
def test_mixing_of_ones_own_is_refused(model_type: str, path: str) -> None:
    model = build_tiny(model_type)
    module = model.get_submodule(path)
    base = type(module).__name__

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return super(type(self), self).forward(*args, **kwargs)

    subclassed(module, forward=forward)
    with pytest.raises(PatchError, match=f"My{base} is a {base} with its own forward: how it mixes tokens"):
        fastpack.patch(model)
    assert not fastpack.is_patched(model)


@pytest.mark.parametrize("which", ["mlp", "input_layernorm"])
def test_other_forwards_of_ones_own_run_and_are_named(which: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        result: Tensor = super(type(self), self).forward(x)
        return result * 1.1

    model = tiny_model("llama")
    module = model.model.layers[1].get_submodule(which)
    subclassed(module, forward=forward)
    name = type(module).__name__
    alone = run_alone(model, make_sequences(VOCAB))
    with pytest.raises(PatchError, match=f"strict=True, .*{name}: a Llama"):
        fastpack.patch(model, strict=True)
    fastpack.patch(model)
    assert [what for what, _ in fastpack.report(model).skipped] == [name]
    check_exact(model, alone)


def test_stock_class() -> None:
    class Same(llama.LlamaAttention):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.more = 1

        def described(self) -> str:
            return "new, and nobody calls it"

    class Called(llama.LlamaAttention):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    class Layer(llama.LlamaDecoderLayer):  # transformers wraps its forward
        pass

    assert changes_of(Same) == []
    assert changes_of(Called) == ["__call__"]
    assert changes_of(Layer) == []
    config = tiny_model("llama").config
    assert stock_class(Same(config, 0)) is llama.LlamaAttention
    assert stock_class(Called(config, 0)) is Called
    assert stock_class(Layer(config, 0)) is llama.LlamaDecoderLayer
    assert stock_class(nn.Linear(2, 2)) is nn.Linear
    linear = torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert stock_class(linear) is nn.Linear
