"""Attention of checkpointed layers waits on the host for the backward, instead of running twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from offloading import (
    KINDS,
    LAYERS,
    ForgetfulLink,
    LateLink,
    LossyLink,
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

import fastpack
from fastpack.backends import triton_packed
from fastpack.backends.call import AttentionCall
from fastpack.offload import activations, saved
from fastpack.offload.activations import ActivationOffload
from fastpack.offload.transfer import BLOCK, HostChannel
from fastpack.ops.kernels import attention
from fastpack.packing.seqlens import PackedSeqLens

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, where there is no GPU")
SENT = LAYERS - activations.KEEP
LENGTHS = (12, 5)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let short sequences count as long ones, and list the tokens of each forward of the attention kernels."""
    ran: list[int] = []
    forward = attention.forward
    monkeypatch.setattr(triton_packed, "rejects", lambda shape: None)
    monkeypatch.setattr(activations, "LEAST_OPERATIONS", 0)
    monkeypatch.setattr(attention, "forward", lambda q, *args, **kw: ran.append(len(q)) or forward(q, *args, **kw))
    return ran


def model_of(link: type[LateLink] = LateLink, *, reentrant: bool = False, choice: str = "checkpoints") -> Any:
    model = offloaded(tiny(), choice, reentrant=reentrant, link=link)
    model.enable_input_require_grads()
    return model


def stock_of(*, reentrant: bool = False) -> Any:
    model = prepared(tiny(), None, reentrant=reentrant)
    model.enable_input_require_grads()
    return model


@pytest.mark.sample(1)
@KINDS
def test_attention_runs_once(reentrant: bool, forwards: list[int]) -> None:
    want = gradients(stock_of(reentrant=reentrant), LENGTHS)
    assert len(forwards) == 2 * LAYERS
    forwards.clear()
    model = model_of(reentrant=reentrant)
    assert equal(gradients(model, LENGTHS), want)
    assert len(forwards) == LAYERS
    stats, link = offload(model).stats, channel(model).link
    assert (stats.attention, stats.products) == (SENT, 0)
    assert sorted(link.did("copy_back")) == link.did("send"), "each once"
    assert (link.hazards, link.abandoned, in_use(channel(model).pool)) == (0, 0, 0)
    (note,) = (note for note in fastpack.report(model).notes if note.startswith("offload"))
    assert f"{stats.tensors} layer inputs, and attention of {SENT} layers, of 1 forwards waited" in note


@pytest.mark.slow
def test_beside_gate_and_up(forwards: list[int]) -> None:
    model = model_of(choice="activations")
    assert equal(gradients(model, LENGTHS), gradients(stock_of(), LENGTHS))
    assert offload(model).stats.attention == SENT
    assert offload(model).stats.products > 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("link", [LossyLink, ForgetfulLink])
def test_negative_control(link: type[LateLink], forwards: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients depend on what was copied back; layer inputs stay on the device here."""
    monkeypatch.setattr(saved, "KEEP", 100)
    assert not equal(gradients(model_of(link), LENGTHS), gradients(stock_of(), LENGTHS))


@pytest.mark.slow
def test_two_backwards(forwards: list[int]) -> None:
    model, stock = model_of(), stock_of()
    results = []
    for each in (stock, model):
        loss = run(each, LENGTHS)
        for retain in (True, False):
            each.zero_grad()
            loss.backward(retain_graph=retain)
            results.append(collected(each))
        del loss
    assert all(equal(results[0], result) for result in results[1:])
    assert (in_use(channel(model).pool), channel(model).link.hazards) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("why", ["short", "slow link", "small"])
def test_computed_again(why: str, forwards: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where copies would take longer than attention, it runs twice, as before."""
    if why == "short":
        monkeypatch.setattr(activations, "LEAST_OPERATIONS", 1000)
    if why == "slow link":
        monkeypatch.setattr(activations, "ATTENTION_RATE", 1e9)
    model = model_of()
    if why == "small":
        offload(model).min_bytes = 2**30
    assert equal(gradients(model, LENGTHS), gradients(stock_of(), LENGTHS))
    assert len(forwards) == 4 * LAYERS
    assert offload(model).stats.attention == 0


def test_layer_inputs_go_first() -> None:
    """Attention is computed again where its result would take the host memory of inputs of layers to come."""
    link = LateLink(torch.device("cpu"))
    channel = HostChannel(link)
    ours = ActivationOffload(lambda device: channel, LAYERS, 0, of_mlps=False)
    out, lse = torch.zeros(16, 2, 8), torch.zeros(2, 16)
    link.memory = (2 * 2 + LAYERS) * BLOCK
    kept = []
    for index in range(LAYERS):
        kept.append(ours.save_attention(index, [out, lse], 2**40))
        channel.pool.take(out.nbytes)  # the layer's input
    assert [x is not None for x in kept] == [True, True, *[False] * (LAYERS - 2 - activations.KEEP), True, True]
    assert ours.sent == (0, 2)
    assert ours.made_again == {("attention", activations.NO_HOST_MEMORY): LAYERS - 2 - activations.KEEP}


def test_operations() -> None:
    """They count the keys that each query sees, in a window and in a tree."""
    packed = PackedSeqLens.from_lengths([5, 3])
    q, k, v = torch.zeros(8, 4, 16), torch.zeros(8, 2, 16), torch.zeros(8, 2, 8)
    for window, pairs in ((None, 15 + 6), (2, 9 + 5), (1, 8), (9, 21)):
        call = AttentionCall(q, k, v, packed, 1.0, window=window)
        assert call.operations == 2 * pairs * 4 * (16 + 8)
    tree = packed.share(packed.prefixes_in(torch.tensor([[7, 8, 9, 1, 2, 7, 8, 3]])))
    assert tree.shared is not None
    tokens = tree.shared.total_tokens
    assert AttentionCall(q[:tokens], k[:tokens], v[:tokens], tree, 1.0).operations == 2 * (15 + 3) * 4 * (16 + 8)
