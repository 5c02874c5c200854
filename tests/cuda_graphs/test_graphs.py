"""Replayed steps give what eager steps give: logits, losses, gradients and training.

Without a GPU, a fake recorder runs the passes again over the static inputs, as a graph would, and overwrites with NaN
what another replay would have overwritten. ``test_graphs_gpu.py`` shows that the device agrees.
"""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from adapter_cases import with_lora
from oracle import FLOAT32_BOUND, compare, make_sequences, relative, run_batch
from recording import LARGE, SMALL, Varlen, check, graphed, hidden, reason, runner, step
from tiny import FAST, VOCAB, tiny_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastpack
from fastpack.cuda_graphs.recorder import CudaRecorder
from fastpack.cuda_graphs.runner import WAITING
from fastpack.exactness.tiny import build_tiny, model_types
from fastpack.families.varlen import VARLEN_FAMILIES
from fastpack.model.model_runtime import runtime_of
from fastpack.packing.buckets import Bucket
from fastpack.packing.inputs import read_packing

pytestmark = pytest.mark.usefixtures("varlen")


@pytest.mark.parametrize("model_type", FAST)
def test_families(model_type: str, varlen: Varlen) -> None:
    plain, model = fastpack.patch(tiny_model(model_type)), graphed(tiny_model(model_type))
    for lengths, kind in ((SMALL, "padded left"), (LARGE, "TRL's keywords"), (SMALL, "several packed rows")):
        want = step(plain, lengths, kind)
        varlen.tokens.clear()
        check(step(model, lengths, kind), want)
        assert set(varlen.tokens) == {Bucket.of(lengths).tokens}, "on the bucket's tokens"
    assert runner(model).stats.replays == 3
    assert not runner(model).stats.eager
    assert runner(model).stats.recordings == 2, "one for each bucket"


@pytest.mark.parametrize("model_type", ["gpt2", "olmo", "persimmon", "gpt_oss"])
def test_other_families(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if model_type == "gpt_oss":
        monkeypatch.setattr(Varlen, "rejects", lambda self, shape: "no attention sinks" if shape.sinks else None)
    plain, model = fastpack.patch(tiny_model(model_type)), graphed(tiny_model(model_type))
    check(step(model), step(plain))
    if model_type == "gpt_oss":
        assert reason(model) == "a kernel reads each batch's lengths on the host"
    else:
        assert runner(model).stats.replays == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", [f.model_type for f in VARLEN_FAMILIES if f.model_type in model_types() and not f.drops_packing]
)
def test_every_varlen_family(model_type: str) -> None:
    """Every family also takes ready-made embeddings, as a recording passes them."""
    plain, model = fastpack.patch(tiny_model(model_type)), graphed(tiny_model(model_type))
    for lengths in (SMALL, LARGE, SMALL):
        error = compare(step(model, lengths), step(plain, lengths))
        assert error.worst <= 2 * FLOAT32_BOUND, error
    assert runner(model).stats.replays == 3


def test_negative_control() -> None:
    """The comparison fails if a replay reads the batch it was recorded with."""
    plain, model = fastpack.patch(tiny_model("llama")), graphed(tiny_model("llama"))
    first = step(model)
    (recorded,) = runner(model)._recordings.steps.values()
    write, batches = recorded._write_inputs, []
    recorded._write_inputs = lambda *inputs: batches.append(inputs) or write(*inputs)
    step(model)
    recorded._write_inputs = lambda *_: write(*batches[0])
    other = make_sequences(VOCAB, SMALL, seed=1)
    stale, want = (run_batch(m, other, "padded right") for m in (model, plain))
    assert runner(model).stats.replays == 3
    assert all(torch.equal(a, b) for a, b in zip(stale.logits, first.logits, strict=True)), "the first batch again"
    assert compare(stale, want).worst > 1e-2


def test_one_memory_for_embeddings_and_gradient() -> None:
    model = graphed(tiny_model("llama"))
    step(model)
    (recorded,) = runner(model)._recordings.steps.values()
    assert recorded._grads[0].data_ptr() == recorded._embeddings.data_ptr()


