"""The table of attention backends.

A backend is a module with ``SERVES``, ``run(call)`` and ``rejects(shape)``. To add one, write a file in this folder and
a row here, at its place in the order in which ``auto`` asks. :data:`TRACED` names the backends that ``torch.compile``
knows; ``READ_LENGTHS`` in :mod:`fastpack.backends.custom_op` names those that read lengths on the host. The docstring
of ``patch`` and ``LIMITS`` of ``fastpack doctor`` list all backends.
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
    """The interface of a module in ``backends/``. The first line of the module's docstring says what it is."""

    __doc__: str | None

    @property
    def SERVES(self) -> Collection[str]:
        """The attributes of :class:`fastpack.backends.call.Visibility` that the backend serves."""

    def run(self, call: AttentionCall, /) -> Tensor:
        """Return ``[T, H, V]``: the attention of each token over the keys that ``call.visibility`` describes."""

    def rejects(self, shape: AttentionShape, /) -> str | None:
        """Return why this backend can't serve, visibility aside, or None if it can."""


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
"""Backends that are torch's own operators, which ``torch.compile`` knows: compiled, ``auto`` prefers them."""


def why_not(name: str, shape: AttentionShape) -> str | None:
    """Return why a backend can't serve a shape, or None if it can."""
    return shape.visibility.rejects(BACKENDS[name].SERVES) or BACKENDS[name].rejects(shape)


def in_order(shape: AttentionShape) -> list[str]:
    """Return names in the order in which ``auto`` tries them: the table's, with our kernel where it is faster."""
    names = list(BACKENDS)
    if triton_packed.wins(shape):
        names.remove("triton_packed")
        next_best = "torch_varlen" if flash_attn.wins_on_long(shape) else "flash_attn"
        names.insert(names.index(next_best), "triton_packed")
    return names
