"""Models with Liger's kernels can be patched, whichever of the two came first.

On a CPU a stand-in in plain torch replaces Liger. With a GPU and Liger installed, Liger itself runs.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_liger as stand_in
import pytest
import torch
from oracle import (
    FLOAT32_BOUND,
    INPUT_KINDS,
    compare,
    make_sequences,
    relative,
    run_alone,
    run_batch,
    to_device,
    trained_tokens,
)
from patch_checks import fingerprint
from sft_cases import FEEDS, check_equal, train
from tiny import VOCAB, tiny_model
from transformers.models.llama import modeling_llama as llama

import fastpack
from fastpack.model.model_runtime import runtime_of

ORDERS = ("Liger first", "fastpack first")
Apply = Callable[[Any], None]


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> Apply:
    """Return a function that applies the stand-in to a model and to its class's module; all of it is undone."""

    def apply(model: Any) -> None:
        monkeypatch.setattr(llama, "apply_rotary_pos_emb", stand_in.liger_rotary_pos_emb)
        stand_in.apply(model)

    stand_in.CALLS.clear()
    return apply


def both(model: Any, order: str, liger: Apply) -> Any:
    if order == "Liger first":
        liger(model)
        return fastpack.patch(model)
    fastpack.patch(model)
    liger(model)
    return model


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["padded right", "TRL's keywords"])
def test_the_layers_are_fast_and_exact(order: str, kind: str, liger: Apply) -> None:
    sequences = make_sequences(VOCAB)
    alone = run_alone(tiny_model("llama"), sequences)
    model = both(tiny_model("llama"), order, liger)
    report = fastpack.report(model)
    assert (report.tier, report.skipped) == ("fast", ())
    assert report.swapped["norm"] == 2 * len(model.model.layers) + 1
    assert any("Liger" in note and f"{3 * len(model.model.layers) + 1} norms and MLPs" in note for note in report.notes)
    result = compare(run_batch(model, sequences, kind), alone)
    assert result.worst <= FLOAT32_BOUND, result
    # the last norm is outside the layers, and belongs to whichever library came last
    assert ({} if order == "Liger first" else {"norm": 1}) == stand_in.CALLS
    fastpack.verify(model)


@pytest.mark.parametrize("order", ORDERS)
def test_unpatch_leaves_ligers(order: str, liger: Apply) -> None:
    alone = tiny_model("llama")
    liger(alone)
    model = both(tiny_model("llama"), order, liger)
    fastpack.unpatch(model)
    kept = {name for name, value in fingerprint(model).items() if "_fastpack" in name and value is not None}
    assert not kept
    norm = model.model.layers[0].input_layernorm
    assert norm.forward.__qualname__ == "LigerRMSNorm.forward"
    sequences = make_sequences(VOCAB)
    stand_in.CALLS.clear()
    assert compare(run_alone(model, sequences), run_alone(alone, sequences)).worst == 0
    assert set(stand_in.CALLS) == {"norm", "mlp", "rope"}


def test_a_copy_keeps_them_apart(liger: Apply) -> None:
    """A copy's layers read the copy's weights, also under a drop-in."""
    model = both(tiny_model("llama"), "fastpack first", liger)
    sequences = make_sequences(VOCAB)
    copied = copy.deepcopy(model)
    for layer in copied.model.layers:  # a method is bound to its module again by deepcopy
        assert layer.mlp.forward.__self__ is layer.mlp
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    alone = run_alone(tiny_model("llama"), sequences)
    assert compare(run_batch(copied, sequences, "padded right"), alone).worst <= FLOAT32_BOUND