def test_a_bucket_is_recorded_once() -> None:
    model = graphed(tiny_model("llama"))
    for _ in range(3):
        step(model)
    stats = runner(model).stats
    assert (stats.recordings, stats.replays, dict(stats.eager)) == (1, 3, {})
    step(model, (8, 2, 18, 20, 30))  # other lengths, the same bucket
    assert (stats.recordings, stats.replays) == (1, 4)


def test_gradients_accumulate_over_buckets() -> None:
    """Three micro-batches of two buckets: no ``.grad`` is memory that a later replay writes to."""
    plain, model = fastpack.patch(tiny_model("llama")), graphed(tiny_model("llama"))
    results = []
    for m in (plain, model):
        for lengths in (SMALL, LARGE, SMALL):
            ids = torch.cat(make_sequences(VOCAB, lengths))[None]
            m(input_ids=ids, labels=ids, packed_seq_lens=list(lengths)).loss.backward()
        results.append({name: p.grad for name, p in m.named_parameters()})
    want, ours = results
    floor = max(float(g.abs().max()) for g in want.values())
    for name, gradient in want.items():
        error = float((ours[name] - gradient).abs().max())
        assert error <= FLOAT32_BOUND * max(float(gradient.abs().max()), 1e-3 * floor), name
    statics = {t.data_ptr() for t in runner(model).recorder.statics}
    assert not statics & {g.data_ptr() for g in ours.values()}
    assert runner(model).stats.replays == 3


def test_weights_that_change_in_place_are_seen() -> None:
    models = [fastpack.patch(tiny_model("llama")), graphed(tiny_model("llama"))]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
    for lengths in (SMALL, LARGE, SMALL, LARGE):
        want, ours = (step(m, lengths) for m in models)
        check(ours, want)
        for optimizer in optimizers:
            optimizer.step()
    assert runner(models[1]).stats.replays == 4


def test_two_forwards_before_a_backward() -> None:
    """The second runs eagerly, since its replay would overwrite what the first saved; the third is replayed again."""
    plain, model = fastpack.patch(tiny_model("llama")), graphed(tiny_model("llama"))
    for m in (plain, model):
        first, second = hidden(m), hidden(m, seed=1)
        (first * second).sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        if b.grad is not None:
            assert relative(a.grad, b.grad) <= FLOAT32_BOUND
    stats = runner(model).stats
    assert (stats.replays, dict(stats.eager)) == (1, {WAITING: 1})
    hidden(model).sum().backward()
    assert stats.replays == 2


def test_a_forward_that_was_dropped_waits_for_nothing() -> None:
    model = graphed(tiny_model("llama"))
    out = hidden(model)
    del out
    gc.collect()
    hidden(model).sum().backward()
    assert runner(model).stats.replays == 2
    assert not runner(model).stats.eager


def test_a_second_backward_raises() -> None:
    model = graphed(tiny_model("llama"))
    loss = hidden(model).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(fastpack.PatchError, match="second backward"):
        loss.backward()


def test_a_weight_changed_before_the_backward_raises() -> None:
    model = graphed(tiny_model("llama"))
    loss = hidden(model).square().sum()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    with pytest.raises(fastpack.PatchError, match="changed in place"):
        loss.backward()


def test_evaluation_is_eager() -> None:
    model = graphed(tiny_model("llama"))
    want = hidden(fastpack.patch(tiny_model("llama")))
    with torch.no_grad():
        assert relative(hidden(model), want) <= FLOAT32_BOUND
    assert reason(model) == "gradients are disabled"
    model.eval()
    hidden(model).sum().backward()
    model.train()
    hidden(model).sum().backward()
    assert runner(model).stats.recordings == 2, "training mode is part of what was recorded"


def test_lora_with_its_adapter_disabled_in_between() -> None:
    plain = fastpack.patch(with_lora(tiny_model("llama")))
    model = graphed(with_lora(tiny_model("llama")))
    for m in (plain, model):
        m.enable_input_require_grads()
    sequences = make_sequences(VOCAB)
    for index, disabled in enumerate((False, True, False, True)):
        results = []
        for m in (plain, model):
            if disabled:
                with m.disable_adapter():
                    ids = torch.cat(sequences)[None]
                    results.append(m(input_ids=ids, packed_seq_lens=list(SMALL)).logits.detach())
            else:
                results.append(run_batch(m, sequences, "padded left"))
        if disabled:
            assert relative(results[1], results[0]) <= FLOAT32_BOUND
        else:
            check(results[1], results[0])
        gc.collect()
        assert runner(model).stats.replays == index + 1
    assert runner(model).stats.recordings == 2


