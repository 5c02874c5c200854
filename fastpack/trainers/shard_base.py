"""Shard the frozen weights of a model over ranks, and keep what trains whole on each: FSDP2 and DDP, each for its part.

FSDP2 alone moves adapters with the weights of their layers, reduces their gradients layer by layer, and has weights
that the backward needs again moved twice. Here a layer's unit holds frozen weights alone. They are gathered while
earlier layers run, in the forward and in the backward. The gradients of adapters are averaged by DDP, in few exchanges.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from fastpack.errors import PatchError
from fastpack.model.unwrap import find_parts
from fastpack.utils.modules import decoder_layers
from fastpack.utils.replacement import Replacement, replaces

TargetT = TypeVar("TargetT")
AHEAD = 2
"""The number of layers whose weights are gathered while one runs."""


def shard_base(target: TargetT, mesh: DeviceMesh | None = None, *, keep: int = 0) -> TargetT:
    """Shard the frozen weights of a model with adapters over ranks, in place.

    Example:
        >>> fastpack.patch(trainer)  # doctest: +SKIP
        >>> fastpack.shard_base(trainer)  # launched by torchrun, without accelerate's FSDP plugin  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP

    In a loop of your own, ``model = fastpack.shard_base(model)`` returns the model inside DDP.

    All adapters, embedding and head stay whole: PEFT saves the first, sometimes the others, and on one rank alone. Of
    bitsandbytes' 4-bit weights, the packed values are sharded; their scales, a thirtieth as large, stay whole.

    Args:
        target: a model with adapters, patched or not; or a trainer that holds one and has not run yet, whose
            accelerator then does the same when training begins.
        mesh: a mesh of one dimension; by default all ranks. The ranks may have different batches.
        keep: the number of last layers that stay whole between the forward and the backward.

    Returns:
        The model inside ``DistributedDataParallel``; or the trainer.

    Raises:
        PatchError: nothing or everything trains; weights are sharded already, or quantised in another way than
            bitsandbytes' 4 bits; the mesh has several dimensions; there is one process; or the trainer's accelerator
            shards models itself. Nothing was changed.
    """
    if isinstance(target, nn.Module):
        _check(target, mesh)
        return _sharded(target, mesh, keep, {})  # type: ignore[return-value]
    trainer: Any = target
    accelerator = trainer.accelerator
    if accelerator.distributed_type.value not in ("MULTI_GPU", "MULTI_CPU"):
        raise PatchError(
            f"this trainer's accelerator has distributed_type {accelerator.distributed_type.value}; shard_base needs "
            "plain data parallelism: launch it with torchrun or accelerate launch --multi_gpu, without FSDP or "
            "DeepSpeed. Nothing was changed."
        )
    _check(trainer.model, mesh)
    earlier = vars(accelerator).get("prepare_model")
    if replaces(earlier, _prepare_model):
        earlier.undo()
    Replacement(accelerator, "prepare_model", _prepare_model, (trainer, mesh, keep), None).install()
    return target


def _check(model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Raise a PatchError unless the frozen weights of a model can be sharded."""
    reason = None
    trained = [p.requires_grad for p in model.parameters()]
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        reason = "there is one process: launch several with torchrun"
    elif mesh is not None and mesh.ndim != 1:
        reason = f"the mesh has {mesh.ndim} dimensions: pass one of one dimension"
    elif not any(trained) or all(trained):
        reason = f"{'everything' if all(trained) else 'nothing'} trains: add adapters (peft.get_peft_model) first"
    else:
        packed = {id(layer.weight) for layer in _layers_of_4bit(model)}
        for name, parameter in model.named_parameters():
            if hasattr(parameter, "device_mesh") or hasattr(parameter, "ds_id"):
                reason = f"{name} is sharded already"
            elif not parameter.is_floating_point() and id(parameter) not in packed:
                reason = f"{name} is quantised to {parameter.dtype}: use bitsandbytes' 4 bits, or DDP"
    if reason is not None:
        raise PatchError(
            f"the frozen weights of this {type(model).__name__} can't be sharded: {reason}. Nothing was changed."
        )


def _sharded(model: nn.Module, mesh: DeviceMesh | None, keep: int, settings: dict[str, Any]) -> nn.Module:
    """Return the model inside DDP, with its frozen weights sharded; ``settings`` are DDP's."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if mesh is None:
        kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
        mesh = init_device_mesh(kind, (dist.get_world_size(),))
    for layer in _layers_of_4bit(model):  # FSDP2 keeps plain tensors only
        layer.quant_state = layer.weight.quant_state
        layer.weight = nn.Parameter(layer.weight.data, requires_grad=False)
    whole = _kept_whole(model)
    layers: list[Any] = decoder_layers(find_parts(model).backbone)
    for index, layer in enumerate(layers):
        frees = index < len(layers) - keep
        fully_shard(layer, mesh=mesh, reshard_after_forward=frees, ignored_params=whole)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, ignored_params=whole)
    for index, layer in enumerate(layers):
        assert isinstance(layer, FSDPModule)
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 1 + AHEAD])
        layer.set_modules_to_backward_prefetch(layers[max(0, index - AHEAD) : index][::-1])
    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
    for parameter in whole:  # fully_shard has moved the others
        parameter.data = parameter.data.to(device)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    frozen += [name for name, _ in model.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, frozen)
    return DistributedDataParallel(model, **settings)


def _layers_of_4bit(model: nn.Module) -> list[Any]:
    """Return the layers with bitsandbytes' 4-bit weights."""
    return [m for m in model.modules() if getattr(m._parameters.get("weight"), "quant_state", None) is not None]


def _kept_whole(model: nn.Module) -> set[nn.Parameter]:
    """Return what trains, frozen adapters, embedding and head: PEFT may save these, and on one rank alone."""
    parts = find_parts(model)
    owner: Any = parts.head or parts.backbone
    whole = {parameter for parameter in model.parameters() if parameter.requires_grad}
    inside: list[Any] = [owner.get_input_embeddings(), owner.get_output_embeddings()]
    for module in model.modules():
        inside += [getattr(module, name, None) for name in getattr(module, "adapter_layer_names", ())]
    for each in inside:
        if isinstance(each, nn.Module):
            whole.update(each.parameters())
    return whole


def _prepare_model(
    patched: Replacement[tuple[Any, DeviceMesh | None, int], None], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Prepare the trainer's model: all that accelerate does but its DDP, then ours; any other model as it does."""
    trainer, mesh, keep = patched.spec
    evaluates = kwargs.get("evaluation_mode", args[1] if len(args) > 1 else False)
    if model is not trainer.model or evaluates or getattr(model, "_is_accelerate_prepared", False):
        return patched.stock(model, *args, **kwargs)
    accelerator = patched.owner
    model = patched.stock(model, device_placement=False, evaluation_mode=True)
    handler = accelerator.ddp_handler
    outer: Any = _sharded(model, mesh, keep, {} if handler is None else handler.to_kwargs())
    accelerator._models[-1] = outer
    outer._is_accelerate_prepared = True
    return outer
