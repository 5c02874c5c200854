"""Recordings when memory is short, what holds them alive, and the contents of their bucket padding."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from oracle import FLOAT32_BOUND, compare
from recording import LARGE, SMALL, FakeRecorder, check, graphed, hidden, runner, step, without_epsilon
from tiny import tiny_model
from torch import Tensor

import fastpack
from fastpack.cuda_graphs import recorder as recorder_module
from fastpack.cuda_graphs import recordings as recordings_module
from fastpack.cuda_graphs import step as step_module
from fastpack.cuda_graphs.recorder import CapturedPass, GraphPoolError, NoMemoryError
from fastpack.cuda_graphs.recordings import MAX_DROPS, NO_MEMORY, TOO_LARGE
from fastpack.packing.buckets import Bucket

pytestmark = pytest.mark.usefixtures("varlen")

OF_SMALL, OF_LARGE = (Bucket.of(lengths).tokens for lengths in (SMALL, LARGE))


class Tight(FakeRecorder):
    """A recorder with memory for recordings of ``tokens`` tokens together."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.held, self.refused = tokens, 0, 0
        self.watched: weakref.ref[Any] | None = None
        self.alive: list[bool] = []

    def clear(self) -> None:
        super().clear()
        self.held = 0

    def record(self, device: torch.device, forward: Any, backward: Any) -> CapturedPass:
        if self.watched is not None:
            gc.collect()
            self.alive.append(self.watched() is not None)
        tape = super().record(device, forward, backward)
        tokens = tape.outputs[0].shape[1]
        if self.held + tokens > self.tokens:
            self.refused += 1
            raise NoMemoryError("no")
        self.held += tokens
        return tape


def pair(tokens: int, **settings: Any) -> tuple[Any, Any, Tight]:
    """Return an eager model, a graphed one, and the graphed one's recorder with memory for ``tokens`` tokens."""
    plain, model = fastpack.patch(tiny_model("llama")), graphed(tiny_model("llama"), **settings)
    recorder = Tight(tokens)
    runner(model).recorder = recorder
    return plain, model, recorder


def test_a_batch_that_does_not_fit_runs_eagerly_with_all_memory() -> None:
    plain, model, recorder = pair(OF_SMALL)
    stats = runner(model).stats
    steps = [(SMALL, 1, 1), (LARGE, 1, 1), (LARGE, 1, 1), (SMALL, 2, 2), (SMALL, 2, 3), (LARGE, 2, 3), (SMALL, 3, 4)]
    for lengths, recordings, replays in steps:
        check(step(model, lengths), step(plain, lengths))
        assert (stats.recordings, stats.replays) == (recordings, replays)
        assert recorder.held == (OF_SMALL if lengths is SMALL else 0)
    assert stats.eager == {TOO_LARGE: 3}
    assert recorder.refused == 2, "beside the other, and alone; not once more"
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.clone()
    step(model, LARGE)
    assert recorder.refused == 3, "with other weights it is tried again"


def test_what_fits_alone_is_recorded_alone() -> None:
    plain, model, recorder = pair(OF_LARGE)
    stats = runner(model).stats
    for lengths in (SMALL, LARGE, LARGE):
        check(step(model, lengths), step(plain, lengths))
    assert (stats.recordings, stats.replays, recorder.refused) == (2, 3, 1)
    assert not stats.eager
    assert [key[0] for key in runner(model)._recordings.steps] == [Bucket.of(LARGE)]


def test_nothing_of_the_others_is_left_when_it_is_recorded_alone() -> None:
    _, model, recorder = pair(OF_LARGE)
    step(model, SMALL)
    recordings = runner(model)._recordings
    recorder.watched = weakref.ref(*recordings.steps.values())
    buffers = recordings._buffers
    step(model, LARGE)
    assert recorder.alive == [True, False], "beside it, and alone"
    assert recordings._buffers is not buffers


def test_a_first_recording_is_no_larger_than_fits_beside_the_others() -> None:
    lengths = (400, 120)
    own, wider = Bucket.of(lengths), Bucket.of(lengths, steps=4)
    assert (own.tokens, wider.tokens) == (576, 640)
    plain, model, recorder = pair(OF_SMALL + own.tokens, first_steps=4)
    for each in (SMALL, lengths):
        check(step(model, each), step(plain, each))
    assert (runner(model).stats.recordings, recorder.refused) == (2, 1)


def test_a_wider_recording_that_did_not_fit_is_not_tried_again() -> None:
    lengths, many = (400, 120), (20,) * 26
    own = Bucket.of(lengths)
    assert Bucket.of(many).tokens == own.tokens
    assert not own.holds(many)
    _, model, recorder = pair(own.tokens, first_steps=4)
    step(model, lengths)
    assert (runner(model).stats.recordings, recorder.refused) == (1, 1), "wider, and own"
    step(model, many)
    assert (runner(model).stats.recordings, recorder.refused) == (2, 2), "own beside the other, and alone"


def test_a_failure_beside_a_larger_recording_does_not_count_for_other_sizes() -> None:
    many = (8,) * 18
    assert sum(many) <= OF_LARGE
    assert not Bucket.of(LARGE).holds(many)
    plain, model, recorder = pair(OF_LARGE, max_oversize=3.0)
    for lengths in (LARGE, SMALL, many, many):
        check(step(model, lengths), step(plain, lengths))
    stats = runner(model).stats
    assert (stats.recordings, stats.replays, recorder.refused) == (2, 4, 2)
    assert not stats.eager


