"""``verify`` reports exact models as exact and leaks as leaks, and leaves the model unchanged."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import qlora
from peft import LoraConfig, get_peft_model
from tiny import tiny_model
from torch import Tensor, nn

import fastpack
from fastpack.attention_dispatch import BACKENDS
from fastpack.backends.call import AttentionCall
from fastpack.cli.main import main
from fastpack.exactness.family_settings import NOT_BUILT
from fastpack.exactness.rule import CONTROL, FULL_BOUND
from fastpack.exactness.tiny import build_tiny, model_types
from fastpack.exactness.verification import Check
from fastpack.families.refused import REFUSED
from fastpack.families.registry import FAMILIES
from fastpack.packing.seqlens import PackedSeqLens

UNTELLABLE = {
    "cpmant": "embeds ids that are not in the batch",
    "musicgen": "ModuleList",
    "musicgen_melody": "ModuleList",
}
"""Families in which one embedding of ids doesn't determine the tokens, and the messages of verify."""


@pytest.mark.sample(12)
@pytest.mark.parametrize("model_type", [n for n in model_types() if n not in {*NOT_BUILT, *REFUSED, *UNTELLABLE}])
def test_families(model_type: str) -> None:
    model = fastpack.patch(build_tiny(model_type).train())
    result = fastpack.verify(model)
    assert result.passed
    assert result.verdict == "exact"
    assert len(result.checks) == 11
    assert model.training


@pytest.mark.parametrize("model_type", UNTELLABLE)
def test_models_in_which_tokens_cannot_be_told_apart_are_refused(model_type: str) -> None:
    model = fastpack.patch(build_tiny(model_type))
    with pytest.raises(fastpack.PatchError, match=UNTELLABLE[model_type]):
        fastpack.verify(model)
    assert fastpack.is_patched(model)


def test_inside_inference_mode() -> None:
    """In this mode nothing would be recorded for the gradients that verify compares."""
    model = fastpack.patch(tiny_model("llama"))
    with torch.inference_mode():
        assert fastpack.verify(model).passed
    with torch.no_grad():
        assert fastpack.verify(model).passed


def leak(monkeypatch: pytest.MonkeyPatch, share: float = 1.0) -> None:
    """Add attention that forgets every second boundary, in a share of the heads' size."""
    run = BACKENDS["segments"].run

    def leaky(call: AttentionCall) -> Tensor:
        lengths = call.packed.lengths
        joined = [sum(lengths[i : i + 2]) for i in range(0, len(lengths), 2)]
        packed = PackedSeqLens.from_lengths(joined)
        other = run(AttentionCall(call.q, call.k, call.v, packed, call.scale))
        return run(call).lerp(other, share)

    monkeypatch.setattr(BACKENDS["segments"], "run", leaky)


