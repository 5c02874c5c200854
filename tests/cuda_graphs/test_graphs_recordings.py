"""Which recordings are made, which one serves a batch, and which are dropped for others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from recording import LARGE, SMALL, FakeRecorder, check, graphed, runner, step
from tiny import tiny_model
from torch.nn.modules.module import register_module_forward_hook

import fastpack
from fastpack.cuda_graphs.recorder import CaptureRefusedError, GraphPoolError
from fastpack.cuda_graphs.recordings import RECORDINGS_FULL, GraphSettings
from fastpack.packing.buckets import Bucket

pytestmark = pytest.mark.usefixtures("varlen")


def recording_tokens(model: Any) -> list[int]:
    """Return the tokens of the existing recordings."""
    return [bucket.tokens for bucket, _ in runner(model)._recordings.steps]


def recorded_when(model: Any, *batches: tuple[int, ...]) -> list[int]:
    """Return how many recordings exist after each batch."""
    plain = fastpack.patch(tiny_model("llama"))
    recordings = []
    for lengths in batches:
        check(step(model, lengths), step(plain, lengths))
        model.zero_grad()
        plain.zero_grad()
        recordings.append(runner(model).stats.recordings)
    assert (runner(model).stats.replays, dict(runner(model).stats.eager)) == (len(batches), {})
    return recordings


def test_a_larger_recording_serves_until_it_has_wasted_enough() -> None:
    larger, own, small = (300, 60), (290, 20), (40, 20)
    tokens = [Bucket.of(lengths).tokens for lengths in (larger, own, small)]
    assert tokens == [384, 320, 64]
    model = graphed(tiny_model("llama"), record_after=3 * 64 / 320, max_oversize=1.2)
    counts = recorded_when(model, larger, own, own, own, own, small)
    assert counts == [1, 1, 1, 2, 2, 3], "own sizes when 3 x 64 tokens were wasted, small ones at once"


def test_smaller_batches_count_for_the_sizes_that_would_have_held_them() -> None:
    larger, own, less = (380, 60), (370, 10), (310, 8)
    tokens = [Bucket.of(lengths).tokens for lengths in (larger, own, less)]
    assert tokens == [448, 384, 320]
    settings: dict[str, Any] = {"record_after": 3 * 64 / 384, "max_oversize": 1.5}
    assert recorded_when(graphed(tiny_model("llama"), **settings), larger, own, less, own) == [1, 1, 1, 2]
    model = graphed(tiny_model("llama"), **settings)
    assert recorded_when(model, larger, own, larger, own) == [1, 1, 1, 1], "two do not make it, nor what fits as it is"
    counts = recorded_when(graphed(tiny_model("llama"), **settings), larger, own, less, own, less, less, less)
    assert counts == [1, 1, 1, 2, 2, 2, 3], "what was wasted before a recording counts no more"


def test_the_first_recording_is_one_that_others_can_use() -> None:
    """It is at most a quarter of an octave above its batch; own sizes follow when they are worth it."""
    lengths, larger, small = (400, 120), (400, 200), (300, 90)
    model = graphed(tiny_model("llama"), record_after=1.0, first_steps=4, max_oversize=1.25)
    assert [Bucket.of(x).tokens for x in (lengths, larger, small)] == [576, 640, 448]
    counts = recorded_when(model, lengths, larger, small, *[lengths] * 9)
    assert counts == [1, 1, 2] + 8 * [2] + [3], "64 tokens more in each of nine batches are 576"
    assert [of.tokens for of, _ in runner(model)._recordings.steps] == [640, 448, 576]


def test_every_first_recording_serves_its_own_sizes() -> None:
    settings = GraphSettings()
    for tokens in range(1, 20_000, 37):
        own, first = Bucket.of([tokens]), Bucket.of([tokens], steps=settings.first_steps)
        assert own.tokens <= first.tokens <= settings.max_oversize * own.tokens, tokens
        assert first.holds([tokens])


def test_room_for_recordings() -> None:
    """At the maximum, sizes have to occur twice as often as the least-used recording to replace it."""
    model = graphed(tiny_model("llama"), max_recordings=1)
    step(model, SMALL)
    step(model, SMALL)
    for _ in range(3):
        step(model, LARGE)
    stats = runner(model).stats
    assert (stats.recordings, stats.replays, dict(stats.eager)) == (1, 2, {RECORDINGS_FULL: 3})
    step(model, LARGE)
    assert (stats.recordings, stats.replays) == (2, 3)
    assert [key[0] for key in runner(model)._recordings.steps] == [Bucket.of(LARGE)]


def test_first_recordings_stay_for_what_they_serve() -> None:
    """They are counted by the batches they serve, not by the sizes for which they were made, which may never recur."""
    often, also, seldom, new = (520,), (600,), (300,), (1100,)
    model = graphed(tiny_model("llama"), record_after=1e9, first_steps=4, max_recordings=2)
    batches: Sequence[tuple[int, ...]] = [often, also, also, also, seldom]
    for lengths in batches:
        step(model, lengths)
    assert recording_tokens(model) == [640, 320]
    step(model, new)
    assert runner(model).stats.eager == {RECORDINGS_FULL: 1}, "as rare as the rarest"
    step(model, new)
    assert recording_tokens(model) == [640, 1280], "twice as often"
    step(model, seldom)
    assert recording_tokens(model) == [640, 1280]
    assert runner(model).stats.eager == {RECORDINGS_FULL: 2}


def test_what_is_refused_for_one_size_leaves_nothing_behind() -> None:
    """The other recordings will not be looked up again: their memory is freed."""
    model = graphed(tiny_model("llama"))
    graphs = runner(model)
    step(model, SMALL)
    recorder = graphs.recorder
    assert isinstance(recorder, FakeRecorder)
    assert recorder.statics
    recorder.problem = CaptureRefusedError("it waits")
    plain = fastpack.patch(tiny_model("llama"))
    for lengths in (LARGE, SMALL):
        check(step(model, lengths), step(plain, lengths))
    assert graphs.stats.eager == {"it waits": 2}
    assert not recorder.statics
    assert not graphs._recordings.steps


@pytest.mark.parametrize(("error", "left"), [(CaptureRefusedError, 1), (GraphPoolError, 0)])
def test_recordings_of_another_state(error: type[CaptureRefusedError], left: int) -> None:
    """They stay if a recording is refused, unless it broke the pool."""
    plain, model = fastpack.patch(tiny_model("llama")), graphed(tiny_model("llama"))
    graphs = runner(model)
    recorder = graphs.recorder
    assert isinstance(recorder, FakeRecorder)
    step(model, SMALL)
    for m in (plain, model):
        m.model.norm.weight.requires_grad_(False)
    recorder.problem = error("so")
    check(step(model, SMALL), step(plain, SMALL))
    assert len(graphs._recordings.steps) == left
    for m in (plain, model):
        m.model.norm.weight.requires_grad_(True)
    recorder.problem = None
    check(step(model, SMALL), step(plain, SMALL))
    assert (graphs.stats.recordings, graphs.stats.replays) == (2 - left, 2)
    assert graphs.stats.eager == {"so": 1}


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("model.layers.1.input_layernorm", "eps"),
        ("model.layers.0.self_attn", "scaling"),
        ("model.layers.0.self_attn", "sliding_window"),
        ("model.layers.0.self_attn", "attn_logit_softcapping"),
    ],
)
def test_numbers_that_modules_hold(module: str, name: str) -> None:
    """A recording contains the numbers with which it was made."""
    plain, model = fastpack.patch(tiny_model("gemma2")), graphed(tiny_model("gemma2"))
    before = getattr(model.get_submodule(module), name)
    for value, recordings in ((before, 1), (3 if type(before) is int else 0.5, 2), (before, 2)):
        for m in (plain, model):
            setattr(m.get_submodule(module), name, value)
        check(step(model, SMALL), step(plain, SMALL))
        assert runner(model).stats.recordings == recordings
    assert runner(model).stats.replays == 3


def test_numbers_that_nothing_computes_with() -> None:
    model = graphed(tiny_model("llama"))
    norm = model.model.layers[0].input_layernorm
    norm.last_seen = 0.0
    for value in (0.5, 1.5):
        step(model, SMALL)
        norm.last_seen = value
    assert runner(model).stats.recordings == 1


@pytest.mark.parametrize("first", [True, False])
def test_a_hook_for_every_module(first: bool) -> None:
    """While there is one, nothing is replayed, whether it came before a recording or after."""

    def halve(module: Any, args: Any, out: Any) -> Any:
        return out / 2 if type(module).__name__ == "LlamaMLP" else None

    plain, model = fastpack.patch(tiny_model("llama")), graphed(tiny_model("llama"))
    for index in range(3):
        handle = register_module_forward_hook(halve) if index == (0 if first else 1) else None
        check(step(model, SMALL), step(plain, SMALL))
        if handle is not None:
            handle.remove()
    stats = runner(model).stats
    assert (stats.recordings, stats.replays, sum(stats.eager.values())) == (1, 2, 1)
