"""The runtime that a patched backbone and its head share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from fastpack.layers.experts import ExpertsPlace
from fastpack.layers.hf_attention import follow_stock_config
from fastpack.layers.runtime import Runtime
from fastpack.layers.stock_attention import StockAttention
from fastpack.layers.window_checks import LayerOrder
from fastpack.model.context_parallel import ContextParallel
from fastpack.model.prefix_sharing import PrefixSharing
from fastpack.packing.handover import Handover, Turn
from fastpack.utils.classes import Classes
from fastpack.utils.replacement import replacement_on

if TYPE_CHECKING:  # these modules import much, and only a patch with their options needs them
    from fastpack.cuda_graphs.runner import GraphRunner
    from fastpack.offload.checkpoints import CheckpointOffload


@dataclass(eq=False)
class UserChanges:
    """Checks, before each forward, of changes that a user may have made to a patched backbone.

    Attributes:
        classes: the classes of the modules whose forward was replaced.
        order: the order of the layers; None if no mask of the stock model depends on a layer's place.
        configs: the private configs of modules that attend through our interface.
        attention: the attention implementation that the stock model uses.
        experts: the blocks of experts, whose fast forward follows PEFT's wrappers around them.
        window: the largest number of tokens that a query sees in the layer with the narrowest window or chunk; None for
            no limit.
    """

    classes: Classes = field(default_factory=Classes)
    order: LayerOrder | None = None
    configs: list[Any] = field(default_factory=list)
    attention: StockAttention = field(default_factory=StockAttention)
    experts: list[ExpertsPlace] = field(default_factory=list)
    window: int | None = None

    def follow(self) -> None:
        """Follow changes of the user's config, and new wrappers around experts, on the stock path too."""
        for private in self.configs:
            follow_stock_config(private)
        for place in self.experts:
            place.follow()

    def check(self, backbone: nn.Module) -> None:
        """Raise if a change can't be followed exactly. The host never waits for the device.

        Args:
            backbone: the backbone.

        Raises:
            PatchError: see :meth:`fastpack.utils.classes.Classes.check` and
                :meth:`fastpack.layers.window_checks.LayerOrder.check`.
        """
        self.classes.check()
        if self.order is not None:
            self.order.check(backbone)


@dataclass(frozen=True, eq=False)
class ModelRuntime:
    """The objects that a patched backbone and its head share.

    Attributes:
        layers: the runtime of the layers.
        user_changes: the checks, before each forward, of changes that a user may have made.
        graphs: the runner of CUDA graphs, or None.
        offload: the offload of checkpoints or activations, or None.
        sharing: the sharing of prefixes, or None.
        context_parallel: the group of ranks that share each batch, or None.
        handover: hands a batch's packing down from the head, and from the composite around the backbone.
        composite: the composite around the backbone, or None.
        turn: a composite that makes masks has one forward at a time, since it runs with another config.
    """

    layers: Runtime
    user_changes: UserChanges
    graphs: GraphRunner | None = None
    offload: CheckpointOffload | None = None
    sharing: PrefixSharing | None = None
    context_parallel: ContextParallel | None = None
    handover: Handover = field(default_factory=Handover)
    composite: Any = None
    turn: Turn = field(default_factory=Turn)

    @property
    def drops_packing(self) -> bool:
        """True if the head may drop the packing on the way to the backbone, which then gets it by the handover."""
        return self.layers.context is not None or self.composite is not None

    def describe(self, backbone: nn.Module) -> tuple[str, ...]:
        """Return a line for the report from each part that is in use."""
        device = next(backbone.parameters()).device
        lines = (
            None if self.offload is None else self.offload.describe(backbone),
            None if self.sharing is None else self.sharing.describe(),
            None if self.context_parallel is None else self.context_parallel.describe(),
            None if self.graphs is None else self.graphs.describe(device),
        )
        return tuple(line for line in lines if line is not None)


def runtime_of(backbone: nn.Module) -> ModelRuntime | None:
    """Return the runtime of a patched backbone, or None if it is not patched or another forward wraps ours."""
    ours = replacement_on(backbone)
    return ours.runtime if ours is not None and isinstance(ours.runtime, ModelRuntime) else None
