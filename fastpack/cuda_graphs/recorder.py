"""Recording a forward and a backward pass as CUDA graphs: the one place that talks to the device.

Sources: https://pytorch.org/docs/stable/notes/cuda.html#cuda-graphs (warm-up on a side stream, capture of partial
networks, pools shared by graphs that replay in a known order).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

FIRST_WARM_UPS, WARM_UPS = 3, 1
"""Passes before a recording: the first one of a recorder meets libraries that have not chosen their kernels yet."""

CAPTURE_ERRORS = range(900, 909)
"""cudaErrorStreamCaptureUnsupported to cudaErrorStreamCaptureWrongThread."""


class CaptureRefusedError(Exception):
    """This forward can't be recorded; the text says why. Nothing was changed, and it runs eagerly as it is."""


class NoMemoryError(CaptureRefusedError):
    """There was not enough memory for it. A recording needs more than the step itself, which may well run."""


class SpoiltError(CaptureRefusedError):
    """The pass keeps tensors where replays of other recordings would overwrite them: no tape may be replayed again."""


Forward = Callable[[], Tensor]
Backward = Callable[[Tensor], Sequence[Tensor | None]]


@dataclass(eq=False)
class Tape:
    """A recorded forward and backward pass.

    Attributes:
        output: the forward's output, valid from ``replay_forward`` until anything else is replayed.
        gradients: what the backward returned, valid from ``replay_backward`` until anything else is replayed.
        replay_forward: runs the forward again on whatever its inputs hold now.
        replay_backward: the backward of the last ``replay_forward``; once only, since it overwrites what that saved.
    """

    output: Tensor
    gradients: list[Tensor | None]
    replay_forward: Callable[[], None]
    replay_backward: Callable[[], None]


class Recorder(Protocol):
    """What records. Tests put one that needs no GPU in its place."""

    def rejects(self, device: torch.device) -> str | None:
        """Why nothing can be recorded or replayed here and now, or None."""

    def record(self, device: torch.device, forward: Forward, backward: Backward) -> Tape:
        """Record a pass over static inputs on ``device``, after warming it up.

        Args:
            forward: returns the output, with its autograd graph.
            backward: returns the gradients of the output that it is given.

        Raises:
            CaptureRefusedError: the pass does what can't be recorded, such as waiting for the device.
            NoMemoryError: it took too much memory.
            SpoiltError: no tape of this recorder may be replayed again.
        """

    def cut(self) -> None:
        """Called in a pass: what follows may begin later than what was before it. Nothing, where none is recorded."""

    def clear(self) -> None:
        """Every tape was dropped: so may be what they shared."""


@dataclass(eq=False)
class _Capture:
    """A pass on its way into graphs, one piece after the other.

    Attributes:
        failed: holds the graph of a piece until its capture has ended.
        pieces: those that have.
    """

    pool: Any
    failed: list[torch.cuda.CUDAGraph]
    pieces: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    _begun: bool = False

    def begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        self.failed.append(graph)
        with _leaving(self.pool):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        self._begun = True

    def cut(self) -> None:
        if self._begun:
            self.end()
            self.begin()

    def end(self) -> None:
        """Nothing, after a beginning or an end that raised."""
        if self._begun:
            self._begun = False
            with _leaving(self.pool):
                self.failed[-1].capture_end()
            self.pieces.append(self.failed.pop())


