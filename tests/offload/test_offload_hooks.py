"""The saved-tensor hooks alone, around a few checkpointed layers: which tensors are offloaded, and when."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from offloading import KINDS, LAYERS, Chain, LateLink, chain, in_use
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import fastpack
from fastpack.offload import transfer
from fastpack.offload.activations import LayerActivations
from fastpack.offload.checkpoints import CheckpointOffload
from fastpack.offload.saved import IN_FLIGHT, KEEP, OffloadedTensor, SavedTensorHooks, UnmovedTensor
from fastpack.offload.transfer import HostChannel, HostPool

pytestmark = pytest.mark.usefixtures("no_collection")


def test_host_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "BLOCK", 128)
    pool = HostPool(LateLink(torch.device("cpu")))
    small, large = pool.take(100), pool.take(1000)
    assert ([len(small), len(large)], in_use(pool), pool.nbytes) == ([1, 8], 9, 9 * 128)
    pool.give(large)
    again = pool.take(513)
    assert len(again) == 5
    assert {block.data_ptr() for block in again} < {block.data_ptr() for block in large}
    assert (pool.count, in_use(pool)) == (9, 6)
    assert len(pool.take(128 * 4)) == 4
    assert pool.count == 10, "one was missing"


def test_room_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free blocks count, and the memory of those that are missing."""
    monkeypatch.setattr(transfer, "BLOCK", 128)
    link = LateLink(torch.device("cpu"))
    pool = HostPool(link)
    pool.give(pool.take(1000))
    link.memory = sum(link.given)
    assert pool.has_room([1000])
    assert pool.has_room([500, 500])
    assert not pool.has_room([1000, 1])
    link.memory += 128
    assert pool.has_room([1000, 1])
    assert not pool.has_room([1000, 129])


def test_what_was_not_sent_stays() -> None:
    """A host whose memory others take between the check and the copy is no error."""
    link = LateLink(torch.device("cpu"))
    link.memory = 0
    tensors = [torch.randn(8), torch.randn(8)]
    saved = LayerActivations(HostChannel(link), tensors, None)
    saved.release_device_memory()
    assert all(torch.equal(ours, want) for ours, want in zip(saved.fetch(), tensors, strict=True))
    assert not link.did("send")


@pytest.mark.sample(1)
@KINDS
def test_order(reentrant: bool) -> None:
    """Layer i's input is sent before layer i + KEEP + 1 ends, and its copy back starts before layer i + 1 runs."""
    ours, layers, x = chain(reentrant)
    with ours.saving():
        out = layers(x * 2)
    forward, layers.link.log = layers.link.log, []
    out.sum().backward()
    backward = layers.link.log
    for index in range(LAYERS - KEEP):
        sent = forward.index(("send", index))
        assert ("run", index + KEEP + 1) not in forward[:sent]
        brought = backward.index(("copy_back", index))
        assert brought < backward.index(("run", index + 1))
        assert ("copy_back", index - 1) not in backward[:brought], "no more than one ahead"
        if index + 2 < LAYERS:
            assert brought > backward.index(("run", index + 2)), "not before it is time"


@pytest.mark.sample(1)
@KINDS
def test_few_are_on_the_device(reentrant: bool) -> None:
    """After the forward only the kept inputs are there; during it, those being copied too."""
    ours, _, x = chain(reentrant)
    storages: list[StorageWeakRef] = []
    counts = []

    def alive() -> int:
        return sum(not storage.expired() for storage in storages)

    def layer(x: Tensor) -> Tensor:
        if len(storages) < LAYERS:
            storages.append(StorageWeakRef(x.untyped_storage()))
        counts.append(alive())
        return x.tanh()

    def forward() -> Tensor:
        h = x * 2
        for _ in range(LAYERS):
            h = checkpoint(layer, h, use_reentrant=reentrant)
        return h

    with ours.saving():
        out = forward()
    assert alive() == KEEP
    assert KEEP < max(counts) <= KEEP + IN_FLIGHT + reentrant, "the reentrant kind saves after the layer"
    out.sum().backward()
    assert counts[-1] == 0, "when the first layer runs again, the last ones' inputs are gone"
    storages.clear()
    out = forward()
    assert out.requires_grad
    assert alive() == LAYERS, "without"


def test_each_storage_once() -> None:
    ours, layers, _ = chain()
    x = torch.randn(4, 6, requires_grad=True)
    with ours.saving():
        h = x * 2
        shared = [h.view(6, 4), h.view(2, 12), h]
        out = sum((s.sin() * s.exp()).sum() for s in shared)  # each saved twice, at long distances
    out.backward()
    want = x.detach().clone().requires_grad_()
    w = 2 * want
    sum((s.sin() * s.exp()).sum() for s in [w.view(6, 4), w.view(2, 12), w]).backward()
    assert torch.equal(x.grad, want.grad)
    # h, and of each of the three the exponential, which two operations saved, and the sine, less those kept
    assert ours.stats.tensors == 1 + 3 * 2 - KEEP
    assert Counter(layers.link.did("copy_back")) == {0: 3, 1: 2, 2: 1, 3: 2, 4: 1}, "as often as it is asked for"
    assert (layers.link.hazards, layers.link.abandoned) == (0, 0)


