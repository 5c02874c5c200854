"""Mixers on packed tokens: transformers' forward over kernels that know boundaries, here over stand-ins."""

from __future__ import annotations

import copy
import importlib
import itertools
import pickle
import sys
from collections.abc import Callable
from typing import Any

import fake_mixers
import pytest
import torch
from fake_mixers import Calls, conv_torch, install
from op_checks import count_calls
from text_models import text_model
from torch import Tensor, nn

import fastpack
from fastpack import PackedSeqLens
from fastpack.exactness.tiny import build_tiny, model_types, plain_tokens
from fastpack.families.mixer_spec import MixerSpec
from fastpack.families.registry import FAMILIES
from fastpack.layers.mixers import kernels as mixer_kernels
from fastpack.layers.mixers.forward import mixer_tier
from fastpack.layers.mixers.kernels import packed_conv, packed_recurrence
from fastpack.ops import delta_rule as delta_op
from fastpack.ops import short_conv as conv_op
from fastpack.ops import ssd as ssd_op

LENGTHS = (7, 1, 12, 12, 20, 3)
BOUND = 1e-4
LEAKS = 1e-2

SCANS = {"gated_delta": "chunk_gated_delta_rule", "kda": "chunk_kda", "ssd": "chunk_simple_gla", "conv": None}
COVERED = {
    f.model_type: mixer.scan
    for f in FAMILIES.values()
    for mixer in f.mixers.values()
    if mixer.scan is not None and f.model_type in model_types()
}
for _name in COVERED:  # transformers looks for kernels when it imports these: not while there are stand-ins
    importlib.import_module(FAMILIES[_name].module)
WITH_SCAN = [name for name, scan in COVERED.items() if scan != "conv"]

Kernels = Callable[..., Calls]


