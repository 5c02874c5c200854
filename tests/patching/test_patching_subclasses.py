"""User subclasses and parametrizations of a family's classes: exact like the family, refused, or reported by name."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import FLOAT32_BOUND, make_sequences, relative, run_alone
from patch_checks import check_exact
from tiny import VOCAB, tiny_config, tiny_model
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama as llama

import fastpack
from fastpack.errors import FastpackWarning, PatchError, UnsupportedModelError
from fastpack.exactness.rule import RECURRENT_BOUND
from fastpack.exactness.tiny import build_tiny
from fastpack.utils.classes import changes_of, stock_class


class Louder(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1.2


def subclassed(module: nn.Module, **own: Any) -> None:
    """Replace a module's class by a user's subclass with these attributes."""
    module.__class__ = type(f"My{type(module).__name__}", (type(module),), {**own, "__module__": __name__})


def mix_in(module: nn.Module, mixin: type) -> None:
    """Replace a module's class by a user's class, with a mixin first that is no module."""
    cls: Any = type(module)
    module.__class__ = type(f"My{cls.__name__}", (mixin, cls), {"__module__": __name__})


def vocabulary(model: Any) -> int:
    return min(VOCAB, model.get_input_embeddings().num_embeddings)


MIXERS = {
    "mamba2": ("backbone.layers.0.mixer", "A_log"),
    "bamba": ("model.layers.0.mamba", "A_log"),
    "qwen3_next": ("model.layers.0.linear_attn", "A_log"),
    "gpt_oss": ("model.layers.1.self_attn", "sinks"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("how", ["parametrized", "subclass"])
@pytest.mark.parametrize("model_type", MIXERS)
def test_mixers_of_another_class(model_type: str, how: str) -> None:
    """The class differs by name alone. Left stock, recurrent mixers ran over all sequences as one."""
    path, name = MIXERS[model_type]
    model = build_tiny(model_type).train()
    module = model.get_submodule(path)
    if how == "parametrized":
        parametrize.register_parametrization(module, name, Louder())
    else:
        subclassed(module)
    alone = run_alone(model, make_sequences(vocabulary(model)))
    fastpack.patch(model)
    check_exact(model, alone, FLOAT32_BOUND if model_type == "gpt_oss" else RECURRENT_BOUND)
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


@pytest.mark.parametrize(
    ("model_type", "path"), [("llama", "model.layers.1.self_attn"), ("bamba", "model.layers.0.mamba")]
)
def test_mixing_from_a_mixin_is_refused(model_type: str, path: str) -> None:
    class Louder:
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)  # type: ignore[misc]

    model = build_tiny(model_type)
    module = model.get_submodule(path)
    base = type(module).__name__
    mix_in(module, Louder)
    with pytest.raises(PatchError, match=f"My{base} is a {base} with its own forward: how it mixes tokens"):
        fastpack.patch(model)
    assert not fastpack.is_patched(model)


@pytest.mark.parametrize("path", ["model.layers.1.self_attn", "model.layers.1.mlp", "model.layers.1.input_layernorm"])
def test_mixins_that_change_nothing_are_fast(path: str) -> None:
    class Noted:
        def noted(self) -> str:
            return "new, and nobody calls it"

    model = tiny_model("llama")
    mix_in(model.get_submodule(path), Noted)
    alone = run_alone(model, make_sequences(VOCAB))
    fastpack.patch(model, strict=True)
    check_exact(model, alone)


@pytest.mark.parametrize(
    ("model_type", "path", "name"),
    [
        ("llama", "model.layers.1.self_attn", "LlamaAttention"),
        ("bamba", "model.layers.0.mamba", "BambaMixer"),
        ("bamba", "model.layers.0.mamba", "Mine"),
    ],
)
def test_what_stands_for_a_class_that_mixes_is_refused(model_type: str, path: str, name: str) -> None:
    """A copied class, or another one in a recurrent module's place, ran over all sequences as one."""
    model = build_tiny(model_type)
    parent, _, child = path.rpartition(".")
    copied = type(name, (nn.Module,), {"__module__": __name__})
    setattr(model.get_submodule(parent), child, copied())
    with pytest.raises(PatchError, match=f"{child} is a {name} of {__name__}, which is not the class of transformers"):
        fastpack.patch(model)
    assert not fastpack.is_patched(model)


