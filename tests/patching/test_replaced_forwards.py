"""Replaced forwards of a family's classes, before and after the patch: reported, on a lower tier, or refused."""

from __future__ import annotations

import copy
import pickle
import types
from typing import Any

import pytest
import torch
from oracle import FLOAT32_BOUND, make_sequences, run_alone
from patch_checks import check_exact
from tiny import VOCAB, tiny_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama import modeling_llama as llama
from transformers.models.stablelm import modeling_stablelm as stablelm

import fastpack
from fastpack.errors import PatchError
from fastpack.exactness.tiny import build_tiny
from fastpack.model.backbone import backbone_forward
from fastpack.utils.replacement import replaces

IDS = torch.arange(5, 15)[None]
BATCH: dict[str, Any] = {"input_ids": IDS, "packed_seq_lens": [4, 6], "use_cache": False}
HERE = "test_replaced_forwards."


def attention(self: Any, hidden_states: Tensor, position_embeddings: Any = None, **_: Any) -> Any:
    """Causal attention that reads no table of functions: it would take packed sequences for one."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (proj(hidden_states).view(shape).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
    q, k = llama.apply_rotary_pos_emb(q, k, *position_embeddings)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return self.o_proj(out.transpose(1, 2).reshape(hidden_states.shape)), None


def layer(self: Any, hidden_states: Tensor, position_embeddings: Any = None, **_: Any) -> Tensor:
    """A layer that drops every keyword and the mask, which causal attention doesn't need for rows padded right."""
    x = self.input_layernorm(hidden_states)
    x = hidden_states + 1.1 * self.self_attn(hidden_states=x, position_embeddings=position_embeddings)[0]
    return x + self.mlp(self.post_attention_layernorm(x))


def backbone(self: Any, input_ids: Tensor, attention_mask: Any = None, **_: Any) -> Any:
    """A backbone that counts positions by itself."""
    x = 1.1 * self.embed_tokens(input_ids)
    tables = self.rotary_emb(x, torch.arange(x.shape[1], device=x.device)[None])
    for each in self.layers:
        x = each(x, position_embeddings=tables, attention_mask=None)
    return BaseModelOutputWithPast(last_hidden_state=self.norm(x))


