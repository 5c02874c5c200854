"""The patching contract: one instance, nothing else, exactly undone, and surviving what users do to models.

What other libraries wrap around patched models is in ``test_patching_wrapped.py``.
"""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import FLOAT32_BOUND, compare, flat, make_sequences, padded, relative, run_alone
from patch_checks import check_exact, fingerprint, written_in
from tiny import FAST, VOCAB, tiny_config, tiny_model
from torch import nn
from transformers import AttentionInterface, AutoModel, AutoModelForSequenceClassification
from transformers import AutoModelForTokenClassification as AutoTokenClassifier

import fastpack
from fastpack.backends import torch_varlen
from fastpack.exactness.tiny import build_tiny, model_types
from fastpack.families.fast import FAST_FAMILIES
from fastpack.families.registry import FAMILIES
from fastpack.families.spec import Family
from fastpack.packing import inputs

VARLEN = "olmo"


def installed(families: Iterable[Family]) -> list[Family]:
    """Return the families that this version of transformers has."""
    return [family for family in families if family.model_type in model_types()]


def class_attributes() -> dict[str, Any]:
    classes = {cls for family in installed(FAST_FAMILIES) for cls in _classes(family.module)}
    return {f"{cls.__qualname__}.{key}": value for cls in classes for key, value in vars(cls).items()}


def _classes(module: str) -> list[type]:
    __import__(module)
    return [cls for cls in vars(sys.modules[module]).values() if isinstance(cls, type) and cls.__module__ == module]


@pytest.fixture(params=["llama", VARLEN])
def model(request: pytest.FixtureRequest) -> nn.Module:
    return tiny_model(request.param)


def test_unpatch_restores_everything(model: nn.Module) -> None:
    before = fingerprint(model)
    fastpack.patch(model)
    assert fastpack.is_patched(model)
    assert fingerprint(model) != before
    fastpack.unpatch(model)
    assert not fastpack.is_patched(model)
    assert fingerprint(model) == before


def test_nothing_but_the_instance_changes(model: nn.Module) -> None:
    other = type(model)(model.config)
    before, classes, functional = fingerprint(other), class_attributes(), dict(vars(torch.nn.functional))
    interface = dict(AttentionInterface._global_mapping)
    fastpack.patch(model)
    assert fingerprint(other) == before, "a model built from the same config object is untouched"
    assert class_attributes() == classes
    assert dict(vars(torch.nn.functional)) == functional
    added = set(AttentionInterface._global_mapping) - set(interface)
    assert all(name.startswith("fastpack_") for name in added)
    assert all(
        AttentionInterface._global_mapping[name] is what for name, what in interface.items() if "fast" not in name
    )


def test_importing_changes_nothing() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import fastpack; "
        "new = set(sys.modules) - before; "
        "assert not any(m.split('.')[0] in ('transformers', 'peft', 'trl', 'triton', 'rich') for m in new), new"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_import_is_quick() -> None:
    """Adds under 0.2 s to ``import torch``, of this process's own time: others may be busy. The best of eight.

    As much longer as torch takes beyond 1.2 s, where the machine is slow, but under 0.3 s on any. Without the garbage
    of ``import torch``, the collection of which falls into whoever comes next.
    """
    code = "import time, gc; gc.disable(); at = time.process_time; t = at(); import torch; u = at(); import fastpack; "
    code += "print(u - t, at() - u)"
    runs = [subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True) for _ in range(8)]
    of_torch, ours = zip(*(map(float, run.stdout.split()) for run in runs), strict=True)
    assert min(ours) < min(0.2 * max(1, min(of_torch) / 1.2), 0.3), (ours, of_torch)


def test_patched_undoes_after_an_exception(model: nn.Module) -> None:
    before = fingerprint(model)
    inside = []

    def fail() -> None:
        with fastpack.patched(model):
            inside.append(fastpack.is_patched(model))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert inside == [True]
    assert fingerprint(model) == before


def test_a_second_patch_is_a_no_op_or_replans(model: nn.Module) -> None:
    before = fingerprint(model)
    fastpack.patch(model)
    once = fingerprint(model)
    fastpack.patch(model)
    assert {k: id(v) for k, v in fingerprint(model).items() if "forward" in k and callable(v)} == {
        k: id(v) for k, v in once.items() if "forward" in k and callable(v)
    }
    fastpack.patch(model, attention="reference")
    assert fastpack.report(model).backend == "reference"
    with pytest.raises(fastpack.BackendUnavailableError):
        fastpack.patch(model, attention="flash_attn")
    assert fastpack.report(model).backend == "reference", "the patch in force stays when the new one is refused"
    fastpack.unpatch(model)
    assert fingerprint(model) == before


