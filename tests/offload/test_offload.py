"""Offloaded layer inputs: the same gradients, nothing lives longer than in autograd, and copies are in time."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
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
from oracle import make_sequences
from tiny import VOCAB
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastpack
from fastpack.model.model_runtime import runtime_of
from fastpack.offload import transfer
from fastpack.offload.saved import KEEP
from fastpack.offload.transfer import BLOCK

pytestmark = pytest.mark.usefixtures("no_collection")


@pytest.mark.sample(2)
@KINDS
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_gradients_are_equal(lora: bool, reentrant: bool) -> None:
    model = offloaded(tiny(lora=lora), reentrant=reentrant)
    want = gradients(prepared(tiny(lora=lora), None, reentrant=reentrant))
    assert equal(gradients(model), want)
    # the final norm's input is one more; with LoRA the first layer's is a leaf, which the graph holds on to
    left = LAYERS + 1 - KEEP - lora
    link, pool = channel(model).link, channel(model).pool
    assert offload(model).stats.tensors == left
    assert link.did("send") == [*range(left)]
    assert link.did("copy_back") == [*reversed(range(left))], "each once"
    assert (link.hazards, link.abandoned) == (0, 0)
    assert (pool.count, in_use(pool)) == (left, 0)
    assert offload(model).host_bytes == pool.nbytes == left * BLOCK
    assert f"offload: {left} layer inputs of 1 forwards" in str(fastpack.report(model))


@pytest.mark.sample(2)
@KINDS
@pytest.mark.parametrize("model_type", ["gemma2", "gpt2", "helium", "starcoder2"])
def test_families(model_type: str, reentrant: bool) -> None:
    """Some families save more around their layers: scaled embeddings, norms of several operations."""
    model = offloaded(tiny(model_type), reentrant=reentrant)
    assert equal(gradients(model), gradients(prepared(tiny(model_type), None, reentrant=reentrant)))
    assert offload(model).stats.tensors >= LAYERS + 1 - KEEP
    link = channel(model).link
    assert sorted(link.did("copy_back")) == link.did("send"), "each once"
    assert (link.hazards, link.abandoned, in_use(channel(model).pool)) == (0, 0, 0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("link", [LossyLink, ForgetfulLink])
def test_negative_control(link: type[LateLink]) -> None:
    """The gradients depend on what was copied back, and the fake link detects a missing wait."""
    ours = gradients(offloaded(tiny(), link=link))
    assert not equal(ours, gradients(prepared(tiny(), None)))


@pytest.mark.sample(1)
@KINDS
def test_blocks_are_reused(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of other lengths reuse blocks, with gradient accumulation and with a batch that needs more of them."""
    monkeypatch.setattr(transfer, "BLOCK", 1024)
    model, plain = offloaded(tiny(), reentrant=reentrant), prepared(tiny(), None, reentrant=reentrant)
    left = LAYERS + 1 - KEEP
    for lengths, blocks in (((40, 24), 8), ((33,), 8), ((31, 32), 8), ((65,), 9), ((9,), 9), ((40, 24), 9)):
        for seed in range(2):
            assert equal(gradients(model, lengths, seed), gradients(plain, lengths, seed))
        pool = channel(model).pool
        assert (pool.count, in_use(pool)) == (left * blocks, 0)
    assert channel(model).link.hazards == 0


@pytest.mark.sample(1)
@KINDS
def test_what_the_host_has_no_memory_for_stays(reentrant: bool) -> None:
    """The same gradients, in this step and in the next one, where free buffers count as room."""
    model = offloaded(tiny(), reentrant=reentrant)
    want = gradients(prepared(tiny(), None, reentrant=reentrant))
    link = LateLink(torch.device("cpu"))
    link.memory = 2 * BLOCK
    offload(model).connect = lambda device: link
    for step in (1, 2):
        assert equal(gradients(model), want)
        stats = offload(model).stats
        assert (stats.tensors, stats.left) == (2 * step, LAYERS + 1 - KEEP - 2)
        assert sorted(link.did("copy_back")) == link.did("send")
    assert channel(model).pool.nbytes == link.memory
    note = f"{stats.left} layer inputs stay on the device: the host has no memory left"
    assert note in fastpack.report(model).notes[-1]


@pytest.mark.sample(1)
@KINDS
def test_two_backwards(reentrant: bool) -> None:
    model, plain = offloaded(tiny(), reentrant=reentrant), prepared(tiny(), None, reentrant=reentrant)
    results = []
    for m in (plain, model):
        loss = run(m)
        loss.backward(retain_graph=True)
        results.append(collected(m))
        if m is model:
            assert in_use(channel(m).pool) == LAYERS + 1 - KEEP, "the graph still lives"
        m.zero_grad()
        loss.backward()
        results.append(collected(m))
    assert all(equal(results[0], result) for result in results[1:])
    assert (in_use(channel(model).pool), channel(model).link.hazards) == (0, 0)


@pytest.mark.sample(1)
@KINDS
def test_two_forwards_before_a_backward(reentrant: bool) -> None:
    model, plain = offloaded(tiny(), reentrant=reentrant), prepared(tiny(), None, reentrant=reentrant)
    for m in (model, plain):
        (run(m, (40, 24), 1) * run(m, (30,), 2)).backward()
    assert equal(collected(model), collected(plain))
    pool = channel(model).pool
    assert (pool.count, in_use(pool)) == (2 * (LAYERS + 1 - KEEP), 0)


