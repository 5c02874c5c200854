"""Plan whether a model's batches can be spread over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fastpack.attention_dispatch import AttentionShape, heads_reject
from fastpack.errors import PatchError
from fastpack.families.spec import Family
from fastpack.layers.mixers.fast import serves
from fastpack.layers.mixers.shares import mixer_rejects
from fastpack.model.context_parallel import ContextParallel
from fastpack.patching.recognise import own_class


def plan_context_parallel(
    mesh: Any, backbone: nn.Module, family: Family, shapes: Iterable[AttentionShape], *, packs: bool
) -> ContextParallel | None:
    """Return the group of ranks that will share each batch; None without a mesh, or if it has one rank.

    Args:
        mesh: the ``context_mesh`` of :func:`fastpack.patch`, or None.
        backbone: the model's backbone.
        family: its family.
        shapes: the shapes of its attention modules.
        packs: whether its mixers, if it has any, run on packed tokens.

    Raises:
        PatchError: it is no 1-D ``DeviceMesh``, or this model's batches can't be spread over it.
    """
    if mesh is None:
        return None
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        got = f"a mesh of {mesh.ndim} dimensions" if isinstance(mesh, DeviceMesh) else repr(mesh)
        raise PatchError(
            f"context_mesh is {got}; pass a DeviceMesh of one dimension, such as torch.distributed.device_mesh."
            'init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "cp"))["cp"]. Nothing was changed.'
        )
    if mesh.size() == 1:
        return None
    reason = _model_rejects(backbone, family, packs=packs)
    for shape in () if reason is not None else shapes:
        reason = reason or heads_reject(shape.num_heads, shape.num_kv_heads, mesh.size())
    for module in () if reason is not None else backbone.modules():
        spec = family.mixers.get(own_class(module, family) or "")
        if spec is not None:
            fast = spec.fast if spec.fast is not None and serves(module, spec.fast) else None
            reason = reason or mixer_rejects(module, fast, mesh.size())
    if reason is not None:
        raise PatchError(
            f"context_mesh of {mesh.size()} ranks can't be exact for {type(backbone).__name__}: {reason}. Nothing was "
            "changed."
        )
    return ContextParallel(mesh, family.media)


def _model_rejects(backbone: nn.Module, family: Family, *, packs: bool) -> str | None:
    """Return why no batch of a model can be spread over ranks; None if batches can."""
    if family.repadded:
        return f"{family.model_type} runs on rows of equal length, each with all of its tokens"
    if family.mixers and not packs:
        names = ", ".join(family.mixers)
        return f"{names} mix tokens too, or count positions, and run on one row a sequence"
    if any(getattr(module, "layerdrop", 0.0) > 0 for module in backbone.modules()):
        return "it skips layers at random (layerdrop), and each rank others: set layerdrop to 0 in the config"
    return None
