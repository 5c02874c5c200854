"""Offloaded gate and up activations: the same gradients, and no matmul is recomputed."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from offloading import (
    KINDS,
    LAYERS,
    ForgetfulLink,
    LateLink,
    LossyLink,
    backbone_of,
    channel,
    collected,
    equal,
    gradients,
    in_use,
    offload,
    offloaded,
    prepared,
    run,
    tiny,
)
from recording import FakeRecorder, Varlen, runner
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import fastpack
from fastpack.cuda_graphs.recorder import CapturedPass
from fastpack.exactness.tiny import build_tiny
from fastpack.offload import ACTIVATION_SLOT, saved
from fastpack.offload.activations import (
    CHECKPOINTING,
    KEEP,
    LayerActivations,
    _Sent,
    copied_share,
    is_offloaded,
)
from fastpack.offload.transfer import HostChannel, Rates
from fastpack.ops.linear import gated_mlp
from fastpack.utils.hooks import WrappedCheckpointing

SENT = LAYERS - KEEP
"""The number of layers whose activations are offloaded, if there is time for all."""


pytestmark = pytest.mark.usefixtures("no_collection")


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record which groups of a gated MLP were multiplied."""
    multiplied: list[str] = []
    stock = gated_mlp.group_forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        multiplied.append(kwargs["prefix"])
        return stock(*args, **kwargs)

    monkeypatch.setattr(gated_mlp, "group_forward", counted)
    return multiplied


def notes(model: Any) -> str:
    return "; ".join(fastpack.report(model).notes)


def with_products(model: Any, **settings: Any) -> Any:
    model = offloaded(model, "activations", **settings)
    offload(model).min_bytes = 512
    return model


@pytest.mark.sample(3)
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
    assert groups.count("inner ") == LAYERS, "no matmul is recomputed"
    assert offload(model).stats.products == SENT
    link, pool = channel(model).link, channel(model).pool
    assert sorted(link.did("copy_back")) == link.did("send"), "each once"
    assert (link.hazards, link.abandoned, in_use(pool)) == (0, 0, 0)
    assert f"and gate and up of {SENT} layers, of 1 forwards waited" in notes(model)
    assert "recomputed" not in notes(model)
    layers = backbone_of(model).layers
    assert not any(ACTIVATION_SLOT in layer.__dict__ for layer in layers)
    assert not any(isinstance(layer.__dict__[CHECKPOINTING], WrappedCheckpointing) for layer in layers)


@pytest.mark.sample(2)
@KINDS
@pytest.mark.parametrize("model_type", ["ernie", "gemma4_text"])
def test_where_a_scope_carries_the_packing(model_type: str, reentrant: bool) -> None:
    """A scope around a layer that runs again restores what it replaced, not the slot of one forward."""
    model = with_products(build_tiny(model_type).train(), reentrant=reentrant)
    stock = prepared(build_tiny(model_type).train(), None, reentrant=reentrant)
    for m in (model, stock):
        m.enable_input_require_grads()
    layers = [m for m in model.modules() if CHECKPOINTING in m.__dict__]
    before = [layer.__dict__[CHECKPOINTING] for layer in layers]
    for _ in range(2):
        assert equal(gradients(model), gradients(stock))
        assert [layer.__dict__[CHECKPOINTING] for layer in layers] == before
    assert not any(ACTIVATION_SLOT in layer.__dict__ for layer in layers)
    assert offload(model).stats.tensors


def test_what_has_no_gated_mlp_is_left_alone() -> None:
    model = with_products(tiny("gpt2"))
    assert equal(gradients(model), gradients(prepared(tiny("gpt2"), None)))
    assert offload(model).stats.products == 0
    assert offload(model).stats.tensors >= LAYERS + 1 - saved.KEEP
    assert f"gate and up of {LAYERS} layers: recomputed, they have no gated MLP" in notes(model)


