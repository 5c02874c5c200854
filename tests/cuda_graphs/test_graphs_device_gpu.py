"""Properties of replayed steps that only a device shows: memory, streams, failed captures, synchronisation."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_cases import build
from graphs_on_gpu import LARGE, SMALL, both, close, graphed, hidden, reserved, step
from oracle import make_sequences, positions
from recording import runner
from tiny import VOCAB, tiny_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastpack
from fastpack.cuda_graphs import recorder as recorder_module
from fastpack.cuda_graphs.recorder import CaptureRefusedError, CudaRecorder, no_synchronisation
from fastpack.cuda_graphs.recordings import TOO_LARGE
from fastpack.packing.buckets import Bucket
from fastpack.packing.inputs import read_packing

pytestmark = pytest.mark.gpu


def test_what_happens_between_forward_and_backward_does_no_harm() -> None:
    """The free memory is filled with NaN in between, and freed again."""
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
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    copies = [g.clone() for g in gradients]
    step(model, LARGE)  # with gradients of its own
    assert all(torch.equal(g, c) for g, c in zip(gradients, copies, strict=True))


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_replays_come_in_pieces(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[int] = []
    replay = CudaRecorder._replay

    def counted(self: CudaRecorder, pieces: Sequence[torch.cuda.CUDAGraph], device: torch.device) -> None:
        replayed.append(len(pieces))
        replay(self, pieces, device)

    monkeypatch.setattr(CudaRecorder, "_replay", counted)
    models = [tiny_model("llama", head_dim=64, num_hidden_layers=layers).cuda() for _ in range(2)]
    plain, model = fastpack.patch(models[0]), graphed(models[1])
    for lengths in (SMALL, LARGE, SMALL):
        close(step(model, lengths), step(plain, lengths))
    assert replayed == [{1: 1, 2: 2, 4: 3}[layers]] * 6


def test_a_stream_that_works_across_a_cut_is_refused() -> None:
    """The recorder still records other passes afterwards."""
    device = torch.device("cuda", torch.cuda.current_device())
    x, aside = torch.ones(8, device=device, requires_grad=True), torch.cuda.Stream(device)
    recorder = CudaRecorder()

    def forward(*, joins: bool) -> list[Tensor]:
        y = x * 2
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            z = y + 1
        if joins:
            torch.cuda.current_stream().wait_stream(aside)
        recorder.cut()
        if not joins:
            torch.cuda.current_stream().wait_stream(aside)
        return [y * z]

    def backward(outputs: list[Tensor]) -> Sequence[Tensor | None]:
        return torch.autograd.grad(outputs, [x], [torch.ones_like(outputs[0])])

    with pytest.raises(CaptureRefusedError):
        recorder.record(device, lambda: forward(joins=False), backward)
    tape = recorder.record(device, lambda: forward(joins=True), backward)
    with torch.no_grad():
        x.fill_(3)
    tape.replay_forward()
    tape.replay_backward()
    assert tape.outputs[0].tolist() == [42.0] * 8
    assert tape.gradients[0] is not None
    assert tape.gradients[0].tolist() == [26.0] * 8


def deep() -> nn.Module:
    """Return a model with so many layers that activations are most of its memory."""
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
    references = []
    for enabled in (False, True):
        model = graphed(deep())
        if enabled:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        references.append(held_by_recording(model, LONG))
        assert runner(model).stats.replays == 1
        del model
    assert references[1] < 0.65 * references[0], references


def test_four_buckets_share_their_memory() -> None:
    """With the largest first or last, they take no more than 1.3 times what it takes alone."""
    buckets = [LONG, (600, 700, 300), (500, 500, 300), (200, 500, 300)]
    alone = held_by_recording(graphed(deep()), LONG)
    for order in (buckets, buckets[::-1]):
        model = graphed(deep())
        together = held_by_recording(model, *order)
        assert runner(model).stats.recordings == 4
        assert together <= 1.3 * alone, (together, alone)
        del model


@pytest.mark.parametrize("beside", [False, True])
def test_the_pass_before_a_recording_draws_from_the_others_memory(
    beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a control, the pass allocates beside it."""
    if beside:
        monkeypatch.setattr(recorder_module, "_allocating_from", lambda pool: contextlib.nullcontext())
    model = graphed(deep())
    references = held_by_recording(model, LONG)
    before = reserved()
    torch.cuda.reset_peak_memory_stats()
    held_by_recording(model, (600, 700, 300))
    more = torch.cuda.max_memory_reserved() - before
    assert runner(model).stats.recordings == 2
    assert more > 0.6 * references if beside else more < 0.3 * references, (more, references)


