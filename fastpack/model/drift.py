"""What a user may change on a model after the patch, looked at before each forward; compiled, by what it attends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fastpack.layers.hf_attention import follow_stock_config
from fastpack.layers.stock_attention import StockAttention
from fastpack.layers.window_checks import LayerOrder
from fastpack.utils.classes import Classes


@dataclass(eq=False)
class Watch:
    """Of one patched backbone.

    Attributes:
        classes: of the modules whose forward was replaced.
        order: the layers in their places; None where the stock model masks by no place.
        configs: private ones of modules that attend through our interface.
        attention: what the stock model attends by.
        window: how many tokens a query sees at most in the layer with the narrowest window or chunk; None for none.
    """

    classes: Classes = field(default_factory=Classes)
    order: LayerOrder | None = None
    configs: list[Any] = field(default_factory=list)
    attention: StockAttention = field(default_factory=StockAttention)
    window: int | None = None

    def follow(self) -> None:
        """Take over what was changed in the config, on the stock path too."""
        for private in self.configs:
            follow_stock_config(private)

    def check(self, backbone: nn.Module) -> None:
        """Raise where what was changed can't be exact; waits for nobody.

        Raises:
            PatchError: see :meth:`fastpack.utils.classes.Classes.check` and
                :meth:`fastpack.layers.window_checks.LayerOrder.check`.
        """
        self.classes.check()
        if self.order is not None:
            self.order.check(backbone)