def head(self: Any, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> Any:
    """A head that halves its logits."""
    logits = 0.5 * self.lm_head(self.model(input_ids, **kwargs).last_hidden_state)
    loss = None if labels is None else self.loss_function(logits, labels, VOCAB, **kwargs)
    return CausalLMOutputWithPast(loss=loss, logits=logits)


def norm(self: Any, hidden_states: Tensor) -> Tensor:
    return hidden_states * self.weight


def tables(self: Any, x: Tensor, position_ids: Tensor) -> Any:
    angles = position_ids[..., None].float() * torch.linspace(0.1, 1.0, 8, device=x.device)
    return angles.cos(), angles.sin()


PLACES: dict[str, tuple[Any, Any]] = {
    "attention": (llama.LlamaAttention, attention),
    "layer": (llama.LlamaDecoderLayer, layer),
    "backbone": (llama.LlamaModel, backbone),
    "head": (llama.LlamaForCausalLM, head),
    "norm": (llama.LlamaRMSNorm, norm),
    "rotary": (llama.LlamaRotaryEmbedding, tables),
}
TIERS = {"layer": "varlen", "backbone": "re-padded model", "head": "fast", "norm": "fast", "rotary": "varlen"}


def put(changed: pytest.MonkeyPatch, name: str) -> None:
    cls, forward = PLACES[name]
    changed.setattr(cls, "forward", forward)


@pytest.mark.parametrize("name", TIERS)
def test_it_runs_and_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", attn_implementation="sdpa").train()
    sequences = make_sequences(VOCAB)
    before = run_alone(model, sequences)
    put(monkeypatch, name)
    model.zero_grad()
    alone = run_alone(model, sequences)
    assert max(float((a - b).abs().max()) for a, b in zip(alone.logits, before.logits, strict=True)) > 1e-3
    if name != "head":
        with pytest.raises(PatchError, match="strict=True"):
            fastpack.patch(model, strict=True)
    fastpack.patch(model, strict=name == "head")
    report = fastpack.report(model)
    cls = PLACES[name][0].__name__
    assert report.tier == TIERS[name]
    assert any(what == cls and HERE + PLACES[name][1].__name__ in why for what, why in report.skipped), report.skipped
    check_exact(model, alone)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        check_exact(copied, alone)


def test_on_instances() -> None:
    model: Any = tiny_model("llama", attn_implementation="sdpa").train()
    for each in model.model.layers:
        each.forward = types.MethodType(layer, each)
    alone = run_alone(model, make_sequences(VOCAB))
    fastpack.patch(model)
    report = fastpack.report(model)
    assert report.tier == "varlen"
    assert report.skipped[0] == ("LlamaDecoderLayer", f"its forward is {HERE}layer, of other code: that runs")
    check_exact(model, alone)


@pytest.mark.parametrize("family", ["llama", "stablelm"])
def test_attention_on_an_instance_is_refused(family: str) -> None:
    model: Any = build_tiny(family)
    module = model.model.layers[1].self_attn
    module.forward = types.MethodType(attention, module)
    with pytest.raises(PatchError, match=f"the forward of a {type(module).__name__} was already replaced"):
        fastpack.patch(model)
    del module.forward
    fastpack.patch(model)


def test_nothing_is_named_where_nothing_was_replaced() -> None:
    for family in ("llama", "stablelm", "mamba"):
        report = fastpack.report(fastpack.patch(build_tiny(family)))
        assert report.skipped == ()
        assert report.tier == {"llama": "fast", "stablelm": "varlen", "mamba": "re-padded mixer"}[family]


@pytest.mark.parametrize("family", ["llama", "stablelm"])
def test_attention_is_refused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls: Any = {"llama": llama.LlamaAttention, "stablelm": stablelm.StableLmAttention}[family]
    monkeypatch.setattr(cls, "forward", attention)
    model = build_tiny(family)
    with pytest.raises(PatchError, match=f"the forward of {cls.__name__} is {HERE}attention now"):
        fastpack.patch(model)
    assert not fastpack.is_patched(model)
    monkeypatch.undo()  # as the message says
    fastpack.patch(model)


@pytest.mark.parametrize("name", ["attention", "layer", "backbone", "norm"])
def test_after_the_patch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = fastpack.patch(tiny_model("llama", attn_implementation="sdpa"))
    expected = model(**BATCH).logits
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    put(monkeypatch, name)
    cls, forward = PLACES[name]
    copies.append(copy.deepcopy(model))
    for each in (model, *copies):
        with pytest.raises(PatchError, match=f"{cls.__name__} became {HERE}{forward.__name__} after the patch"):
            each(**BATCH)
    monkeypatch.undo()
    assert torch.equal(model(**BATCH).logits, expected)


def test_a_head_after_the_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own head forward runs around the patched backbone, and gets all its labels."""
    stock, model = (tiny_model("llama", attn_implementation="sdpa") for _ in range(2))
    fastpack.patch(model)
    put(monkeypatch, "head")
    assert fastpack.report(model).skipped[0][0] == "LlamaForCausalLM"
    mask = torch.tensor([[1] * 10, [1] * 7 + [0] * 3])
    batch = {"input_ids": IDS.expand(2, 10), "attention_mask": mask, "labels": IDS.where(mask > 0, -100)}
    ours, theirs = model(**batch), stock(**batch, use_cache=False)
    assert abs(float(ours.loss - theirs.loss)) <= FLOAT32_BOUND * float(theirs.loss)
    assert float((ours.logits - theirs.logits)[mask > 0].abs().max()) <= 1e-5
    assert replaces(model.model.forward, backbone_forward)


def test_a_recurrent_module_runs_on_rows_whoever_wrote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_tiny("mamba2").train()
    cls: Any = type(model.backbone.layers[0].mixer)
    stock = cls.forward

    def louder(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return 1.1 * stock(self, hidden_states, **kwargs)

    monkeypatch.setattr(cls, "forward", louder)
    alone = run_alone(model, make_sequences(VOCAB))
    fastpack.patch(model)
    assert [what for what, _ in fastpack.report(model).skipped] == [cls.__name__]
    check_exact(model, alone)


def test_decorators_of_transformers_are_no_replacement() -> None:
    assert hasattr(llama.LlamaModel.forward, "__wrapped__")
    assert isinstance(fastpack.patch(tiny_model("llama"), strict=True), nn.Module)
