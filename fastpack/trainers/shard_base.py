"""Shard the frozen weights of a model over ranks, and keep what trains whole on each: FSDP2 and DDP, each for its part.

FSDP2 alone moves adapters with the weights of their layers, reduces their gradients layer by layer, and has weights
that the backward needs again moved twice. Here a decoder layer's unit holds its frozen weights alone. They are gathered
while earlier layers run, in the forward and in the backward. All other weights are whole, so that whatever runs outside
of the layers needs no care. The gradients of adapters are averaged by DDP, in few exchanges.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from fastpack.errors import PatchError
from fastpack.model.unwrap import find_parts
from fastpack.ops.quantized_stack import QuantizedStack
from fastpack.trainers.weight_sync import gather_for_sync, why_not_gathered
from fastpack.utils.modules import decoder_layers
from fastpack.utils.replacement import Replacement, replaces
from fastpack.utils.sharding import generate_in_step

TargetT = TypeVar("TargetT")
AHEAD = 1
"""The number of layers whose weights are gathered while one runs. A second would take its memory, and gain nothing."""


def shard_base(target: TargetT, mesh: DeviceMesh | None = None, *, keep: int = 0) -> TargetT:
    """Shard the frozen weights of a model with adapters over ranks, in place.

    Example:
        >>> fastpack.patch(trainer)  # doctest: +SKIP
        >>> fastpack.shard_base(trainer)  # launched by torchrun, without accelerate's FSDP plugin  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP

    In a loop of your own, ``model = fastpack.shard_base(model)`` returns the model inside DDP.

    Weights outside of decoder layers stay whole: embedding, head, towers for images and audio; so do those that layers
    share. So do all adapters: PEFT saves them on one rank alone, as it may embedding and head. Of bitsandbytes' 4-bit
    weights, the packed values are sharded. Their scales stay whole: an eighth of the values, a thirtieth with double
    quantisation. To merge adapters into the base, load what was saved into a whole model.

    **Generation.** Ranks generate in step, until the last is done (transformers' ``synced_gpus``), and move the frozen
    weights for every token: for more than short completions, let vLLM generate. At each sync with vLLM the weights are
    gathered and merged on each rank, and dropped afterwards, so that merges leave no trace in what is sharded.

    Args:
        target: a model with adapters, patched or not; or a trainer that holds one and has not run yet, whose
            accelerator then does the same when training begins.
        mesh: a mesh of one dimension; by default all ranks. The ranks may have different batches.
        keep: the number of last layers that stay whole between the forward and the backward.

    Returns:
        The model inside ``DistributedDataParallel``; or the trainer.

    Raises:
        PatchError: nothing or everything trains; weights are sharded already, or quantised in another way than
            bitsandbytes' ``Linear4bit``; the mesh has several dimensions; there is one process; the trainer's
            accelerator shards models itself; or the trainer generates by continuous batching, or syncs weights with
            vLLM by code of its own or in 4 bits. Nothing was changed.
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
    reason = why_not_gathered(trainer, in_4_bits=any(map(_is_4bit, trainer.model.modules())))
    if reason is not None:
        raise PatchError(
            f"this {type(trainer).__name__} can't generate from a sharded base: {reason}. Nothing was changed."
        )
    earlier = vars(accelerator).get("prepare_model")
    if replaces(earlier, _prepare_model):
        earlier.undo()
    Replacement(accelerator, "prepare_model", _prepare_model, (trainer, mesh, keep), None).install()
    gather_for_sync(trainer, _kept_whole(trainer.model))
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
        whole = _kept_whole(model)
        reason = next(filter(None, (_rejects(model, *each, whole) for each in model.named_parameters())), None)
    if reason is not None:
        raise PatchError(
            f"the frozen weights of this {type(model).__name__} can't be sharded: {reason}. Nothing was changed."
        )


def _rejects(model: nn.Module, name: str, parameter: nn.Parameter, whole: set[nn.Parameter]) -> str | None:
    """Return why a parameter can't be sharded, or None."""
    if hasattr(parameter, "device_mesh") or hasattr(parameter, "ds_id"):
        return f"{name} is sharded already"
    state = getattr(parameter, "quant_state", None)
    quantised = state is not None or isinstance(parameter, QuantizedStack) or not parameter.is_floating_point()
    if not quantised or parameter in whole:
        return None
    if not _is_4bit(model.get_submodule(name.rpartition(".")[0])):
        return (
            f"{name} is quantised, and no weight of bitsandbytes' Linear4bit: whole on each rank it is small, use DDP"
        )
    if getattr(state, "packing_format_for_cpu", False):
        return f"{name} was packed for a CPU by an evaluation: call shard_base before it"
    return None


def _is_4bit(layer: nn.Module) -> bool:
    """Return whether a layer is bitsandbytes' ``Linear4bit``, with a quantised weight."""
    weight = layer._parameters.get("weight")
    return getattr(weight, "quant_state", None) is not None and hasattr(layer, "quant_storage")


def _sharded(model: nn.Module, mesh: DeviceMesh | None, keep: int, settings: dict[str, Any]) -> nn.Module:
    """Return the model inside DDP, with its frozen weights sharded; ``settings`` are DDP's."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if mesh is None:
        kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
        mesh = init_device_mesh(kind, (dist.get_world_size(),))
    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
    whole = _kept_whole(model)
    _leave_scales_with_layers(model, whole, device)
    parts = find_parts(model)
    layers: list[Any] = decoder_layers(parts.backbone)
    for index, layer in enumerate(layers):
        frees = index < len(layers) - keep
        fully_shard(layer, mesh=mesh, reshard_after_forward=frees, ignored_params=whole)
    root: Any = fully_shard(model, mesh=mesh, ignored_params=set(model.parameters()))
    root._get_fsdp_state()._lazy_init()  # FSDP2's at its first call: but generate calls no wrapper of PEFT
    generate_in_step(parts.outermost)
    for index, layer in enumerate(layers):
        assert isinstance(layer, FSDPModule)
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 1 + AHEAD])
        layer.set_modules_to_backward_prefetch(layers[max(0, index - AHEAD) : index][::-1])
    for tensor in (*model.parameters(), *model.buffers()):
        if not hasattr(tensor, "device_mesh"):  # fully_shard has moved these
            tensor.data = tensor.data.to(device)
        if getattr(tensor, "quant_state", None) is not None:
            tensor.quant_state.to(device)  # type: ignore[attr-defined]
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    frozen += [name for name, _ in model.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, frozen)
    return DistributedDataParallel(model, **settings)


def _leave_scales_with_layers(model: nn.Module, whole: set[nn.Parameter], device: torch.device) -> None:
    """Make the 4-bit weights that are not kept whole plain tensors, as FSDP2 needs; what unpacks them stays outside."""
    plain: dict[nn.Parameter, nn.Parameter] = {}
    layers: list[Any] = [layer for layer in model.modules() if _is_4bit(layer)]
    for layer in layers:
        weight = layer.weight
        if weight not in whole:
            weight.quant_state.to(device)
            layer.quant_state = weight.quant_state
            layer.weight = plain.setdefault(weight, nn.Parameter(weight.data, requires_grad=False))
            layer.support_avx512bf16_for_cpu = False  # an evaluation would pack the gathered weight in another way


def _kept_whole(model: nn.Module) -> set[nn.Parameter]:
    """Return all weights but the frozen ones of one decoder layer; frozen adapters are whole, too."""
    layers = decoder_layers(find_parts(model).backbone)
    owners = Counter(parameter for layer in layers for parameter in layer.parameters())
    split = {parameter for parameter, count in owners.items() if count == 1 and not parameter.requires_grad}
    for module in model.modules():
        for name in getattr(module, "adapter_layer_names", ()):
            if isinstance(adapter := getattr(module, name, None), nn.Module):
                split.difference_update(adapter.parameters())
    return set(model.parameters()) - split


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
