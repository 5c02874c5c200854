"""Models whose weights are spread over processes: what stays true of them between steps.

FSDP2 shards modules in place. A module gets a class of its own over the one that it had, and a weight is a DTensor but
while its layer runs: then the same attribute holds the whole weight, a plain parameter. ZeRO-3 leaves an empty tensor
in its place, and fills it while the module that holds it is called.
"""

from __future__ import annotations

import torch.distributed as dist
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


def exchange_inside(module: nn.Module) -> list[dist.ProcessGroup]:
    """The processes that exchange weights whenever something inside this module is called; none where nothing inside is
    sharded (the module itself may be: what it holds is whole while it runs).

    Those of FSDP2 are read off the weights that are shards at the moment; where every one is whole, all processes.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    inside = [child for child in module.modules() if child is not module and is_sharded(child)]
    if not inside:
        return []
    found = (getattr(weight, "device_mesh", None) for child in inside for weight in child.parameters())
    meshes = dict.fromkeys(mesh for mesh in found if mesh is not None)
    groups = dict.fromkeys(mesh.get_group(i) for mesh in meshes for i in range(mesh.ndim))
    return list(groups or [dist.distributed_c10d._get_default_group()])
