"""Record a forward and a backward pass as CUDA graphs; no other module of this package talks to the device.

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
"""Warm-up passes before a recorder's first recording and before later ones.

In the first ones, libraries still choose their kernels.
"""

CAPTURE_ERRORS = range(900, 909)
"""cudaErrorStreamCaptureUnsupported to cudaErrorStreamCaptureWrongThread."""


class CaptureRefusedError(Exception):
    """This forward can't be recorded; the message says why. Nothing was changed, and the forward runs eagerly."""


class NoMemoryError(CaptureRefusedError):
    """There was too little memory to record. A recording needs more memory than the step, which may still run."""


class GraphPoolError(CaptureRefusedError):
    """The pass keeps tensors in memory that replays overwrite, so no recording may be replayed again."""


Forward = Callable[[], list[Tensor]]
Backward = Callable[[list[Tensor]], Sequence[Tensor | None]]


@dataclass(eq=False)
class CapturedPass:
    """A recorded forward and backward pass.

    Attributes:
        outputs: the forward's outputs, valid from ``replay_forward`` until anything else is replayed.
        gradients: the backward's results, valid from ``replay_backward`` until anything else is replayed.
        replay_forward: runs the forward again on the current contents of its inputs.
        replay_backward: runs the backward of the last ``replay_forward``. It may run once only, since it overwrites
            what that forward saved.
    """

    outputs: list[Tensor]
    gradients: list[Tensor | None]
    replay_forward: Callable[[], None]
    replay_backward: Callable[[], None]


class Recorder(Protocol):
    """The interface of a recorder. Tests use one that needs no GPU."""

    def rejects(self, device: torch.device) -> str | None:
        """Return why nothing can be recorded or replayed on a device at this moment, or None."""

    def record(self, device: torch.device, forward: Forward, backward: Backward) -> CapturedPass:
        """Warm up a pass over static inputs, then record it.

        Args:
            device: the device of the inputs.
            forward: returns the outputs, with their autograd graph.
            backward: takes the outputs and returns the gradients.

        Raises:
            CaptureRefusedError: the pass does something that can't be recorded, such as waiting for the device.
            NoMemoryError: the pass took too much memory.
            GraphPoolError: no recording of this recorder may be replayed again.
        """

    def cut(self) -> None:
        """End a piece of the pass that is being recorded and begin the next; do nothing if none is being recorded."""

    def clear(self) -> None:
        """Release the memory that recordings share, after all of them were dropped."""


@dataclass(eq=False)
class _Capture:
    """A pass that is being captured into graphs, piece by piece.

    Attributes:
        unfinished: holds a piece's graph until its capture has ended.
        pieces: the graphs whose captures have ended.
    """

    pool: Any
    unfinished: list[torch.cuda.CUDAGraph]
    pieces: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    _begun: bool = False

    def begin(self) -> None:
        """Begin the capture of a piece."""
        graph = torch.cuda.CUDAGraph()
        self.unfinished.append(graph)
        with _leaving_pool_on_error(self.pool):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        self._begun = True

    def cut(self) -> None:
        """End a piece and begin the next one, if one has begun."""
        if self._begun:
            self.end()
            self.begin()

    def end(self) -> None:
        """End the current piece; do nothing if beginning or ending it has raised."""
        if self._begun:
            self._begun = False
            with _leaving_pool_on_error(self.pool):
                self.unfinished[-1].capture_end()
            self.pieces.append(self.unfinished.pop())


