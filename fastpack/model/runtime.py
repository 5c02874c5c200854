"""The runtime that a patched backbone and its head share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from fastpack.layers.hf_attention import follow_stock_config
from fastpack.layers.runtime import Runtime
from fastpack.layers.stock_attention import StockAttention
from fastpack.layers.window_checks import LayerOrder
from fastpack.model.prefix_sharing import PrefixSharing
from fastpack.utils.classes import Classes
from fastpack.utils.replacement import replacement_on

if TYPE_CHECKING:  # heavy, and imported where a model is patched with them
    from fastpack.cuda_graphs.runner import GraphRunner
    from fastpack.offload.checkpoints import CheckpointOffload


@dataclass(eq=False)
class Watch:
    """The things about a patched backbone that a user may change, looked at before each forward.

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


@dataclass(frozen=True, eq=False)
class ModelRuntime:
    """The things that a patched backbone and its head share.

    Attributes:
        layers: what they share with the layers.
        watch: what a user may change after the patch, looked at before each forward.
        graphs: what replays the layers as CUDA graphs.
        offload: what sees the tensors that a forward saves.
        sharing: what lets tokens that sequences share run once.
    """

    layers: Runtime
    watch: Watch
    graphs: GraphRunner | None = None
    offload: CheckpointOffload | None = None
    sharing: PrefixSharing | None = None

    def describe(self, backbone: nn.Module) -> tuple[str, ...]:
        """Return a line for the report from each part that is in use."""
        device = next(backbone.parameters()).device
        lines = (
            None if self.offload is None else self.offload.describe(backbone),
            None if self.sharing is None else self.sharing.describe(),
            None if self.graphs is None else self.graphs.describe(device),
        )
        return tuple(line for line in lines if line is not None)


def runtime_of(backbone: nn.Module) -> ModelRuntime | None:
    """Return the runtime of a patched backbone, or None if it is not patched or another forward covers ours."""
    found = replacement_on(backbone)
    return found.runtime if found is not None and isinstance(found.runtime, ModelRuntime) else None