@pytest.mark.parametrize("link", [LossyLink, ForgetfulLink])
def test_negative_control(link: type[LateLink], monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients depend on activations that were copied back; layer inputs stay on the device here."""
    monkeypatch.setattr(saved, "KEEP", 100)
    ours = gradients(with_products(tiny(), link=link))
    assert not equal(ours, gradients(prepared(tiny(), None)))
    assert equal(gradients(with_products(tiny())), gradients(prepared(tiny(), None)))


@pytest.mark.sample(1)
@KINDS
def test_two_backwards(reentrant: bool) -> None:
    """A retained graph copies them back again, and gradients don't overwrite those that stayed."""
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
    assert (in_use(channel(model).pool), channel(model).link.hazards) == (0, 0)


@pytest.mark.sample(1)
@KINDS
def test_two_forwards_before_a_backward(reentrant: bool) -> None:
    model, plain = with_products(tiny(), reentrant=reentrant), prepared(tiny(), None, reentrant=reentrant)
    for m in (model, plain):
        (run(m, (40, 24), 1) * run(m, (30,), 2)).backward()
    assert equal(collected(model), collected(plain))
    assert (in_use(channel(model).pool), channel(model).link.hazards) == (0, 0)


def test_half_a_backward_and_none() -> None:
    model = with_products(tiny())
    for upto in (3, None):
        hidden = backbone_of(model)(
            input_ids=torch.arange(3, 43)[None], packed_seq_lens=[40], output_hidden_states=True
        ).hidden_states
        if upto is not None:
            torch.autograd.grad(hidden[-1].sum(), hidden[upto])
        del hidden
        link = channel(model).link
        link.wait(len(link.queue))
        assert (in_use(channel(model).pool), link.hazards) == (0, 0)
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
    assert not any(ACTIVATION_SLOT in layer.__dict__ for layer in layers)
    assert (offload(model).stats.products, in_use(channel(model).pool)) == (4, 0)
    assert equal(gradients(model), gradients(prepared(tiny(), None)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("choice", ["checkpoints", "activations"])
def test_in_recorded_steps(choice: str, varlen: Varlen) -> None:
    """Recorded passes do the same, in host buffers that are never freed."""
    model, plain = offloaded(tiny(lora=True), choice, graphs="auto"), prepared(tiny(lora=True), None)
    runner(model).recorder = FakeRecorder()
    batches = ((9, 9, 9), (90, 60), (9, 9, 9), (90, 60))
    for lengths in batches:
        ours, want = gradients(model, lengths), gradients(plain, lengths)
        for name, gradient in want.items():
            torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6)
    stats = offload(model).stats
    assert not runner(model).stats.eager
    assert runner(model).stats.replays == len(batches)
    assert (stats.forwards, stats.recorded) == (0, (LAYERS - 1, SENT if choice == "activations" else 0, 0))
    assert f"{LAYERS - 1} layer inputs" in notes(model)
    assert "of each recorded step wait in" in notes(model)
    pool = recorded(model).pool
    assert (in_use(pool), recorded(model).link.hazards) == (0, 0)
    assert pool.count == LAYERS - 1 + (2 * SENT if choice == "activations" else 0), "shared by recordings"


def recorded(model: Any) -> HostChannel:
    (channel,) = (channel for (_, recording), channel in offload(model)._channels.items() if recording)
    assert channel is not None
    return channel


class AddressOnlyRecorder(FakeRecorder):
    """Keeps addresses but not what its passes close over, as graphs do."""

    def record(self, device: torch.device, forward: Any, backward: Any) -> CapturedPass:
        tape = super().record(device, forward, backward)
        gradients = [None if g is None else torch.zeros_like(g) for g in tape.gradients]
        return CapturedPass(tape.outputs, gradients, lambda: None, lambda: None)


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["unpatched", "patched anew", "dropped"])
def test_a_recorded_forward_holds_its_buffers(how: str, varlen: Varlen) -> None:
    """They live until its backward is over and the device is done."""
    model = offloaded(tiny(lora=True), "activations", graphs="auto")
    offload(model).min_bytes = 512
    runner(model).recorder = AddressOnlyRecorder()
    loss = run(model)
    pool, link = weakref.ref(recorded(model).pool), recorded(model).link
    buffers = [weakref.ref(buffer) for buffer in recorded(model).pool._free]
    if how == "unpatched":
        fastpack.unpatch(model)
    elif how == "patched anew":
        fastpack.patch(model)
    else:
        del model
    gc.collect()
    assert len(buffers) > SENT
    assert all(buffer() is not None for buffer in buffers)
    assert link.drained == 0
    loss.backward()
    del loss
    gc.collect()
    assert pool() is None
    assert not any(buffer() is not None for buffer in buffers)
    assert link.drained == 1, "the memory may not be reused while a replay reads it"


def test_pace() -> None:
    """At an H200's rates with 3,000 tokens of Llama 8B, half of the layers; at a tenth of its link's rate, none."""
    x, gate = torch.empty(3000, 4096, dtype=torch.bfloat16), torch.empty(3000, 14336, dtype=torch.bfloat16)
    assert 0.45 < copied_share(Rates(55e9, 790e12), [gate, gate], x) < 0.6
    assert copied_share(Rates(5.5e9, 790e12), [gate, gate], x) == 0.0
    assert copied_share(Rates(55e9, 79e12), [gate, gate], x) == 1.0


@pytest.mark.sample(1)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.75, 1.0])
def test_which_layers(share: float) -> None:
    """Offloaded layers are evenly spread, and no copy ends behind the last layer."""
    sent = [index for index in range(32) if is_offloaded(index, 32, share)]
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
        why = "there is no time to copy them" if link is SlowLink else "could not be measured then"
        assert f"gate and up of {SENT} layers: recomputed, " in notes(model)
        assert why in notes(model)