@pytest.mark.parametrize("share", [1.0, 0.01])
def test_a_leak_is_found(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fastpack.patch(tiny_model("llama"))
    leak(monkeypatch, share)
    with pytest.raises(fastpack.ContaminationError, match="FAILED") as caught:
        fastpack.verify(model)
    failed = {check.what for check in caught.value.verification.checks if not check.passed}
    assert "packed, as each sequence alone: logits" in failed
    assert any("sequence changed: gradients" in what for what in failed)
    assert fastpack.is_patched(model)


def test_a_wrong_backward_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits are right, but the gradients are not."""
    run = BACKENDS["segments"].run

    def half(call: AttentionCall) -> Tensor:
        out = run(call)
        return out.detach() + 0.5 * (out - out.detach())

    monkeypatch.setattr(BACKENDS["segments"], "run", half)
    model = fastpack.patch(tiny_model("llama"))
    with pytest.raises(fastpack.ContaminationError) as caught:
        fastpack.verify(model)
    failed = [check.what for check in caught.value.verification.checks if not check.passed]
    assert failed
    assert all("gradients" in what for what in failed)


def test_a_check_that_could_not_fail_fails() -> None:
    """A model in which no token sees another would pass whatever happens: the control says that the verdict is open."""
    model = tiny_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    with pytest.raises(fastpack.InconclusiveError, match="can't tell whether") as caught:
        fastpack.verify(fastpack.patch(model))
    result = caught.value.verification
    assert result.verdict == "can't tell"
    assert not result.passed
    assert [check.what for check in result.checks if not check.passed] == [
        f"control, taken for one sequence: {what}" for what in ("logits", "gradients of embeddings")
    ]
    with pytest.raises(fastpack.InconclusiveError):
        fastpack.patch(fastpack.unpatch(model), verify=True)
    assert not fastpack.is_patched(model)


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_a_model_that_gives_no_numbers_or_zeros_is_not_found_exact(value: float) -> None:
    """Its results never differ, whatever it does to sequences."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(value)
    with pytest.raises(fastpack.InconclusiveError, match="can't tell whether"):
        fastpack.verify(fastpack.patch(model))


def test_nothing_is_left_behind() -> None:
    model = fastpack.patch(tiny_model("llama"), attention="reference", kernels="torch")
    model.model.layers[0].eval()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    modes = [m.training for m in model.modules()]
    fastpack.verify(model)
    assert all(p.grad is None and torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert [m.training for m in model.modules()] == modes
    assert fastpack.report(model).backend == "reference"
    assert not model.get_input_embeddings()._forward_hooks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    result = fastpack.verify(fastpack.patch(tiny_model("llama").to(dtype)))
    assert result.dtype == str(dtype).removeprefix("torch.")
    bounds = {check.bound for check in result.checks if not check.at_least}
    if dtype == torch.float64:
        assert bounds == {FULL_BOUND}
    else:
        assert torch.finfo(dtype).eps / 2 <= min(bounds) < max(bounds) < 5e-2


def test_half_precision_does_not_hide_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fastpack.patch(tiny_model("llama").bfloat16())
    leak(monkeypatch, 0.5)
    with pytest.raises(fastpack.ContaminationError):
        fastpack.verify(model)


def wrong(call: AttentionCall, how: str) -> AttentionCall:
    """Return the call with one error in it."""
    if how.startswith("a scale"):
        return replace(call, scale=(1.02 if "2 %" in how else 1.05) * call.scale)
    if how == "a window off by one":
        return replace(call, window=None if call.window is None else call.window + 1)
    lengths = list(call.packed.lengths)
    joined = PackedSeqLens.from_lengths([sum(lengths[:2]), *lengths[2:]], device=call.q.device)
    return replace(call, packed=joined)


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["a scale 2 % off", "a window off by one", "one boundary missed"])
@pytest.mark.parametrize("model_type", ["ministral", "mixtral"])
def test_half_precision_does_not_hide_what_is_wrong_on_purpose(
    model_type: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models have windows, or experts."""
    model = fastpack.patch(build_tiny(model_type, dtype=torch.bfloat16), attention="segments")
    assert fastpack.verify(model).verdict == "exact"
    run = BACKENDS["segments"].run
    monkeypatch.setattr(BACKENDS["segments"], "run", lambda call: run(wrong(call, how)))
    with pytest.raises(fastpack.ContaminationError) as caught:
        fastpack.verify(model)
    failed = [check for check in caught.value.verification.checks if not check.passed]
    assert failed[0].what == "packed, as each sequence alone: logits"
    assert failed[0].error > 1.1 * failed[0].bound


@pytest.mark.sample(1)
@pytest.mark.parametrize("model_type", ["granite", "granitemoe", "gpt_oss"])
def test_right_models_pass_in_half_precision(model_type: str) -> None:
    """They round much, or their routers choose differently after any rounding, so fixed bounds failed them."""
    model = fastpack.patch(build_tiny(model_type, dtype=torch.bfloat16), verify=True)
    assert fastpack.is_patched(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", [n for n in model_types() if n in FAMILIES and FAMILIES[n].tier == "fast" and n not in NOT_BUILT]
)
def test_every_fast_family_in_half_precision(model_type: str) -> None:
    result = fastpack.verify(fastpack.patch(build_tiny(model_type, dtype=torch.bfloat16)))
    for check in result.checks:
        if check.at_least:
            assert check.error > check.bound


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
def test_qlora_as_people_run_it(seed: int, tmp_path: Path) -> None:
    """The stream is float32, the 4-bit weights compute in bfloat16: two stock runs differ as much as ours does."""
    model = fastpack.patch(qlora(tmp_path, torch.bfloat16, torch.bfloat16, prepared=True))
    result = fastpack.verify(model, seed=seed)
    assert result.dtype == "bfloat16"
    assert result.verdict == "exact"


class _MeanOverTokens(torch.autograd.Function):
    """A matmul whose weight's gradient comes from the mean over all tokens of a batch, as VeLoRA's does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, torch.outer(grad.flatten(0, -2).sum(0), x.flatten(0, -2).mean(0))


class MeanOverTokens(nn.Module):
    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return _MeanOverTokens.apply(x, self.weight)


def test_a_leak_into_the_gradient_of_a_weight_alone_is_found() -> None:
    """Logits and embedding gradients are right. If the weight is frozen, nothing is wrong."""
    model: Any = tiny_model("llama")
    model.model.layers[0].self_attn.o_proj = MeanOverTokens(model.model.layers[0].self_attn.o_proj)
    fastpack.patch(model)
    with pytest.raises(fastpack.ContaminationError) as caught:
        fastpack.verify(model)
    failed = [check.what for check in caught.value.verification.checks if not check.passed]
    assert failed == [f"{what}, as each sequence alone: gradients of trained weights" for what in ("packed", "padded")]
    model.model.layers[0].self_attn.o_proj.weight.requires_grad_(False)
    assert fastpack.verify(model).passed


def test_where_nothing_trains() -> None:
    model = fastpack.patch(tiny_model("llama").requires_grad_(False))
    result = fastpack.verify(model)
    assert result.passed
    assert not any("trained weights" in check.what for check in result.checks)


def test_controls_are_three_times_what_is_allowed() -> None:
    result = fastpack.verify(fastpack.patch(tiny_model("llama")))
    bounds = {check.what.split(": ")[1]: check.bound for check in result.checks if check.what.startswith("packed")}
    for check in result.checks:
        if check.at_least:
            assert check.bound == CONTROL * bounds[check.what.split(": ")[1]]


def test_several_ends_of_a_text() -> None:
    """Llama 3's config has several end tokens."""
    model = tiny_model("llama")
    model.config.eos_token_id = [2, 90]
    assert fastpack.verify(fastpack.patch(model)).passed


def test_a_frozen_embedding_that_is_scaled_in_place() -> None:
    wrapped = get_peft_model(build_tiny("ctrl"), LoraConfig(r=4, target_modules="all-linear"))
    assert fastpack.verify(fastpack.patch(wrapped)).passed


def test_lora_and_a_bare_backbone() -> None:
    wrapped = get_peft_model(build_tiny("bamba"), LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.2))
    assert fastpack.verify(fastpack.patch(wrapped)).passed
    with pytest.raises(fastpack.PatchError, match="patch\\(model\\) first"):
        fastpack.verify(tiny_model("llama"))


def test_patch_that_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fastpack.is_patched(fastpack.patch(tiny_model("llama"), verify=True))
    leak(monkeypatch)
    model = tiny_model("llama")
    with pytest.raises(fastpack.ContaminationError):
        fastpack.patch(model, verify=True)
    assert not fastpack.is_patched(model)


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    result = fastpack.verify(fastpack.patch(tiny_model("llama")))
    text = str(result)
    for words in (
        "exact",
        "packed, as each sequence alone: gradients of trained weights",
        "control",
        "<= 1.0e-05",
        "ok",
    ):
        assert words in text
    assert json.loads(json.dumps(result.to_dict()))["passed"] is True


@pytest.mark.parametrize(("terminal", "width"), [("60", 60), ("100", 100), ("250", 100), (None, 100)])
def test_the_table_fits_its_terminal(terminal: str | None, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fastpack.patch(tiny_model("llama"))
    if terminal is None:
        monkeypatch.delenv("COLUMNS", raising=False)
        monkeypatch.setattr("sys.__stdout__", None)
    else:
        monkeypatch.setenv("COLUMNS", terminal)
    result = fastpack.verify(model)
    long = replace(result, checks=(Check("word " * 50, 0.0, 1e-4), *result.checks))
    assert max(map(len, str(long).splitlines())) == width
    # an optional package that is not installed gives a longer message
    assert max(map(len, str(fastpack.report(model)).splitlines())) == width


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    assert main(["verify", str(tmp_path / "model"), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "fastpack verify: LlamaForCausalLM" in printed
    config = tmp_path / "model" / "config.json"
    assert main(["verify", str(config), "--random", "--device", "cpu", "--dtype", "float32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tier"] == "fast"
    for wrong in (["nowhere.json"], [str(tmp_path / "model"), "--dtype", "int3"], [str(tmp_path)]):
        assert main(["verify", *wrong, "--device", "cpu"]) == 2
    assert main(["verify", str(tmp_path / "modle"), "--device", "cpu"]) == 2
    assert "modle: there is no such file or folder" in capsys.readouterr().err
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for flag, value, message in (
        ("--device", "nosuch", "--device nosuch can't be used here: "),
        ("--device", "cuda:99", "--device cuda:99 can't be used here: "),
        ("--kernels", "triton", "the tensors are on the CPU"),
    ):
        flags = {"--device": "cpu", flag: value}
        assert main(["verify", str(config), "--random", *itertools.chain(*flags.items())]) == 2
        assert message in capsys.readouterr().err
    leak(monkeypatch)
    assert main(["verify", str(tmp_path / "model"), "--device", "cpu"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_the_command_where_nobody_can_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = tiny_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    model.save_pretrained(tmp_path / "model")
    assert main(["verify", str(tmp_path / "model"), "--device", "cpu"]) == 3
    assert "can't tell in this dtype" in capsys.readouterr().out


def test_the_command_on_weights_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 is only for sequences that see each other."""
    tiny_model("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_text("x")
    assert main(["verify", str(tmp_path)]) == 2
    assert "can't be loaded: " in capsys.readouterr().err


@pytest.mark.parametrize("lengths", [(), (5,), (5, 6), (5, 0, 7)])
def test_too_few_sequences(lengths: tuple[int, ...]) -> None:
    model = fastpack.patch(tiny_model("llama"))
    with pytest.raises(ValueError, match="verify takes three or more sequences"):
        fastpack.verify(model, lengths=lengths)
