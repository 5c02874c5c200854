"""One recorded step: static inputs, the recording over them, and the autograd Function that replays it.

Shape suffixes: T real tokens, Tb tokens of the bucket, N sequences of the bucket, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fastpack.cuda_graphs.pieces import cut_between
from fastpack.cuda_graphs.recorder import CaptureRefusedError, Recorder, Tape
from fastpack.cuda_graphs.stack import Stack
from fastpack.errors import PatchError
from fastpack.ops.autograd import differentiable_once
from fastpack.ops.row_count import RowCount
from fastpack.packing.buckets import Bucket
from fastpack.packing.seqlens import PackedSeqLens, Value

MOST_WORK = 0.5
"""The share of a token's work, as weights tell it, that has to be left out for bucket padding to be called so."""


class HostLengthsError(Exception):
    """A kernel asked, while it was being recorded, for lengths that only the device knows."""


class _Unknown(tuple[int, ...]):
    """Lengths that change from replay to replay: looking at them would freeze those of the first."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise HostLengthsError("its attention reads each batch's lengths on the host")

    __len__ = __iter__ = __getitem__ = __contains__ = __add__ = _refuse


class StaticSeqLens(PackedSeqLens):
    """The lengths of whatever batch is being replayed: offsets and positions on the device, and the bucket's sizes."""

    def memo(self, key: Any, build: Callable[[], Value]) -> Value:
        """Only for the stand-in mask: anything else would be made of one batch, and kept for the others."""
        if not (isinstance(key, tuple) and key[0] == "mask"):
            raise HostLengthsError("its attention prepares each batch on the host")
        return super().memo(key, build)


@dataclass(eq=False)
class Buffers:
    """Memory for what goes into replays, shared by all recordings: only one is under way at a time.

    The gradient goes into a backward where the embeddings went into its forward, which has copied them by then.
    """

    _held: dict[Any, Tensor] = field(default_factory=dict)

    def take(self, like: Tensor, tokens: int) -> Tensor:
        """``[1, tokens, H]`` of the dtype and device of ``like`` ``[1, T, H]``; what is handed out is never freed."""
        key = (like.dtype, like.device, like.shape[-1])
        held = self._held.get(key)
        if held is None or held.shape[1] < tokens:
            held = self._held[key] = torch.zeros(
                1, tokens, like.shape[-1], dtype=like.dtype, device=like.device
            )  # recordings over a smaller one keep it
        return held[:, :tokens]


class Ticket:
    """Held by a replayed forward until its backward has run, or until nothing can call it any more."""

    __slots__ = ("__weakref__", "done")

    def __init__(self) -> None:
        self.done = False


@dataclass(eq=False)
class Request:
    """What a step is asked to compute.

    Attributes:
        stack: the modules.
        run: from embeddings ``[1, Tb, H]`` and lengths to the backbone's outputs.
        embeddings: ``[1, T, H]``.
        packed: their lengths.
        bucket: what they round up to.
        in_pieces: whether it may be recorded in pieces: no other stream works across its layers.
    """

    stack: Stack
    run: Callable[[Tensor, PackedSeqLens], Any]
    embeddings: Tensor
    packed: PackedSeqLens
    bucket: Bucket
    in_pieces: bool