def test_small_products_are_made_again() -> None:
    model = with_products(tiny())
    offload(model).min_bytes = 2**20
    assert equal(gradients(model), gradients(prepared(tiny(), None)))
    assert offload(model).stats.products == 0
    assert f"of {LAYERS} layers: recomputed, they have less than 1,048,576 bytes" in notes(model)


def test_memory_is_freed_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the forward, one layer's activations are copied while the next layer runs; later all are on the host."""
    products: list[StorageWeakRef] = []
    alive: list[int] = []
    stock = _Sent.send

    def count() -> int:
        return sum(not storage.expired() for storage in products)

    def send(sent: _Sent, channel: HostChannel, tensors: Any) -> LayerActivations:
        products.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)
        saved_layer = stock(sent, channel, tensors)
        alive.append(count())
        return saved_layer

    monkeypatch.setattr(_Sent, "send", send)
    loss = run(with_products(tiny()))
    assert alive == [2] * SENT, "those of earlier layers are on the host"
    assert (len(products), count()) == (2 * SENT, 0)
    loss.backward()


def test_they_are_brought_before_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way: list[bool] = []
    stock = LayerActivations.fetch

    def fetch(saved_layer: LayerActivations) -> list[Tensor]:
        under_way.append(all(contents._fetched is not None for contents in saved_layer._storages))
        return stock(saved_layer)

    monkeypatch.setattr(LayerActivations, "fetch", fetch)
    gradients(with_products(tiny()))
    assert under_way == [True] * SENT


@pytest.mark.sample(1)
@KINDS
def test_a_loss_that_lives_on_holds_nothing(reentrant: bool) -> None:
    """A loop may keep its loss until after the next forward; that keeps no activations alive."""
    model = with_products(tiny(), reentrant=reentrant)
    sizes = []
    for _ in range(3):
        loss = run(model)
        loss.backward()
        assert in_use(channel(model).pool) == 0
        sizes.append(channel(model).pool.nbytes)
    assert len(set(sizes)) == 1
    del loss


@pytest.mark.sample(2)
@pytest.mark.parametrize("rates", [Rates(1.0, 1.0), None], ids=["sent", "none sent"])
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_selective_checkpointing(model_type: str, rates: Rates | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Selective checkpointing expects the second run to repeat every operation of the first, so none is left out."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    monkeypatch.setattr(LateLink, "rates", lambda self, dtype: rates)
    results = []
    for choice in ("activations", None):
        model = with_products(tiny(model_type)) if choice else prepared(tiny(model_type), None)
        contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
        results.append(gradients(model))
        if choice:
            assert f"of {LAYERS} layers: recomputed, other code watches" in notes(model)
    assert equal(*results)


def test_layers_that_never_run_again_send_nothing() -> None:
    results = []
    for model in (with_products(tiny()), prepared(tiny(), None)):
        model.requires_grad_(False)
        model.disable_input_require_grads()
        for layer in model.model.layers[4:]:
            layer.requires_grad_(True)
        results.append(gradients(model))
        if len(results) == 1:
            assert offload(model).stats.products == SENT - 4
    assert equal(*results)


def test_what_was_made_before_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations that never left the device are returned as copies."""
    model = with_products(tiny(), reentrant=True)
    layers = backbone_of(model).layers
    outputs: list[Tensor] = []
    layers[3].register_forward_hook(lambda module, args, out: outputs.append(out))

    def fail(*_: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            raise ZeroDivisionError

    layers[4].post_attention_layernorm.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        run(model)
    (out,) = (tensor for tensor in outputs if tensor.requires_grad)
    results = []
    for _ in range(2):
        model.zero_grad()
        out.sum().backward(retain_graph=True)
        results.append(collected(model))
    assert equal(*results)


def test_autocast_and_dropout() -> None:
    results = []
    for model in (with_products(tiny(lora=True)), prepared(tiny(lora=True), None)):
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.3
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(model)
        loss.backward()
        results.append(collected(model))
    assert equal(*results)
