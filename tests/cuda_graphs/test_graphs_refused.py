"""Batches that can't be replayed run eagerly and are counted under the reason; replaced modules are recorded anew."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from adapter_cases import with_lora
from oracle import FLOAT32_BOUND, Result, compare, make_sequences, relative
from recording import SMALL, FakeRecorder, Varlen, check, graphed, hidden, looks, reason, runner, step
from tiny import VOCAB, tiny_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutputWithPast

import fastpack
from fastpack.attention_dispatch import BACKENDS
from fastpack.backends.call import AttentionCall
from fastpack.cuda_graphs.recorder import CaptureRefusedError, capture_problem
from fastpack.cuda_graphs.recordings import GraphSettings
from fastpack.cuda_graphs.runner import ENOUGH_WORK
from fastpack.cuda_graphs.stack import Stack
from fastpack.packing.buckets import Bucket

pytestmark = pytest.mark.usefixtures("varlen")


def test_checkpointing_that_cannot_be_recorded() -> None:
    model = graphed(with_lora(tiny_model("llama")))
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.disable_input_require_grads()
    ids = torch.cat(make_sequences(VOCAB))[None]
    model(input_ids=ids, packed_seq_lens=list(SMALL))
    assert "enable_input_require_grads" in reason(model)
    model = graphed(tiny_model("llama"))
    for layer in model.model.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = lambda f, *args: checkpoint(f, *args, use_reentrant=False)
    step(model)
    assert reason(model) == "its gradient checkpointing is not plain torch.utils.checkpoint"


def left_open(function: Any, *args: Any, use_reentrant: bool, preserve_rng_state: bool) -> Any:
    """Checkpoint as torch did before 2.13: if a function raises, its hooks stay until its frame is gone."""

    def hooks() -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: pytest.fail("made by the wrong pass")):
            yield

    frame = hooks()
    next(frame)
    out = function(*args)
    next(frame, None)
    return out


def test_nothing_is_left_open_by_checkpointing_that_was_refused(
    varlen: Varlen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the following eager pass saves its tensors for a backward that runs the refused pass again."""
    errors = []
    run = varlen.run

    def look(call: AttentionCall) -> Tensor:
        try:
            len(call.packed.lengths)
        except Exception as error:
            errors.append(error)  # and with it the frames on its way
            raise
        return run(call)

    monkeypatch.setattr(varlen, "run", look)
    monkeypatch.setattr("fastpack.cuda_graphs.stack.checkpoint", left_open)
    models = [fastpack.patch(tiny_model("llama")), graphed(tiny_model("llama"))]
    for m in models:
        m.train().gradient_checkpointing_enable({"use_reentrant": False})
    want, ours = (step(m) for m in models)
    check(ours, want)
    assert reason(models[1]) == "a kernel reads each batch's lengths on the host"
    assert errors
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


REPLACED: dict[str, Any] = {
    "data": lambda m: setattr(m.model.layers[1].mlp.up_proj.weight, "data", torch.randn(48, 32)),
    "parameter": lambda m: setattr(m.model.layers[1].mlp.up_proj, "weight", nn.Parameter(torch.randn(48, 32))),
    "module": lambda m: setattr(m.model.layers[1].mlp, "up_proj", nn.Linear(32, 48, bias=False)),
    "assigned": lambda m: m.load_state_dict({k: torch.randn_like(v) for k, v in m.state_dict().items()}, assign=True),
    "buffer": lambda m: setattr(m.model.rotary_emb, "inv_freq", m.model.rotary_emb.inv_freq * 0.5),
}


@pytest.mark.parametrize("what", REPLACED)
def test_what_is_replaced_is_recorded_anew(what: str) -> None:
    models = [fastpack.patch(tiny_model("llama")), graphed(tiny_model("llama"))]
    step(models[1])
    for m in models:
        torch.manual_seed(0)
        REPLACED[what](m)
    want, ours = (step(m) for m in models)
    check(ours, want)
    assert runner(models[1]).stats.recordings == 2
    assert len(runner(models[1])._recordings.steps) == 1