@pytest.mark.parametrize("model_type", ["llama", "mamba2"])
def test_a_backbone_and_then_the_model_around_it(model_type: str) -> None:
    model = build_tiny(model_type).eval()
    before = fingerprint(model)
    alone = run_alone(model, make_sequences(VOCAB))
    fastpack.patch(fastpack.patch(model.base_model))
    fastpack.patch(model)
    assert fastpack.report(model).swapped["head"] == 1
    check_exact(model, alone)
    fastpack.patch(model.base_model)
    check_exact(model, alone)
    fastpack.unpatch(model)
    assert fingerprint(model) == before


def test_what_would_leave_a_patched_head_stock() -> None:
    model = fastpack.patch(tiny_model("llama"))
    with pytest.raises(fastpack.PatchError, match=r"the backbone alone would leave that one stock"):
        fastpack.patch(model.base_model, attention="reference")
    classifier = AutoModelForSequenceClassification.from_config(copy.deepcopy(model.config))
    classifier.model = model.base_model
    with pytest.raises(fastpack.PatchError, match=r"another head, a LlamaForSequenceClassification,"):
        fastpack.patch(classifier)
    fastpack.unpatch(model)
    fastpack.patch(classifier)
    assert fastpack.report(model).model == "LlamaForSequenceClassification"


class Holder:
    """A stand-in for a trainer, with a policy and a reference model."""

    def __init__(self, model: nn.Module, ref_model: nn.Module) -> None:
        self.model, self.ref_model = model, ref_model

    def train(self) -> None: ...


def test_a_refused_reference_leaves_the_policy_as_it_was() -> None:
    policy = fastpack.patch(tiny_model("llama"))
    with pytest.raises(fastpack.UnsupportedModelError):
        fastpack.patch(Holder(policy, build_tiny("prophetnet")), attention="reference")
    assert fastpack.report(policy).backend == "segments", "the patch in force stays"


NO_TARGET = (TypeError, r"takes a model .* or a trainer")
NO_MODEL = (fastpack.UnsupportedModelError, "not a transformers model")


@pytest.mark.parametrize(
    ("other", "error", "words"), [("a name", *NO_TARGET), (None, *NO_TARGET), (nn.Linear(2, 2), *NO_MODEL)]
)
def test_what_is_no_model(other: Any, error: type[Exception], words: str) -> None:
    for ask in (fastpack.is_patched, fastpack.report, fastpack.patch):
        with pytest.raises(error, match=words):
            ask(other)


def test_a_model_that_a_trainer_has_twice_is_patched_once() -> None:
    model = tiny_model("llama")
    before = fingerprint(model)
    fastpack.patch(Holder(model, model))
    assert len(model._forward_pre_hooks) == 1
    fastpack.unpatch(model)
    assert fingerprint(model) == before


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_come_back_patched(model: nn.Module, how: str) -> None:
    alone = run_alone(model, make_sequences(VOCAB))
    fastpack.patch(model)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    assert fastpack.is_patched(twin)
    check_exact(twin, alone)
    with torch.no_grad():  # the copy runs on its own weights
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(**flat(make_sequences(VOCAB)), packed_seq_lens=[7, 1, 19, 19, 33]).logits.any()
    check_exact(model, alone)
    fastpack.unpatch(twin)
    assert not any("forward" in module.__dict__ for module in twin.modules())
    assert not twin._forward_pre_hooks
    assert fastpack.is_patched(model)


def test_pickle_opens_patched_in_a_fresh_process(tmp_path: Path) -> None:
    model = fastpack.patch(tiny_model(VARLEN))
    torch.save(model, tmp_path / "model.pt")
    code = (
        f"import torch; m = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False); "
        "import fastpack; assert fastpack.is_patched(m); "
        "m(input_ids=torch.arange(3, 13)[None], packed_seq_lens=[4, 6])"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_save_pretrained_is_stock(model: nn.Module, tmp_path: Path) -> None:
    alone = run_alone(model, make_sequences(VOCAB))
    model.save_pretrained(tmp_path / "stock")
    fastpack.patch(model)
    model.save_pretrained(tmp_path / "patched")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "patched" / name).read_bytes() == (tmp_path / "stock" / name).read_bytes()
    again = type(model).from_pretrained(tmp_path / "patched", attn_implementation="eager").train()
    assert not fastpack.is_patched(again)
    assert compare(run_alone(again, make_sequences(VOCAB)), alone).worst <= FLOAT32_BOUND


