"""The recordings of one stack: which one serves a batch, when to make another, which to drop when memory is short."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import torch

from fastpack.cuda_graphs.recorder import CaptureRefusedError, GraphPoolError, NoMemoryError, Recorder
from fastpack.cuda_graphs.step import RecordedStep, Request, StaticBuffers
from fastpack.packing.buckets import Bucket

RECORDINGS_FULL = "the maximum number of recordings is reached"
TOO_LARGE = "there was not enough memory to record this many tokens"
NO_MEMORY = "there is not enough memory to keep recordings beside its largest batches"
FORGET_AFTER = 2000
"""Batches after which all counts are halved."""
MAX_DROPS, DROP_WINDOW = 4, 200
"""Recording ends once all recordings were dropped ``MAX_DROPS`` times for a batch that needed their memory.

A drop counts if it comes within ``DROP_WINDOW`` batches of the one before.
"""


@dataclass(frozen=True)
class GraphSettings:
    """Settings that decide when to record.

    Attributes:
        record_after: how much a recording of a batch's own sizes must save, while a larger recording serves them,
            before it is made: this many times its own tokens. The savings are summed over the batches that it could
            have served since the last recording was made. If no recording serves a batch, one is made at first sight.
            Recording takes the time of three steps of an 8B model, and of ten of a 0.5B model, whose passes wait for
            the host. A token of bucket padding takes about half of the time of a real one, and a tenth if matmuls leave
            it out.
        first_steps: the number of steps between two powers of two. A recording made at first sight rounds its tokens up
            to such a step, since other batches will use it too. A batch's own sizes have 16 such steps.
        max_recordings: the largest number of recordings. Once it is reached, new sizes replace the least-used recording
            when they have occurred twice as often as it was used.
        max_oversize: the largest ratio of a recording's tokens to those of the batch's own sizes at which it may serve.
        max_oversize_left_out: the same for a recording whose matmuls leave bucket padding out.
        max_work: floating-point operations in a layer, forward and backward, above which a step no longer waits for
            launches. A layer of 60 to 100 launches keeps a host busy for 2 to 7 ms, forward and backward (measured). In
            this time an H200 does 1.4e12 to 5e12 operations.
        max_changes: the number of replacements of modules or weights after which recording is given up, if each comes
            within ``max_changes`` x 10 batches of the one before.
    """

    record_after: float = 4.0
    first_steps: int = 4
    max_recordings: int = 32
    max_oversize: float = 1.5
    max_oversize_left_out: float = 2.0
    max_work: float = 5e12
    max_changes: int = 8

    def max_oversize_for(self, step: RecordedStep) -> float:
        """Return the largest ratio of a recording's tokens to a batch's at which it may serve."""
        return self.max_oversize_left_out if step.leaves_out_bucket_padding else self.max_oversize


@dataclass(frozen=True, eq=False)
class StackState:
    """One state of the stack, independent of a batch's sizes.

    Attributes:
        reason: why the stack can't be recorded in this state, or None.
        work: floating-point operations of a token in an average layer.
    """

    reason: str | None
    work: float


CacheKey = tuple[Bucket, StackState]
"""The sizes of a recording and the state of the stack in it."""


@dataclass(frozen=True)
class Lookup:
    """The result of looking a batch up.

    Attributes:
        step: the recording that serves the batch, or None.
        new: whether it was recorded for this batch.
        reason: why none serves it, or None.
    """

    step: RecordedStep | None = None
    new: bool = False
    reason: str | None = None


@dataclass(eq=False)
class Recordings:
    """All recordings of a stack, and counts of the sizes of its batches. Recordings share the recorder's memory.

    If memory is too small for another recording besides the existing ones, a larger recording goes on serving. If no
    larger recording can serve, all are dropped and the batch is recorded alone. If that fails too, the batch runs
    eagerly, in the memory that was freed. Smaller sizes are recorded anew afterwards. Sizes that did not fit are not
    tried again until modules or weights are replaced.

    Attributes:
        steps: the recordings by cache key.
    """

    steps: dict[CacheKey, RecordedStep] = field(default_factory=dict)
    _batches: Counter[CacheKey] = field(default_factory=Counter)  # by their own sizes
    _uses: Counter[CacheKey] = field(default_factory=Counter)  # uses, and batches of its sizes before it was made
    _wasted_tokens: Counter[CacheKey] = field(default_factory=Counter)
    _too_large: dict[StackState, int] = field(default_factory=dict)
    _did_not_fit: set[CacheKey] = field(default_factory=set)  # together with the other recordings
    _drops: int = 0
    _since_drop: int = 0
    _buffers: StaticBuffers = field(default_factory=StaticBuffers)

    def serve(self, request: Request, state: StackState, settings: GraphSettings, recorder: Recorder) -> Lookup:
        """Return the recording that serves a batch, after making it if it is worth making; or why there is none.

        Raises:
            CaptureRefusedError: in this state nothing can be recorded, or recordings are no longer kept.
        """
        key = (request.bucket, state)
        self._count_batch(key)
        if key in self.steps:
            return self._use(key)
        larger = self._find_larger(request, state, settings)
        if larger is None:
            return self._record_first(request, state, settings, recorder)
        worth = self._count_waste(key, larger[0]) >= settings.record_after * request.bucket.tokens
        if worth and key not in self._did_not_fit and self._has_room(key, settings):
            if lookup := self._try_recording(request, state, settings, recorder):
                return lookup
            self._did_not_fit.add(key)
        return self._use(larger)

    def forget(self, state: StackState, recorder: Recorder) -> None:
        """Drop the recordings of a state that will not be looked up again."""
        self.steps = {key: step for key, step in self.steps.items() if key[1] is not state}
        if not self.steps:
            self._release(recorder)

    def _record_first(self, request: Request, state: StackState, settings: GraphSettings, recorder: Recorder) -> Lookup:
        """Record for a batch that no recording serves, first in larger sizes that other batches can use."""
        own = request.bucket
        limit = self._too_large.get(state, own.tokens + 1)
        if own.tokens < limit:
            if not self._has_room((own, state), settings):
                return Lookup(reason=RECORDINGS_FULL)
            wider = Bucket.of(request.packed.lengths, steps=settings.first_steps)
            if own.tokens < wider.tokens and (state not in self._too_large or wider.tokens < limit):
                if lookup := self._try_recording(replace(request, bucket=wider), state, settings, recorder):
                    return lookup
                if not self.steps:
                    self._too_large[state] = wider.tokens
            if lookup := self._try_recording(request, state, settings, recorder):
                return lookup
            if self.steps:
                self._drop_all(recorder)
                if lookup := self._try_recording(request, state, settings, recorder):
                    return lookup
            self._too_large[state] = own.tokens
        self._drop_all(recorder)
        return Lookup(reason=TOO_LARGE)

    def _use(self, key: CacheKey, *, new: bool = False) -> Lookup:
        """Count a use of a recording and return it."""
        self._uses[key] += 1
        return Lookup(self.steps[key], new)

    def _find_larger(self, request: Request, state: StackState, settings: GraphSettings) -> CacheKey | None:
        """Return the key of the smallest recording of larger sizes that may serve a batch, or None."""
        fitting = [
            (bucket, of)
            for (bucket, of), step in self.steps.items()
            if of is state
            and bucket.tokens <= request.bucket.tokens * settings.max_oversize_for(step)
            and bucket.holds(request.packed.lengths)
        ]
        return min(fitting, key=_tokens, default=None)

    def _try_recording(
        self, request: Request, state: StackState, settings: GraphSettings, recorder: Recorder
    ) -> Lookup | None:
        """Record a batch and keep the existing recordings; return None if there is not enough memory."""
        template = next((step for (_, of), step in self.steps.items() if of is state), None)
        try:
            step = RecordedStep(request, recorder, self._buffers, template)
        except (NoMemoryError, torch.OutOfMemoryError):
            if not self.steps:
                self._release(recorder)
            return None
        except GraphPoolError:
            self.steps = {}
            self._release(recorder)
            raise
        if len(self.steps) >= settings.max_recordings:
            del self.steps[self._least_used()]
        key = (request.bucket, state)
        self.steps[key] = step
        self._uses[key] = self._batches[Bucket.of(request.packed.lengths), state] - 1
        self._wasted_tokens.clear()  # from here on, waste is counted against the new recording too
        return self._use(key, new=True)

    def _drop_all(self, recorder: Recorder) -> None:
        """Drop all recordings for a batch that needs their memory.

        Raises:
            CaptureRefusedError: this has happened too often in a short while.
        """
        if not self.steps:
            return
        self.steps = {}
        self._release(recorder)
        self._drops = self._drops + 1 if self._since_drop < DROP_WINDOW else 1
        self._since_drop = 0
        if self._drops >= MAX_DROPS:
            raise CaptureRefusedError(NO_MEMORY)

    def _release(self, recorder: Recorder) -> None:
        """Release the memory that recordings share."""
        self._wasted_tokens.clear()
        self._did_not_fit.clear()
        self._buffers = StaticBuffers()
        recorder.clear()

    def _has_room(self, key: CacheKey, settings: GraphSettings) -> bool:
        """Return whether a recording may be added, or these sizes are frequent enough to replace the least-used one."""
        return len(self.steps) < settings.max_recordings or self._batches[key] >= 2 * self._uses[self._least_used()]

    def _least_used(self) -> CacheKey:
        """Return the key of the recording with the fewest uses."""
        return min(self.steps, key=self._uses.__getitem__)

    def _count_waste(self, key: CacheKey, larger: Bucket) -> int:
        """Count the tokens that smaller recordings would have saved on this batch, which ``larger`` serves.

        Returns:
            The tokens that a recording of these sizes would have saved so far.
        """
        own, state = key
        for bucket, other in self._batches:
            holds = bucket.max_seqlen >= own.max_seqlen and bucket.sequences >= own.sequences
            if other is state and holds and own.tokens <= bucket.tokens < larger.tokens:
                self._wasted_tokens[bucket, other] += larger.tokens - bucket.tokens
        return self._wasted_tokens[key]

    def _count_batch(self, key: CacheKey) -> None:
        """Count a batch of these sizes; old counts lose weight."""
        self._since_drop += 1
        self._batches[key] += 1
        if self._batches.total() >= FORGET_AFTER:  # old batches lose weight
            self._batches, self._uses = _halved(self._batches), _halved(self._uses)


def _halved(counts: Counter[CacheKey]) -> Counter[CacheKey]:
    return Counter({key: count // 2 for key, count in counts.items() if count > 1})


def _tokens(key: CacheKey) -> int:
    return key[0].tokens
