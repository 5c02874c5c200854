"""Models whose weights are spread over processes: what stays true of them between steps.

FSDP2 shards modules in place. A module gets a class of its own over the one that it had, and a weight is a DTensor but
while its layer runs: then the same attribute holds the whole weight, a plain parameter. ZeRO-3 leaves an empty tensor
in its place, and fills it while the module that holds it is called.
"""

from __future__ import annotations

from torch import Tensor, nn


def is_sharded(module: nn.Module) -> bool:
    """True for a module that FSDP2 was applied to."""
    return any(cls.__name__ == "FSDPModule" and cls.__module__.startswith("torch.") for cls in type(module).__mro__)


def is_gathered(weight: Tensor) -> bool:
    """True for a shard of a weight that is whole while its layer runs: one that nothing but FSDP2 has split.

    A weight that is split among devices for tensor parallelism too is a DTensor also then. FSDP2 splits over a mesh of
    one dimension; with hybrid sharding over the second of two, and has copies along the first.
    """
    placements = getattr(weight, "placements", None)  # of a DTensor, which not every build of torch has
    if placements is None:
        return False
    return len(placements) == 1 or (len(placements) == 2 and placements[0].is_replicate())


def is_partitioned(weight: Tensor) -> bool:
    """True for a weight of ZeRO-3, which is empty but inside a call of its module."""
    return hasattr(weight, "ds_id")
