"""Keep the bytes of MXFP4 in the order of its specification while a model is patched.

The kernels that transformers loads them for have orders of their own, on Hopper for example. To undo such an order
takes a dozen passes over a stack, and several times its memory. So the patch does it once, an expert at a time, and
``unpatch`` brings the kernels' order back, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.families.spec import ExpertsSpec
from fastpack.layers.mxfp4_experts import EXPERTS
from fastpack.utils.replacement import Restore, do_nothing


class PlainLayout:
    """The layout of bytes ``[E, I / 2, O]`` in the specification's order, with the methods of the kernels' layouts."""

    name = None

    def swizzle_data(self, data: Tensor) -> Tensor:
        """Return the bytes as they are."""
        return data

    def unswizzle_data(self, data: Tensor) -> Tensor:
        """Return the bytes as they are."""
        return data

    def swizzle_block_shape(self, block_shape: Any) -> Any:
        """Return the shape as it is."""
        return block_shape


@dataclass(eq=False)
class PlainOrder:
    """The order of a stack's bytes. It has the methods of a :class:`fastpack.utils.replacement.PreHook`.

    Attributes:
        module: the block of experts.
        name: the name of the stack.
        layout: the kernels' layout, once the order has changed.
    """

    module: nn.Module
    name: str
    layout: Any = None

    def install(self) -> None:
        """Put the bytes into the specification's order."""
        layout = getattr(self.module, self.name).storage.layout
        self._reorder(layout.unswizzle_data, PlainLayout())
        self.layout = layout

    def undo(self) -> Restore:
        """Put the bytes into the kernels' order again, and return a function that undoes this."""
        stack = getattr(self.module, self.name, None)
        if not isinstance(getattr(getattr(stack, "storage", None), "layout", None), PlainLayout):
            return do_nothing
        self._reorder(self.layout.swizzle_data, self.layout)
        return self.install

    def disable(self) -> Restore:
        """Undo the change, since the stock forward runs the kernels."""
        return self.undo()

    def _reorder(self, change: Callable[[Tensor], Tensor], layout: Any) -> None:
        """Change the bytes of one expert after the other; both orders have columns last, and rows beside each other."""
        stack: Any = getattr(self.module, self.name)
        storage = copy.copy(stack.storage)
        changed: Tensor | None = None
        with torch.no_grad():
            for index in range(len(storage.data)):
                matrix = change(storage.data[index, None])[0].mT
                changed = matrix.new_empty(len(storage.data), *matrix.shape) if changed is None else changed
                changed[index] = matrix
        assert changed is not None
        storage.data, storage.layout = changed.mT, layout
        stack.storage = storage


def plain_orders(found: Iterable[tuple[nn.Module, ExpertsSpec]]) -> tuple[PlainOrder, ...]:
    """Return the changes that bring the specification's order to the stacks whose kernels have another one."""
    changes: list[PlainOrder] = []
    for holder, spec in found:
        block = holder.get_submodule(EXPERTS)
        for name in (spec.inner, spec.down):
            layout = getattr(block, name).storage.layout
            if getattr(layout, "name", "") is not None and hasattr(layout, "swizzle_data"):
                changes.append(PlainOrder(block, name))
    return tuple(changes)
