"""Spread the stacked weights of experts over ranks, so that each keeps some of the experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from fastpack.errors import PatchError, UnsupportedModelError
from fastpack.layers.read_projection import why_not_plain
from fastpack.model.unwrap import find_parts
from fastpack.ops.quantized_stack import QuantizedStack
from fastpack.patching.quantize import stacks_of
from fastpack.utils.sharding import generate_in_step

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ModelT = TypeVar("ModelT", bound=nn.Module)


def shard_experts(model: ModelT, mesh: DeviceMesh) -> ModelT:
    """Keep on each rank of a mesh only its part of the experts, in place (expert parallelism).

    The stacks become ``DTensor`` parameters that are sharded by experts. In a patched model (:func:`fastpack.patch`,
    before or after this) each token goes to every rank once, and the sum of what its experts there return comes back.
    Every rank has batches of its own. Results and gradients are those of the whole model; the gradient of a stack is
    that of the mean of the ranks' losses, as DDP and FSDP2 take it for the other weights. Unpatched, torch raises.

    In fast families with gradient checkpointing, the host waits for the device once a forward. Else it waits in each
    block; without checkpointing also to keep no memory for rows that other ranks compute. All ranks run forwards of one
    kind at once, with the same hooks: none returns attentions or fills a cache while another doesn't. ``generate`` goes
    on until the last rank is done (transformers' ``synced_gpus``).

    Example:
        >>> mesh = init_device_mesh("cuda", (2,))  # doctest: +SKIP
        >>> fastpack.shard_experts(model, mesh)  # the same weights on each rank  # doctest: +SKIP
        >>> fastpack.patch(get_peft_model(model, config))  # doctest: +SKIP

    **Engines.** DDP must leave the stacks alone. They are put on the list of what it ignores, if DDP gets this very
    model. Around a model inside PEFT's wrappers, give DDP the list:
    ``DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(outer, names)``, with the names of parameters
    that have ``device_mesh``. FSDP2 leaves them alone with ``ignored_params``. An optimiser that steps over many
    tensors at once can't mix these with others: if stacks train, pass ``foreach=False``.

    Args:
        model: a model of transformers with stacked experts that are dense, with or without adapters.
        mesh: a mesh of one dimension, whose size divides the number of experts.

    Returns:
        The same model.

    Raises:
        UnsupportedModelError: fastpack knows no stacked experts in this model.
        PatchError: the mesh has several dimensions, or its size does not divide the number of experts; or a stack is
            quantised, sharded or offloaded. Nothing was changed.
    """
    from torch.distributed.tensor import DTensor, Shard

    parts = find_parts(model)
    backbone = parts.backbone
    stacks = list(stacks_of(backbone))
    if not stacks:
        raise UnsupportedModelError(
            f"{type(backbone).__name__} has no experts with stacked weights that fastpack knows. Nothing was changed."
        )
    if mesh.ndim != 1:
        raise PatchError(f"the mesh has {mesh.ndim} dimensions: pass one of one dimension. Nothing was changed.")
    for stack in stacks:
        what = f"{stack.name} of a {type(stack.block).__name__}"
        weight = stack.weight
        reason = "it is not a plain parameter" if weight is None else why_not_plain(weight)
        if isinstance(weight, QuantizedStack):
            reason = "it is quantised"
        if reason is not None or weight is None:
            raise PatchError(f"{what} can't be spread over ranks: {reason}. Nothing was changed.")
        if weight.shape[0] % mesh.size():
            raise PatchError(
                f"{what} has {weight.shape[0]} experts, which {mesh.size()} ranks can't share equally. Pass a mesh "
                "whose size divides them. Nothing was changed."
            )
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for stack in stacks:
        for name in (stack.name, f"{stack.name}_bias"):
            whole = stack.block._parameters.get(name)
            if whole is not None:
                own = whole.detach().chunk(ranks)[rank].clone()
                spread = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
                stack.block._parameters[name] = nn.Parameter(spread, requires_grad=whole.requires_grad)
    generate_in_step(parts.outermost)
    names = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return model
