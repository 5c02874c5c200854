"""Products that wait on the host instead of being made again: the same gradients, and not a product more."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from offloading import (
    KINDS,
    LAYERS,
    LENGTHS,
    ForgetfulLink,
    LateLink,
    LossyLink,
    backbone_of,
    collected,
    equal,
    gradients,
    lane,
    offload,
    offloaded,
    prepared,
    run,
    tiny,
)
from recording import FakeRecorder, Varlen, runner
from torch import Tensor

import fastpack
from fastpack.attention_dispatch import BACKENDS
from fastpack.offload import saved
from fastpack.offload.products import CHECKPOINTING, KEEP, KEPT, is_sent, pace
from fastpack.offload.transfer import HostPool, Rates
from fastpack.ops import gated_mlp

SENT = LAYERS - KEEP
"""Layers whose products leave where there is time for all."""


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """Whatever is given back is given back by counting references alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which groups of a gated MLP were multiplied."""
    made: list[str] = []
    stock = gated_mlp.group_forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(kwargs["prefix"])
        return stock(*args, **kwargs)

    monkeypatch.setattr(gated_mlp, "group_forward", counted)
    return made


def with_products(model: Any, **settings: Any) -> Any:
    model = offloaded(model, "activations", **settings)
    offload(model).min_bytes = 512
    return model


@KINDS
@pytest.mark.parametrize("model_type", ["llama", "phi3", "gemma2", "qwen3"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_same_gradients_without_products(model_type: str, lora: bool, reentrant: bool, groups: list[str]) -> None:
    model = with_products(tiny(model_type, lora=lora), reentrant=reentrant)
    want = gradients(prepared(tiny(model_type, lora=lora), None, reentrant=reentrant))
    again = groups.count("inner ")
    assert again == 2 * LAYERS
    groups.clear()
    assert equal(gradients(model), want)
    assert groups.count("inner ") == LAYERS, "none a second time"
    assert offload(model).stats.products == SENT
    link, pool = lane(model).link, lane(model).pool
    assert sorted(link.did("bring")) == link.did("send"), "each once"
    assert (link.hazards, link.abandoned, pool.in_use) == (0, 0, 0)
    assert f"and gate and up of {SENT} layers, of 1 forwards waited" in str(fastpack.report(model))
    layers = backbone_of(model).layers
    assert not any(KEPT in layer.__dict__ for layer in layers)
    assert not any("Journey" in str(layer.__dict__[CHECKPOINTING]) for layer in layers)


def test_what_has_no_gated_mlp_is_left_alone() -> None:
    model = with_products(tiny("gpt2"))
    assert equal(gradients(model), gradients(prepared(tiny("gpt2"), None)))
    assert offload(model).stats.products == 0
    assert offload(model).stats.tensors >= LAYERS + 1 - saved.KEEP


@pytest.mark.parametrize("link", [LossyLink, ForgetfulLink])
def test_negative_control(link: type[LateLink], monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients do come from products that were brought back: layer inputs stay here."""
    monkeypatch.setattr(saved, "KEEP", 100)
    ours = gradients(with_products(tiny(), link=link))
    assert not equal(ours, gradients(prepared(tiny(), None)))
    assert equal(gradients(with_products(tiny())), gradients(prepared(tiny(), None)))


@KINDS
def test_two_backwards(reentrant: bool) -> None:
    """A retained graph brings them again, and gradients don't take the place of those that stayed."""
    model, plain = with_products(tiny(), reentrant=reentrant), prepared(tiny(), None, reentrant=reentrant)
    results = []
    for m in (plain, model):
        loss = run(m)
        for retain in (True, True, False):
            m.zero_grad()
            loss.backward(retain_graph=retain)
            results.append(collected(m))
        del loss
    assert all(equal(results[0], result) for result in results[1:])
    assert (lane(model).pool.in_use, lane(model).link.hazards) == (0, 0)


@KINDS
def test_two_forwards_before_a_backward(reentrant: bool) -> None:
    model, plain = with_products(tiny(), reentrant=reentrant), prepared(tiny(), None, reentrant=reentrant)
    for m in (model, plain):
        (run(m, (40, 24), 1) * run(m, (30,), 2)).backward()
    assert equal(collected(model), collected(plain))
    assert (lane(model).pool.in_use, lane(model).link.hazards) == (0, 0)


