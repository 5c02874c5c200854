"""``report`` after changes since the patch: layers copied, cut or added, and a loss that no longer runs."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from oracle import FLOAT32_BOUND, INPUT_KINDS, make_sequences, relative, run_alone
from patch_checks import check_exact
from peft import LoraConfig, get_peft_model
from test_patching_covered import ours_in
from tiny import VOCAB, tiny_model
from torch import nn
from trainer_cases import plain, sft

import fastpack
from fastpack.errors import BackendUnavailableError, FastpackWarning


def layers_of(model: Any) -> nn.ModuleList:
    result: nn.ModuleList = model.base_model.layers if hasattr(model.base_model, "layers") else model.base_model.h
    return result


def replicate(layers: nn.ModuleList) -> None:
    """Copy layers as PEFT does, with the same weights."""
    layers.append(copy.deepcopy(layers[0]))
    for new, old in zip(layers[-1].parameters(), layers[0].parameters(), strict=True):
        new.data = old.data


def loss_of(model: Any) -> float:
    batch = INPUT_KINDS["padded right"](make_sequences(VOCAB))
    return float(model(**batch, use_cache=False).loss)


@pytest.mark.parametrize(("model_type", "tier"), [("llama", "fast"), ("gpt_neox", "varlen")])
def test_copied_layers(model_type: str, tier: str) -> None:
    """Copies are patched like their originals, and restored with them."""
    stock = tiny_model(model_type)
    model = fastpack.patch(copy.deepcopy(stock))
    before = fastpack.report(model)
    assert before.tier == tier
    for each in (stock, model):
        replicate(layers_of(each))
    result = fastpack.report(model)
    assert result.tier == tier
    assert len(result.layers[tier]) == len(before.layers[tier]) + 1
    assert not result.skipped
    fastpack.unpatch(model)
    assert not ours_in(model)
    assert not any("fastpack" in str(getattr(m, "config", None)) for m in model.modules())
    assert loss_of(model) == loss_of(stock)
    fastpack.patch(model)
    assert len(fastpack.report(model).layers[tier]) == len(result.layers[tier])
    assert abs(loss_of(model) - loss_of(stock)) < FLOAT32_BOUND * 10


def test_layers_that_peft_replicates() -> None:
    replicated = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], layer_replication=[(0, 2), (1, 2)])
    model = get_peft_model(fastpack.patch(tiny_model("llama")), replicated)
    assert len(fastpack.report(model).layers["fast"]) == 3
    fastpack.unpatch(model)
    assert not ours_in(model)


@pytest.mark.parametrize("kind", ["dynamic", "linear"])
def test_rotary_frequencies_put_in(kind: str) -> None:
    """Frequencies that depend on the length follow each sequence only if the patch found the module."""
    model: Any = fastpack.patch(tiny_model("llama"))
    model.config.rope_parameters = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4}
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    skipped = fastpack.report(model).skipped
    assert [name for name, _ in skipped] == (["LlamaRotaryEmbedding"] if kind == "dynamic" else [])
    assert all("rotary type 'dynamic', put into the model after the patch" in why for _, why in skipped)
    assert not fastpack.report(fastpack.patch(fastpack.unpatch(model))).skipped


def test_layers_cut_and_put_in() -> None:
    model = fastpack.patch(tiny_model("llama"))
    model.model.layers = model.model.layers[:1]
    assert fastpack.report(model).layers == {"fast": ("layers.0.self_attn",)}
    assert not fastpack.report(model).skipped
    model.model.layers.append(tiny_model("llama").model.layers[0])
    result = fastpack.report(model)
    assert result.layers == {"fast": ("layers.0.self_attn",)}
    assert [(name, why[:2]) for name, why in result.skipped] == [("LlamaAttention", "1 ")]
    assert "patch(unpatch(model))" in str(result)
    fastpack.patch(fastpack.unpatch(model))
    assert len(fastpack.report(model).layers["fast"]) == 2


def test_what_another_patched_model_has_stays() -> None:
    """In shared layers or a nested model, another patch's modules are not copies of this one's."""
    policy = fastpack.patch(tiny_model("llama"))
    want, ours = loss_of(policy), ours_in(policy)
    reference = copy.deepcopy(policy)
    reference.model.layers = policy.model.layers
    fastpack.unpatch(reference)
    assert (loss_of(policy), ours_in(policy)) == (want, ours)
    policy.average = copy.deepcopy(policy)
    inside = ours_in(policy.average)
    fastpack.unpatch(policy)
    assert ours_in(policy.average) == inside
    assert loss_of(policy.average) == want


def test_a_model_in_a_model_without_weights_at_hand() -> None:
    model = fastpack.patch(tiny_model("llama"))
    model.average = copy.deepcopy(model)
    model.to("meta")
    inside = ours_in(model.average)
    fastpack.unpatch(model)
    assert ours_in(model.average) == inside


@pytest.mark.parametrize("saved", [None, ["self_attn"]])
def test_a_refused_patch_leaves_copies_patched(saved: Any) -> None:
    replicated = {"layer_replication": [(0, 2), (1, 2)]} if saved is None else {"modules_to_save": saved}
    settings: dict[str, Any] = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj" if saved is None else "up_proj"]}
    model = get_peft_model(fastpack.patch(tiny_model("llama")), LoraConfig(**settings, **replicated))
    want, ours = loss_of(model), ours_in(model)
    with pytest.raises(BackendUnavailableError):
        fastpack.patch(model, attention="flash_attn")
    assert (loss_of(model), ours_in(model)) == (want, ours)


def test_copies_share_the_scope_that_tells_them_the_packing() -> None:
    model, plain = fastpack.patch(tiny_model("bloom").eval()), tiny_model("bloom").eval()
    before = fastpack.report(model)
    for each in (model, plain):
        replicate(layers_of(each))
    result = fastpack.report(model)
    (tier,) = before.layers
    assert len(result.layers[tier]) == len(before.layers[tier]) + 1
    assert not result.skipped
    check_exact(model, run_alone(plain, make_sequences(VOCAB)))


def skipped_loss(target: Any) -> list[str]:
    return [why for what, why in fastpack.report(target).skipped if what == "loss"]


def test_a_trainer_that_brings_a_loss(tmp_path: Path) -> None:
    trainer = sft(tmp_path)
    model = fastpack.patch(tiny_model("llama"), loss="fused")
    assert not skipped_loss(model)
    assert any(note.startswith("loss: fused") for note in fastpack.report(model).notes)
    model.forward = functools.wraps(model.forward)(functools.partial(model.forward))
    assert not skipped_loss(model), "it calls ours"
    model.forward = trainer.model.forward  # what its constructor does
    (why,) = skipped_loss(model)
    assert "TRL's trainers have their own loss" in why
    assert not any(note.startswith("loss: fused") for note in fastpack.report(model).notes)
    assert skipped_loss(fastpack.patch(tiny_model("llama").model, loss="fused")) == ["a bare backbone has no loss"]
    trainer = plain(tmp_path)
    fastpack.patch(trainer.model, loss="fused")
    assert not skipped_loss(trainer)
    trainer.model = Accelerator().prepare(trainer.model)
    assert not skipped_loss(trainer), "accelerate's wrapper calls ours"


def test_an_adapter_of_the_head() -> None:
    model = fastpack.patch(tiny_model("llama", tie_word_embeddings=False), loss="fused")
    settings: dict[str, Any] = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "lm_head"]}
    model = get_peft_model(model, LoraConfig(lora_dropout=0.1, **settings)).train()
    (why,) = skipped_loss(model)
    assert "dropout before the LoRA of lm_head" in why
    with pytest.warns(FastpackWarning, match="dropout before the LoRA of lm_head"):
        loss_of(model)
    assert not skipped_loss(fastpack.patch(tiny_model("llama"), loss="fused"))


INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, where there is no GPU")


@pytest.mark.parametrize("kernels", ["auto", "torch", pytest.param("triton", marks=INTERPRETED)])
def test_kernels_are_those_of_the_loss_too(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastpack.model import loss

    asked = []
    original = loss.linear_cross_entropy

    def recorded(*args: Any, **kwargs: Any) -> torch.Tensor:
        asked.append(kwargs["implementation"])
        return original(*args, **kwargs)

    monkeypatch.setattr(loss, "linear_cross_entropy", recorded)
    loss_of(fastpack.patch(tiny_model("llama"), loss="fused", kernels=kernels))
    assert asked == [kernels]


@pytest.mark.parametrize("fused", [None, "fused"])
@pytest.mark.parametrize("kind", ["padded left", "packed_seq_lens"])
def test_labels_that_another_number_marks(kind: str, fused: Any) -> None:
    model = tiny_model("llama").train()
    batch = INPUT_KINDS[kind](make_sequences(VOCAB))
    want = fastpack.patch(model, loss=fused)(**batch).loss
    labels = batch["labels"].masked_fill(batch["labels"] == -100, 0)
    assert relative(model(**{**batch, "labels": labels}, ignore_index=0).loss, want) <= FLOAT32_BOUND
    assert not (batch["labels"] == 0).any(), "a label of its own would be ignored too"


def test_triton_without_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may move to a GPU after the patch, so the error comes only when a kernel is needed."""
    model = fastpack.patch(tiny_model("llama"), kernels="triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"on the CPU.*kernels='auto'"):
        loss_of(model)


def test_a_loss_that_knows_no_such_number() -> None:
    model = fastpack.patch(tiny_model("xlm").train())
    batch = INPUT_KINDS["padded right"](make_sequences(VOCAB))
    torch.manual_seed(0)
    want = model(**batch).loss
    torch.manual_seed(0)
    assert model(**batch, ignore_index=0).loss == want


@pytest.mark.parametrize("which", ["self_attn", "mlp", "input_layernorm"])
def test_parts_with_hooks_are_named(which: str) -> None:
    model = fastpack.patch(tiny_model("llama"))
    assert fastpack.report(model).skipped == ()
    part = model.model.layers[1].get_submodule(which)
    handle = part.register_forward_hook(lambda *_: None)
    why = "1: with hooks: called as a module, so its neighbours are not fused with it"
    assert fastpack.report(model).skipped == ((type(part).__name__, why),)
    handle.remove()
    assert fastpack.report(model).skipped == ()


@pytest.mark.parametrize("which", ["self_attn", "mlp", "input_layernorm", ""])
def test_parts_whose_forward_was_replaced_are_named(which: str) -> None:
    model = fastpack.patch(tiny_model("llama"))
    parts = [layer.get_submodule(which) for layer in model.model.layers]
    for part in parts:
        ours = part.forward
        part.forward = lambda *args, ours=ours, **kwargs: ours(*args, **kwargs)
    why = f"{len(parts)}: another forward has replaced fastpack's, and runs"
    assert fastpack.report(model).skipped == ((type(parts[0]).__name__, why),)


def test_hooks_of_accelerate_leave_our_forwards() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    model = fastpack.patch(tiny_model("llama"))
    for module in list(model.model.modules()):
        add_hook_to_module(module, ModelHook())
    assert fastpack.report(model).skipped == ()