def test_recording_ends_if_weights_keep_moving() -> None:
    model = graphed(tiny_model("llama"), max_changes=3)
    for _ in range(5):
        step(model)
        for p in model.parameters():
            p.data = p.data.clone()
    assert "replaced 3 times" in reason(model)
    assert runner(model).stats.recordings == 3
    assert "replaced 3 times" in runner(model).describe(torch.device("cpu"))


def test_negative_control_of_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the comparison of addresses, a replay reads the old weights: the tests above can fail."""
    monkeypatch.setattr(Stack, "unchanged", lambda self: True)
    models = [fastpack.patch(tiny_model("llama")), graphed(tiny_model("llama"))]
    step(models[1])
    for m in models:
        torch.manual_seed(0)
        REPLACED["data"](m)
    assert compare(step(models[1]), step(models[0])).worst > 1e-2


def test_gradients_stay_clean_and_random_states_too() -> None:
    """A recording leaves no gradient behind, runs no hook of a parameter, and draws no random number."""
    model = graphed(tiny_model("llama"))
    fired: list[str] = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    state = torch.get_rng_state()
    out = hidden(model)
    assert runner(model).stats.recordings == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert not fired
    assert all(p.grad is None for p in model.parameters())
    assert all(type(p) is nn.Parameter and p.is_leaf for p in model.parameters())
    out.sum().backward()
    assert len(fired) == len(set(fired)) == len([p for p in model.parameters() if p.grad is not None])


def test_dropout_is_drawn_anew_in_each_replay() -> None:
    """The same random state gives what the eager model gives, another one something else; recording draws nothing."""
    lengths = (30, 34)
    assert Bucket.of(lengths).tokens == sum(lengths)  # no padding, for which random numbers would be drawn too
    models = [fastpack.patch(with_lora(tiny_model("llama"), lora_dropout=0.3)) for _ in range(2)]
    graphed(models[1])

    def seeded(model: Any, seed: int) -> Result:
        torch.manual_seed(seed)
        return step(model, lengths, "packed_seq_lens")

    for seed in (1, 2):
        check(seeded(models[1], seed), seeded(models[0], seed))
    assert compare(seeded(models[1], 3), seeded(models[0], 2)).worst > 1e-2
    assert runner(models[1]).stats.replays == 3
    assert runner(models[1]).stats.recordings == 1


def forward_of_a_trainer(head: Any, labels: Tensor, meddle: Any = None, **kwargs: Any) -> Any:
    """Replace a head's forward as TRL does."""
    if meddle is not None:
        meddle(head)
    logits = head.lm_head(head.model(**kwargs).last_hidden_state)
    return CausalLMOutputWithPast(loss=head.loss_function(logits, labels, VOCAB), logits=logits)


def replaced(model: Any, module: str = "trl.trainer.utils") -> Any:
    """Return the model with its forward replaced by a function of this module."""
    forward = types.FunctionType(
        forward_of_a_trainer.__code__, {**globals(), "__name__": module}, argdefs=forward_of_a_trainer.__defaults__
    )
    model.forward = types.MethodType(forward, model)
    return model


