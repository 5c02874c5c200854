"""Stacks of experts that are spread over ranks: a ``DTensor`` that a mesh of one dimension shards by experts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastpack.ops.experts.across_ranks import ExpertRanks, with_mean_gradient


def ranks_of(stack: Tensor | None) -> ExpertRanks | None:
    """Return the ranks over which a stack ``[E, ., .]`` is spread, equally many experts on each; None if it is not.

    FSDP2's shards are whole while their module runs; so ask about a stack only then.
    """
    weight: Any = stack
    placements = getattr(weight, "placements", None)  # of a DTensor, which not every build of torch has
    if placements is None or len(placements) != 1 or not placements[0].is_shard(0):
        return None
    mesh = weight.device_mesh
    own, left = divmod(weight.shape[0], mesh.size())
    return None if left else ExpertRanks(mesh.size(), mesh.get_local_rank(), mesh.get_group(), own)


def own_part(weight: Tensor, ranks: ExpertRanks) -> Tensor:
    """Return the part of a stack or a bias that is here, or that belongs to this rank's experts if it is whole.

    Its gradient is that of the mean of the ranks' losses, as an engine takes it for weights that every rank has.
    """
    spread: Any = weight
    if hasattr(spread, "to_local"):
        return with_mean_gradient(spread.to_local(), ranks.ranks)
    return weight.narrow(0, ranks.rank * ranks.own, ranks.own)