def test_half_a_backward_and_none() -> None:
    model = with_products(tiny())
    for upto in (3, None):
        hidden = backbone_of(model)(
            input_ids=torch.arange(3, 43)[None], packed_seq_lens=[40], output_hidden_states=True
        ).hidden_states
        if upto is not None:
            torch.autograd.grad(hidden[-1].sum(), hidden[upto])
        del hidden
        link = lane(model).link
        link.wait(len(link.queue))
        assert (lane(model).pool.in_use, link.hazards) == (0, 0)
    assert equal(gradients(model), gradients(prepared(tiny(), None)))


def test_an_exception_puts_everything_back() -> None:
    model = with_products(tiny())
    layers = backbone_of(model).layers
    before = [layer.__dict__[CHECKPOINTING] for layer in layers]

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    handle = layers[4].post_attention_layernorm.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        run(model)
    handle.remove()
    gc.collect()  # the traceback's frames hold on to tensors
    assert [layer.__dict__[CHECKPOINTING] for layer in layers] == before
    assert not any(KEPT in layer.__dict__ for layer in layers)
    assert (offload(model).stats.products, lane(model).pool.in_use) == (4, 0)
    assert equal(gradients(model), gradients(prepared(tiny(), None)))


@pytest.mark.parametrize("choice", ["checkpoints", "activations"])
def test_in_recorded_steps(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that are recorded do the same, in host buffers that are never let go."""
    monkeypatch.setitem(BACKENDS, "torch_varlen", Varlen())
    model, plain = offloaded(tiny(lora=True), choice, graphs="auto"), prepared(tiny(lora=True), None)
    offload(model).min_bytes = 512
    runner(model).recorder = FakeRecorder()
    for lengths in ((40, 24), (9, 9, 9), (40, 24)):
        ours, want = gradients(model, lengths), gradients(plain, lengths)
        for name, gradient in want.items():
            torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6)
    stats = offload(model).stats
    assert not runner(model).stats.eager
    assert runner(model).stats.replays == 3
    assert stats.products == (SENT * stats.forwards if choice == "activations" else 0)
    assert stats.tensors >= (LAYERS + 1 - saved.KEEP) * stats.forwards
    (recorded,) = (found for (_, recording), found in offload(model)._lanes.items() if recording)
    assert recorded is not None
    assert (recorded.pool.in_use, recorded.link.hazards) == (0, 0)
    assert recorded.pool.count > 0


def test_buffers_of_recordings_stay() -> None:
    for keep in (False, True):
        pool = HostPool(LateLink(torch.device("cpu")), keep=keep)
        small = pool.take(100)
        pool.give(small)
        large = pool.take(1000)
        pool.give(large)
        assert (pool.count, pool.nbytes) == ((2, 128 + 1024) if keep else (1, 1024))
        assert (pool.take(100) is small) == keep


def test_pace() -> None:
    """An H200's rates at 3,000 tokens of Llama 8B: about half of the layers; a tenth of its link, none."""
    x, gate = torch.empty(3000, 4096, dtype=torch.bfloat16), torch.empty(3000, 14336, dtype=torch.bfloat16)
    assert 0.45 < pace(Rates(55e9, 790e12), [gate, gate], x) < 0.6
    assert pace(Rates(5.5e9, 790e12), [gate, gate], x) == 0.0
    assert pace(Rates(55e9, 79e12), [gate, gate], x) == 1.0


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.75, 1.0])
def test_which_layers(share: float) -> None:
    """Evenly spread, and none so late that its copy would be behind the last layer."""
    sent = [index for index in range(32) if is_sent(index, 32, share)]
    assert abs(len(sent) - 31 * share) <= 2
    if sent:
        assert max(sent) + 1 / share <= 31
        gaps = {b - a for a, b in itertools.pairwise(sent)}
        assert max(gaps) - min(gaps) <= 1


def test_slow_links_send_nothing() -> None:
    class SlowLink(LateLink):
        def rates(self, dtype: torch.dtype) -> Rates:
            return Rates(bytes=1.0, operations=1e12)

    class UnknownLink(LateLink):
        def rates(self, dtype: torch.dtype) -> None:  # type: ignore[override]
            return None

    want = gradients(prepared(tiny(), None))
    for link in (SlowLink, UnknownLink):
        model = with_products(tiny(), link=link)
        assert equal(gradients(model), want)
        assert offload(model).stats.products == 0
        assert offload(model).stats.tensors > 0


def test_small_products_stay_unkept() -> None:
    model = with_products(tiny())
    offload(model).min_bytes = 2**20
    want: dict[str, Tensor] = gradients(prepared(tiny(), None))
    assert equal(gradients(model), want)
    assert offload(model).stats.products == 0
    assert sum(LENGTHS) > 1
