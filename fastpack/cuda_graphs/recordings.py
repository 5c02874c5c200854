"""The recordings of one stack: which serves a batch, when another is made, what gives way where memory is short."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import torch

from fastpack.cuda_graphs.recorder import CaptureRefusedError, NoMemoryError, Recorder, SpoiltError
from fastpack.cuda_graphs.step import Buffers, RecordedStep, Request
from fastpack.packing.buckets import Bucket

NO_ROOM = "there are as many recordings as are kept"
TOO_LARGE = "there was not enough memory to record as many tokens"
NO_MEMORY = "there is not enough memory to keep recordings beside its largest batches"
FORGET_AFTER = 2000
"""Batches after which each counts half."""
MOST_DROPS, FEW_BATCHES = 4, 200
"""How often all recordings may give way to a batch that needs their memory, each time within so many batches of the
time before, until there are none any more."""


@dataclass(frozen=True)
class GraphSettings:
    """When to record.

    Attributes:
        record_after: while recordings of larger sizes serve, how many tokens one of a batch's own sizes would have
            saved since the last was made, over all batches that it would have held, before it is made too; in multiples
            of its tokens. Without a recording that serves, one is made at first sight. Recording takes the time of
            three steps of an 8B model, and of ten of a 0.5B model, whose passes wait for the host; tokens of
            bucket padding take about half of that of others, a tenth where products leave them out.
        first_steps: how many values between two powers of two there are for the tokens of a recording that is made at
            first sight, which others will come to use; those of a batch's own sizes are 16.
        max_recordings: how many are kept; once there are so many, sizes have to come twice as often as the one used
            least was, to take its place.
        roomy: how many times the tokens of its own sizes a batch may be replayed with.
        roomy_left_out: the same by a recording that leaves bucket padding out of its products.
        max_work: floating-point operations in a layer, forward and backward, above which launching is no longer what
            a step waits for. A layer of 60 to 100 launches keeps a host busy for 2 to 7 ms, forward and backward
            (measured), in which an H200 does 1.4e12 to 5e12.
        max_changes: how often modules or weights may be replaced, each time within ``max_changes`` x 10 batches of the
            time before, until recording is given up.
    """

    record_after: float = 4.0
    first_steps: int = 4
    max_recordings: int = 32
    roomy: float = 1.5
    roomy_left_out: float = 2.0
    max_work: float = 5e12
    max_changes: int = 8

    def roomy_for(self, step: RecordedStep) -> float:
        """How much roomier than a batch this one may be."""
        return self.roomy_left_out if step.leaves_out_bucket_padding else self.roomy


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

    Where that is too small for another beside them, a roomier one goes on serving. If there is none, all give way: to
    an attempt to record the batch alone, and if that fails to the batch itself, which runs as it is. Smaller sizes are
    then recorded anew; what did not fit is not tried again until modules or weights are replaced.

    Attributes:
        steps: by what they are of.
    """

    steps: dict[Key, RecordedStep] = field(default_factory=dict)
    _sightings: Counter[Key] = field(default_factory=Counter)  # of batches' own sizes
    _served: Counter[Key] = field(default_factory=Counter)  # by each recording, and what had come before it was made
    _wasted: Counter[Key] = field(default_factory=Counter)
    _too_large: dict[Circumstances, int] = field(default_factory=dict)
    _crowded: set[Key] = field(default_factory=set)  # did not fit beside others
    _drops: int = 0
    _since_drop: int = 0
    _buffers: Buffers = field(default_factory=Buffers)

    def serve(self, request: Request, known: Circumstances, settings: GraphSettings, recorder: Recorder) -> Found:
        """What serves this batch, made now if it is time to.

        Raises:
            CaptureRefusedError: in these circumstances nothing can be recorded, or no longer kept.
        """
        key = (request.bucket, known)
        self._see(key)
        if key in self.steps:
            return self._used(key)
        roomy = self._roomy(request, known, settings)
        if roomy is None:
            return self._first(request, known, settings, recorder)
        worth = self._waste(key, roomy[0]) >= settings.record_after * request.bucket.tokens
        if worth and key not in self._crowded and self._has_room(key, settings):
            if found := self._try(request, known, settings, recorder):
                return found
            self._crowded.add(key)
        return self._used(roomy)

    def forget(self, known: Circumstances, recorder: Recorder) -> None:
        """Drop what was recorded in these circumstances: nobody will ask for it again."""
        self.steps = {key: step for key, step in self.steps.items() if key[1] is not known}
        if not self.steps:
            self._release(recorder)

    def _first(self, request: Request, known: Circumstances, settings: GraphSettings, recorder: Recorder) -> Found:
        """The same for sizes that no recording serves."""
        own = request.bucket
        limit = self._too_large.get(known, own.tokens + 1)
        if own.tokens < limit:
            if not self._has_room((own, known), settings):
                return Found(reason=NO_ROOM)
            wider = Bucket.of(request.packed.lengths, steps=settings.first_steps)
            if own.tokens < wider.tokens and (known not in self._too_large or wider.tokens < limit):
                if found := self._try(replace(request, bucket=wider), known, settings, recorder):
                    return found
                if not self.steps:
                    self._too_large[known] = wider.tokens
            if found := self._try(request, known, settings, recorder):
                return found
            if self.steps:
                self._give_way(recorder)
                if found := self._try(request, known, settings, recorder):
                    return found
            self._too_large[known] = own.tokens
        self._give_way(recorder)
        return Found(reason=TOO_LARGE)

    def _used(self, key: Key, *, made: bool = False) -> Found:
        self._served[key] += 1
        return Found(self.steps[key], made)

    def _roomy(self, request: Request, known: Circumstances, settings: GraphSettings) -> Key | None:
        """The smallest recording that serves sizes not its own."""
        fitting = [
            (bucket, of)
            for (bucket, of), step in self.steps.items()
            if of is known
            and bucket.tokens <= request.bucket.tokens * settings.roomy_for(step)
            and bucket.holds(request.packed.lengths)
        ]
        return min(fitting, key=_tokens, default=None)

    def _try(self, request: Request, known: Circumstances, settings: GraphSettings, recorder: Recorder) -> Found | None:
        """A recording of the request's sizes, beside what is there; None where there is not enough memory."""
        alike = next((step for (_, of), step in self.steps.items() if of is known), None)
        try:
            step = RecordedStep(request, recorder, self._buffers, alike)
        except (NoMemoryError, torch.OutOfMemoryError):
            if not self.steps:
                self._release(recorder)
            return None
        except SpoiltError:
            self.steps = {}
            self._release(recorder)
            raise
        if len(self.steps) >= settings.max_recordings:
            del self.steps[self._rarest()]
        key = (request.bucket, known)
        self.steps[key] = step
        self._served[key] = self._sightings[Bucket.of(request.packed.lengths), known] - 1
        self._wasted.clear()  # what others waste from here on, they waste beside this one
        return self._used(key, made=True)

    def _give_way(self, recorder: Recorder) -> None:
        """Drop everything, for a batch that needs the memory; too often in a short while, for good."""
        if not self.steps:
            return
        self.steps = {}
        self._release(recorder)
        self._drops = self._drops + 1 if self._since_drop < FEW_BATCHES else 1
        self._since_drop = 0
        if self._drops >= MOST_DROPS:
            raise CaptureRefusedError(NO_MEMORY)

    def _release(self, recorder: Recorder) -> None:
        self._wasted.clear()
        self._crowded.clear()
        self._buffers = Buffers()
        recorder.clear()

    def _has_room(self, key: Key, settings: GraphSettings) -> bool:
        """Whether there may be one more, or these sizes come so often that they may take the rarest one's place."""
        return len(self.steps) < settings.max_recordings or self._sightings[key] >= 2 * self._served[self._rarest()]

    def _rarest(self) -> Key:
        return min(self.steps, key=self._served.__getitem__)

    def _waste(self, key: Key, roomy: Bucket) -> int:
        """Tokens that a recording of these sizes would have saved, now that ``roomy`` serves a batch of them too."""
        own, known = key
        for seen, of in self._sightings:
            holds = seen.max_seqlen >= own.max_seqlen and seen.sequences >= own.sequences
            if of is known and holds and own.tokens <= seen.tokens < roomy.tokens:
                self._wasted[seen, of] += roomy.tokens - seen.tokens
        return self._wasted[key]

    def _see(self, key: Key) -> None:
        self._since_drop += 1
        self._sightings[key] += 1
        if self._sightings.total() >= FORGET_AFTER:  # what came long ago counts less and less
            self._sightings, self._served = _halved(self._sightings), _halved(self._served)


def _halved(counts: Counter[Key]) -> Counter[Key]:
    return Counter({key: count // 2 for key, count in counts.items() if count > 1})


def _tokens(key: Key) -> int:
    return key[0].tokens
