"""One recorded step: static inputs, the recording over them, and the autograd Function that replays it.

The outputs of a step are the hidden states and, if they were requested, the routers' logits.

Shape suffixes: T real tokens, Tb tokens of the bucket, N sequences of the bucket, H hidden size, R routers, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor

from fastpack.cuda_graphs.gradients import ROUTER_LOGITS, find_gradients, no_autocast, recorded_outputs
from fastpack.cuda_graphs.pieces import cut_between
from fastpack.cuda_graphs.recorder import CapturedPass, CaptureRefusedError, Recorder
from fastpack.cuda_graphs.stack import Stack
from fastpack.errors import PatchError
from fastpack.ops.autograd import differentiable_once
from fastpack.ops.row_count import RowCount
from fastpack.packing.buckets import Bucket
from fastpack.packing.seqlens import PackedSeqLens, Value

MIN_WORK_LEFT_OUT = 0.5
"""The share of a token's work, estimated from weights, above which a recording counts as leaving bucket padding out."""


class HostLengthsError(Exception):
    """A kernel asked for lengths on the host while it was recorded. Only the device has them."""


class _UnreadableLengths(tuple[int, ...]):
    """Lengths that change from replay to replay. Reading them raises: a recording would keep the first batch's."""

    def _refuse(self, *_: Any) -> NoReturn:
        """Raise HostLengthsError."""
        raise HostLengthsError("a kernel reads each batch's lengths on the host")

    __len__ = __iter__ = __getitem__ = __contains__ = __add__ = _refuse


class StaticSeqLens(PackedSeqLens):
    """The lengths of the batch that is being replayed: offsets and positions on the device, and the bucket's sizes."""

    @property
    def knows_lengths(self) -> bool:
        """False: they change from replay to replay."""
        return False

    def memo(self, key: Any, build: Callable[[], Value]) -> Value:
        """Return the memo of the mask placeholder or of chunks; raise for any other key.

        These are made of tensors on the device and of the bucket's sizes, so that each replay computes its own. Any
        other value would be built from one batch and kept for the others.

        Raises:
            HostLengthsError: the key is another one.
        """
        if not (isinstance(key, tuple) and key[0] in ("mask", "chunks")):
            raise HostLengthsError("a kernel prepares each batch on the host")
        return super().memo(key, build)

    def _chunk_count(self, size: int) -> int:
        """Return room for the chunks of every batch in the bucket; those that a batch lacks are empty."""
        return self.total_tokens // size + len(self.cu_seqlens) - 1


@dataclass(eq=False)
class StaticBuffers:
    """Memory for the inputs of replays, shared by all recordings, since only one replay is under way at a time.

    A backward's output gradient uses the memory of its forward's embeddings, which the forward has copied by then.
    """

    _buffers: dict[Any, Tensor] = field(default_factory=dict)

    def take(self, like: Tensor, tokens: int, *, place: int = 0) -> Tensor:
        """Return ``[A, tokens, H]`` of the dtype and device of ``like`` ``[A, T, H]``.

        Memory that was handed out is never freed.

        Args:
            like: a tensor of the dtype, the device and the sizes A and H.
            tokens: the number of tokens.
            place: the place among the outputs of a step. Outputs of one size have memory of their own.
        """
        key = (like.dtype, like.device, like.shape[0], like.shape[2], place)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape[1] < tokens:
            buffer = self._buffers[key] = torch.zeros(
                like.shape[0], tokens, like.shape[2], dtype=like.dtype, device=like.device
            )  # earlier recordings keep a smaller buffer
        return buffer[:, :tokens]


class PendingBackward:
    """A mark that a replayed forward holds until its backward has run, or until nothing can call it any more."""

    __slots__ = ("__weakref__", "done")

    def __init__(self) -> None:
        """Mark the backward as not done."""
        self.done = False


@dataclass(eq=False)
class Request:
    """A batch, and the stack that has to compute it.

    Attributes:
        stack: the modules.
        run: computes the backbone's outputs from embeddings ``[1, Tb, H]`` and lengths.
        embeddings: ``[1, T, H]``.
        packed: the lengths of the embeddings.
        bucket: the sizes to which the lengths round up.
        in_pieces: whether the pass may be recorded in pieces; it may if no other stream works across its layers.
    """

    stack: Stack
    run: Callable[[Tensor, PackedSeqLens], Any]
    embeddings: Tensor
    packed: PackedSeqLens
    bucket: Bucket
    in_pieces: bool


