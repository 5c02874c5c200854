"""On a GPU: replayed steps against eager ones, and what only a device shows (memory, streams, failed captures)."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import GPU_FLOAT32_BOUND, Result, compare, make_sequences, padded, positions, run_alone, run_batch
from test_adapters import with_lora
from test_exact_gpu import LENGTHS as SMALL
from test_exact_gpu import build, check, oracle_and_plain
from tiny import EXPERTS, FAST, VOCAB, tiny_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastpack
from fastpack.graphs import GraphRunner, GraphSettings, runner_of
from fastpack.graphs.runner import WAITING
from fastpack.packing import Bucket
from fastpack.packing_inputs import pack_inputs

pytestmark = pytest.mark.gpu

LARGE = (300, 41, 290, 2, 440)


def runner(model: Any) -> GraphRunner:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    found = runner_of(inner.base_model)
    assert found is not None
    return found


def graphed(model: Any, attention: str = "auto", **settings: Any) -> Any:
    """Patched, each size recorded when it comes first, however much work there is."""
    fastpack.patch(model, graphs="auto", attention=attention)
    runner(model).settings = GraphSettings(**{"record_after": 1, "max_work": float("inf"), **settings})
    return model


def both(dtype: torch.dtype = torch.float32, wrap: Any = lambda m: m, model_type: str = "llama") -> tuple[Any, Any]:
    """The same model eager and graphed."""
    return fastpack.patch(wrap(build(model_type, dtype))), graphed(wrap(build(model_type, dtype)))


def step(model: nn.Module, lengths: Sequence[int] = SMALL, kind: str = "padded right") -> Result:
    return run_batch(model, make_sequences(VOCAB, lengths), kind)


def close(ours: Result, want: Result, bound: float = GPU_FLOAT32_BOUND) -> None:
    error = compare(ours, want)
    assert error.worst <= bound, error


def hidden(model: Any, lengths: Sequence[int] = SMALL, seed: int = 0) -> Tensor:
    ids = torch.cat(make_sequences(VOCAB, lengths, seed))[None].cuda()
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    out: Tensor = inner.base_model(input_ids=ids, packed_seq_lens=list(lengths)).last_hidden_state
    return out


def reserved() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_dropout_is_drawn_anew_in_each_replay() -> None:
    """From the same random state a replay draws what an eager pass draws, from another one something else."""
    lengths = (30, 34)
    assert Bucket.of(lengths).tokens == sum(lengths)  # no tail, for which random numbers would be drawn too
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
        check(compare(run_batch(model, sequences, kind), wide), plain)
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
    """Interleaved buckets, with real rounding in the way of nothing."""
    plain, model = both(model_type=model_type)
    for lengths in (SMALL, LARGE, SMALL, LARGE):
        close(step(model, lengths), step(plain, lengths))
    stats = runner(model).stats
    assert (stats.recordings, stats.replays, sum(stats.eager.values())) == (2, 4, 0), stats


def test_the_same_kernels_give_the_same_bits() -> None:
    """Eager on the bucket's own sizes: the forward is equal bit by bit, the backward as far as its atomics are."""
    plain, model = both(torch.bfloat16)
    batch = padded(make_sequences(VOCAB, SMALL), "right")
    ids, mask = batch["input_ids"].cuda(), batch["attention_mask"]
    packed = pack_inputs(tuple(ids.shape), ids.device, attention_mask=mask).bucketed()
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
    (recorded,) = runner(model)._steps.values()
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


def test_what_happens_between_forward_and_backward_does_no_harm() -> None:
    """The rest of the memory is filled with NaN in between, and given back."""
    plain, model = both()
    want, ours = hidden(plain), hidden(model)
    torch.cuda.empty_cache()
    junk = [torch.full((2**20,), float("nan"), device="cuda") for _ in range(64)]
    del junk
    torch.cuda.empty_cache()
    for out in (want, ours):
        out.square().sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        if b.grad is not None:
            assert (a.grad - b.grad).abs().max() <= 3e-5 * b.grad.abs().max() + 1e-6
    kept = [p.grad for p in model.parameters() if p.grad is not None]
    copies = [g.clone() for g in kept]
    step(model, LARGE)  # with gradients of its own
    assert all(torch.equal(g, c) for g, c in zip(kept, copies, strict=True))


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
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_gradient_checkpointing(kind: str, lora: bool) -> None:
    models = both(wrap=with_lora if lora else lambda m: m)
    for m in models:
        m.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
        m.enable_input_require_grads()
    for lengths in (SMALL, LARGE, SMALL):
        want, ours = (step(m, lengths) for m in models)
        close(ours, want)
    assert runner(models[1]).stats.replays == 3, runner(models[1]).stats


def deep() -> nn.Module:
    """Enough layers and tokens that activations are most of what is held."""
    return tiny_model("llama", hidden_size=256, intermediate_size=1024, head_dim=64, num_hidden_layers=8).to(
        "cuda", torch.bfloat16
    )


LONG = (700, 900, 400)


def held_by_recording(model: Any, *batches: Sequence[int]) -> int:
    before = reserved()
    for lengths in batches:
        hidden(model, lengths).sum().backward()
        model.zero_grad()
    return reserved() - before


