"""Replayed steps against eager ones, on a GPU."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import with_lora
from gpu_cases import build, check, oracle_and_plain
from graphs_on_gpu import LARGE, SMALL, both, close, graphed, hidden, step
from oracle import GPU_FLOAT32_BOUND, Result, compare, make_sequences, padded, run_alone, run_batch
from recording import runner
from tiny import EXPERTS, FAST, VOCAB, tiny_model
from torch import nn

import fastpack
from fastpack.cuda_graphs.runner import WAITING
from fastpack.packing.buckets import Bucket
from fastpack.packing.inputs import read_packing

pytestmark = pytest.mark.gpu


def test_dropout_is_drawn_anew_in_each_replay() -> None:
    """From the same random state a replay draws what an eager pass draws; from another state, other numbers."""
    lengths = (30, 34)
    assert Bucket.of(lengths).tokens == sum(lengths)  # no padding, for which random numbers would be drawn too
    eager, model = both(wrap=lambda m: with_lora(m, lora_dropout=0.3))

    def seeded(m: Any, seed: int) -> Result:
        torch.manual_seed(seed)
        return step(m, lengths, "packed_seq_lens")

    for seed in (1, 2):
        close(seeded(model, seed), seeded(eager, seed))
    assert compare(seeded(model, 3), seeded(eager, 2)).worst > 1e-2
    state = torch.cuda.get_rng_state()
    step(model, lengths, "packed_seq_lens")
    assert not torch.equal(torch.cuda.get_rng_state(), state), "the next replay would draw the same"
    assert runner(model).stats.recordings == 1
    assert runner(model).stats.replays == 4


@pytest.mark.parametrize("model_type", [name for name in FAST if name not in EXPERTS])
def test_families_in_bf16(model_type: str) -> None:
    wide, plain = oracle_and_plain(model_type)
    model = graphed(build(model_type, torch.bfloat16))
    sequences = make_sequences(VOCAB, SMALL)
    for kind in ("padded left", "TRL's keywords", "several packed rows"):
        check(compare(run_batch(model, sequences, kind), wide, half=True), plain)
    stats = runner(model).stats
    report = fastpack.report(model)
    if "rotary" in report.swapped and "dynamic" in str(model.config.rope_parameters):
        # dynamic NTK asks the device how long the sequences are, stock too
        assert stats.replays == 0, stats
        assert "waits for the device" in str(stats.eager)
    elif report.backend == "torch_varlen":
        assert (stats.recordings, stats.replays) == (1, 3), stats
    else:
        assert stats.replays in (0, 3), stats


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt2"])
def test_float32_on_the_memory_efficient_kernel(model_type: str) -> None:
    """Buckets alternate, in float32, so that rounding hides no error."""
    plain, model = both(model_type=model_type)
    for lengths in (SMALL, LARGE, SMALL, LARGE):
        close(step(model, lengths), step(plain, lengths))
    stats = runner(model).stats
    assert (stats.recordings, stats.replays, sum(stats.eager.values())) == (2, 4, 0), stats


def test_the_same_kernels_give_the_same_bits() -> None:
    """Eager on the bucket's own sizes, the forward is equal bit by bit, and the backward up to its atomics."""
    plain, model = both(torch.bfloat16)
    batch = padded(make_sequences(VOCAB, SMALL), "right")
    ids, mask = batch["input_ids"].cuda(), batch["attention_mask"]
    packed = read_packing(tuple(ids.shape), ids.device, attention_mask=mask).bucketed()
    results = []
    for m, lens in ((plain, {"packed_seq_lens": packed}), (model, {"attention_mask": mask.cuda()})):
        out = m.model(input_ids=ids, **lens).last_hidden_state
        out.float().square().sum().backward()
        results.append((out, {n: p.grad for n, p in m.named_parameters() if p.grad is not None}))
    (want, want_grads), (ours, our_grads) = results
    assert runner(model).stats.replays == 1
    assert torch.equal(ours, want)
    for name, gradient in want_grads.items():
        error = (our_grads[name].float() - gradient.float()).abs().max() / gradient.float().abs().max()
        assert error <= 2e-2, name


def test_negative_control() -> None:
    """A replay that reads the batch it was recorded with fails the comparison."""
    plain, model = both()
    step(model)
    (recorded,) = runner(model)._recordings.steps.values()
    recorded._write_inputs = lambda embeddings, packed: None
    other = make_sequences(VOCAB, SMALL, seed=1)
    assert compare(run_batch(model, other, "padded right"), run_batch(plain, other, "padded right")).worst > 1e-2


def test_gradients_accumulate_over_buckets() -> None:
    models = both()
    results = []
    for m in models:
        for lengths in (SMALL, LARGE, SMALL):
            ids = torch.cat(make_sequences(VOCAB, lengths))[None].cuda()
            m(input_ids=ids, labels=ids, packed_seq_lens=list(lengths)).loss.backward()
        results.append({name: p.grad for name, p in m.named_parameters()})
    want, ours = results
    floor = max(float(g.abs().max()) for g in want.values())
    for name, gradient in want.items():
        error = float((ours[name] - gradient).abs().max())
        assert error <= GPU_FLOAT32_BOUND * max(float(gradient.abs().max()), 1e-3 * floor), name
    assert runner(models[1]).stats.replays == 3


def test_two_forwards_before_a_backward() -> None:
    plain, model = both()
    for m in (plain, model):
        first, second = hidden(m), hidden(m, seed=1)
        (first * second).sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        if b.grad is not None:
            assert (a.grad - b.grad).abs().max() <= 1e-4 * b.grad.abs().max() + 1e-6
    stats = runner(model).stats
    assert (stats.replays, dict(stats.eager)) == (1, {WAITING: 1})