class CudaRecorder:
    """Records into CUDA graphs that share one memory pool.

    All graphs of a recorder draw their intermediates from the same pool: once one is captured, no tensor object holds
    its memory any more, and the next capture gets the same addresses. So the pool grows to what the largest needs, not
    to their sum; the price is that a replay overwrites what any other left there, and that only one forward may wait
    for its backward. Its outputs are read through tensors that alias their addresses without holding them. The pass
    before a capture draws from the pool too, once graphs hold it: a pass beside it would need as much again.

    Captures are local to this thread, so that the threads of data loaders and of NCCL may go on calling CUDA. A pass
    becomes one graph, or several where it is cut (:mod:`fastpack.cuda_graphs.pieces`).
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()  # without any, there is no such pool
        self._first = True
        self._under_way: _Capture | None = None
        self._last_stream: torch.cuda.Stream | None = None
        # A graph whose capture did not end stays referenced: the allocator may go on asking it whether it captures.
        self._failed: list[torch.cuda.CUDAGraph] = []

    def rejects(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"CUDA graphs need a CUDA device, not {device.type}"
        if torch.cuda.is_current_stream_capturing():
            return "someone else is capturing a graph"
        return None

    def clear(self) -> None:
        self._pool = None
        self._graphs = weakref.WeakSet()

    def cut(self) -> None:
        if self._under_way is not None:
            self._under_way.cut()

    def record(self, device: torch.device, forward: Forward, backward: Backward) -> Tape:
        failed = len(self._failed)
        with torch.cuda.device(device):
            try:
                # a backward is cut by the thread that began its capture; and so warmed up by it, since libraries have a
                # workspace for each thread
                with torch.autograd.set_multithreading_enabled(False):
                    return self._record(forward, backward)
            except RuntimeError as error:
                refusal = capture_problem(error)
                if refusal is None:
                    raise
                if len(self._failed) > failed:
                    self._recover()
                raise refusal from error

    def _recover(self) -> None:
        """After a capture that did not end: leave the pool and the stream, and make the random generator forget it.

        It refuses to work ("Offset increment outside graph capture") until the next capture that ends well.
        """
        self.clear()
        _recording_stream.cache_clear()
        with torch.cuda.stream(torch.cuda.Stream()):
            something = torch.zeros(1, device="cuda")
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            something.zero_()
            graph.capture_end()

    def _record(self, forward: Forward, backward: Backward) -> Tape:
        current = torch.cuda.current_stream()
        stream = _recording_stream(current.device_index)
        holders = list(self._graphs)
        pool = self._pool if holders else None
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream), contextlib.nullcontext() if pool is None else _drawing_from(pool):
                for left in reversed(range(FIRST_WARM_UPS if self._first else WARM_UPS)):
                    # the last one finds out what a capture would trip over, without its damage
                    with no_synchronisation() if left == 0 else contextlib.nullcontext():
                        backward(forward())
        finally:
            current.wait_stream(stream)
        if pool is None:
            _free_unused()
            pool = torch.cuda.graph_pool_handle()
        captured_forward, output = self._capture(forward, stream, pool)
        captured_backward, gradients = self._capture(lambda: backward(output), stream, pool)
        self._first, self._pool = False, pool
        self._graphs.update([*captured_forward, *captured_backward])
        device = output.device
        return Tape(
            _alias(output.detach()),
            [None if g is None else _alias(g) for g in gradients],
            lambda: self._replay(captured_forward, device),
            lambda: self._replay(captured_backward, device),
        )

    def _capture(
        self, run: Callable[[], Any], stream: torch.cuda.Stream, pool: Any
    ) -> tuple[list[torch.cuda.CUDAGraph], Any]:
        # torch.cuda.graph would leave its stream current where the end of a capture raises
        self._under_way = capture = _Capture(pool, self._failed)
        with torch.cuda.stream(stream):
            try:
                capture.begin()
                result = run()
            finally:
                self._under_way = None
                capture.end()
        return capture.pieces, result

    def _replay(self, pieces: Sequence[torch.cuda.CUDAGraph], device: torch.device) -> None:
        stream = torch.cuda.current_stream(device)
        if self._last_stream is not None and self._last_stream != stream:
            stream.wait_stream(self._last_stream)  # the graphs share memory
        self._last_stream = stream
        for graph in pieces:
            graph.replay()


@functools.cache
def _recording_stream(device_index: int) -> torch.cuda.Stream:
    """The one stream of a device on which everybody records: libraries keep a workspace (64 MB) for each they meet."""
    return torch.cuda.Stream(device_index)


def _free_unused() -> None:
    """What was freed is there for a capture to take."""
    torch.cuda.synchronize()
    gc.collect(1)  # a young cycle that holds memory of the pool would keep it from the next capture
    torch.cuda.empty_cache()


@contextlib.contextmanager
def _leaving(pool: Any) -> Iterator[None]:
    """A capture that does not begin or end well leaves its pool all the same.

    Otherwise the allocator takes it for under way for good: it waits for its end to take back what another stream used,
    and ``torch.cuda.empty_cache`` frees nothing any more.
    """
    try:
        yield
    except RuntimeError:
        with contextlib.suppress(RuntimeError):  # it was left, or never entered
            _leave(pool, torch.cuda.current_device())
        raise


@contextlib.contextmanager
def _drawing_from(pool: Any) -> Iterator[None]:
    """What this thread allocates on the current device comes from a pool that graphs hold, whose memory replays use.

    Raises:
        SpoiltError: something is still held at the end.
    """
    device = torch.cuda.current_device()
    before = _held_of(pool)
    # as torch.cuda.use_mem_pool does, which wants a pool that nobody holds by the end of its life
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
    failure: RuntimeError | None = None
    try:
        yield
    except RuntimeError as error:
        traceback.clear_frames(error.__traceback__)  # they hold what the pass was about to use
        failure = error
    finally:  # nobody replays behind Ctrl-C or another error of the user's, which go their way
        _leave(pool, device)
        _free_unused()
    if _held_of(pool) > before:
        raise SpoiltError("it keeps a tensor from one batch for the next ones") from failure
    if failure is not None:
        raise failure


def _leave(pool: Any, device: int) -> None:
    torch._C._cuda_endAllocateToPool(device, pool)
    torch._C._cuda_releasePool(device, pool)


def _held_of(pool: Any) -> int:
    """Bytes of a pool in tensors."""
    segments = torch.cuda.memory_snapshot(pool)
    return sum(b["size"] for s in segments for b in s["blocks"] if b["state"] == "active_allocated")


def capture_problem(error: BaseException) -> CaptureRefusedError | None:
    """What a capture, or the warm-up that forbids synchronisation, tripped over; None for any other error.

    An error inside a capture comes out as the one of its end, with the first one behind it.
    """
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__context__
    if any(isinstance(link, torch.OutOfMemoryError) for link in chain):
        return NoMemoryError("there is not enough memory to record it")
    codes = [getattr(link, "error_code", None) for link in chain]
    if any(code not in (None, 0) and code not in CAPTURE_ERRORS for code in codes):
        return None  # the device itself is in trouble
    for link, code in zip(reversed(chain), reversed(codes), strict=True):
        text = str(link).partition("\n")[0]
        if isinstance(link, RuntimeError) and "called a synchronizing CUDA operation" in text:
            return CaptureRefusedError("its forward or backward waits for the device")
        capturing = "captur" in text.lower() and ("CUDA" in text or "stream" in text)
        if code in CAPTURE_ERRORS or (isinstance(link, RuntimeError) and code is None and capturing):
            return CaptureRefusedError(f"it can't be captured ({text})")
    return None


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    """Whatever waits for the device raises a RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class _Address:
    """Bytes on the device, as ``torch.as_tensor`` reads them: without owning them."""

    def __init__(self, tensor: Tensor) -> None:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (extent * tensor.element_size(),),
            "typestr": "|u1",
            "strides": None,
            "version": 2,
        }


def _alias(tensor: Tensor) -> Tensor:
    """The same memory without a reference to it."""
    if tensor.numel() == 0:
        return tensor.detach()
    raw: Tensor = torch.as_tensor(_Address(tensor), device=tensor.device)
    return raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
