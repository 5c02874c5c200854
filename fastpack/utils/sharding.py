"""Facts about models whose weights are sharded over processes.

FSDP2 shards modules in place. It puts a new class over the module's own, and makes each weight a DTensor. While the
layer runs, the same attribute holds the whole weight as a plain parameter. ZeRO-3 leaves an empty tensor in a weight's
place and fills it while the module that holds the weight is called.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn


def is_sharded(module: nn.Module) -> bool:
    """Return whether FSDP2 was applied to a module."""
    return any(cls.__name__ == "FSDPModule" and cls.__module__.startswith("torch.") for cls in type(module).__mro__)


def is_gathered(weight: Tensor) -> bool:
    """Return whether a sharded weight is whole while its layer runs: it is if only FSDP2 splits it.

    If tensor parallelism splits the weight too, it stays a DTensor. FSDP2 shards over a mesh of one dimension. With
    hybrid sharding it shards over the second of two dimensions and replicates over the first.
    """
    placements = getattr(weight, "placements", None)  # of a DTensor, which not every build of torch has
    if placements is None:
        return False
    return len(placements) == 1 or (len(placements) == 2 and placements[0].is_replicate())


def is_partitioned(weight: Tensor) -> bool:
    """Return whether ZeRO-3 shards a weight, so that it is empty outside a call of its module."""
    return hasattr(weight, "ds_id")


def exchange_inside(module: nn.Module) -> list[dist.ProcessGroup]:
    """Return the groups of processes that exchange weights when a module inside this one is called.

    There is no group if no module inside is sharded. Whether the module itself is sharded doesn't matter: its own
    weights are whole while it runs. FSDP2's groups are read from the weights that are shards at the moment. If every
    weight is whole, the group of all processes is returned.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    inside = [child for child in module.modules() if child is not module and is_sharded(child)]
    if not inside:
        return []
    every = (getattr(weight, "device_mesh", None) for child in inside for weight in child.parameters())
    meshes = dict.fromkeys(mesh for mesh in every if mesh is not None)
    groups = dict.fromkeys(mesh.get_group(i) for mesh in meshes for i in range(mesh.ndim))
    return list(groups or [dist.distributed_c10d._get_default_group()])


def generate_in_step(model: nn.Module) -> None:
    """Let ``generate`` of a transformers model go on with every rank's until the last is done (its ``synced_gpus``).

    Its layers exchange weights or tokens, so that a rank that stopped earlier would leave the others waiting.
    """
    model._is_fsdp_managed_module = True  # type: ignore[assignment]  # transformers' mark on models with FSDP2
