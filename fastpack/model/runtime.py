"""What a patched backbone and its head share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from fastpack.layers.runtime import Runtime
from fastpack.model.drift import Watch
from fastpack.model.prefix_sharing import PrefixSharing
from fastpack.utils.replacement import replacement_on

if TYPE_CHECKING:  # heavy, and imported where a model is patched with them
    from fastpack.cuda_graphs.runner import GraphRunner
    from fastpack.offload.checkpoints import CheckpointOffload


@dataclass(frozen=True, eq=False)
class ModelRuntime:
    """What a patched backbone and its head share.

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
        """A line for a report from each part that there is."""
        device = next(backbone.parameters()).device
        lines = (
            None if self.offload is None else self.offload.describe(backbone),
            None if self.sharing is None else self.sharing.describe(),
            None if self.graphs is None else self.graphs.describe(device),
        )
        return tuple(line for line in lines if line is not None)


def runtime_of(backbone: nn.Module) -> ModelRuntime | None:
    """The runtime of a patched backbone; None for one that is not, or whose forward somebody has covered."""
    found = replacement_on(backbone)
    return found.runtime if found is not None and isinstance(found.runtime, ModelRuntime) else None