def test_training_sees_the_weights_change() -> None:
    models = both()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True) for m in models]
    for _ in range(4):
        want, ours = (step(m) for m in models)
        close(ours, want, bound=2e-3)
        assert abs(float(ours.loss - want.loss)) <= 1e-5 * abs(float(want.loss))
        for optimizer in optimizers:
            optimizer.step()
    assert runner(models[1]).stats.replays == 4


def test_weights_that_move_are_recorded_anew() -> None:
    plain, model = both()
    step(model)
    for m in (plain, model):
        m.load_state_dict({name: value * 0.5 for name, value in m.state_dict().items()}, assign=True)
    close(step(model), step(plain))
    assert runner(model).stats.recordings == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_with_its_adapter_disabled_in_between(dtype: torch.dtype) -> None:
    plain, model = both(dtype, lambda m: with_lora(m).to(dtype))
    bound = GPU_FLOAT32_BOUND if dtype == torch.float32 else 5e-2
    for _ in range(2):
        close(step(model), step(plain), bound)
        for m in (plain, model):
            with torch.no_grad(), m.disable_adapter():
                step_out = hidden(m)
            assert step_out.isfinite().all()
    stats = runner(model).stats
    assert (stats.recordings, stats.replays) == (1, 2)
    with model.disable_adapter(), plain.disable_adapter():
        for m in (model, plain):
            m.enable_input_require_grads()
        a, b = hidden(model), hidden(plain)
    assert (a - b).abs().max() <= (1e-4 if dtype == torch.float32 else 5e-2) * b.abs().max()
    assert stats.replays == 3


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
@pytest.mark.parametrize(
    ("lora", "model_type"), [(False, "llama"), (True, "llama"), (True, "qwen3_moe")], ids=["full", "lora", "experts"]
)
def test_gradient_checkpointing(kind: str, lora: bool, model_type: str) -> None:
    models = both(wrap=with_lora if lora else lambda m: m, model_type=model_type)
    for m in models:
        m.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
        m.enable_input_require_grads()
    for lengths in (SMALL, LARGE, SMALL):
        want, ours = (step(m, lengths) for m in models)
        close(ours, want)
    assert runner(models[1]).stats.replays == 3, runner(models[1]).stats


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
@pytest.mark.parametrize(("model_type", "attention"), [("llama", "segments"), ("llama", "flex")])
def test_gradient_checkpointing_where_nothing_is_recorded(model_type: str, attention: str, kind: str) -> None:
    """These kernels wait for the host: the refused recording leaves the eager pass alone."""
    models = [
        fastpack.patch(build(model_type, torch.float32), attention=attention),
        graphed(build(model_type, torch.float32), attention),
    ]
    for m in models:
        m.train().gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
        m.enable_input_require_grads()
    for lengths in (SMALL, LARGE):
        want, ours = (step(m, lengths) for m in models)
        close(ours, want, bound=1e-3)
    stats = runner(models[1]).stats
    assert (stats.replays, sum(stats.eager.values())) == (0, 2), stats


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_over_float32_weights(dtype: torch.dtype) -> None:
    """Weights change between the steps: a cast that autocast cached would be stale."""
    sequences = make_sequences(VOCAB, SMALL)
    model, stock = graphed(build("llama", torch.float32), "torch_varlen"), build("llama", torch.float32)
    for _ in range(3):
        wide = run_alone(build_like(stock), sequences)
        with torch.autocast("cuda", dtype):
            plain = compare(run_alone(stock, sequences), wide, half=True)
            check(compare(run_batch(model, sequences, "padded left"), wide, half=True), plain)
        with torch.no_grad():
            for m in (model, stock):
                for p in m.parameters():
                    p.mul_(0.9)
    assert runner(model).stats.replays == 3


def build_like(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


@pytest.mark.parametrize("model_type", EXPERTS)
def test_experts_are_replayed_or_refused(model_type: str) -> None:
    plain, model = both(model_type=model_type)
    for _ in range(2):
        close(step(model), step(plain))
    stats = runner(model).stats
    assert stats.replays in (0, 2), stats
    assert torch.randn(8, device="cuda").isfinite().all()


def test_a_copy_records_for_itself() -> None:
    plain, model = both()
    want = step(plain)
    close(step(model), want)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    close(step(other), want)
    assert runner(other).stats.recordings == 1


def test_nf4(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    build("llama", torch.bfloat16).save_pretrained(tmp_path)
    quantisation = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )

    def load() -> Any:
        loaded = AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=quantisation, device_map={"": 0}, dtype=torch.bfloat16
        )
        return with_lora(loaded.train())

    plain, model = fastpack.patch(load()), graphed(load())
    for lengths in (SMALL, LARGE, SMALL):
        close(step(model, lengths), step(plain, lengths), bound=5e-2)
    assert runner(model).stats.replays == 3, runner(model).stats


@pytest.mark.parametrize("settings", [{}, {"padding_free": True, "max_length": None}], ids=["padded", "padding_free"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_trl_trains_the_same(settings: dict[str, Any], checkpointing: bool, tmp_path: Path) -> None:
    trainers = pytest.importorskip("test_trainers")
    settings = {**settings, "gradient_accumulation_steps": 2, "gradient_checkpointing": checkpointing}
    heads = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    want, _ = trainers.train(fastpack.patch(tiny_model("llama", **heads)), tmp_path, patch=None, **settings)
    model = tiny_model("llama", **heads)
    fastpack.patch(model, graphs="auto")
    ours, trainer = trainers.train(model, tmp_path, patch=None, **settings)
    trainers.check_equal(ours, want, bound=1e-3)
    assert runner(trainer.model).stats.replays >= trainers.STEPS, runner(trainer.model).stats
