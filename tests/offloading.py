"""Helpers to test offloading without a GPU: a fake link, models that use it, and checkpointed layers without a model.

The fake link copies on a queue of its own, as late as possible: a copy runs when it, or a later one, is waited for.
Buffers that are read earlier hold NaN, and memory that is freed under a copy is counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from adapter_cases import with_lora
from oracle import make_sequences
from tiny import VOCAB, tiny_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastpack
from fastpack.model.model_runtime import runtime_of
from fastpack.offload import transfer
from fastpack.offload.checkpoints import CheckpointOffload
from fastpack.offload.transfer import HostChannel, HostPool, Rates

LAYERS = 7
LENGTHS = (40, 1, 23)
KINDS = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


class LateLink:
    """A link that copies as late as allowed, and logs its copies."""

    def __init__(self, device: torch.device) -> None:
        self.queue: list[Callable[[], None]] = []
        self.log: list[tuple[str, int]] = []
        self.names: dict[int, int] = {}
        self.hazards = self.abandoned = self.done = self.drained = 0
        self.held: list[Tensor] = []
        self.memory = 1 << 40
        self.given: list[int] = []

    def allocate(self, nbytes: int) -> Tensor:
        self.given.append(nbytes)
        return torch.full((nbytes,), 255, dtype=torch.uint8)  # NaN in every dtype

    def room(self) -> int:
        return self.memory - sum(self.given)

    def record_event(self) -> int:
        return -1

    def send(self, source: Tensor, blocks: Sequence[Tensor], since: int) -> int:
        self.names[blocks[0].data_ptr()] = sum(what == "send" for what, _ in self.log)
        self.log.append(("send", self.names[blocks[0].data_ptr()]))

        views = [block.detach() for block in blocks]  # the queue does not keep the blocks

        def act(x: Tensor) -> None:
            for part, view in zip(x.split(transfer.BLOCK), views, strict=True):
                view[: len(part)] = part

        return self._later(weakref.ref(source), act)

    def copy_back(self, blocks: Sequence[Tensor], nbytes: int) -> tuple[Tensor, int]:
        self.log.append(("copy_back", self.names[blocks[0].data_ptr()]))
        tensor, views = torch.full((nbytes,), 255, dtype=torch.uint8), [block.detach() for block in blocks]
        return tensor, self._later(weakref.ref(tensor), lambda x: x.copy_(torch.cat(views)[:nbytes]))

    def _later(self, device: weakref.ref[Tensor], act: Callable[[Tensor], Any]) -> int:
        def run() -> None:
            there = device()
            if there is None:
                self.hazards += 1
            else:
                with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(there):
                    act(there)

        self.queue.append(run)
        return len(self.queue)

    def wait(self, event: int) -> None:
        for run in self.queue[self.done : event]:
            run()
        self.done = max(self.done, event)

    def abandon(self, tensor: Tensor) -> None:
        self.abandoned += 1
        self.held.append(tensor)

    def drain(self) -> None:
        self.drained += 1

    def rates(self, dtype: torch.dtype) -> Rates:
        return Rates(bytes=1.0, operations=1.0)

    def did(self, what: str) -> list[int]:
        return [which for did, which in self.log if did == what]


class LossyLink(LateLink):
    """The negative control: zeros come back."""

    def copy_back(self, blocks: Sequence[Tensor], nbytes: int) -> tuple[Tensor, int]:
        return torch.zeros(nbytes, dtype=torch.uint8), len(self.queue)


class ForgetfulLink(LateLink):
    """Another negative control: nothing waits for copies to the device."""

    def wait(self, event: int) -> None:
        if not self.did("copy_back"):
            super().wait(event)


def backbone_of(model: Any) -> Any:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base.base_model


def offloaded(
    model: Any,
    choice: Any = "checkpoints",
    *,
    reentrant: bool = False,
    link: type[LateLink] = LateLink,
    graphs: Any = None,
) -> Any:
    """Return the model patched and checkpointed, with a fake link."""
    prepared(model, choice, reentrant=reentrant, graphs=graphs)
    ours = offload(model)
    ours.connect, ours.min_bytes = link, 1024  # the tokens' statistics are smaller
    return model


def prepared(model: Any, choice: Any, *, reentrant: bool = False, graphs: Any = None) -> Any:
    fastpack.patch(model, offload=choice, graphs=graphs)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if hasattr(model, "get_base_model"):
        model.enable_input_require_grads()
    return model


def offload(model: Any) -> CheckpointOffload:
    runtime = runtime_of(backbone_of(model))
    ours = None if runtime is None else runtime.offload
    assert ours is not None
    return ours


def channel(model: Any) -> HostChannel:
    (only,) = (channel for channel in offload(model)._channels.values() if channel is not None)
    return only


def in_use(pool: HostPool) -> int:
    """Return how many blocks are in use."""
    return pool.count - len(pool._free)


def run(model: Any, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> Tensor:
    ids = torch.cat(make_sequences(VOCAB, lengths, seed))[None]
    loss: Tensor = model(input_ids=ids, labels=ids, packed_seq_lens=list(lengths)).loss
    return loss


def gradients(model: Any, *args: Any) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    run(model, *args).backward()
    return collected(model)


def collected(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def equal(ours: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return bool(want) and ours.keys() == want.keys() and all(torch.equal(ours[name], want[name]) for name in want)


def tiny(model_type: str = "llama", *, lora: bool = False) -> Any:
    model = tiny_model(model_type, num_hidden_layers=LAYERS)
    return with_lora(model) if lora else model


class Chain:
    """Checkpointed layers without a model around, and a log of when they run."""

    def __init__(self, link: LateLink, reentrant: bool) -> None:
        self.link, self.reentrant = link, reentrant

    def __call__(self, x: Tensor) -> Tensor:
        for index in range(LAYERS):
            x = checkpoint(self.layer, x, index, use_reentrant=self.reentrant)
        return x

    def layer(self, x: Tensor, index: int) -> Tensor:
        self.link.log.append(("run", index))
        return torch.tanh(x * (index + 1.5))


def chain(reentrant: bool = False) -> tuple[CheckpointOffload, Chain, Tensor]:
    link = LateLink(torch.device("cpu"))
    x = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return CheckpointOffload(connect=lambda device: link, min_bytes=0), Chain(link, reentrant), x