pytestmark = pytest.mark.usefixtures("nothing_installed")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Return a function: ``kernels("fla")`` installs stand-ins for these packages, which serve float32 on a CPU."""

    def installed(*packages: str, leaky: bool = False) -> Calls:
        calls = Calls(leaky)
        for package in packages:
            install(monkeypatch, getattr(fake_mixers, package)(calls))
        monkeypatch.setattr(mixer_kernels, "_others_serve", lambda device, dtype: True)
        return calls

    return installed


def sequences() -> list[Tensor]:
    return [plain_tokens(1, length, seed=i)[0] for i, length in enumerate(LENGTHS)]


def weights(start: int, logits: Tensor) -> Tensor:
    made = torch.randn(sum(LENGTHS), logits.shape[-1], generator=torch.Generator().manual_seed(1))
    return made[start : start + len(logits)] / logits.shape[-1]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def scores(outputs: Any) -> Tensor:
    """Return the logits ``[L, V]``, or the last hidden states of a backbone alone."""
    return (outputs.logits if "logits" in outputs else outputs.last_hidden_state)[0]


def run_alone(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    logits: list[Tensor] = []
    for sequence in sequences():
        result = scores(model(input_ids=sequence[None], use_cache=False))
        (result * weights(sum(map(len, logits)), result)).sum().backward()
        logits.append(result.detach())
    return torch.cat(logits), gradients(model)


def run_packed(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    logits = scores(model(input_ids=torch.cat(sequences())[None], packed_seq_lens=list(LENGTHS)))
    (logits * weights(0, logits)).sum().backward()
    return logits.detach(), gradients(model)


def error(result: tuple[Tensor, dict[str, Tensor]], alone: tuple[Tensor, dict[str, Tensor]]) -> float:
    floor = 1e-3 * max(float(g.abs().max()) for g in alone[1].values())
    errors = [float((result[0] - alone[0]).abs().max() / alone[0].abs().max())]
    for name, grad in alone[1].items():
        other = result[1].get(name, torch.zeros_like(grad))
        errors.append(float((other - grad).abs().max() / max(float(grad.abs().max()), floor)))
    return max(errors)


def mixers_of(model: nn.Module, model_type: str) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__ in FAMILIES[model_type].mixers]


def expected(names: list[str], layers: int) -> list[tuple[str, int, list[int]]]:
    return [(name, sum(LENGTHS), [0, *itertools.accumulate(LENGTHS)]) for _ in range(layers) for name in names]


@pytest.mark.sample(5)
@pytest.mark.parametrize("model_type", COVERED)
def test_exact_over_flash_linear_attention(model_type: str, kernels: Kernels) -> None:
    model = build_tiny(model_type).train()
    alone = run_alone(model)
    calls = kernels("fla")
    fastpack.patch(model)
    count = len(mixers_of(model, model_type))
    assert count
    assert fastpack.report(model).swapped["packed mixer"] == count
    assert "re-padded mixer" not in fastpack.report(model).swapped
    assert error(run_packed(model), alone) <= BOUND
    activation_free = COVERED[model_type] == "conv"
    names = ["fla conv"] if activation_free else ["fla conv", str(SCANS[str(COVERED[model_type])])]
    assert calls.made == expected(names, count), "once a layer, with all tokens and where the sequences begin"

    calls.made.clear()
    model.gradient_checkpointing_enable()
    assert error(run_packed(model), alone) <= BOUND
    assert len(calls.made) >= 2 * count * len(names), "run again in the backward pass"

    fastpack.unpatch(model)
    calls.made.clear()
    assert error(run_alone(model), alone) == 0
    assert not calls.made


@pytest.mark.filterwarnings("ignore::fastpack.errors.UntriedVersionWarning")
def test_only_some_mixers_have_kernels(kernels: Kernels) -> None:
    """GLM 5 picks keys on rows, and its linear layers run on packed tokens."""
    model = text_model("glm5_next_text")
    alone = run_alone(model)
    calls = kernels("fla")
    fastpack.patch(model)
    swapped = fastpack.report(model).swapped
    assert (swapped["packed mixer"], swapped["re-padded mixer"]) == (2, 2)
    calls.made.clear()  # the twin's
    assert error(run_packed(model), alone) <= BOUND
    assert calls.made == expected(["fla conv", "chunk_kda"], 2)


@pytest.mark.parametrize("model_type", [name for name in WITH_SCAN if COVERED[name] == "ssd"])
def test_exact_over_mamba_ssm_and_causal_conv1d(model_type: str, kernels: Kernels) -> None:
    model = build_tiny(model_type).train()
    alone = run_alone(model)
    calls = kernels("mamba", "fla")
    fastpack.patch(model)
    assert error(run_packed(model), alone) <= BOUND
    names = {name for name, *_ in calls.made}
    assert "mamba_chunk_scan_combined" in names, "before flash-linear-attention"
    assert "chunk_simple_gla" not in names
    assert calls.made[0][1:] == expected([""], 1)[0][1:]
    note = next(n for n in fastpack.report(model).notes if n.startswith("mixers"))
    assert note == "mixers: causal-conv1d, mamba-ssm on packed tokens"


@pytest.mark.parametrize("model_type", WITH_SCAN)
def test_boundaries_that_are_dropped_are_caught(model_type: str, kernels: Kernels) -> None:
    model = build_tiny(model_type).train()
    alone = run_alone(model)
    kernels("fla", leaky=True)
    fastpack.patch(model)
    assert error(run_packed(model), alone) > LEAKS


@pytest.mark.sample(3)
@pytest.mark.parametrize("model_type", COVERED)
def test_exact_with_nothing_installed(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own recurrences and convolution run anywhere, in float32, too."""
    model = build_tiny(model_type).train()
    alone = run_alone(model)
    ops = ((ssd_op, "ssd"), (delta_op, "gated_delta_rule"), (conv_op, "short_conv"))
    *scans, convs = (count_calls(monkeypatch, op, name) for op, name in ops)
    fastpack.patch(model)
    report, count = fastpack.report(model), len(mixers_of(model, model_type))
    assert report.swapped["packed mixer"] == count
    assert report.unpadded == 1
    assert "mixers: fastpack on packed tokens" in report.notes
    assert error(run_packed(model), alone) <= BOUND
    assert len(convs) == count, "once a layer"
    assert [len(calls) for calls in scans] == [
        count * (COVERED[model_type] in kinds) for kinds in (("ssd",), ("gated_delta", "kda"))
    ]
    assert all(args[0].shape[0] == sum(LENGTHS) for calls in (*scans, convs) for args in calls), "with all tokens"

    monkeypatch.setattr(conv_op, "_positions", lambda cu_seqlens, tokens: torch.arange(tokens))
    assert error(run_packed(model), alone) > LEAKS, "a convolution that crosses boundaries"