def test_attention_in_both_directions_is_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(PatchError, match="set to attend in both directions"):
        fastpack.patch(model)
    opt: Any = fastpack.patch(build_tiny("opt"))
    opt.model.decoder.layers[1].self_attn.is_causal = False
    with pytest.raises(PatchError, match="'bidirectional'"):
        opt(torch.arange(5, 15)[None], attention_mask=torch.ones(1, 10), use_cache=False)


@pytest.mark.parametrize("how", ["class", "hook", "forward"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "granite"])
def test_tables_that_are_no_rotation(model_type: str, how: str) -> None:
    """The two halves of cos and sin differ, and fast RoPE reads only one."""

    def bent(tables: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return tuple(table * torch.linspace(0.8, 1.2, table.shape[-1]) for table in tables)

    model: Any = build_tiny(model_type).train()
    module = model.model.rotary_emb
    stock = type(module).forward
    if how == "class":
        subclassed(module, forward=lambda self, *args, **kwargs: bent(stock(self, *args, **kwargs)))
    elif how == "hook":
        module.register_forward_hook(lambda module, args, tables: bent(tables))
    else:
        module.forward = lambda *args, **kwargs: bent(stock(module, *args, **kwargs))
    alone = run_alone(model, make_sequences(VOCAB))
    with pytest.raises(PatchError, match="its cos and sin may be any of"):
        fastpack.patch(model, strict=True)
    fastpack.patch(model)
    assert fastpack.report(model).tier == "varlen"
    check_exact(model, alone)


@pytest.mark.parametrize("path", ["layers.1", "layers.1.self_attn", "layers.1.mlp", "layers.1.input_layernorm", "norm"])
def test_a_class_that_came_after_the_patch(path: str) -> None:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return super(type(self), self).forward(*args, **kwargs)

    model: Any = fastpack.patch(tiny_model("llama"))
    ids = torch.arange(5, 15)[None]
    module = model.model.get_submodule(path)
    before = type(module)
    subclassed(module, note="nothing of the base's")
    model(ids, use_cache=False)
    subclassed(module, forward=forward)
    with pytest.raises(PatchError, match=f"a My{before.__name__} became a MyMy{before.__name__} after the patch"):
        model(ids, use_cache=False)
    module.__class__ = before
    model(ids, use_cache=False)


@pytest.mark.parametrize("which", ["self_attn", "mlp", "input_layernorm"])
def test_a_decorator_hides_nothing(which: str) -> None:
    """``functools.wraps`` leads back to the stock source."""
    model = tiny_model("llama")
    module = model.model.layers[1].get_submodule(which)
    stock: Any = type(module).forward

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        return (result[0] * 1.1, *result[1:]) if isinstance(result, tuple) else result * 1.1

    subclassed(module, forward=forward)
    alone = run_alone(model, make_sequences(VOCAB))
    if which == "self_attn":
        with pytest.raises(PatchError, match="with its own forward: how it mixes tokens"):
            fastpack.patch(model)
        return
    fastpack.patch(model)
    assert [what for what, _ in fastpack.report(model).skipped] == [type(module).__name__]
    check_exact(model, alone)


@pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "rotate_half"])
def test_decorated_helpers_of_a_family(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock: Any = getattr(llama, name)

    @functools.wraps(stock)
    def mine(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        return tuple(x * 1.1 for x in result) if isinstance(result, tuple) else result * 1.1

    monkeypatch.setattr(llama, name, mine)
    model = tiny_model("llama")
    alone = run_alone(model, make_sequences(VOCAB))
    with pytest.warns(FastpackWarning, match="LlamaAttention .* a twin of it does not match"):
        fastpack.patch(model)
    assert fastpack.report(model).tier == "varlen"
    check_exact(model, alone)


def test_attention_functions_of_ones_own_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def mine(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(module, query * 1.1, *args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "mine", mine)
    for model_type in ("llama", "opt"):
        model = build_tiny(model_type)
        model.set_attn_implementation("mine")
        with pytest.raises(PatchError, match=r"attends by test_patching_subclasses.mine .*set_attn_implementation"):
            fastpack.patch(model)
        model.set_attn_implementation("sdpa")
        fastpack.patch(model)
    monkeypatch.setattr(llama, "eager_attention_forward", mine)
    fastpack.patch(tiny_model("llama", attn_implementation="sdpa"))
    with pytest.raises(PatchError, match="attn_implementation='eager'"):
        fastpack.patch(tiny_model("llama", attn_implementation="eager"))


def test_methods_of_an_instance() -> None:
    model: Any = build_tiny("gemma").train()
    norm = model.model.layers[1].input_layernorm
    stock = norm._norm
    norm._norm = lambda x: 1.1 * stock(x)
    alone = run_alone(model, make_sequences(VOCAB))
    fastpack.patch(model)
    assert fastpack.report(model).skipped[0][0] == "GemmaRMSNorm"
    check_exact(model, alone)
    latent: Any = build_tiny("deepseek_v3")
    attention = latent.model.layers[1].self_attn
    attention.expand_kv = type(attention).expand_kv.__get__(attention)
    with pytest.raises(PatchError, match="'expand_kv'"):
        fastpack.patch(latent)


@pytest.mark.parametrize(
    ("model_type", "name"), [("qwen3", "variance_epsilon"), ("exaone4", "variance_epsilon"), ("gemma3_text", "eps")]
)
def test_norms_of_heads_with_settings_of_their_own(model_type: str, name: str) -> None:
    model: Any = build_tiny(model_type).train()
    norm = model.model.layers[1].self_attn.k_norm
    assert getattr(norm, name) < 0.3
    setattr(norm, name, 0.3)
    alone = run_alone(model, make_sequences(VOCAB))
    fastpack.patch(model, strict=True)
    check_exact(model, alone)


def test_a_norm_that_reads_rows() -> None:
    class Rows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            _, _, width = x.shape
            return x / width**0.5

    for model_type in ("llama", "olmo2", "mixtral"):
        model: Any = build_tiny(model_type).train()
        layer = model.model.layers[1]
        for name in ("input_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"):
            if hasattr(layer, name):
                setattr(layer, name, Rows())
        alone = run_alone(model, make_sequences(VOCAB))
        fastpack.patch(model)
        assert fastpack.report(model).tier == "fast"
        check_exact(model, alone)


def test_dynamic_frequencies_of_ones_own_are_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model: Any = tiny_model("llama", rope_parameters=rope, max_position_embeddings=16)
    subclassed(model.model.rotary_emb, forward=lambda self, *args: super(type(self), self).forward(*args))
    with pytest.raises(UnsupportedModelError, match=r"'dynamic', whose .* length\. It has a forward"):
        fastpack.patch(model)


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


class OwnConfig(LlamaConfig):
    """A config like remote code's, with a ``model_type`` of its own."""

    model_type = "llama_of_my_own"


class OwnModel(llama.LlamaModel):
    config_class = OwnConfig
    _no_split_modules = ("LlamaDecoderLayer",)
    _keys_to_ignore_on_load_missing = ("nothing",)
    main_input_name = "the_ids"


class AnnotatedModel(llama.LlamaModel):
    config: OwnConfig


class OwnHead(llama.LlamaForCausalLM):
    config_class = OwnConfig
    model_tags = ("mine",)


def of_ones_own(backbone: Any) -> Any:
    """Return a user's own head over a backbone, with the configs of both."""
    settings = tiny_config("llama").to_dict()
    config = OwnConfig(**{name: value for name, value in settings.items() if name != "model_type"})
    torch.manual_seed(0)
    model = OwnHead(config)
    model.model = backbone(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.15)
    return model.train()


@pytest.mark.parametrize("backbone", [OwnModel, AnnotatedModel])
def test_subclasses_that_only_name_things_are_fast(backbone: Any) -> None:
    model = of_ones_own(backbone)
    alone = run_alone(model, make_sequences(VOCAB))
    whole = fastpack.report(fastpack.patch(tiny_model("llama"))).swapped
    fastpack.patch(model, strict=True)
    report = fastpack.report(model)
    assert (report.tier, report.swapped, report.model, report.family) == ("fast", whole, "OwnHead", "llama")
    check_exact(model, alone)
    fastpack.verify(model)
    fastpack.patch(model, loss="fused")
    assert not fastpack.report(model).skipped
    sequences = make_sequences(VOCAB)
    ids = torch.cat(sequences)[None]
    outputs = model(input_ids=ids, labels=ids, packed_seq_lens=[len(s) for s in sequences])
    assert outputs.logits is None, "its loss is the family's too"
    assert relative(outputs.loss, alone.loss) <= FLOAT32_BOUND


def test_a_prefix_that_names_no_backbone() -> None:
    """The head is recognised anyway. Its fused loss, which needs that name, is not used."""
    model = tiny_model("llama")
    subclassed(model, base_model_prefix="transformer")
    alone = run_alone(model, make_sequences(VOCAB))
    fastpack.patch(model, loss="fused")
    assert fastpack.report(model).tier == "fast"
    ((what, why),) = fastpack.report(model).skipped
    assert what == "loss"
    assert "base_model_prefix='transformer' names no module" in why
    check_exact(model, alone)


def test_what_does_more_than_naming_things_is_refused() -> None:
    """The cases are an ``__init__`` over its own config, a helper, a flag and a forward."""

    def twice_as_sharp(self: Any, config: Any) -> None:
        llama.LlamaModel.__init__(self, config)
        for layer in self.layers:
            layer.self_attn.scaling *= 2

    changes: dict[str, Any] = {
        "__init__": twice_as_sharp,
        "supports_gradient_checkpointing": False,
        "_can_record_outputs": {},
        "get_input_embeddings": lambda self: self.embed_tokens,
        "forward": lambda self, *args, **kwargs: llama.LlamaModel.forward(self, *args, **kwargs),
    }
    for name, what in changes.items():
        cls = type("OwnModel", (llama.LlamaModel,), {"config_class": OwnConfig, name: what, "__module__": __name__})
        assert changes_of(cls) == [name]
        model = of_ones_own(cls)
        with pytest.raises(UnsupportedModelError, match=r"family 'llama_of_my_own' \(OwnModel\) is not covered"):
            fastpack.patch(model)
        assert not fastpack.is_patched(model)


def test_remote_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Head and backbone are loaded by ``trust_remote_code`` and registered for a ``model_type`` of their own."""
    from transformers import AutoConfig, AutoModelForCausalLM, dynamic_module_utils

    modules = tmp_path / "modules"
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(modules))
    monkeypatch.syspath_prepend(str(modules))
    folder = tmp_path / "own"
    tiny_model("llama").save_pretrained(folder)
    (folder / "modeling_own.py").write_text(REMOTE)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own_llama", "architectures": ["OwnForCausalLM"]}
    config["auto_map"] = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))

    assert AutoConfig.from_pretrained(folder, trust_remote_code=True).model_type == "own_llama"
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).train()
    assert type(model.model).__module__.startswith("transformers_modules.")
    alone = run_alone(model, make_sequences(VOCAB))
    fastpack.patch(model, strict=True)
    assert fastpack.report(model).tier == "fast"
    check_exact(model, alone)


REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel


class OwnConfig(LlamaConfig):
    model_type = "own_llama"


class OwnModel(LlamaModel):
    config_class = OwnConfig


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
        self.post_init()
"""
