"""Honour accelerate's context parallelism in a trainer: the patched model spreads each batch, not torch's machinery.

The ranks of a group get the same batches from accelerate's data loader. Stock, the trainer then cuts a batch into
shares, drops its mask, and torch reroutes attention. Here the batch stays whole, and the loss on every rank is that of
the whole batch, so that the mean of the ranks' gradients is right. What the trainer adds up or gathers over all ranks
then holds each batch once for each rank of its group, which replacements of a few methods correct.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fastpack.errors import PatchError
from fastpack.layers.stock_attention import describe_parallelism, sequence_parallelism
from fastpack.patching.state import CONTEXT_PARALLEL, trainer_record
from fastpack.utils.classes import defined_in
from fastpack.utils.replacement import Replacement, do_nothing


@dataclass
class ContextParallelState:
    """The context parallelism of a trainer.

    Attributes:
        ranks: the size of a group.
        changes: the replacements on the trainer and its accelerator.
    """

    ranks: int
    changes: list[Replacement[int, None]] = field(default_factory=list)


def context_mesh_of(trainer: Any) -> DeviceMesh | None:
    """Return the mesh over which a trainer's accelerator was asked to spread sequences, or None.

    Raises:
        PatchError: it spreads them by DeepSpeed, or without FSDP2, so that nobody averages gradients; it gives the
            ranks of a group different batches; or torch's machinery is set up already, since the trainer ran.
    """
    accelerator = getattr(trainer, "accelerator", None)
    config = getattr(accelerator, "parallelism_config", None)
    spread = sequence_parallelism(config)
    if accelerator is None or config is None or spread is None:
        return None
    whose = f"the accelerator of this {type(trainer).__name__}"
    mesh = accelerator.torch_device_mesh
    backend = getattr(config, "cp_backend", "torch")  # accelerate 1.12 has a choice
    if not config.cp_enabled or backend != "torch" or mesh is None or not accelerator.is_fsdp2:
        raise PatchError(f"{describe_parallelism(spread, whose)} Nothing was changed.")
    reason = None
    if hasattr(accelerator, "_cp_context") and trainer_record(trainer, CONTEXT_PARALLEL) is None:
        reason = (
            "has set up torch's context parallelism already. Patch before the first trainer.train(), and leave "
            "precompute_ref_log_probs out"
        )
    streams = not hasattr(trainer.train_dataset, "__len__")
    if streams and accelerator.dataloader_config.dispatch_batches is not False:
        reason = (
            "deals the rows of a streamed data set to all ranks. Pass accelerator_config={'dispatch_batches': False} "
            "among the trainer's arguments"
        )
    if reason is not None:
        raise PatchError(f"{whose} has {spread}, and {reason}. Nothing was changed.")
    found: DeviceMesh = mesh["cp"]
    return found


def plan_spread(trainer: Any, mesh: DeviceMesh | None) -> Callable[[], None]:
    """Return a function that lets the patched model spread a trainer's batches over a mesh, or undoes that for None.

    A model alone, which a user's own loop feeds, has nothing to set up.
    """
    if isinstance(trainer, nn.Module):
        return do_nothing
    return functools.partial(_set_up, trainer, 1 if mesh is None else mesh.size())


def _set_up(trainer: Any, ranks: int) -> None:
    state = trainer_record(trainer, CONTEXT_PARALLEL)
    if state is not None:
        for change in reversed(state.changes):
            change.undo()
        _gather_anew(trainer)
        del trainer.__dict__[CONTEXT_PARALLEL]
    if ranks == 1:
        return
    state = ContextParallelState(ranks)
    replacements: list[tuple[Any, str, Callable[..., Any]]] = [
        (trainer.accelerator, "_prepare_cp", _prepare_nothing),
        (trainer.accelerator, "gather_for_metrics", _gather_once),
        (trainer, "_prepare_context_parallel_inputs", _leave_whole),
        (trainer, "_get_num_items_in_batch", _count_for_each_rank),
    ]
    if defined_in(type(trainer).compute_loss).startswith("transformers."):
        replacements[-1] = (trainer, "_get_num_items_in_batch", _count_once)
        replacements.append((trainer, "compute_loss", _compute_loss))
    for owner, name, function in replacements:
        state.changes.append(Replacement(owner, name, function, ranks, None))
        state.changes[-1].install()
    _gather_anew(trainer)
    trainer.__dict__[CONTEXT_PARALLEL] = state


def _gather_anew(trainer: Any) -> None:
    """Let the first evaluation gather as later ones do: the trainer keeps the accelerator's method from its start."""
    keywords = getattr(trainer.gather_function, "keywords", {})
    trainer.gather_function = functools.partial(trainer.accelerator.gather_for_metrics, **keywords)


def _prepare_nothing(patched: Replacement[int, None], *args: Any) -> tuple[Any, ...]:
    """Leave the model without accelerate's hooks, which drop masks, and torch's settings as they are."""
    return args


def _leave_whole(patched: Replacement[int, None], model: Any, inputs: Any) -> tuple[Callable[[], Any], Any]:
    """Leave a batch whole, and attention as it is."""
    return contextlib.nullcontext, inputs


def _count_for_each_rank(patched: Replacement[int, None], *args: Any, **kwargs: Any) -> Any:
    """Count the labels of all ranks, those of a group once for each of its ranks.

    The trainer multiplies its cross-entropy by the number of all ranks, and divides it by this count. If tokens are
    averaged on each rank alone, it is this rank's count.
    """
    config = patched.owner.accelerator.parallelism_config
    size, config.cp_size = config.cp_size, 1  # the count is divided by it, in transformers 5.17 rounded down
    try:
        return patched.stock(*args, **kwargs)
    finally:
        config.cp_size = size


def _count_once(patched: Replacement[int, None], *args: Any, **kwargs: Any) -> Any:
    """Count the labels of all ranks, those of a group once."""
    count = _count_for_each_rank(patched, *args, **kwargs)
    gathered = patched.owner.args.average_tokens_across_devices
    return count if count is None or not gathered else count / patched.spec


def _compute_loss(
    patched: Replacement[int, None],
    model: nn.Module,
    inputs: dict[str, Any],
    return_outputs: bool = False,
    num_items_in_batch: Tensor | int | None = None,
) -> Any:
    """Return the loss of transformers' trainer, which multiplies all of it, auxiliary losses too, by all ranks."""
    trainer = patched.owner
    result = patched.stock(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
    counts = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func
    if not (trainer.args.average_tokens_across_devices and counts) or num_items_in_batch is None:
        return result
    return (result[0] / patched.spec, *result[1:]) if return_outputs else result / patched.spec


def _gather_once(patched: Replacement[int, None], *args: Any, **kwargs: Any) -> Any:
    """Gather the values of one rank of each group, before accelerate cuts off what fills up the last batch."""
    from accelerate.utils import recursively_apply

    accelerator, ranks = patched.owner, patched.spec
    gather = accelerator.gather

    def one_of_each(data: Any) -> Any:
        def kept(x: Tensor) -> Tensor:
            # the ranks of a group follow each other
            return torch.cat(x.chunk(accelerator.num_processes)[::ranks])

        return recursively_apply(kept, gather(data))

    accelerator.gather = one_of_each
    try:
        return patched.stock(*args, **kwargs)
    finally:
        del accelerator.gather
