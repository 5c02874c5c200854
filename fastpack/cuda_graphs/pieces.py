"""Passes are recorded in pieces, so that the device begins with the first while the host hands over the next.

A device begins with a graph once all of it was handed over, which takes the host about 1 us a kernel: 1 to 1.5 ms for
a stack, forward and backward each (measured). A first piece of one layer is there after a tenth of that, and lasts
longer than handing over the next four; these longer than the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

CUTS = (1, 5)
"""How many layers lie before a cut, counted from either end: a backward begins where a forward ends."""


@contextmanager
def cut_between(layers: Sequence[nn.Module], cut: Callable[[], None]) -> Iterator[None]:
    """Call ``cut`` where :data:`CUTS` says, between the layers of a forward inside and of its backward, which may run
    outside."""
    places = [place for many in CUTS for place in (many, len(layers) - many) if 0 < place < len(layers)]
    cut_before = dict.fromkeys(layers[place] for place in places)  # one may be in several places
    hook = functools.partial(_cut_here, cut)
    handles = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in cut_before]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _cut_here(cut: Callable[[], None], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cut()
    hidden = args[0] if args else kwargs.get("hidden_states")
    if isinstance(hidden, Tensor) and hidden.requires_grad:
        # its gradient is whole once the layer and all behind it are done
        hidden.register_hook(lambda _: cut())
