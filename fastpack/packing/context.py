"""The packing of the batch that is under way, for modules that no keyword reaches."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.errors import PatchError
from fastpack.packing.seqlens import PackedSeqLens

Checkpointed = Sequence[tuple[nn.Module, Callable[..., Any]]]
"""Modules that are checkpointed, and what does it."""


class PackingContext(threading.local):
    """One for each patched model whose modules, or whose head, drop keywords; bound into its swapped forwards.

    Checkpointed layers run again in the backward pass, when other forwards may have begun: each is given the packing
    of its own forward. Each thread has its own batch under way. A copy of a layer or of a model shares it, so that a
    layer's copy, of which PEFT's ``modules_to_save`` trains one, finds the packing where the layer does.

    Attributes:
        packed: what the backbone runs on; None outside its forward.
    """

    def __init__(self) -> None:
        """Begin empty in each thread, with all attributes that a compiler looks for."""
        self.packed: PackedSeqLens | None = None
        self._offered: tuple[Tensor, PackedSeqLens] | None = None
        self._in_rows = False

    def __deepcopy__(self, memo: Any) -> PackingContext:
        return self

    def __reduce__(self) -> tuple[type[PackingContext], tuple[()]]:
        return PackingContext, ()  # a pickle holds no batch

    @contextmanager
    def offering(self, source: Tensor, packed: PackedSeqLens) -> Iterator[None]:
        """:meth:`offer` until a head's forward ends, however it does."""
        self.offer(source, packed)
        try:
            yield
        finally:
            self._offered = None

    def offer(self, source: Tensor, packed: PackedSeqLens) -> None:
        """Keep a head's reading of a batch for the backbone that will be given this ``source``, ids or embeddings."""
        self._offered = (source, packed)

    def take(self, source: Tensor | None) -> PackedSeqLens | None:
        """Return the packing that the head offered for these ids or embeddings, and forget it; None for none."""
        offered, self._offered = self._offered, None
        return offered[1] if offered is not None and offered[0] is source else None

    @contextmanager
    def around(self, backbone: nn.Module, packed: PackedSeqLens) -> Iterator[None]:
        """Hold this packing while a backbone's forward runs."""
        checkpointed = [
            module
            for module in backbone.modules()
            if module.training and getattr(module, "gradient_checkpointing", False) and _CHECKPOINT in module.__dict__
        ]
        with self._running(packed, [(module, module.__dict__[_CHECKPOINT]) for module in checkpointed]):
            yield

    @contextmanager
    def _running(self, packed: PackedSeqLens, checkpointed: Checkpointed) -> Iterator[None]:
        before, self.packed = self.packed, packed
        # in a backward others than those that do it, which somebody (offloading) may have lent for the forward
        found = [(module, module.__dict__[_CHECKPOINT]) for module, _ in checkpointed]
        try:
            for module, function in checkpointed:
                setattr(module, _CHECKPOINT, functools.partial(self._checkpoint, packed, checkpointed, function))
            yield
        finally:
            self.packed = before
            for module, function in found:
                setattr(module, _CHECKPOINT, function)

    def _checkpoint(
        self,
        packed: PackedSeqLens,
        checkpointed: Checkpointed,
        checkpoint: Callable[..., Any],
        function: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            again = self.packed is not packed  # in the backward; layers inside layers are checkpointed again
            with self._running(packed, checkpointed) if again else nullcontext():
                return function(*args, **kwargs)

        return checkpoint(run, *args, **kwargs)

    @contextmanager
    def in_rows(self) -> Iterator[None]:
        """Hide the packing from what a module calls that is run on one row a sequence: rows are boundaries enough."""
        self._in_rows = True
        try:
            yield
        finally:
            self._in_rows = False

    def required(self, module: nn.Module) -> PackedSeqLens | None:
        """The packing for this module, None where the stock path runs.

        Raises:
            PatchError: it is run again in a backward pass by a checkpointing that is not transformers' own, and
                nobody knows for which batch.
        """
        if self._in_rows:
            return None
        if self.packed is None and torch._C._current_graph_task_id() != -1:
            raise PatchError(
                f"{type(module).__name__} runs again in the backward pass, and its packing is not known any more. Use "
                "model.gradient_checkpointing_enable(), whose layers are given theirs, instead of a wrapper around "
                "layers; or checkpoint around the whole model."
            )
        return self.packed


_CHECKPOINT = "_gradient_checkpointing_func"