class RecordedStep:
    """A recorded forward and backward of a decoder stack, for one bucket.

    Attributes:
        leaves_out_bucket_padding: whether most matmuls skip the rows after the last real token.

    Args:
        request: the batch with which it is recorded.
        recorder: records the passes.
        buffers: memory for the inputs.
        template: a recording of the same stack in the same state, which tells it which tensors have gradients.

    Raises:
        CaptureRefusedError: the step can't be recorded.
        NoMemoryError, torch.OutOfMemoryError: there is too little memory for the recording or for the pass before it.
    """

    def __init__(
        self, request: Request, recorder: Recorder, buffers: StaticBuffers, template: RecordedStep | None = None
    ) -> None:
        """Record a step."""
        stack, bucket, like = request.stack, request.bucket, request.embeddings.detach()
        device = like.device
        self.bucket = bucket
        self._run = request.run  # holds what a replay reads outside the device's memory (offloading's host buffers)
        self._embeddings = buffers.take(like, bucket.tokens)
        self._cu_seqlens = torch.zeros(bucket.sequences + 1, dtype=torch.int32, device=device)
        self._position_ids = torch.zeros(1, bucket.tokens, dtype=torch.long, device=device)
        request.packed.write_bucketed(bucket, self._cu_seqlens, self._position_ids)
        self._pads_with_zeros, self._passes = True, 0
        rows = torch.full((1,), bucket.tokens // 2, dtype=torch.int32, device=device)
        self._row_count = RowCount(rows, bucket.tokens)
        leaf = self._embeddings.detach().requires_grad_(request.embeddings.requires_grad)
        aliases = stack.aliases()

        def forward() -> list[Tensor]:
            # New lengths for each pass, since values derived from them belong to one pass. A copy of the input, since
            # some families scale it in place, and the gradient uses its memory.
            packed = StaticSeqLens(
                _UnreadableLengths(),
                self._cu_seqlens,
                self._position_ids,
                bucket.max_seqlen,
                row_count=self._row_count if self._pads_with_zeros else None,
            )
            self._passes += 1
            pieces = cut_between(stack.layers, recorder.cut) if request.in_pieces else nullcontext()
            with stack.recordable(aliases), _uncached_autocast(device), pieces:
                outputs = request.run(leaf.clone(), packed)
            self.output_type = type(outputs)
            return recorded_outputs(outputs)

        def backward(outputs: list[Tensor]) -> Sequence[Tensor | None]:
            with stack.recordable(aliases), no_autocast(device):  # checkpointing runs modules again
                return torch.autograd.grad(outputs, inputs, self._grads)

        with _host_lengths_refused(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            if template is None:
                # The pass runs on zeros. If its results are finite, bucket padding will be zeros too, left out of
                # matmuls or not.
                self._embeddings.zero_()
                with stack.recordable(aliases):
                    has_gradient, outputs, self._pads_with_zeros = find_gradients(
                        forward, leaf, aliases, may_draw=not stack.checkpoints
                    )
                self.parameters = [p for p, alias in aliases.items() if has_gradient[alias]]
                self._has_input_gradient = has_gradient[leaf]
            else:
                self.parameters, self._has_input_gradient = template.parameters, template._has_input_gradient
                self._pads_with_zeros = template._pads_with_zeros
                outputs = template._captured.outputs
            self._write_inputs(like, request.packed)
            self._grads = [buffers.take(output, bucket.tokens, place=i) for i, output in enumerate(outputs)]
            del outputs
            inputs: list[Tensor] = [leaf] if self._has_input_gradient else []
            inputs += [aliases[p] for p in self.parameters]
            self._captured: CapturedPass = recorder.record(device, forward, backward)
        self._groups = _by_dtype(self._captured.gradients)
        left_out = self._row_count.work / self._passes if self._pads_with_zeros else 0.0
        self.leaves_out_bucket_padding = left_out > MIN_WORK_LEFT_OUT * stack.total_work()

    def _write_inputs(self, embeddings: Tensor, packed: PackedSeqLens) -> None:
        """Write a batch and its lengths into the static inputs, and fill the bucket padding."""
        tokens = packed.total_tokens
        self._embeddings[:, :tokens].copy_(embeddings)
        bucket_padding = self._embeddings[:, tokens:]
        if self._pads_with_zeros:
            bucket_padding.zero_()  # most families keep zeros at zero: matmuls skip them, or take less power
        else:
            bucket_padding.copy_(embeddings[:, :1])  # as in un-padding: a norm may divide by zero
        self._row_count.rows.fill_(tokens)
        packed.write_bucketed(self.bucket, self._cu_seqlens, self._position_ids)

    def replay(self, request: Request, pending: PendingBackward) -> Any:
        """Return the backbone's outputs for a batch, with an autograd graph that replays the backward."""
        hidden, *logits = _Replay.apply(self, request.packed, pending, request.embeddings, *self.parameters)
        routed = {ROUTER_LOGITS: logits[0].unbind(0)} if logits else {}
        return self.output_type(last_hidden_state=hidden, **routed)

    def run_forward(self, embeddings: Tensor, packed: PackedSeqLens) -> tuple[Tensor, ...]:
        """Replay the forward and return copies of its outputs, ``[1, T, H]`` and perhaps ``[R, T, E]``."""
        self._write_inputs(embeddings, packed)
        self._captured.replay_forward()
        return tuple(output[:, : packed.total_tokens].clone() for output in self._captured.outputs)

    def start_backward(self, grads: Sequence[Tensor]) -> None:
        """Replay the backward of the last :meth:`run_forward`, from the gradients of its outputs."""
        for static, grad in zip(self._grads, grads, strict=True):
            tokens = grad.shape[1]
            static[:, :tokens].copy_(grad)
            static[:, tokens:].zero_()
        self._captured.replay_backward()

    def take_gradients(self, tokens: int) -> list[Tensor | None]:
        """Return the gradients of the embeddings ``[1, tokens, H]`` (None if they have none) and of the parameters.

        Each is a tensor of its own: a parameter without a gradient takes it as its ``.grad``, which the next replay
        must not overwrite.
        """
        copies: list[Tensor | None] = [None if g is None else torch.empty_like(g) for g in self._captured.gradients]
        for group in self._groups:
            torch._foreach_copy_([copies[i] for i in group], [self._captured.gradients[i] for i in group])  # type: ignore[misc]
        if not self._has_input_gradient:
            return [None, *copies]
        assert copies[0] is not None
        return [copies[0][:, :tokens], *copies[1:]]


class _Replay(torch.autograd.Function):
    """The replay of a step. Its inputs include the parameters, so that autograd and gradient hooks know of them."""

    @staticmethod
    def forward(
        ctx: Any,
        step: RecordedStep,
        packed: PackedSeqLens,
        pending: PendingBackward,
        embeddings: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        """Replay the forward."""
        outputs = step.run_forward(embeddings, packed)
        ctx.step, ctx.pending, ctx.versions = step, pending, _versions(parameters)  # while the device works
        return outputs

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Replay the backward and return the gradients."""
        if ctx.pending.done:
            raise PatchError(
                "a second backward through a forward that was replayed from a CUDA graph: the first backward overwrote "
                "the saved activations (retain_graph=True does not help). Patch with graphs=None to do this."
            )
        ctx.pending.done = True
        step, ctx.step = ctx.step, None  # a loss that is still referenced does not hold the recording
        step.start_backward(grads)
        if _versions(step.parameters) != ctx.versions:  # compared while the device works
            raise PatchError(
                "a parameter was changed in place between a forward that was replayed from a CUDA graph and its "
                "backward, which would read the new values. Step the optimizer after the backward."
            )
        return (None, None, None, *step.take_gradients(grads[0].shape[1]))


@contextmanager
def _host_lengths_refused() -> Iterator[None]:
    """Turn a HostLengthsError into a CaptureRefusedError."""
    try:
        yield
    except HostLengthsError as error:
        raise CaptureRefusedError(str(error)) from error


def _versions(parameters: Sequence[Tensor]) -> int:
    """Return a number that grows with every in-place change of a parameter."""
    return sum(map(_version, parameters))


_version = attrgetter("_version")


def _uncached_autocast(device: torch.device) -> torch.autocast:
    """Return a context with autocast's current settings, but without its cache.

    The cache would give the recording weights that were cast before it began.
    """
    kind = device.type
    return torch.autocast(
        kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind), cache_enabled=False
    )


def _by_dtype(tensors: Sequence[Tensor | None]) -> list[list[int]]:
    """Return the indices of the tensors, grouped by dtype."""
    groups: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor is not None:
            groups.setdefault(tensor.dtype, []).append(index)
    return list(groups.values())
