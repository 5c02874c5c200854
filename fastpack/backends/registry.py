"""The table of attention backends.

A backend is a module with ``SERVES``, ``run(call)`` and ``rejects(shape)``; adding one is a file in this folder and a
row here, in the order in which ``auto`` asks. :data:`TRACED` names those that ``torch.compile`` knows, ``READ_LENGTHS``
in :mod:`fastpack.backends.custom_op` those that read lengths on the host; ``patch``'s docstring and README list all.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from torch import Tensor

from fastpack.backends import (
    flash_attn,
    flex,
    mem_efficient,
    reference,
    segments,
    torch_varlen,
    triton_packed,
    xformers,
)
from fastpack.backends.call import AttentionCall, AttentionShape


class Backend(Protocol):
    """The interface of a module in ``backends/``. Its docstring's first line says what the backend is."""

    __doc__: str | None

    @property
    def SERVES(self) -> Collection[str]:
        """Attributes of :class:`fastpack.backends.call.Visibility` that it follows."""

    def run(self, call: AttentionCall, /) -> Tensor:
        """``[T, H, V]``: attention of each token over the keys that ``call.visibility`` says."""

    def rejects(self, shape: AttentionShape, /) -> str | None:
        """Return why this backend can't compute a call of this shape, visibility aside, or None if it can."""


# In order of preference: `auto` takes the first that does not reject.
BACKENDS: dict[str, Backend] = {
    "flash_attn": flash_attn,
    "torch_varlen": torch_varlen,
    "xformers": xformers,
    "mem_efficient": mem_efficient,
    "flex": flex,
    "triton_packed": triton_packed,
    "segments": segments,
    "reference": reference,
}

TRACED = ("torch_varlen",)
"""Backends that are operators of torch's own, which ``torch.compile`` knows: there ``auto`` prefers them."""


def why_not(name: str, shape: AttentionShape) -> str | None:
    """Say why a backend can't serve a shape, or return None if it can."""
    return shape.visibility.rejects(BACKENDS[name].SERVES) or BACKENDS[name].rejects(shape)


def in_order(shape: AttentionShape) -> list[str]:
    """Names in the order in which ``auto`` tries them: the table's, our own kernel ahead of those it is faster than."""
    names = list(BACKENDS)
    if triton_packed.wins(shape):
        names.remove("triton_packed")
        next_best = "torch_varlen" if flash_attn.wins_on_long(shape) else "flash_attn"
        names.insert(names.index(next_best), "triton_packed")
    return names
