"""The table of attention backends.

A backend is a module with ``SERVES``, ``LIMITS``, ``run(call)`` and ``rejects(shape)``. To add one, write a file in
this folder and add a row to the table below, at the place where ``auto`` should try it. :data:`TRACED` names the
backends that ``torch.compile`` can trace; ``READ_LENGTHS`` in :mod:`fastpack.backends.custom_op` names the backends
that read lengths on the host. The docstring of ``patch`` and ``fastpack doctor`` list all backends.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from torch import Tensor

from fastpack.backends import (
    cudnn,
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
from fastpack.backends.limits import Limits


class Backend(Protocol):
    """The interface of a module in ``backends/``. The first line of the module's docstring says what it is."""

    __doc__: str | None

    @property
    def LIMITS(self) -> Limits:
        """The backend's limits in words."""

    @property
    def SERVES(self) -> Collection[str]:
        """The attributes of :class:`fastpack.backends.call.Visibility` that this backend supports."""

    def run(self, call: AttentionCall, /) -> Tensor:
        """Return ``[T, H, V]``: each token's attention over the keys that ``call.visibility`` describes."""

    def rejects(self, shape: AttentionShape, /) -> str | None:
        """Return why this backend can't serve a shape, or None. The caller checks the visibility."""


# In order of preference: `auto` takes the first backend that does not reject the shape.
BACKENDS: dict[str, Backend] = {
    "flash_attn": flash_attn,
    "torch_varlen": torch_varlen,
    "cudnn": cudnn,
    "xformers": xformers,
    "mem_efficient": mem_efficient,
    "flex": flex,
    "triton_packed": triton_packed,
    "segments": segments,
    "reference": reference,
}

TRACED = ("torch_varlen",)
"""Torch's own operators, which ``torch.compile`` can trace. In a compiled region ``auto`` tries them first."""


def why_not(name: str, shape: AttentionShape) -> str | None:
    """Return why a backend can't serve a shape, or None if it can."""
    return shape.visibility.rejects(BACKENDS[name].SERVES) or BACKENDS[name].rejects(shape)


def in_order(shape: AttentionShape) -> list[str]:
    """Return the backends' names in the order in which ``auto`` tries them.

    It is the table's order, except that fastpack's own kernel and cuDNN's move up where they are faster.
    """
    kernels = {"cudnn": cudnn, "triton_packed": triton_packed}
    faster = [name for name, kernel in kernels.items() if kernel.wins(shape)]
    rest = [name for name in BACKENDS if name not in faster]
    at = 1 if flash_attn.wins_on_long(shape) else 0
    return [*rest[:at], *faster, *rest[at:]]