class RecordedStep:
    """A decoder stack's forward and backward for one bucket, recorded.

    Attributes:
        leaves_out_bucket_padding: True where most products don't compute what comes behind the last real token.

    Args:
        like_this: a recording of the same stack in the same state, which knows already what has a gradient.

    Raises:
        CaptureRefusedError: it can't be recorded.
        NoMemoryError, torch.OutOfMemoryError: there is too little memory, for the recording or for what goes before it.
    """

    def __init__(
        self, request: Request, recorder: Recorder, buffers: Buffers, like_this: RecordedStep | None = None
    ) -> None:
        stack, bucket, like = request.stack, request.bucket, request.embeddings.detach()
        device = like.device
        self.bucket = bucket
        self._run = request.run  # and with it what a replay reads outside the device's memory (offloading's buffers)
        self._embeddings = buffers.take(like, bucket.tokens)
        self._cu_seqlens = torch.zeros(bucket.sequences + 1, dtype=torch.int32, device=device)
        self._position_ids = torch.zeros(1, bucket.tokens, dtype=torch.long, device=device)
        request.packed.write_bucketed(bucket, self._cu_seqlens, self._position_ids)
        self._pads_with_zeros, self._passes = True, 0
        rows = torch.full((1,), bucket.tokens // 2, dtype=torch.int32, device=device)
        self._row_count = RowCount(rows, bucket.tokens)
        leaf = self._embeddings.detach().requires_grad_(request.embeddings.requires_grad)
        stand_ins = stack.stand_ins()

        def forward() -> Tensor:
            # New lengths each time: what is derived from them belongs to this pass. And a copy of the input: some
            # families scale it in place, and the gradient takes its memory.
            packed = StaticSeqLens(
                _Unknown(),
                self._cu_seqlens,
                self._position_ids,
                bucket.max_seqlen,
                row_count=self._row_count if self._pads_with_zeros else None,
            )
            self._passes += 1
            pieces = cut_between(stack.layers, recorder.cut) if request.in_pieces else nullcontext()
            with stack.recordable(stand_ins), _uncached_autocast(device), pieces:
                outputs = request.run(leaf.clone(), packed)
            self.output_type = type(outputs)
            return only_hidden_states(outputs)

        def backward(output: Tensor) -> Sequence[Tensor | None]:
            with stack.recordable(stand_ins), _no_autocast(device):  # checkpointing runs modules again
                return torch.autograd.grad(output, inputs, self._grad)

        with _host_lengths_refused(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            if like_this is None:
                # as bucket padding will be, if all is finite then, whether products leave it out or not
                self._embeddings.zero_()
                with stack.recordable(stand_ins):
                    found, hidden, self._pads_with_zeros = _find_reached(
                        forward, leaf, stand_ins, may_draw=not stack.checkpoints
                    )
                self.parameters = [p for p, stand_in in stand_ins.items() if found[stand_in]]
                self._has_input_gradient = found[leaf]
            else:
                self.parameters, self._has_input_gradient = like_this.parameters, like_this._has_input_gradient
                self._pads_with_zeros = like_this._pads_with_zeros
                hidden = like_this._tape.output
            self._write_inputs(like, request.packed)
            self._grad: Tensor = buffers.take(hidden, bucket.tokens)
            del hidden
            inputs: list[Tensor] = [leaf] if self._has_input_gradient else []
            inputs += [stand_ins[p] for p in self.parameters]
            self._tape: Tape = recorder.record(device, forward, backward)
        self._groups = _by_dtype(self._tape.gradients)
        left_out = self._row_count.work / self._passes if self._pads_with_zeros else 0.0
        self.leaves_out_bucket_padding = left_out > MOST_WORK * stack.total_work()

    def _write_inputs(self, embeddings: Tensor, packed: PackedSeqLens) -> None:
        tokens = packed.total_tokens
        self._embeddings[:, :tokens].copy_(embeddings)
        bucket_padding = self._embeddings[:, tokens:]
        if self._pads_with_zeros:
            bucket_padding.zero_()  # most families keep these at zero: products leave them out, or take less power
        else:
            bucket_padding.copy_(embeddings[:, :1])  # as un-padding makes it: a norm may divide by zero
        self._row_count.rows.fill_(tokens)
        packed.write_bucketed(self.bucket, self._cu_seqlens, self._position_ids)

    def replay(self, request: Request, ticket: Ticket) -> Any:
        """The backbone's outputs for this batch, with its gradients recorded too."""
        hidden: Tensor = _Replay.apply(self, request.packed, ticket, request.embeddings, *self.parameters)
        return self.output_type(last_hidden_state=hidden)

    def run_forward(self, embeddings: Tensor, packed: PackedSeqLens) -> Tensor:
        """``[1, T, H]``, in memory of its own."""
        self._write_inputs(embeddings, packed)
        self._tape.replay_forward()
        return self._tape.output[:, : packed.total_tokens].clone()

    def start_backward(self, grad_1TH: Tensor) -> None:
        """Of the last :meth:`run_forward`, from the gradient of its output."""
        tokens = grad_1TH.shape[1]
        self._grad[:, :tokens].copy_(grad_1TH)
        self._grad[:, tokens:].zero_()
        self._tape.replay_backward()

    def take_gradients(self, tokens: int) -> list[Tensor | None]:
        """Those of the embeddings ``[1, tokens, H]`` (None where they have none) and of the parameters, when started.

        Each is a tensor of its own: a parameter without a gradient takes the one it is given as its ``.grad``, which
        the next replay must not overwrite.
        """
        fresh: list[Tensor | None] = [None if g is None else torch.empty_like(g) for g in self._tape.gradients]
        for group in self._groups:
            torch._foreach_copy_([fresh[i] for i in group], [self._tape.gradients[i] for i in group])  # type: ignore[misc]
        if not self._has_input_gradient:
            return [None, *fresh]
        assert fresh[0] is not None
        return [fresh[0][:, :tokens], *fresh[1:]]


class _Replay(torch.autograd.Function):
    """The parameters are inputs so that autograd, and whoever waits for their gradients, knows of them."""

    @staticmethod
    def forward(
        ctx: Any, step: RecordedStep, packed: PackedSeqLens, ticket: Ticket, embeddings: Tensor, *parameters: Tensor
    ) -> Tensor:
        out = step.run_forward(embeddings, packed)
        ctx.step, ctx.ticket, ctx.versions = step, ticket, _versions(parameters)  # while the device works
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.ticket.done:
            raise PatchError(
                "a second backward through a forward that was replayed from a CUDA graph: the first one overwrote what "
                "was saved for it (retain_graph=True does not help). Patch with graphs=None to do this."
            )
        ctx.ticket.done = True
        step, ctx.step = ctx.step, None  # who still holds the loss does not hold the recording
        step.start_backward(grad)
        if _versions(step.parameters) != ctx.versions:  # asked while the device works
            raise PatchError(
                "a parameter was changed in place between the forward, which was replayed from a CUDA graph, and its "
                "backward, which would read the new values. Step the optimizer after the backward."
            )
        return (None, None, None, *step.take_gradients(grad.shape[1]))


@contextmanager
def _host_lengths_refused() -> Iterator[None]:
    try:
        yield
    except HostLengthsError as error:
        raise CaptureRefusedError(str(error)) from error


def _find_reached(
    forward: Callable[[], Tensor], leaf: Tensor, stand_ins: Mapping[nn.Parameter, nn.Parameter], *, may_draw: bool
) -> tuple[dict[Tensor, bool], Tensor, bool]:
    """Whether the leaf and each stand-in has a gradient, from one eager pass; its output; and whether all is finite.

    Args:
        may_draw: whether the pass may draw random numbers on its device, which a replay draws anew.

    Raises:
        CaptureRefusedError: the pass draws random numbers where it may not, it reads a parameter that no module of the
            stack has among its own (whose gradient would be lost), or nothing has a gradient.
    """
    wanted = [t for t in (leaf, *stand_ins.values()) if t.requires_grad]
    before = _random_states(leaf.device)
    output = forward()
    leaves = _leaves(output)
    if not leaves <= {id(t) for t in wanted}:
        raise CaptureRefusedError("a module reads a parameter that no module of the stack has among its own")
    if not leaves:
        raise CaptureRefusedError("nothing in the stack has a gradient")
    with _no_autocast(leaf.device):
        gradients = torch.autograd.grad(output, wanted, torch.zeros_like(output), allow_unused=True)
    drew = [not torch.equal(a, b) for a, b in zip(before, _random_states(leaf.device), strict=True)]
    if drew[0] and not may_draw:
        raise CaptureRefusedError("it draws random numbers (dropout) under gradient checkpointing")
    if any(drew[1:]):
        raise CaptureRefusedError("it draws random numbers on the host")
    found = {leaf: False, **{t: gradient is not None for t, gradient in zip(wanted, gradients, strict=True)}}
    finite = all(bool(t.isfinite().all()) for t in (output, *gradients) if t is not None)
    return found, output.detach(), finite


def _leaves(output: Tensor) -> set[int]:
    """Ids of the tensors at which the autograd graph of ``output`` ends."""
    found: set[int] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting.extend(following for following, _ in node.next_functions)
    return found


def _versions(parameters: Sequence[Tensor]) -> int:
    """A number that grows with every change in place."""
    return sum(map(_version, parameters))


_version = attrgetter("_version")


def only_hidden_states(outputs: Any) -> Tensor:
    """``last_hidden_state``, if a backbone returned nothing else.

    Raises:
        CaptureRefusedError: it did.
    """
    more = [name for name, value in outputs.items() if value is not None and name != "last_hidden_state"]
    if more:
        raise CaptureRefusedError(f"it also returns {', '.join(more)}")
    return outputs.last_hidden_state


def _uncached_autocast(device: torch.device) -> torch.autocast:
    """Autocast as it is, but without its cache, which would hand weights cast before the recording to it."""
    kind = device.type
    return torch.autocast(
        kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind), cache_enabled=False
    )


def _no_autocast(device: torch.device) -> torch.autocast:
    """A backward is outside autocast, as that of a loss is; what checkpointing runs again is in the one that it saw."""
    return torch.autocast(device.type, enabled=False)


def _random_states(device: torch.device) -> list[Tensor]:
    """That of the device, and that of the host where it is another."""
    if device.type == "cuda":
        return [torch.cuda.get_rng_state(device), torch.get_rng_state()]
    return [torch.get_rng_state()]


def _by_dtype(tensors: Sequence[Tensor | None]) -> list[list[int]]:
    groups: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor is not None:
            groups.setdefault(tensor.dtype, []).append(index)
    return list(groups.values())