def test_occasional_drops_do_not_end_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings_module, "DROP_WINDOW", 2)
    plain, model, _ = pair(OF_SMALL)
    for _round in range(MAX_DROPS + 2):
        for lengths in (SMALL, SMALL, LARGE):
            check(step(model, lengths), step(plain, lengths))
    assert runner(model).stats.eager == {TOO_LARGE: MAX_DROPS + 2}


def test_recording_is_given_up_where_memory_never_suffices() -> None:
    plain, model, recorder = pair(OF_SMALL)
    stats = runner(model).stats
    for _ in range(MAX_DROPS + 2):
        for lengths in (SMALL, LARGE):
            check(step(model, lengths), step(plain, lengths))
    assert stats.recordings == stats.replays == MAX_DROPS
    assert stats.eager == {TOO_LARGE: MAX_DROPS - 1, NO_MEMORY: 5}
    assert recorder.held == 0
    assert NO_MEMORY in runner(model).describe(torch.device("cpu"))


def test_a_larger_recording_goes_on_serving() -> None:
    plain, model, recorder = pair(OF_LARGE, max_oversize=3.0)
    stats = runner(model).stats
    step(model, LARGE)
    for _ in range(3):
        check(step(model, SMALL), step(plain, SMALL))
    assert (stats.recordings, stats.replays, recorder.refused) == (1, 4, 1)
    assert not stats.eager


def test_memory_may_be_short_for_the_pass_before_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model, _ = pair(OF_LARGE)

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(step_module, "find_gradients", full)
    check(step(model), step(plain))
    assert runner(model).stats.eager == {TOO_LARGE: 1}


def watched(model: Any) -> tuple[Tensor, weakref.ref[Any]]:
    """Return a forward's output, and a weak reference to the recording that computed it."""
    out = hidden(model)
    return out, weakref.ref(*runner(model)._recordings.steps.values())


def test_a_held_loss_does_not_hold_the_recording() -> None:
    """As in a loop that rebinds the loss in the next step."""
    _, model, _ = pair(OF_SMALL)
    out, there = watched(model)
    out.sum().backward()
    step(model, LARGE)
    gc.collect()
    assert there() is None
    assert out.grad_fn is not None


def test_a_forward_that_waits_holds_it() -> None:
    """Negative control."""
    _, model, _ = pair(OF_SMALL)
    out, there = watched(model)
    runner(model)._drop()
    gc.collect()
    assert there() is not None
    out.sum().backward()
    gc.collect()
    assert there() is None


def test_bucket_padding_is_zeros() -> None:
    """Whatever the batch before left in bucket padding: matmuls of zeros take the least power."""
    model = graphed(tiny_model("llama"))
    hidden(model, lengths=LARGE)
    hidden(model)
    large, small = runner(model)._recordings.steps.values()
    real = sum(SMALL)
    assert small._embeddings.data_ptr() == large._embeddings.data_ptr()
    assert small.bucket.tokens > real
    assert bool(small._embeddings[:, :real].any(-1).all())
    assert not small._embeddings[:, real:].any()


def test_no_zeros_where_a_norm_divides_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [without_epsilon(tiny_model("llama")) for _ in range(3)]
    plain = fastpack.patch(models[0])
    model = graphed(models[1])
    for lengths in (SMALL, LARGE, SMALL):
        check(step(model, lengths), step(plain, lengths))
    assert not any(recorded._pads_with_zeros for recorded in runner(model)._recordings.steps.values())
    assert runner(model).stats.replays == 3
    find_gradients = step_module.find_gradients
    monkeypatch.setattr(step_module, "find_gradients", lambda *a, **k: (*find_gradients(*a, **k)[:2], True))
    wrong = compare(step(graphed(models[2])), step(plain)).worst
    assert not wrong <= FLOAT32_BOUND, "negative control"


@pytest.mark.parametrize(
    ("raised", "left", "error"),
    [
        (None, 0, None),
        (None, 512, GraphPoolError),
        (RuntimeError, 0, RuntimeError),
        (RuntimeError, 512, GraphPoolError),
        (KeyboardInterrupt, 512, KeyboardInterrupt),
        (SystemExit, 512, SystemExit),
        (ValueError, 512, ValueError),
    ],
)
def test_errors_of_a_pass_that_allocates_from_the_pool(
    raised: type[BaseException] | None,
    left: int,
    error: type[BaseException] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tensors left in the pool end recording; errors that are not about memory pass through. (The pool is a fake.)"""
    held = iter([0, left])
    ended: list[object] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool", lambda *_: None, raising=False)
    monkeypatch.setattr(recorder_module, "_end_allocation", lambda *pool: ended.append(pool))
    monkeypatch.setattr(recorder_module, "_empty_cache", lambda: None)
    monkeypatch.setattr(recorder_module, "_active_bytes", lambda _: next(held))

    def run() -> None:
        with recorder_module._allocating_from("pool"):
            if raised is not None:
                raise raised

    if error is None:
        run()
    else:
        with pytest.raises(error):
            run()
    assert ended == [("pool", 0)]