class CudaRecorder:
    """Records into CUDA graphs that share one memory pool.

    All graphs of a recorder allocate their intermediates from the same pool. Once a graph is captured, no tensor object
    holds its memory any more, and the next capture gets the same addresses. So the pool grows to the largest
    recording's needs, not to the sum of all. The price: a replay overwrites the results of every other one, and only
    one forward may wait for its backward. Outputs are read through tensors that alias their addresses without holding
    them. The warm-up before a capture allocates from the pool too, once graphs hold it; otherwise it would need as much
    memory again.

    Captures are local to this thread, so that the threads of data loaders and of NCCL may go on calling CUDA. A pass
    becomes one graph, or several if it is cut (:mod:`fastpack.cuda_graphs.pieces`).
    """

    def __init__(self) -> None:
        """Set up a recorder without a pool."""
        self._pool: Any = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()  # while this is empty, no pool exists
        self._first = True
        self._current_capture: _Capture | None = None
        self._last_stream: torch.cuda.Stream | None = None
        # A graph whose capture did not end stays referenced: the allocator may still ask it whether it captures.
        self._unfinished: list[torch.cuda.CUDAGraph] = []

    def rejects(self, device: torch.device) -> str | None:
        """Return why nothing can be recorded or replayed on a device at this moment, or None."""
        if device.type != "cuda":
            return f"CUDA graphs need a CUDA device, not {device.type}"
        if torch.cuda.is_current_stream_capturing():
            return "other code is capturing a graph"
        return None

    def clear(self) -> None:
        """Forget the pool, after all recordings were dropped."""
        self._pool = None
        self._graphs = weakref.WeakSet()

    def cut(self) -> None:
        """End a piece of the pass that is being recorded and begin the next; do nothing if none is being recorded."""
        if self._current_capture is not None:
            self._current_capture.cut()

    def record(self, device: torch.device, forward: Forward, backward: Backward) -> CapturedPass:
        """Warm up a pass over static inputs, then record it: see :meth:`Recorder.record`."""
        unfinished = len(self._unfinished)
        with torch.cuda.device(device):
            try:
                # The thread that begins the capture of a backward also has to cut it. It runs the warm-up too, since
                # libraries have a workspace for each thread.
                with torch.autograd.set_multithreading_enabled(False):
                    return self._record(forward, backward)
            except RuntimeError as error:
                refusal = capture_problem(error)
                if refusal is None:
                    raise
                if len(self._unfinished) > unfinished:
                    self._recover()
                raise refusal from error

    def _recover(self) -> None:
        """Leave the pool and the stream of a capture that did not end, and reset the random generator.

        The generator refuses to work ("Offset increment outside graph capture") until the next capture that ends well.
        So this captures an empty graph.
        """
        self.clear()
        _recording_stream.cache_clear()
        with torch.cuda.stream(torch.cuda.Stream()):
            tensor = torch.zeros(1, device="cuda")
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            tensor.zero_()
            graph.capture_end()

    def _record(self, forward: Forward, backward: Backward) -> CapturedPass:
        current = torch.cuda.current_stream()
        stream = _recording_stream(current.device_index)
        holders = list(self._graphs)
        pool = self._pool if holders else None
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream), contextlib.nullcontext() if pool is None else _allocating_from(pool):
                for left in reversed(range(FIRST_WARM_UPS if self._first else WARM_UPS)):
                    # The last warm-up finds what would break a capture, without the damage of a broken capture.
                    with no_synchronisation() if left == 0 else contextlib.nullcontext():
                        backward(forward())
        finally:
            current.wait_stream(stream)
        if pool is None:
            _empty_cache()
            pool = torch.cuda.graph_pool_handle()
        captured_forward, outputs = self._capture(forward, stream, pool)
        captured_backward, gradients = self._capture(lambda: backward(outputs), stream, pool)
        self._first, self._pool = False, pool
        self._graphs.update([*captured_forward, *captured_backward])
        device = outputs[0].device
        return CapturedPass(
            [_alias(output.detach()) for output in outputs],
            [None if g is None else _alias(g) for g in gradients],
            lambda: self._replay(captured_forward, device),
            lambda: self._replay(captured_backward, device),
        )

    def _capture(
        self, run: Callable[[], Any], stream: torch.cuda.Stream, pool: Any
    ) -> tuple[list[torch.cuda.CUDAGraph], Any]:
        # torch.cuda.graph would leave its stream current if the end of a capture raises.
        self._current_capture = capture = _Capture(pool, self._unfinished)
        with torch.cuda.stream(stream):
            try:
                capture.begin()
                result = run()
            finally:
                self._current_capture = None
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
    """Return the device's only stream for recordings.

    Libraries keep a workspace (64 MB) for each stream on which they run, so all recorders share one.
    """
    return torch.cuda.Stream(device_index)


def _empty_cache() -> None:
    """Return freed memory to the device, where a capture can allocate it."""
    torch.cuda.synchronize()
    gc.collect(1)  # a young cycle may hold memory of the pool, which the next capture needs
    torch.cuda.empty_cache()


@contextlib.contextmanager
def _leaving_pool_on_error(pool: Any) -> Iterator[None]:
    """Leave the pool if the beginning or the end of a capture raises.

    Otherwise the allocator believes for good that a capture is under way: it defers freeing memory that another stream
    used, and ``torch.cuda.empty_cache`` frees nothing any more.
    """
    try:
        yield
    except RuntimeError:
        with contextlib.suppress(RuntimeError):  # the pool was left already, or never entered
            _end_allocation(pool, torch.cuda.current_device())
        raise


@contextlib.contextmanager
def _allocating_from(pool: Any) -> Iterator[None]:
    """Let this thread allocate on the current device from a pool that graphs hold, whose memory replays overwrite.

    Raises:
        GraphPoolError: a tensor in the pool outlives the context.
    """
    device = torch.cuda.current_device()
    before = _active_bytes(pool)
    # torch.cuda.use_mem_pool does the same, but requires that nothing holds the pool at its end.
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
    failure: RuntimeError | None = None
    try:
        yield
    except RuntimeError as error:
        traceback.clear_frames(error.__traceback__)  # frames hold tensors of the pass
        failure = error
    finally:  # Ctrl-C and other errors of the user pass through: nothing is replayed after them
        _end_allocation(pool, device)
        _empty_cache()
    if _active_bytes(pool) > before:
        raise GraphPoolError("it keeps a tensor from one batch for the next ones") from failure
    if failure is not None:
        raise failure


def _end_allocation(pool: Any, device: int) -> None:
    """Stop allocating from a pool and give up the reference to it."""
    torch._C._cuda_endAllocateToPool(device, pool)
    torch._C._cuda_releasePool(device, pool)


def _active_bytes(pool: Any) -> int:
    """Return the number of bytes of a pool that tensors hold."""
    segments = torch.cuda.memory_snapshot(pool)
    return sum(b["size"] for s in segments for b in s["blocks"] if b["state"] == "active_allocated")


def capture_problem(error: BaseException) -> CaptureRefusedError | None:
    """Return the refusal that stands for an error of a capture or of its warm-up, or None for any other error.

    An error inside a capture surfaces as an error of the capture's end, with the first error as its context.
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
        return None  # the device itself has failed
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
    """Raise a RuntimeError in the body wherever it waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class _Address:
    """Bytes on the device, in the form that ``torch.as_tensor`` reads without owning them."""

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
    """Return a tensor over the same memory that holds no reference to it."""
    if tensor.numel() == 0:
        return tensor.detach()
    raw: Tensor = torch.as_tensor(_Address(tensor), device=tensor.device)
    return raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