def test_switching_adapters_and_scales() -> None:
    model = graphed(with_lora(tiny_model("llama")))
    plain = fastpack.patch(with_lora(tiny_model("llama")))
    for m in (model, plain):
        torch.manual_seed(3)
        m.add_adapter("other", m.peft_config["default"])
        for name, p in m.named_parameters():
            if "lora_B.other" in name:
                nn.init.normal_(p.data, std=0.3)
    for act in (
        lambda m: m.set_adapter("other"),
        lambda m: m.set_adapter("default"),
        lambda m: [x.scale_layer(0.5) for x in m.modules() if hasattr(x, "scale_layer")],
        lambda m: m.merge_adapter(),
        lambda m: m.unmerge_adapter(),
    ):
        for m in (model, plain):
            act(m)
        model.enable_input_require_grads()
        plain.enable_input_require_grads()
        ids = torch.cat(make_sequences(VOCAB))[None]
        a, b = (m(input_ids=ids, packed_seq_lens=list(SMALL)) for m in (model, plain))
        assert relative(a.logits, b.logits) <= FLOAT32_BOUND
        del a, b
        gc.collect()
    assert runner(model).stats.recordings == 4, "unmerged again is as before"
    assert runner(model).stats.replays == 5


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_gradient_checkpointing(kind: str, varlen: Varlen) -> None:
    models = [fastpack.patch(tiny_model("llama")), graphed(tiny_model("llama"))]
    for m in models:
        m.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
    functions = [layer._gradient_checkpointing_func for layer in models[1].model.layers]
    for lengths in (SMALL, LARGE, SMALL):
        want, ours = (step(m, lengths) for m in models)
        check(ours, want)
    assert runner(models[1]).stats.replays == 3
    assert [layer._gradient_checkpointing_func for layer in models[1].model.layers] == functions, "put back"
    varlen.tokens.clear()
    hidden(models[1]).sum().backward()
    assert len(varlen.tokens) == 2 * 2, "each layer ran again in the backward"
    models[1].gradient_checkpointing_disable()
    step(models[1])
    assert runner(models[1]).stats.recordings == 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_around_the_model(reentrant: bool) -> None:
    plain, model = fastpack.patch(tiny_model("llama")), graphed(tiny_model("llama"))
    results = []
    for m in (plain, model):
        embeddings = m.model.embed_tokens(torch.cat(make_sequences(VOCAB))[None])

        def run(x: Tensor, m: Any = m) -> Tensor:
            out: Tensor = m.model(inputs_embeds=x, packed_seq_lens=list(SMALL)).last_hidden_state
            return out

        checkpoint(run, embeddings, use_reentrant=reentrant).square().sum().backward()
        results.append({name: p.grad for name, p in m.named_parameters() if p.grad is not None})
    for name, gradient in results[0].items():
        assert relative(results[1][name], gradient) <= FLOAT32_BOUND, name
    assert runner(model).stats.replays == 0
    assert sum(runner(model).stats.eager.values()) == 2


def test_frozen_weights_and_inputs() -> None:
    """Half of the layers and the embedding are frozen; the rest gets gradients."""
    models = [fastpack.patch(tiny_model("llama")), graphed(tiny_model("llama"))]
    for m in models:
        m.model.embed_tokens.requires_grad_(False)
        m.model.layers[0].requires_grad_(False)
    want, ours = (step(m) for m in models)
    assert "model.layers.0.mlp.up_proj.weight" not in want.grads
    check(ours, want)
    for m in models:
        m.model.layers[0].requires_grad_(True)
    want, ours = (step(m) for m in models)
    check(ours, want)
    assert runner(models[1]).stats.recordings == 2


def test_autocast_over_float32_weights() -> None:
    models = [fastpack.patch(tiny_model("llama")), graphed(tiny_model("llama"))]
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            want, ours = (step(m) for m in models)
        wide = step(models[0])
        assert 1e-4 < compare(ours, wide).worst <= 1.5 * compare(want, wide).worst
        with torch.no_grad():
            for m in models:
                for p in m.parameters():
                    p.mul_(0.5)
    step(models[1])
    assert runner(models[1]).stats.recordings == 2, "autocast is part of what was recorded"