def test_checkpointing_saves_memory() -> None:
    held = []
    for enabled in (False, True):
        model = graphed(deep())
        if enabled:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        held.append(held_by_recording(model, LONG))
        assert runner(model).stats.replays == 1
        del model
    assert held[1] < 0.65 * held[0], held


def test_four_buckets_share_their_memory() -> None:
    """The largest first or last: no more than 1.3 times what it takes alone."""
    buckets = [LONG, (600, 700, 300), (500, 500, 300), (200, 500, 300)]
    alone = held_by_recording(graphed(deep()), LONG)
    for order in (buckets, buckets[::-1]):
        model = graphed(deep())
        together = held_by_recording(model, *order)
        assert runner(model).stats.recordings == 4
        assert together <= 1.3 * alone, (together, alone)
        del model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_over_float32_weights(dtype: torch.dtype) -> None:
    """Weights change between the steps: a cast that autocast cached would be stale."""
    sequences = make_sequences(VOCAB, SMALL)
    model, stock = graphed(build("llama", torch.float32), "torch_varlen"), build("llama", torch.float32)
    for _ in range(3):
        wide = run_alone(build_like(stock), sequences)
        with torch.autocast("cuda", dtype):
            plain = compare(run_alone(stock, sequences), wide)
            check(compare(run_batch(model, sequences, "padded left"), wide), plain)
        with torch.no_grad():
            for m in (model, stock):
                for p in m.parameters():
                    p.mul_(0.9)
    assert runner(model).stats.replays == 3


def build_like(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


class Meddling(nn.Module):
    """A norm that does something to the device first."""

    def __init__(self, norm: nn.Module, meddle: Any) -> None:
        super().__init__()
        self.norm, self.meddle = norm, meddle

    def forward(self, x: Tensor) -> Tensor:
        self.meddle(x)
        out: Tensor = self.norm(x)
        return out


@pytest.mark.parametrize("how", ["item", "nonzero", "synchronize"])
def test_what_waits_for_the_device_runs_eagerly(how: str) -> None:
    """``synchronize`` slips through the warm-up: its capture fails, and random numbers can be drawn all the same."""
    meddle = {
        "item": lambda x: x.sum().item(),
        "nonzero": lambda x: x.nonzero(),
        "synchronize": lambda x: torch.cuda.synchronize(),
    }[how]
    plain, model = both()
    model.model.norm = Meddling(model.model.norm, meddle)
    other = graphed(build("llama", torch.float32))
    step(other)
    for _ in range(2):
        want = hidden(plain)
        assert (hidden(model) - want).abs().max() <= 1e-4 * want.abs().max()
    stats = runner(model).stats
    assert stats.replays == 0, stats
    assert sum(stats.eager.values()) == 2, stats
    assert all("waits for the device" in why or "can't be captured" in why for why in stats.eager), stats
    assert torch.randn(8, device="cuda").isfinite().all()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    close(step(other), step(fastpack.patch(build("llama", torch.float32))))
    model.model.norm = model.model.norm.norm
    assert (hidden(model) - want).abs().max() <= 1e-4 * want.abs().max()
    assert stats.replays == 1, "as soon as it no longer does"


@pytest.mark.parametrize("model_type", EXPERTS)
def test_experts_are_replayed_or_refused(model_type: str) -> None:
    plain, model = both(model_type=model_type)
    for _ in range(2):
        close(step(model), step(plain))
    stats = runner(model).stats
    assert stats.replays in (0, 2), stats
    assert torch.randn(8, device="cuda").isfinite().all()


def test_another_stream() -> None:
    plain, model = both()
    close(step(model), step(plain))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ours, want = step(model), step(plain)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    close(ours, want)
    assert runner(model).stats.replays == 2


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


def test_memory_comes_back_with_unpatch() -> None:
    model = deep()
    held_by_recording(graphed(model), LONG)  # the libraries' workspaces on a recorder's stream stay with the process
    fastpack.unpatch(model)
    before = reserved()
    held_by_recording(graphed(model), LONG)
    held = reserved() - before
    fastpack.unpatch(model)
    assert held > 2**24
    assert reserved() - before < 0.2 * held


def test_no_synchronisation_in_a_replay() -> None:
    model = graphed(build("llama", torch.bfloat16))
    sequences = make_sequences(VOCAB, SMALL)
    ids = torch.cat(sequences)[None].cuda()
    packed = pack_inputs(tuple(ids.shape), ids.device, position_ids=positions(sequences))

    def go() -> None:
        model.model(input_ids=ids, packed_seq_lens=packed).last_hidden_state.float().sum().backward()

    go()
    torch.cuda.set_sync_debug_mode("error")
    try:
        go()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert runner(model).stats.replays == 2


def test_ddp_gets_its_gradients(tmp_path: Path) -> None:
    """Its accumulators live on the default stream, where a capture must not reach."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        plain, model = both()
        wrapped = DistributedDataParallel(model, device_ids=[0])
        for lengths in (SMALL, LARGE, SMALL):
            ids = torch.cat(make_sequences(VOCAB, lengths))[None].cuda()
            for m in (plain, wrapped):
                m.zero_grad()
                m(input_ids=ids, labels=ids, packed_seq_lens=list(lengths)).loss.backward()
            for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert (a.grad - b.grad).abs().max() <= 1e-4 * b.grad.abs().max() + 1e-7, name
        assert runner(model).stats.replays == 3
    finally:
        torch.distributed.destroy_process_group()


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
