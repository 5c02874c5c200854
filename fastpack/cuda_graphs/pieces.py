"""Cut recordings into pieces, so that the device starts the first piece while the host submits the next one.

A device starts a graph only once all of it has been submitted, which takes the host about 1 us a kernel: 1 to 1.5 ms
for a stack's forward, and as much for its backward (measured). The first piece has one layer, and is submitted in a
tenth of that time. While the device runs it, the host submits the next four layers; while those run, it submits the
rest. So the device never waits after the first piece.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

CUTS = (1, 5)
"""Numbers of layers before a cut, counted from both ends: a backward begins where a forward ends."""


@contextmanager
def cut_between(layers: Sequence[nn.Module], cut: Callable[[], None]) -> Iterator[None]:
    """Call ``cut`` between layers, at the places that :data:`CUTS` names.

    This covers the forward inside the context and that forward's backward, which may run outside.

    Args:
        layers: the decoder layers, in the order in which they run.
        cut: ends the current piece and begins the next.
    """
    places = [place for count in CUTS for place in (count, len(layers) - count) if 0 < place < len(layers)]
    cut_before = dict.fromkeys(layers[place] for place in places)  # a layer may occur in several places
    hook = functools.partial(_cut_here, cut)
    handles = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in cut_before]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _cut_here(cut: Callable[[], None], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Cut before a layer's forward, and after its backward once its input's gradient is complete."""
    cut()
    hidden = args[0] if args else kwargs.get("hidden_states")
    if isinstance(hidden, Tensor) and hidden.requires_grad:
        # The gradient is complete once this layer and all later ones have run backward.
        hidden.register_hook(lambda _: cut())
