"""The recordings of one stack: which serves a batch, when another is made, what gives way where memory is short."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import torch

from fastpack.graphs.recorder import CaptureRefusedError, NoMemoryError, Recorder
from fastpack.graphs.step import Buffers, RecordedStep, Request
from fastpack.packing import Bucket

NO_ROOM = "there are as many recordings as are kept"
TOO_LARGE = "there was not enough memory to record as many tokens"
NO_MEMORY = "there is not enough memory to keep recordings beside its largest batches"
FORGET_AFTER = 2000
"""Batches after which each counts half."""
MOST_DROPS = 4
"""How often all recordings may give way to a batch that needs their memory, until there are none any more."""


@dataclass(frozen=True)
class GraphSettings:
    """When to record.

    Attributes:
        record_after: while recordings of slightly larger sizes serve, how many tokens one of a batch's own sizes would
            have saved since the last was made, over all batches that it would have held, before it is made too; in
            multiples of its tokens. Without a recording that serves, one is made at first sight. Recording takes about
            three steps' time, and tokens of a tail about half of that of others.
        first_steps: how many values between two powers of two there are for the tokens of a recording that is made at
            first sight, which others will come to use; those of a batch's own sizes are 16.
        max_recordings: how many are kept; once there are so many, sizes have to come twice as often as those that came
            least often to take their place.
        roomy: how many times the tokens of its own sizes a batch may be replayed with.
        max_work: floating-point operations in a layer, forward and backward, above which launching is no longer what
            a step waits for. A layer of 60 to 100 launches keeps a host busy for 2 to 7 ms, forward and backward
            (measured), in which an H200 does 1.4e12 to 5e12.
        max_changes: how often modules or weights may be replaced, each time within ``max_changes`` x 10 batches of the
            time before, until recording is given up.
    """

    record_after: float = 1.0
    first_steps: int = 4
    max_recordings: int = 32
    roomy: float = 1.25
    max_work: float = 5e12
    max_changes: int = 8


@dataclass(frozen=True, eq=False)
class Circumstances:
    """What the stack is like, apart from sizes: why it can't be recorded so (or None), and its work for a token."""

    reason: str | None
    work: float


Key = tuple[Bucket, Circumstances]
"""What a recording is of."""


@dataclass(frozen=True)
class Found:
    """What serves a batch: a recording, which may have been made for it; or why none does."""

    step: RecordedStep | None = None
    made: bool = False
    reason: str | None = None


@dataclass(eq=False)
class Recordings:
    """All of them, and what is known of sizes. They share the recorder's memory.

    Where that is too small for another, a roomier one goes on serving. If there is none, all give way: to an attempt to
    record the batch alone, or to the batch itself, which runs as it is. Smaller sizes are then recorded anew; what did
    not fit is not tried again until modules or weights are replaced.

    Attributes:
        steps: by what they are of.
    """

    steps: dict[Key, RecordedStep] = field(default_factory=dict)
    _sightings: Counter[Key] = field(default_factory=Counter)
    _wasted: Counter[Key] = field(default_factory=Counter)
    _too_large: dict[Circumstances, int] = field(default_factory=dict)
    _drops: int = 0
    _buffers: Buffers = field(default_factory=Buffers)

    def find(self, request: Request, known: Circumstances, settings: GraphSettings, recorder: Recorder) -> Found:
        """What serves this batch, made now if it is time to.

        Raises:
            CaptureRefusedError: in these circumstances nothing can be recorded, or no longer kept.
        """
        bucket, packed = request.bucket, request.packed
        key = (bucket, known)
        self._see(key)
        step = self.steps.get(key)
        if step is not None:
            return Found(step)
        alike = [found for (_, of), found in self.steps.items() if of is known]
        large = settings.roomy * bucket.tokens
        fitting = [found for found in alike if found.bucket.tokens <= large and found.bucket.holds(packed.lengths)]
        roomy = min(fitting, key=_tokens, default=None)
        if roomy is not None and self._waste(key, roomy.bucket) < settings.record_after * bucket.tokens:
            return Found(roomy)
        reason = self._why_not_now(key, settings)
        if reason is None:
            first = bucket if roomy is not None else Bucket.of(packed.lengths, steps=settings.first_steps)
            step = self._try(replace(request, bucket=first), recorder, alike[0] if alike else None)
            if step is None and roomy is None and (self.steps or first != bucket):
                del alike, fitting  # or they would live on
                self._give_way(recorder)
                step = self._try(request, recorder, None)
            if step is not None:
                self._keep((step.bucket, known), step, settings)
                return Found(step, made=True)
            self._too_large[known] = bucket.tokens
            reason = TOO_LARGE
        if roomy is not None:
            return Found(roomy)
        if reason == TOO_LARGE:
            self._give_way(recorder)
        return Found(reason=reason)

    def _try(self, request: Request, recorder: Recorder, like_this: RecordedStep | None) -> RecordedStep | None:
        """A recording of this batch's sizes; None where there is not enough memory."""
        try:
            return RecordedStep(request, recorder, self._buffers, like_this)
        except (NoMemoryError, torch.OutOfMemoryError):
            return None

    def _keep(self, key: Key, step: RecordedStep, settings: GraphSettings) -> None:
        if len(self.steps) >= settings.max_recordings:
            del self.steps[self._rarest()]
        self.steps[key] = step
        self._wasted.clear()  # what others waste from here on, they waste beside this one

    def _give_way(self, recorder: Recorder) -> None:
        if not self.steps:
            return
        self.steps.clear()
        self._wasted.clear()
        self._buffers = Buffers()
        recorder.clear()
        self._drops += 1
        if self._drops >= MOST_DROPS:
            raise CaptureRefusedError(NO_MEMORY)

    def _why_not_now(self, key: Key, settings: GraphSettings) -> str | None:
        """Why sizes may not be recorded now."""
        bucket, known = key
        if bucket.tokens >= self._too_large.get(known, bucket.tokens + 1):
            return TOO_LARGE
        full = len(self.steps) >= settings.max_recordings
        return NO_ROOM if full and self._sightings[key] < 2 * self._sightings[self._rarest()] else None

    def _rarest(self) -> Key:
        return min(self.steps, key=self._sightings.__getitem__)

    def _waste(self, key: Key, roomy: Bucket) -> int:
        """Tokens that a recording of these sizes would have saved, now that ``roomy`` serves a batch of them too."""
        own, known = key
        for seen, of in self._sightings:
            holds = seen.max_seqlen >= own.max_seqlen and seen.sequences >= own.sequences
            if of is known and holds and own.tokens <= seen.tokens < roomy.tokens:
                self._wasted[seen, of] += roomy.tokens - seen.tokens
        return self._wasted[key]

    def _see(self, key: Key) -> None:
        self._sightings[key] += 1
        if self._sightings.total() >= FORGET_AFTER:  # what came long ago counts less and less
            self._sightings = Counter({seen: count // 2 for seen, count in self._sightings.items() if count > 1})


def _tokens(step: RecordedStep) -> int:
    return step.bucket.tokens