@pytest.mark.parametrize("order", ORDERS)
def test_others_of_ligers_are_honoured(order: str, liger: Apply) -> None:
    """A forward of Liger's that is no drop-in for the module's own is called."""
    sequences = make_sequences(VOCAB)

    def apply(model: Any) -> None:
        stand_in.apply(model, mlp=stand_in.LigerExperts)

    stock = tiny_model("llama")
    apply(stock)
    alone = run_alone(stock, sequences)
    assert compare(run_alone(tiny_model("llama"), sequences), alone).worst > 0.01, "it computes something else"
    model = both(tiny_model("llama"), order, apply)
    if order == "Liger first":
        assert [what for what, _ in fastpack.report(model).skipped] == ["LlamaMLP"]
    assert compare(run_batch(model, sequences, "padded right"), alone).worst <= FLOAT32_BOUND


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("cls", "activation", "called"),
    [
        (stand_in.LigerGEGLUMLP, "gelu_pytorch_tanh", False),
        (stand_in.LigerGEGLUMLP, "gelu", True),
        (stand_in.LigerSwiGLUMLP, "gelu", True),
    ],
)
def test_an_activation_of_its_own(cls: Any, activation: str, called: bool, order: str) -> None:
    """Liger's MLPs have a fixed activation, whatever the config names."""
    stock = tiny_model("llama", hidden_act=activation)
    stand_in.apply(stock, mlp=cls)
    sequences = make_sequences(VOCAB)
    alone = run_alone(stock, sequences)
    model = both(tiny_model("llama", hidden_act=activation), order, lambda it: stand_in.apply(it, mlp=cls))
    assert [what for what, _ in fastpack.report(model).skipped] == ["LlamaMLP"] * called
    stand_in.CALLS.clear()
    assert compare(run_batch(model, sequences, "padded right"), alone).worst <= FLOAT32_BOUND
    assert bool(stand_in.CALLS["mlp"]) == called


def doubled(forward: Any) -> Any:
    @functools.wraps(forward)
    def twice(self: Any, x: Any) -> Any:
        return 2 * forward(self, x)

    return twice


@pytest.mark.parametrize("order", ORDERS)
def test_what_wraps_ligers_is_called(order: str) -> None:
    """This holds although ``functools.wraps`` gives the wrapper the names of Liger's function."""

    def apply(model: Any) -> None:
        stand_in.apply(model)
        for layer in model.model.layers:
            layer.mlp.forward = types.MethodType(doubled(stand_in.LigerSwiGLUMLP.forward), layer.mlp)

    stock = tiny_model("llama")
    apply(stock)
    sequences = make_sequences(VOCAB)
    alone = run_alone(stock, sequences)
    model = both(tiny_model("llama"), order, apply)
    assert compare(run_batch(model, sequences, "padded right"), alone).worst <= FLOAT32_BOUND


@pytest.mark.parametrize("order", ORDERS)
def test_an_offset_of_its_own_is_honoured(order: str) -> None:
    model = both(tiny_model("llama"), order, stand_in.apply)
    model.model.layers[0].input_layernorm.offset = 1.0
    stand_in.CALLS.clear()
    with torch.no_grad():
        run = model(**INPUT_KINDS["padded right"](make_sequences(VOCAB)), use_cache=False)
    assert run.loss.isfinite()
    if order == "fastpack first":  # the other was swapped already
        assert stand_in.CALLS["norm"] == 2


@pytest.mark.parametrize("own", [False, True])
def test_float32_norms_in_half_precision_keep_ligers(own: bool) -> None:
    """Liger's norms do not promote, but the family's own would."""
    model = tiny_model("llama").bfloat16()
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.float()
    if own:
        stand_in.build_of(model, 0.0, "llama")
    else:
        stand_in.apply(model)
    fastpack.patch(model)
    report = fastpack.report(model)
    assert [what for what, _ in report.skipped] == [] if own else ["LlamaRMSNorm"]
    assert any("called as modules" in note for note in report.notes) == own
    stand_in.CALLS.clear()
    assert model(**INPUT_KINDS["padded right"](make_sequences(VOCAB)), use_cache=False).loss.isfinite()
    assert stand_in.CALLS["norm"]


@pytest.mark.parametrize(("offset", "casting_mode"), [(0.0, "llama"), (1.0, "gemma"), (0.0, "gemma")])
def test_models_of_ligers_own_classes(offset: float, casting_mode: str) -> None:
    """``AutoLigerKernelForCausalLM`` builds such models."""
    model = tiny_model("llama")
    stand_in.build_of(model, offset, casting_mode)
    sequences = make_sequences(VOCAB)
    alone = run_alone(model, sequences)
    assert (compare(run_alone(tiny_model("llama"), sequences), alone).worst > 0.01) == (offset == 1.0)
    fastpack.patch(model)
    report = fastpack.report(model)
    layers = len(model.model.layers)
    assert (report.tier, report.swapped["norm"], report.swapped["mlp"]) == ("fast", 2 * layers + 1, layers)
    assert not any("Liger" in note for note in report.notes)
    stand_in.CALLS.clear()
    assert compare(run_batch(model, sequences, "padded right"), alone).worst <= FLOAT32_BOUND
    assert not stand_in.CALLS
    fastpack.unpatch(model)
    assert compare(run_alone(model, sequences), alone).worst == 0