def test_a_recorded_backward_is_outside_autocast() -> None:
    """A loss's backward is outside autocast too: what ran in float32 has its backward in float32."""
    autocast_states: list[bool] = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            autocast_states.append(torch.is_autocast_enabled("cpu"))
            return grad

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Watch.apply(x)

    model = tiny_model("llama")
    model.model.norm = Watched()
    graphed(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = hidden(model).sum()
    loss.backward()
    assert runner(model).stats.replays == 1
    assert autocast_states
    assert not any(autocast_states)


def test_embeddings_as_inputs() -> None:
    models = [fastpack.patch(tiny_model("llama")), graphed(tiny_model("llama"))]
    sequences = make_sequences(VOCAB)
    ids = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(s) for s in sequences], batch_first=True)
    results = []
    for m in models:
        embeddings = m.model.embed_tokens(ids).detach().requires_grad_()
        out = m(inputs_embeds=embeddings, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
        out.loss.backward()
        results.append((out.logits, embeddings.grad, m.model.layers[0].mlp.up_proj.weight.grad))
    for want, ours in zip(*results, strict=True):
        assert relative(ours, want) <= FLOAT32_BOUND
    assert runner(models[1]).stats.replays == 1


def test_a_pickle_makes_a_recorder_of_its_own() -> None:
    """The recorder for GPUs holds objects that can't be pickled."""
    model = fastpack.patch(tiny_model("llama"), graphs="auto")
    other = pickle.loads(pickle.dumps(model))
    assert type(runner(other).recorder) is type(runner(model).recorder) is CudaRecorder
    assert runner(other).recorder is not runner(model).recorder


def test_copies_and_pickles_start_empty() -> None:
    model = graphed(tiny_model("llama"))
    want = step(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        graphs = runner(other)
        assert graphs is not runner(model)
        assert (graphs.stats.recordings, graphs.settings.record_after) == (0, 0)
        other.zero_grad()
        check(step(other), want)
        assert (graphs.stats.replays, runner(model).stats.replays) == (1, 1)


def test_a_batch_that_comes_in_a_bucket() -> None:
    plain, model = fastpack.patch(tiny_model("llama")), graphed(tiny_model("llama"))
    ids = nn.utils.rnn.pad_sequence(make_sequences(VOCAB), batch_first=True)
    packed = read_packing(tuple(ids.shape), ids.device, attention_mask=(ids != 0).long())
    want = plain.model(input_ids=ids, packed_seq_lens=packed).last_hidden_state
    ours = model.model(input_ids=ids, packed_seq_lens=packed.bucketed()).last_hidden_state
    assert relative(ours, want) <= FLOAT32_BOUND
    assert runner(model).stats.replays == 1


def test_undone_with_the_patch() -> None:
    model = graphed(tiny_model("llama"))
    step(model)
    fastpack.unpatch(model)
    assert getattr(runtime_of(model.model), "graphs", None) is None
    fastpack.patch(model)
    assert getattr(runtime_of(model.model), "graphs", None) is None
    fastpack.patch(model, graphs="auto")
    assert runner(model).stats.recordings == 0


def test_the_report_says_so() -> None:
    notes = fastpack.report(fastpack.patch(tiny_model("llama"), graphs="auto")).notes
    assert any(note.startswith("graphs: off, CUDA graphs need a CUDA device") for note in notes)
    assert not any("graphs" in note for note in fastpack.report(fastpack.patch(tiny_model("llama"))).notes)
    notes = fastpack.report(fastpack.patch(build_tiny("gemma4_text"), graphs="auto")).notes
    assert any(note.startswith("graphs: off, since some layers look up each batch") for note in notes)
    model = graphed(tiny_model("llama"))
    for _ in range(3):
        step(model)
    with torch.no_grad():
        model(input_ids=torch.ones(1, 4, dtype=torch.long))
    line = runner(model).describe(torch.device("cpu"))
    assert line == "graphs: on; 1 recorded, 3 steps replayed; 1 run eagerly: gradients are disabled"