@pytest.mark.sample(2)
@KINDS
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_nothing_behind(where: str, reentrant: bool) -> None:
    model = offloaded(tiny(), reentrant=reentrant)
    norm = backbone_of(model).layers[LAYERS - 2 if where == "forward" else 1].post_attention_layernorm
    armed = where == "forward"

    def fail(module: nn.Module, args: Any) -> None:
        if armed:
            raise ZeroDivisionError

    handle = norm.register_forward_pre_hook(fail)
    if where == "forward":
        with pytest.raises(ZeroDivisionError):
            run(model)
    else:
        loss = run(model)
        armed = True
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        del loss
    handle.remove()
    gc.collect()  # the traceback's frames hold on to tensors
    link, pool = channel(model).link, channel(model).pool
    assert pool.count > 0
    assert in_use(pool) == 0
    link.wait(len(link.queue))
    assert link.hazards == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert equal(gradients(model), gradients(prepared(tiny(), None, reentrant=reentrant)))


def test_copies_start_empty() -> None:
    model = offloaded(tiny())
    want = gradients(model)
    model.zero_grad(set_to_none=True)
    model.disable_input_require_grads()  # transformers' hook, which can't be pickled
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert offload(twin) is not offload(model)
        assert (offload(twin).host_bytes, offload(twin).stats.forwards) == (0, 0)
        assert equal(gradients(twin), want)
        assert channel(twin) is not channel(model)
        assert channel(twin).pool.count == channel(model).pool.count


def test_unpatching_drops_the_buffers() -> None:
    model = offloaded(tiny())
    gradients(model)
    buffers = [weakref.ref(buffer) for buffer in channel(model).pool._free]
    loss = run(model, (20,))
    fastpack.unpatch(model)
    assert getattr(runtime_of(backbone_of(model)), "offload", None) is None
    assert sum(buffer() is not None for buffer in buffers) == len(buffers), "the graph lives"
    del loss
    assert not any(buffer() is not None for buffer in buffers)


def idle(model: Any) -> str:
    (why,) = offload(model).stats.idle
    assert not offload(model).stats.forwards
    assert f"1 forwards without: {why}" in fastpack.report(model).notes[-1]
    return why


def test_why_not() -> None:
    model = offloaded(tiny())
    model.gradient_checkpointing_disable()
    assert fastpack.report(model).notes[-1] == "offload: nothing to do, gradient checkpointing is off"
    run(model).backward()
    assert idle(model) == "gradient checkpointing is off"

    model = offloaded(tiny())
    backbone_of(model).layers[2].gradient_checkpointing = False
    run(model).backward()
    assert idle(model).startswith(f"{LAYERS - 1} of {LAYERS} layers are checkpointed")

    model = prepared(tiny(), "checkpoints")  # with no stand-in
    why = "copies that overlap with the computation need a CUDA device, not cpu"
    assert fastpack.report(model).notes[-1] == f"offload: nothing to do, {why}"
    run(model).backward()
    assert idle(model).startswith(why)
    assert fastpack.report(model).notes[-1] == f"offload: 1 forwards without: {why}", "said once"

    model = offloaded(tiny())
    with torch.autograd.graph.save_on_cpu():
        run(model).backward()
    assert idle(model).startswith("other code packs saved tensors")


@pytest.mark.sample(1)
@KINDS
def test_checkpointing_around_the_model(reentrant: bool) -> None:
    model, plain = offloaded(tiny()), prepared(tiny(), None)
    results = []
    for m in (model, plain):
        embeddings = m.model.embed_tokens(torch.cat(make_sequences(VOCAB, LENGTHS))[None])

        def whole(x: Tensor, m: Any = m) -> Tensor:
            out: Tensor = m.model(inputs_embeds=x, packed_seq_lens=list(LENGTHS)).last_hidden_state
            return out

        checkpoint(whole, embeddings, use_reentrant=reentrant).square().sum().backward()
        results.append(collected(m))
    assert equal(*results)
    assert not offload(model).stats.forwards
    assert len(offload(model).stats.idle) == (1 if reentrant else 2), "in the backward, and before if it saves"


def test_evaluation_is_not_counted() -> None:
    model = offloaded(tiny())
    with torch.no_grad():
        run(model)
    run(model.eval()).backward()
    assert not offload(model).stats.forwards
    assert not offload(model).stats.idle
    run(model.train()).backward()
    assert offload(model).stats.forwards == 1


def test_wrapped_layers_count_as_checkpointed() -> None:
    """As accelerate wraps them under FSDP."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def wrapped(choice: Any) -> Any:
        model = fastpack.patch(tiny("starcoder2"), offload=choice)
        for index, layer in enumerate(model.model.layers):
            model.model.layers[index] = checkpoint_wrapper(layer)
        return model

    model = wrapped("checkpoints")
    offload(model).connect, offload(model).min_bytes = LateLink, 1024
    assert equal(gradients(model), gradients(wrapped(None)))
    assert offload(model).stats.tensors >= LAYERS + 1 - KEEP


def test_autocast() -> None:
    results = []
    for model in (offloaded(tiny(lora=True)), prepared(tiny(lora=True), None)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(model)
        loss.backward()
        results.append(collected(model))
    assert equal(*results)


def test_options() -> None:
    model = tiny()
    with pytest.raises(fastpack.PatchError, match=r"offload='all' is not a choice.*'checkpoints'"):
        fastpack.patch(model, offload="all")  # type: ignore[arg-type]
    assert not fastpack.is_patched(model)
    fastpack.patch(model)
    assert getattr(runtime_of(model.model), "offload", None) is None
    fastpack.patch(model, offload="checkpoints")
    assert getattr(runtime_of(model.model), "offload", None) is not None