def test_unknown_liger_classes_are_reported() -> None:
    model = tiny_model("llama")
    stand_in.build_of(model, 0.5, "llama")
    sequences = make_sequences(VOCAB)
    alone = run_alone(model, sequences)
    fastpack.patch(model)
    count = 2 * len(model.model.layers) + 1
    assert f"{count} modules have Liger's own classes: they are called as modules" in fastpack.report(model).notes
    assert compare(run_batch(model, sequences, "padded right"), alone).worst <= FLOAT32_BOUND


# --- Liger itself -----------------------------------------------------------------------------------------------------


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return Liger's own function; its replacements in transformers' module are undone at the end."""
    if importlib.util.find_spec("liger_kernel") is None:
        pytest.skip("LIGER IS NOT INSTALLED")
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    for name in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP"):
        monkeypatch.setattr(llama, name, getattr(llama, name))
    return _apply_liger_kernel_to_instance


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_liger_itself(order: str, fused: bool, real: Any) -> None:
    """This includes Liger's fused loss, which returns no logits."""
    sequences = make_sequences(VOCAB)
    alone = run_alone(tiny_model("llama").cuda(), sequences)
    model = both(tiny_model("llama").cuda(), order, lambda it: real(model=it, fused_linear_cross_entropy=fused))
    report = fastpack.report(model)
    assert (report.tier, report.skipped) == ("fast", ())
    assert any("Liger" in note for note in report.notes)
    batch = to_device(INPUT_KINDS["padded right"](sequences), torch.device("cuda"))
    out = model(**batch, num_items_in_batch=trained_tokens(sequences))
    assert (out.logits is None) == fused
    out.loss.backward()
    assert relative(out.loss.detach(), alone.loss) < 1e-4
    for name, parameter in model.named_parameters():
        assert relative(parameter.grad, alone.grads[name]) < 1e-3, name


@pytest.mark.gpu
@pytest.mark.usefixtures("real")
def test_a_model_that_liger_built() -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    sequences = make_sequences(VOCAB)
    alone = run_alone(tiny_model("llama").cuda(), sequences)
    apply_liger_kernel_to_llama(fused_linear_cross_entropy=False)
    model = fastpack.patch(tiny_model("llama").cuda())
    assert type(model.model.norm).__module__.startswith("liger_kernel.")
    report = fastpack.report(model)
    assert (report.tier, report.skipped, report.swapped["mlp"]) == ("fast", (), len(model.model.layers))
    assert compare(run_batch(model, sequences, "padded right"), alone).worst < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("order", ORDERS)
def test_recordings_with_liger(order: str, real: Any) -> None:
    """Replays equal the results without recordings, also if Liger is applied after the first recordings."""
    plain = both(tiny_model("llama").cuda(), order, lambda it: real(model=it, fused_linear_cross_entropy=False))
    model = fastpack.patch(tiny_model("llama").cuda(), graphs="auto")
    if order == "fastpack first":
        for seed in range(4):
            run_batch(model, make_sequences(VOCAB, seed=seed), "TRL's keywords")
    real(model=model, fused_linear_cross_entropy=False)
    if order == "Liger first":
        fastpack.patch(fastpack.unpatch(model), graphs="auto")
    for seed in range(5):
        sequences = make_sequences(VOCAB, seed=seed)
        want, result = run_batch(plain, sequences, "TRL's keywords"), run_batch(model, sequences, "TRL's keywords")
        assert compare(result, want).worst < 1e-4
    runner = getattr(runtime_of(model.model), "graphs", None)
    assert runner is not None
    assert runner.stats.replays


@pytest.mark.gpu
@pytest.mark.parametrize("patch", ["model", "trainer"])
@pytest.mark.parametrize("feed", FEEDS)
def test_trls_trainer_has_liger_too(feed: str, patch: str, tmp_path: Path, real: Any) -> None:
    """``use_liger_kernel=True`` applies Liger as training begins, so after our patch."""
    stock, _ = train(tiny_model("llama", attn_implementation="sdpa"), tmp_path, patch=None, **FEEDS[feed])
    model = tiny_model("llama", attn_implementation="sdpa")
    ours, trainer = train(model, tmp_path, patch=patch, use_liger_kernel=True, **FEEDS[feed])
    check_equal(ours, stock, 1e-3)
    report = fastpack.report(trainer)
    assert (report.tier, report.skipped) == ("fast", ())
    assert any("Liger" in note for note in report.notes)
