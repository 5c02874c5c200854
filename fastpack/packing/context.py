"""The packing of the batch that is being run, for modules that no keyword reaches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from fastpack.errors import PatchError
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.utils.hooks import WrappedCheckpointing
from fastpack.utils.thread_scope import ThreadScope

Checkpointed = Sequence[tuple[nn.Module, Callable[..., Any]]]
"""Modules that are checkpointed, each with its checkpoint function."""


class PackingContext(ThreadScope):
    """The packing of a patched model whose modules drop keywords.

    Each thread has its own batch. Checkpointed layers run again in the backward pass, when other forwards may have
    begun, so each layer gets the packing of its own forward. A copy of a layer or a model shares the context: PEFT's
    ``modules_to_save`` trains a copy of a layer, which has to find the packing too.

    Attributes:
        packed: the packing that the backbone runs on; None outside its forward.
    """

    def __init__(self) -> None:
        """Set up without a batch, once in each thread, with all attributes that a compiler looks for."""
        self.packed: PackedSeqLens | None = None
        self._in_rows = False

    @contextmanager
    def around(self, backbone: nn.Module, packed: PackedSeqLens) -> Iterator[None]:
        """Keep this packing while a backbone's forward runs."""
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
        # in a backward these may differ from `checkpointed`: offloading sets its own functions during the forward
        current = [(module, module.__dict__[_CHECKPOINT]) for module, _ in checkpointed]
        try:
            for module, function in checkpointed:
                kept = functools.partial(self._checkpoint, packed, checkpointed, function)
                setattr(module, _CHECKPOINT, WrappedCheckpointing(function, kept))
            yield
        finally:
            self.packed = before
            for module, function in current:
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
            again = self.packed is not packed  # in the backward: checkpointed layers in this one need it too
            with self._running(packed, checkpointed) if again else nullcontext():
                return function(*args, **kwargs)

        return checkpoint(run, *args, **kwargs)

    @contextmanager
    def in_rows(self) -> Iterator[None]:
        """Hide the packing from modules that are called on rows of one sequence each, and so need no packing."""
        self._in_rows = True
        try:
            yield
        finally:
            self._in_rows = False

    def required(self, module: nn.Module) -> PackedSeqLens | None:
        """Return the packing for this module, or None if the stock path runs.

        Raises:
            PatchError: the module runs again in a backward pass, and its batch is unknown, since the checkpointing is
                not transformers' own.
        """
        if self._in_rows:
            return None
        if self.packed is None and torch._C._current_graph_task_id() != -1:
            raise PatchError(
                f"{type(module).__name__} runs again in the backward pass, and its packing is no longer known. Use "
                "model.gradient_checkpointing_enable(), which keeps the packing for each layer, instead of a wrapper "
                "around layers; or checkpoint around the whole model."
            )
        return self.packed


_CHECKPOINT = "_gradient_checkpointing_func"