def test_the_report_says_what_runs(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = kernels("fla")
    model = fastpack.patch(build_tiny("qwen3_next"))
    assert fastpack.report(model).tier == "fast"
    assert "mixers: flash-linear-attention on packed tokens" in " ".join(fastpack.report(model).notes)
    fastpack.unpatch(model)
    assert not installed.made, "planning runs nothing"

    monkeypatch.setattr(mixer_kernels, "_others_serve", in_halves)
    model = fastpack.patch(build_tiny("bamba"))
    assert "mixers: fastpack on packed tokens" in fastpack.report(model).notes
    assert mixer_tier(mixers_of(model, "bamba")[0], MixerSpec()) == "re-padded mixer"


@pytest.mark.parametrize("hopper", [True, False])
def test_the_faster_kernel_serves(hopper: bool, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours on Hopper, unless torch.compile traces; then fla's, where its gates are right."""
    pytest.importorskip("triton")
    kernels("fla")
    monkeypatch.setattr(mixer_kernels, "_others_serve", in_halves)
    monkeypatch.setattr(mixer_kernels, "_on_hopper", lambda device: hopper)
    monkeypatch.setattr("triton.__version__", "3.7.1")
    ops: tuple[mixer_kernels.Op, ...] = ("gated_delta", "kda", "ssd", "conv")

    def serving() -> list[str]:
        mixer_kernels._gates_are_wrong.cache_clear()  # it holds for one Triton
        return [mixer_kernels.names(op, torch.device("cuda"), torch.bfloat16) for op in ops]

    fla, own = "flash-linear-attention", "fastpack"
    assert serving() == [own if hopper else fla] * 4
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    assert serving() == [fla] * 4
    monkeypatch.setattr("triton.__version__", "3.6.0")
    assert serving() == ([fla, fla, own, fla] if hopper else [fla] * 4), "the stand-ins have no chunk_gla"


@pytest.mark.parametrize("model_type", ["qwen3_next", "zamba2", "lfm2"])
def test_plain_torch_runs_no_kernel(model_type: str, kernels: Kernels) -> None:
    calls = kernels("fla")
    model = build_tiny(model_type).train()
    result = run_alone(model)
    fastpack.patch(model, kernels="torch")
    assert "mixers: fastpack on packed tokens" in fastpack.report(model).notes
    assert error(run_packed(model), result) <= BOUND
    assert not calls.made
    fastpack.unpatch(model)
    run_packed(fastpack.patch(model))
    assert calls.made


def in_halves(device: torch.device, dtype: torch.dtype) -> bool:
    return dtype != torch.float32


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "bamba", "falcon_h1"])  # without experts, whose routing flips
def test_what_computes_is_asked_at_each_batch(
    model_type: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A float32 model doesn't use installed kernels; under autocast it does, as exact as the stock model there."""
    calls = kernels("fla")
    monkeypatch.setattr(mixer_kernels, "_others_serve", in_halves)
    model = build_tiny(model_type).train()
    wide = run_alone(model)
    with torch.autocast("cpu", torch.bfloat16):
        plain = run_alone(model)
    fastpack.patch(model)
    assert error(run_packed(model), wide) <= BOUND
    assert not calls.made
    with torch.autocast("cpu", torch.bfloat16):
        ours = run_packed(model)
    assert {name for name, *_ in calls.made} >= {SCANS[str(COVERED[model_type])]}
    assert error(ours, wide) <= 1.5 * error(plain, wide)


def test_a_float32_buffer_does_not_widen_what_kernels_get(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens in Falcon-H1 if only weights are cast down: its multipliers are a buffer."""
    calls = kernels("fla")
    monkeypatch.setattr(mixer_kernels, "_others_serve", in_halves)
    model = build_tiny("falcon_h1").train()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    wide = run_alone(copy.deepcopy(model).float())
    assert mixers_of(model, "falcon_h1")[0].mup_vector.dtype == torch.float32
    plain = run_alone(model)
    ours = run_packed(fastpack.patch(model))
    assert {name for name, *_ in calls.made} >= {"chunk_simple_gla"}
    assert error(ours, wide) <= 1.5 * error(plain, wide)


@pytest.mark.parametrize("package", ["fla", "mamba"])
def test_gradient_of_a_skip_before_a_norm(package: str, kernels: Kernels) -> None:
    """If D x is most of a head's output, a norm after it leaves only differences of D's gradient."""
    kernels(package)
    heads, value, total = 2, 64, sum(LENGTHS)
    generator = torch.Generator().manual_seed(0)
    x, direction = (torch.randn(1, total, heads, value, generator=generator) for _ in range(2))
    B, C = (0.1 * torch.randn(1, total, heads, 16, generator=generator) for _ in range(2))
    dt, A = torch.full((1, total, heads), 0.1), -torch.ones(heads)
    packed = PackedSeqLens.from_lengths(LENGTHS)

    def gradient(dtype: torch.dtype, rounded: bool = False) -> Tensor:
        D = torch.ones(heads, dtype=dtype, requires_grad=True)
        y = packed_recurrence("ssd", packed, x.to(dtype), dt, A, B.to(dtype), C.to(dtype), D, 8)
        y = (y.to(dtype) if rounded else y).float()
        ((y * y.pow(2).mean(-1, keepdim=True).rsqrt()) * direction).sum().backward()
        assert D.grad is not None
        return D.grad.float()

    x, B, C = (z.bfloat16().float() for z in (x, B, C))
    wide = gradient(torch.float32)

    def wrong_by(result: Tensor) -> float:
        return float((result - wide).abs().max() / wide.abs().max())

    ours, control = wrong_by(gradient(torch.bfloat16)), wrong_by(gradient(torch.bfloat16, rounded=True))
    assert ours <= 1e-2 < control / 3, (ours, control)


@pytest.mark.parametrize("model_type", ["qwen3_next", "bamba", "mamba2", "falcon_h1", "lfm2"])
def test_generate_is_stock(model_type: str, kernels: Kernels) -> None:
    model = build_tiny(model_type).eval()
    prompt = sequences()[2][None]
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    stock = model.generate(prompt, **settings)
    calls = kernels("fla", "mamba")
    fastpack.patch(model)
    assert torch.equal(model.generate(prompt, **settings), stock)
    assert not calls.made


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_compiled(training: bool, compile_anew: None) -> None:
    """Each mixer breaks the graph; nothing else does."""
    model = fastpack.patch(build_tiny("lfm2").train(training))
    ids = plain_tokens(1, 20, seed=0)
    packed = PackedSeqLens.from_lengths([5, 1, 14])
    with torch.set_grad_enabled(training):
        want = model(input_ids=ids, packed_seq_lens=packed).logits
        got = torch.compile(model, backend="aot_eager")(input_ids=ids, packed_seq_lens=packed).logits
    assert float((got - want).abs().max() / want.abs().max()) <= 1e-5


def test_the_report_follows_a_model_that_moves(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels("fla")
    model = fastpack.patch(build_tiny("qwen3_next"))
    assert fastpack.report(model).tier == "fast"
    assert "mixers: flash-linear-attention on packed tokens" in fastpack.report(model).notes
    monkeypatch.setattr(mixer_kernels, "_others_serve", lambda device, dtype: False)
    assert "mixers: fastpack on packed tokens" in fastpack.report(model).notes


def test_copies_come_back_patched(kernels: Kernels) -> None:
    calls = kernels("fla")
    model = fastpack.patch(build_tiny("qwen3_next").train())
    result = run_packed(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        calls.made.clear()
        with torch.no_grad():
            other.lm_head.weight.mul_(2)  # its own weights
        assert torch.equal(run_packed(other)[0], 2 * result[0])
        assert calls.made


def test_nothing_of_transformers_changes(kernels: Kernels) -> None:
    model = build_tiny("bamba").train()
    upstream = vars(sys.modules[type(model).__module__])
    before = dict(upstream)
    kernels("fla")
    run_packed(fastpack.patch(model))
    assert upstream.keys() == before.keys()
    assert all(upstream[name] is before[name] for name in before)


def test_an_unchecked_forward_runs_on_rows(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward is from another release, or replaced by other code."""
    model = build_tiny("qwen3_next").train()
    alone = run_alone(model)
    calls = kernels("fla")
    mixer = mixers_of(model, "qwen3_next")[0]
    stock = type(mixer).forward

    def forward(
        self: Any, hidden_states: Tensor, cache_params: Any = None, attention_mask: Any = None, **_: Any
    ) -> Any:
        return stock(self, hidden_states, cache_params, attention_mask)

    with monkeypatch.context() as replaced:
        replaced.setattr(type(mixer), "forward", forward)
        fastpack.patch(model)
        assert any("has not been checked" in note for note in fastpack.report(model).notes)
        assert error(run_packed(model), alone) <= BOUND
        assert not calls.made
        fastpack.unpatch(model)

    object.__setattr__(mixer, "forward", forward.__get__(mixer))
    with pytest.raises(fastpack.PatchError, match=r"strict=True.*another package replaced the forward"):
        fastpack.patch(model, strict=True)
    fastpack.patch(model)
    assert fastpack.report(model).swapped["re-padded mixer"] == 1
    assert any("another package replaced the forward" in note for note in fastpack.report(model).notes)
    assert error(run_packed(model), alone) <= BOUND


def test_an_offloaded_convolution_runs_on_rows(kernels: Kernels) -> None:
    """transformers' decorator around the forward loads its weight; the packed forward has no such decorator."""
    kernels("fla")
    model = build_tiny("qwen3_next").train()
    mixer: Any = mixers_of(model, "qwen3_next")[0]
    mixer.conv1d._hf_hook = object()
    fastpack.patch(model)
    assert fastpack.report(model).swapped["re-padded mixer"] == 1
    assert any("has a convolution with hooks" in note for note in fastpack.report(model).notes)


@pytest.mark.parametrize("taps", [2, 4, 7])
@pytest.mark.parametrize("activation", ["silu", None])
def test_convolution_in_torch(taps: int, activation: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = (7, 1, 3, 12, 1)
    packed = PackedSeqLens.from_lengths(lengths)
    x, weight, bias = (torch.randn(*s, generator=generator) for s in ((1, 8, sum(lengths)), (8, taps), (8,)))
    inputs = [y.double().requires_grad_() for y in (x, weight, bias)]
    out = packed_conv(packed, *inputs, activation)
    alone = [conv_torch(part, *inputs[1:], activation=activation) for part in inputs[0].split(lengths, 2)]
    direction = torch.randn(out.shape, generator=generator, dtype=torch.double)
    joined = torch.cat(alone, 2)
    assert torch.allclose(out, joined, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad((y * direction).sum(), inputs) for y in (out, joined))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)
    as_one = packed_conv(PackedSeqLens.from_lengths([sum(lengths)]), *inputs, activation)
    assert not torch.allclose(as_one, joined, rtol=1e-2), "control"