def test_fetched_out_of_order() -> None:
    """An operation that saved two tensors fetches the first one first: fetched tensors are not prefetched again."""
    channel = HostChannel(LateLink(torch.device("cpu")))
    hooks = SavedTensorHooks(lambda device: channel, min_bytes=0)
    tensors = [torch.randn(8) for _ in range(4 + KEEP)]
    saved = [hooks.pack(tensor.clone()) for tensor in tensors]
    hooks.finish()
    for index in (2, 3, 0, 1):
        assert torch.equal(saved[index].unpack(), tensors[index])
    assert channel.link.did("copy_back") == [2, 1, 3, 0]
    assert torch.equal(saved[3].unpack(), tensors[3])
    assert channel.link.did("copy_back")[4:] == [3], "again, when it is asked for again"


def test_a_storage_with_other_contents() -> None:
    channel = HostChannel(LateLink(torch.device("cpu")))
    hooks = SavedTensorHooks(lambda device: channel, min_bytes=0)
    x = torch.randn(8)
    saved = [hooks.pack(x), hooks.pack(x)]
    others = [hooks.pack(torch.randn(8)) for _ in range(KEEP + IN_FLIGHT)]
    want = x.clone()
    x.mul_(2)
    saved.append(hooks.pack(x))
    hooks.finish()
    assert torch.equal(saved[0].unpack(), want)
    assert torch.equal(saved[1].unpack(), want)
    assert torch.equal(saved[2].unpack(), 2 * want)
    assert channel.pool.count == len(others) + 2 - KEEP


def test_an_output_that_stays_keeps_nothing_alive() -> None:
    ours = CheckpointOffload(connect=lambda device: None)
    leaf = torch.randn(8, requires_grad=True)
    with ours.saving():
        out = leaf.exp()  # which saves its output
    storage = StorageWeakRef(out.untyped_storage())
    del out
    assert storage.expired()


def test_a_parameter_changed_in_place_raises() -> None:
    ours, _, x = chain()
    weight = nn.Parameter(torch.ones(8))
    with ours.saving():
        out = (x * 2) * weight
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(fastpack.PatchError, match="in place"):
        out.sum().backward()


def test_which_tensors_are_offloaded() -> None:
    link = LateLink(torch.device("cpu"))
    channel = HostChannel(link)
    x = torch.randn(64, 64)
    leaf = x.clone().requires_grad_()
    offloaded = {
        "a result": leaf * 1,
        "a frozen leaf": x,
        "half precision": x.repeat(2, 1).to(torch.bfloat16),
        "a whole storage in another shape": (leaf * 1).view(1, 64, 64),
    }
    unmoved = {
        "a leaf, which the graph holds": leaf,
        "a parameter": nn.Parameter(x.clone()),
        "whole numbers": x.long(),
        "some rows": x.repeat(2, 1)[:64],
        "some columns": x.repeat(1, 2)[:, :64],
        "transposed": x.clone().t(),
        "small": x[:63].clone(),
        "sparse": x.to_sparse(),
    }
    for name, tensor in {**offloaded, **unmoved}.items():
        hooks = SavedTensorHooks(lambda device: channel, min_bytes=64 * 64 * 4)
        assert isinstance(hooks.pack(tensor), OffloadedTensor if name in offloaded else UnmovedTensor), name
    nowhere = SavedTensorHooks(lambda device: None, min_bytes=0)
    assert isinstance(nowhere.pack(leaf * 1), UnmovedTensor)


def test_part_of_a_graph() -> None:
    """Memory of a prefetched but unused tensor is held until its copy is done."""
    ours, layers, x = chain()
    hidden = [x * 2]
    with ours.saving():
        for index in range(LAYERS):
            hidden.append(checkpoint(layers.layer, hidden[-1], index, use_reentrant=False))
    (grad,) = torch.autograd.grad(hidden[-1].sum(), hidden[4])
    start = hidden[4].detach().requires_grad_()
    end = start
    for index in range(4, LAYERS):
        end = layers.layer(end, index)
    (want,) = torch.autograd.grad(end.sum(), start)
    assert torch.equal(grad, want)
    assert layers.link.did("copy_back") == [4, 3]
    assert layers.link.abandoned == 0
    del hidden
    assert layers.link.abandoned == 1
    layers.link.wait(len(layers.link.queue))
    assert layers.link.hazards == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("which", "after"), [(0, 0), (0, KEEP), (LAYERS - 1, LAYERS - 1)], ids=["waiting", "on its way", "kept"]
)
def test_a_change_in_place_raises(which: int, after: int) -> None:
    """It raises as autograd does without hooks."""
    ours, layers, x = chain()
    with pytest.raises(RuntimeError, match="inplace"):
        _change(layers, x, which, after).sum().backward()

    def offloading() -> None:
        with ours.saving():
            out = _change(layers, x, which, after)
        out.sum().backward()

    with pytest.raises(fastpack.PatchError, match="in place"):
        offloading()


def test_a_change_after_the_copy_does_no_harm() -> None:
    ours, layers, x = chain()
    layers(x * 2).sum().backward()
    want = x.grad
    x.grad = None
    with ours.saving():
        out = _change(layers, x, 0, KEEP + IN_FLIGHT)
    out.sum().backward()
    assert torch.equal(x.grad, want)


def _change(layers: Chain, x: Tensor, which: int, after: int) -> Tensor:
    """Return the output of layers whose input ``which`` is changed in place after layer ``after`` has run."""
    hidden = [x * 2]
    for index in range(LAYERS):
        hidden.append(checkpoint(layers.layer, hidden[-1], index, use_reentrant=False))
        if index == after:
            hidden[which].detach().mul_(2)
    return hidden[-1]