class Meddling(nn.Module):
    """A norm that does something to the device first."""

    def __init__(self, norm: nn.Module, meddle: Any) -> None:
        super().__init__()
        self.norm, self.meddle = norm, meddle

    def forward(self, x: Tensor) -> Tensor:
        self.meddle(x)
        out: Tensor = self.norm(x)
        return out


@pytest.mark.parametrize("when", ["warm-up", "capture"])
def test_sizes_that_memory_is_too_small_to_record(when: str) -> None:
    """They run eagerly without the others' memory, smaller sizes are recorded anew, and random numbers still work."""

    def hog(x: Tensor) -> None:
        capturing = torch.cuda.is_current_stream_capturing()
        recording = capturing if when == "capture" else not capturing and torch.cuda.get_sync_debug_mode() > 0
        if recording and x.shape[-2] > Bucket.of(SMALL).tokens:
            torch.empty(2**50, device="cuda", dtype=torch.uint8)

    plain, model = both()
    model.model.norm = Meddling(model.model.norm, hog)
    plain.model.norm = Meddling(plain.model.norm, hog)  # so that both have the same parameters
    references: list[int] = []
    for lengths, recordings in ((SMALL, 1), (LARGE, 1), (LARGE, 1), (SMALL, 2)):
        close(step(model, lengths), step(plain, lengths))
        assert runner(model).stats.recordings == recordings
        references.append(reserved())
    assert references[1] < references[0], "the recording is gone"
    assert runner(model).stats.eager == {TOO_LARGE: 2}
    assert torch.randn(8, device="cuda").isfinite().all()


def test_a_tensor_that_stays_where_replays_write() -> None:
    """All recordings are dropped: the tensor that one of them would overwrite stays right."""
    tensors: dict[int, Tensor] = {}

    def keep(x: Tensor) -> None:
        if x.shape[-2] not in tensors:
            tensors[x.shape[-2]] = torch.arange(2**18, device="cuda")

    plain, model = both()
    model.model.norm, plain.model.norm = Meddling(model.model.norm, keep), Meddling(plain.model.norm, lambda x: None)
    stats = runner(model).stats
    for lengths in (SMALL, SMALL, LARGE, SMALL):
        close(step(model, lengths), step(plain, lengths))
    assert (stats.recordings, stats.replays) == (1, 2)
    assert stats.eager == {"it keeps a tensor from one batch for the next ones": 2}
    assert len(tensors) > 1
    assert all(torch.equal(tensor, torch.arange(2**18, device="cuda")) for tensor in tensors.values())


def test_ctrl_c_in_the_pass_before_a_recording_is_not_swallowed() -> None:
    def interrupt(x: Tensor) -> None:
        if torch.cuda.get_sync_debug_mode() > 0 and x.shape[-2] > Bucket.of(SMALL).tokens:
            raise KeyboardInterrupt

    _, model = both()
    model.model.norm = Meddling(model.model.norm, interrupt)
    step(model, SMALL)
    with pytest.raises(KeyboardInterrupt):
        step(model, LARGE)


@pytest.mark.parametrize("how", ["item", "nonzero", "synchronize"])
def test_what_waits_for_the_device_runs_eagerly(how: str) -> None:
    """``synchronize`` passes the warm-up: its capture fails, and random numbers still work."""
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
    before = reserved()
    torch.empty(2**28, device="cuda", dtype=torch.uint8)
    assert torch.cuda.memory_reserved() >= before + 2**28
    assert reserved() == before, "the allocator still believes that a capture is under way"
    close(step(other), step(fastpack.patch(build("llama", torch.float32))))
    model.model.norm = model.model.norm.norm
    assert (hidden(model) - want).abs().max() <= 1e-4 * want.abs().max()
    assert stats.replays == 1, "as soon as it no longer does"


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


def test_memory_comes_back_with_unpatch() -> None:
    model = deep()
    held_by_recording(graphed(model), LONG)  # the libraries' workspaces on a recorder's stream stay with the process
    fastpack.unpatch(model)
    before = reserved()
    held_by_recording(graphed(model), LONG)
    references = reserved() - before
    fastpack.unpatch(model)
    assert references > 2**24
    assert reserved() - before < 0.2 * references


def test_no_synchronisation_in_a_replay() -> None:
    model = graphed(build("llama", torch.bfloat16))
    sequences = make_sequences(VOCAB, SMALL)
    ids = torch.cat(sequences)[None].cuda()
    packed = read_packing(tuple(ids.shape), ids.device, position_ids=positions(sequences))

    def go() -> None:
        model.model(input_ids=ids, packed_seq_lens=packed).last_hidden_state.float().sum().backward()

    go()
    with no_synchronisation():
        go()
    assert runner(model).stats.replays == 2


def test_ddp_gets_its_gradients(tmp_path: Path) -> None:
    """DDP's accumulators live on the default stream, which a capture must not touch."""
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
