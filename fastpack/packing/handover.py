"""The handover of a batch's packing from the module that reads it to a module inside it, past modules that drop it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from fastpack.packing.seqlens import PackedSeqLens


@dataclass(frozen=True, eq=False)
class EnteredBatch:
    """The batch that a composite model was entered with, for the text model inside it.

    Attributes:
        packed: the batch's packing; None if the stock forward runs.
        ids: the composite's ``input_ids [B, S]``, from which, with images, it makes the embeddings of its text model;
            None if these may come from elsewhere, or inputs train.
    """

    packed: PackedSeqLens | None
    ids: Tensor | None = None


class Turn:
    """A lock that threads take in turn, and one thread more than once. A copy or a pickle is a lock of its own."""

    def __init__(self) -> None:
        """Set up the lock."""
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        """Wait for the turn."""
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        """End the turn."""
        self._lock.release()

    def __reduce__(self) -> tuple[type[Turn], tuple[()]]:
        """Pickle or copy a lock that nobody holds."""
        return Turn, ()


class Handover(threading.local):
    """Hands a batch's packing down inside one patched model. Each thread has its own batch.

    A head offers the packing that it read to the module that it calls. A composite model hands the batch that it was
    entered with to its text model.

    Attributes:
        entered: the batch of the composite that is running, or None.
        images: for each time that the running composite has computed features of images, the number of the image that
            each of its tokens shows, equal for equal images; None where it is unknown.
    """

    def __init__(self) -> None:
        """Set up without a batch, once in each thread, with all attributes that a compiler looks for."""
        self.entered: EnteredBatch | None = None
        self.images: list[list[int] | None] = []
        self._offered: tuple[Tensor, PackedSeqLens] | None = None

    def __deepcopy__(self, memo: object) -> Handover:
        """Return an empty handover: a copied model hands over its own batches."""
        return Handover()

    def __reduce__(self) -> tuple[type[Handover], tuple[()]]:
        """Pickle an empty handover."""
        return Handover, ()

    @property
    def is_pending(self) -> bool:
        """True if an offer was not taken yet."""
        return self._offered is not None

    def offer(self, source: Tensor, packed: PackedSeqLens) -> None:
        """Keep the packing that a head has read, for a call with this ``source`` (ids or embeddings)."""
        self._offered = (source, packed)

    @contextmanager
    def offering(self, source: Tensor, packed: PackedSeqLens) -> Iterator[None]:
        """Offer a packing until a head's forward ends, also by an exception."""
        self.offer(source, packed)
        try:
            yield
        finally:
            self._offered = None

    def take(self, source: Tensor | None) -> PackedSeqLens | None:
        """Return the packing that the head offered for these ids or embeddings, or None, and forget it."""
        offered, self._offered = self._offered, None
        return offered[1] if offered is not None and offered[0] is source else None

    @contextmanager
    def entering(self, batch: EnteredBatch) -> Iterator[None]:
        """Hand this batch to the text model until the composite's forward ends."""
        before, self.entered = (self.entered, self.images), batch
        self.images = []
        try:
            yield
        finally:
            self.entered, self.images = before