@pytest.mark.parametrize("by_trl", [False, True], ids=["own forward", "TRL's"])
def test_modules_are_looked_at_before_lengths_are_waited_for(by_trl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules are compared once only: it takes time, which on a GPU hides behind the previous step."""
    model = graphed(tiny_model("llama"))
    if by_trl:
        replaced(model)
    step(model)
    order = looks(monkeypatch)
    step(model)
    assert order[:2] == ["look", "lengths"]
    assert order.count("look") == 1


MEDDLING: dict[str, Any] = {
    "a weight": lambda head: setattr(head.model.norm, "weight", nn.Parameter(head.model.norm.weight * 0.5)),
    "a mode": lambda head: head.model.layers[1].eval(),
}


@pytest.mark.parametrize("what", MEDDLING)
def test_a_forward_that_is_not_known_to_leave_modules_alone(what: str) -> None:
    model = replaced(graphed(tiny_model("llama")), "someone.else")
    step(model)
    ids = torch.cat(make_sequences(VOCAB))[None]
    model(input_ids=ids, labels=ids, packed_seq_lens=list(SMALL), meddle=MEDDLING[what]).loss.backward()
    assert runner(model).stats.recordings == 2, "recorded anew"


def test_a_hook_of_someone_between_the_look_and_the_backbone() -> None:
    model = replaced(graphed(tiny_model("llama")))
    step(model)
    model.register_forward_pre_hook(lambda head, _: MEDDLING["a weight"](head))
    step(model)
    assert runner(model).stats.recordings == 2, "recorded anew"


def test_a_hook_that_replaces_weights_behind_the_look() -> None:
    """A hook of the backbone runs after the head's snapshot, which is then not used."""
    models = [fastpack.patch(tiny_model("llama")), graphed(tiny_model("llama"))]

    def replace(module: Any, args: Any) -> None:
        module.layers[1].mlp.up_proj.weight.data = module.layers[1].mlp.up_proj.weight.data * 0.5

    for m in models:
        step(m)
        m.model.register_forward_pre_hook(replace)
    want, ours = (step(m) for m in models)
    check(ours, want)


@pytest.mark.parametrize("by_trl", [False, True], ids=["own forward", "TRL's"])
def test_a_snapshot_is_forgotten_after_a_failure(by_trl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = graphed(tiny_model("llama"))
    if by_trl:
        replaced(model)
    step(model)
    ids = torch.ones(1, 4, dtype=torch.long)

    def fail(_: Any) -> None:
        raise fastpack.PackingError("before the backbone")

    kwargs = {"packed_seq_lens": [4], "meddle": fail} if by_trl else {"packed_seq_lens": [3]}
    with pytest.raises(fastpack.PackingError):
        model(input_ids=ids, labels=ids, **kwargs)
    order = looks(monkeypatch)
    hidden(model)
    assert "look" in order
    model.model.norm.weight = nn.Parameter(model.model.norm.weight * 0.5)
    hidden(model).sum().backward()
    assert runner(model).stats.recordings == 2, "recorded anew"


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "dropout under checkpointing": (lambda m: _dropout(m), {}, "random numbers (dropout) under gradient"),
    "hooks": (lambda m: m.model.layers[0].mlp.register_forward_hook(lambda *_: None), {}, "carries hooks"),
    "pre-hooks": (lambda m: m.model.norm.register_forward_pre_hook(lambda *_: None), {}, "carries hooks"),
    "hooks of a parameter": (lambda m: m.model.norm.weight.register_hook(lambda g: g), {}, "parameter carries hooks"),
    "hidden states": (lambda m: None, {"output_hidden_states": True}, "output_hidden_states"),
    "hidden states by config": (lambda m: setattr(m.config, "output_hidden_states", True), {}, "output_hidden_states"),
    "an unknown tensor": (lambda m: None, {"something": torch.zeros(1)}, "something came"),
    "a subclass": (lambda m: _subclass(m), {}, "trains a Odd"),
    "work": (lambda m: setattr(runner(m), "settings", GraphSettings(1, max_work=1.0)), {}, ENOUGH_WORK),
    "the recorder": (lambda m: setattr(runner(m).recorder, "problem", CaptureRefusedError("so")), {}, "so"),
    "the device": (lambda m: setattr(runner(m).recorder, "where", "no such device"), {}, "no such device"),
}


class Odd(nn.Parameter):
    pass


def _subclass(model: Any) -> None:
    model.model.norm.weight = Odd(model.model.norm.weight.data)


def _dropout(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.model.norm.register_module("extra", nn.Dropout(0.5))
    plain = model.model.norm.__dict__["forward"]
    model.model.norm.forward = lambda x: model.model.norm.extra(plain(x))


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    prepare, keywords, why = REFUSED[what]
    models = [fastpack.patch(tiny_model("llama")), graphed(tiny_model("llama"))]
    ids = torch.cat(make_sequences(VOCAB))[None]
    results = []
    for m in models:
        if m is models[1] or why not in ("so", "no such device", ENOUGH_WORK):
            prepare(m)
        torch.manual_seed(0)
        results.append(m.base_model(input_ids=ids, packed_seq_lens=list(SMALL), **keywords).last_hidden_state)
    assert relative(results[1], results[0]) <= FLOAT32_BOUND
    assert why in reason(models[1])
    assert runner(models[1]).stats.replays == 0
    models[1].base_model(input_ids=ids, packed_seq_lens=list(SMALL), **keywords)
    assert runner(models[1]).stats.eager[reason(models[1])] == 2


@pytest.mark.parametrize("backend", ["segments", "reference", "flex"])
def test_attention_that_prepares_on_the_host_is_refused(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "flex":
        monkeypatch.setattr(BACKENDS["flex"], "rejects", lambda shape: None)
        monkeypatch.setattr(BACKENDS["flex"], "_compiled", lambda: lambda q, k, v, **_: q)
    model = tiny_model("llama")
    fastpack.patch(model, graphs="auto", attention=backend)
    graphs = runner(model)
    graphs.recorder, graphs.settings = FakeRecorder(), GraphSettings(record_after=0)
    hidden(model)
    assert reason(model).startswith("a kernel ")


def test_hooks_that_transformers_leaves_behind_do_no_harm() -> None:
    model = graphed(tiny_model("llama"))
    ids = torch.cat(make_sequences(VOCAB))[None]
    with torch.no_grad():
        assert model.model(input_ids=ids, packed_seq_lens=list(SMALL), output_hidden_states=True).hidden_states
    assert any(m._forward_hooks for m in model.model.layers.modules())
    step(model)
    assert runner(model).stats.replays == 1


def test_hooks_that_come_and_go() -> None:
    """While hooks exist the stack runs eagerly; afterwards the old recording serves again."""
    model = graphed(tiny_model("llama"))
    step(model)
    calls: list[int] = []
    handle = model.model.layers[1].register_forward_hook(lambda *_: calls.append(1))
    step(model)
    assert calls == [1]
    handle.remove()
    step(model)
    assert (runner(model).stats.replays, runner(model).stats.recordings) == (2, 1)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RuntimeError("called a synchronizing CUDA operation"), "waits for the device"),
        (
            RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture unless"),
            "can't be captured",
        ),
        (torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"), "can't be captured"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"), None),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), None),
        (ValueError("captured by surprise in a CUDA stream"), None),
    ],
)
def test_which_errors_mean_that_it_cannot_be_captured(error: BaseException, why: str | None) -> None:
    problem = capture_problem(error)
    assert problem is None if why is None else why in str(problem)
    with pytest.raises(RuntimeError) as end:
        _end_capture_after(error)
    assert capture_problem(end.value) is not None, "the end of a capture says so, whatever came before"


def _end_capture_after(error: BaseException) -> None:
    try:
        raise error
    finally:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


def test_any_other_error_comes_through() -> None:
    model = graphed(tiny_model("llama"))
    runner(model).recorder.problem = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="mat1"):
        step(model)


def test_on_a_cpu_nothing_changes() -> None:
    plain, model = fastpack.patch(tiny_model("llama")), fastpack.patch(tiny_model("llama"), graphs="auto")
    for _ in range(3):
        check(step(model), step(plain))
    assert reason(model) == "CUDA graphs need a CUDA device, not cpu"


@pytest.mark.parametrize("whose", ["its own", "the embedding's", "nobody's"])
def test_a_parameter_that_is_read_behind_the_modules_is_refused(whose: str) -> None:
    """It would be read, but would get no gradient."""
    models = [fastpack.patch(tiny_model("llama")), graphed(tiny_model("llama"))]
    results = []
    for m in models:
        norm = m.model.norm
        torch.manual_seed(0)
        weight = {
            "its own": norm.weight,
            "the embedding's": m.model.embed_tokens.weight,
            "nobody's": torch.randn(32, requires_grad=True),
        }[whose]
        norm.forward = lambda x, weight=weight: x * (weight if weight.ndim == 1 else weight[0])
        hidden(m).square().sum().backward()
        results.append(weight.grad)
    assert relative(results[1], results[0]) <= FLOAT32_BOUND
    assert reason(models[1]) == "a module reads a parameter that no module of the stack has among its own"