def test_generate_is_stock(model: nn.Module) -> None:
    ids = padded(make_sequences(VOCAB, (4, 9, 6)), "left")
    ids = {"input_ids": ids["input_ids"][:3], "attention_mask": ids["attention_mask"][:3]}
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.eval()
    stock = model.generate(**ids, **settings)
    fastpack.patch(model)
    assert torch.equal(model.generate(**ids, **settings), stock)
    assert torch.equal(model.generate(**ids, **settings, use_cache=False), stock)
    assert torch.equal(model.generate(**ids, **settings, num_beams=2), _stock_beams(model, ids, settings))


def _stock_beams(model: nn.Module, ids: dict[str, Any], settings: dict[str, Any]) -> torch.Tensor:
    stock = copy.deepcopy(model)
    fastpack.unpatch(stock)
    return stock.generate(**ids, **settings, num_beams=2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_masks_of_zeros_and_ones_take_the_stock_path(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read once where a cache is asked for; not where it came, nor in steps of decoding: nothing waits."""
    read: list[Any] = []
    numbers = inputs.read_segments
    monkeypatch.setattr(inputs, "read_segments", lambda mask: read.append(mask) or numbers(mask))
    model = tiny_model("llama").eval()
    batch = padded(make_sequences(VOCAB, (4, 9, 6)), "left")
    arguments = {"input_ids": batch["input_ids"][:3], "attention_mask": batch["attention_mask"][:3].to(dtype)}
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    stock = model.generate(**arguments, **settings), model(**arguments, use_cache=True).logits
    fastpack.patch(model)
    assert torch.equal(model.generate(**arguments, **settings), stock[0])
    assert not read
    assert torch.equal(model(**arguments, use_cache=True).logits, stock[1])
    assert len(read) == (0 if dtype == torch.bool else 1)
    model(input_ids=arguments["input_ids"][:, -1:], attention_mask=arguments["attention_mask"][:, -1:], use_cache=True)
    assert len(read) == (0 if dtype == torch.bool else 1)


def test_an_explicit_cache_or_attentions_take_the_stock_path(model: nn.Module) -> None:
    batch = padded(make_sequences(VOCAB), "right")
    with torch.no_grad():
        stock = model(**batch, use_cache=True, output_attentions=True)
        fastpack.patch(model)
        ours = model(**batch, use_cache=True, output_attentions=True)
        default = model(**batch)
    assert ours.past_key_values is not None
    assert torch.equal(ours.attentions[0], stock.attentions[0])
    assert torch.equal(ours.logits, stock.logits)
    assert default.past_key_values is None, "no cache is made unless asked for"


def test_the_signature_is_the_stock_one() -> None:
    """Trainers drop data set columns that ``forward`` does not name."""
    model = tiny_model("llama")
    names = set(inspect.signature(model.forward).parameters)
    backbone = set(inspect.signature(model.model.forward).parameters)
    fastpack.patch(model)
    assert names <= set(inspect.signature(model.forward).parameters)
    assert backbone <= set(inspect.signature(model.model.forward).parameters)
    assert type(model).__name__ == "LlamaForCausalLM"


def test_classification_heads_and_bare_backbone() -> None:
    sequences = make_sequences(VOCAB)
    batch = padded(sequences, "right")
    ids, mask = batch["input_ids"][:-1], batch["attention_mask"][:-1]  # a row of padding has no token to pool
    for auto in (AutoModelForSequenceClassification, AutoTokenClassifier):
        model = tiny_model("llama", auto=auto, num_labels=3)
        stock = model(ids, attention_mask=mask, use_cache=False).logits
        fastpack.patch(model)
        ours = model(ids, attention_mask=mask).logits
        where = mask.bool() if stock.ndim == 3 else slice(None)
        assert relative(ours[where], stock[where]) <= FLOAT32_BOUND
    labels = torch.where(mask.bool(), ids % 3, -100)
    loss = model(ids, attention_mask=mask, labels=labels).loss
    fastpack.unpatch(model)
    assert relative(loss, model(ids, attention_mask=mask, labels=labels, use_cache=False).loss) <= FLOAT32_BOUND
    bare = tiny_model("llama", auto=AutoModel)
    stock = bare(ids, attention_mask=mask, use_cache=False).last_hidden_state
    fastpack.patch(bare)
    assert relative(bare(ids, attention_mask=mask).last_hidden_state[mask.bool()], stock[mask.bool()]) <= FLOAT32_BOUND


def test_an_upstream_source_that_computes_something_else_is_varlen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    stock = LlamaAttention.forward

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Upstream has changed."""
        return stock(self, hidden_states * 1.1, *args, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", written_in(LlamaAttention.__module__, forward))
    model = tiny_model("llama")
    alone = run_alone(model, make_sequences(VOCAB))
    with pytest.warns(fastpack.FastpackWarning), pytest.raises(fastpack.PatchError, match="strict"):
        fastpack.patch(model, strict=True)
    with pytest.warns(fastpack.FastpackWarning, match="LlamaAttention"):
        fastpack.patch(model)
    report = fastpack.report(model)
    assert report.tier == "varlen"
    assert report.skipped[0][0] == "LlamaAttention"
    check_exact(model, alone)


def test_each_form_of_attention_has_a_family_in_the_tests() -> None:
    def forms(names: Iterable[str]) -> set[Any]:
        return {FAMILIES[name].fast[cls] for name in names for cls in FAMILIES[name].attention}

    handed_down = [family for family in installed(FAST_FAMILIES) if not family.drops_packing]
    assert forms(FAST) == forms(family.model_type for family in handed_down)


def test_a_model_that_gets_no_faster_warns() -> None:
    with pytest.warns(fastpack.NoFasterWarning, match="nothing gets faster"):
        fastpack.patch(build_tiny("xlnet"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = build_tiny("xlnet")
        with pytest.raises(fastpack.NoFasterWarning):
            fastpack.patch(model)
        assert not fastpack.is_patched(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastpack.patch(build_tiny("bamba"))


@pytest.mark.parametrize(("model_type", "message"), [("gemma4_text", True), ("gemma3n_text", True), ("llama", False)])
def test_the_report_notes_what_checkpointing_would_lose(model_type: str, message: bool) -> None:
    notes = fastpack.report(fastpack.patch(build_tiny(model_type))).notes
    assert any("reentrant checkpointing loses gradients" in note for note in notes) == message


def test_the_report_notes_what_autocast_will_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over float32 weights a kernel that wants half precision serves as soon as there is autocast."""
    monkeypatch.setattr(torch_varlen, "rejects", lambda s: None if s.dtype == torch.bfloat16 else f"not {s.dtype}")
    report = fastpack.report(fastpack.patch(tiny_model("llama")))
    assert (report.backend, report.notes) == ("segments", ("attention: torch_varlen under autocast to bfloat16",))
    report = fastpack.report(fastpack.patch(tiny_model("llama"), attention="torch_varlen"))
    assert report.backend == "torch_varlen"
    assert "torch_varlen needs autocast" in report.notes[0]
    report = fastpack.report(fastpack.patch(tiny_model("llama").bfloat16()))
    assert (report.backend, report.notes) == ("torch_varlen", ())
    with pytest.raises(fastpack.BackendUnavailableError, match=r"not torch\.float64"):
        fastpack.patch(tiny_model("llama").double(), attention="torch_varlen")


def test_report_says_what_was_done() -> None:
    model = tiny_model("qwen3")
    assert fastpack.report(model).tier == "stock"
    fastpack.patch(model)
    report = fastpack.report(model)
    assert (report.tier, report.family, report.model) == ("fast", "qwen3", "Qwen3ForCausalLM")
    assert report.backend == "segments"
    assert report.swapped == {"backbone": 1, "head": 1, "layer": 2, "attention": 2, "mlp": 2, "norm": 9}
    assert report.projections == {"linear": 14}
    text = str(report)
    assert "Qwen3ForCausalLM" in text
    assert "segments" in text
    assert pickle.loads(pickle.dumps(report.to_dict())) == report.to_dict()


def test_all_names_what_there_is() -> None:
    assert sorted(fastpack.__all__) == fastpack.__all__
    assert all(hasattr(fastpack, name) for name in fastpack.__all__)


def test_tiny_configs_switch_the_family_traits_on() -> None:
    assert tiny_config("gemma2").attn_logit_softcapping == 2.0
    assert tiny_config("mistral").sliding_window == 8
