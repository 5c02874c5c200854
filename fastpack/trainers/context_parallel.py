"""Honour accelerate's context parallelism in a trainer: the patched model spreads each batch, not torch's machinery.

The ranks of a group get the same batches from accelerate's data loader. Stock, the trainer then cuts a batch into
shares, drops its mask, and torch reroutes attention. Here the batch stays whole, and so is the loss on every rank, as
on the ranks of tensor parallelism. So the number of labels by which the loss is divided counts them once for each rank.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fastpack.errors import PatchError
from fastpack.layers.stock_attention import describe_parallelism, sequence_parallelism
from fastpack.patching.state import SPREAD, trainer_record
from fastpack.utils.replacement import Replacement, do_nothing


@dataclass
class SpreadState:
    """What a trainer had before its batches were spread.

    Attributes:
        ranks: the size of a group.
        tp_size: TRL's count of the ranks that see the same batch, or None.
        changes: the replacements on the trainer and its accelerator.
    """

    ranks: int
    tp_size: int | None
    changes: list[Replacement[int, None]] = field(default_factory=list)


def context_mesh_of(trainer: Any) -> DeviceMesh | None:
    """Return the mesh over which a trainer's accelerator spreads sequences by torch's machinery, or None.

    Raises:
        PatchError: other machinery spreads them (DeepSpeed's), or accelerate has made no mesh; or torch's machinery is
            set up already, since the trainer ran.
    """
    accelerator = getattr(trainer, "accelerator", None)
    config = getattr(accelerator, "parallelism_config", None)
    spread = sequence_parallelism(config)
    if accelerator is None or config is None or spread is None:
        return None
    whose = f"the accelerator of this {type(trainer).__name__}"
    every = accelerator.torch_device_mesh
    if not config.cp_enabled or config.cp_backend != "torch" or every is None:
        raise PatchError(f"{describe_parallelism(spread, whose)} Nothing was changed.")
    if hasattr(accelerator, "_cp_context") and trainer_record(trainer, SPREAD) is None:
        raise PatchError(
            f"{whose} has {spread}, and has set up torch's context parallelism for an earlier run. Patch before the "
            "first trainer.train(). Nothing was changed."
        )
    mesh: DeviceMesh = every["cp"]
    return mesh


def plan_spread(trainer: Any, mesh: DeviceMesh | None) -> Callable[[], None]:
    """Return a function that lets the patched model spread a trainer's batches over a mesh, or undoes that for None.

    A model alone, which a user's own loop feeds, has nothing to set up.
    """
    if isinstance(trainer, nn.Module):
        return do_nothing
    return functools.partial(_set_up, trainer, 1 if mesh is None else mesh.size())


def _set_up(trainer: Any, ranks: int) -> None:
    state = trainer_record(trainer, SPREAD)
    if state is not None:
        for change in reversed(state.changes):
            change.undo()
        if state.tp_size is not None:
            trainer._tp_size = state.tp_size
        del trainer.__dict__[SPREAD]
    if ranks == 1:
        return
    state = SpreadState(ranks, getattr(trainer, "_tp_size", None))
    for owner, name, function in (
        (trainer.accelerator, "_prepare_cp", _prepare_nothing),
        (trainer, "_prepare_context_parallel_inputs", _leave_whole),
        (trainer, "_get_num_items_in_batch", _count_for_each_rank),
    ):
        state.changes.append(Replacement(owner, name, function, ranks, None))
        state.changes[-1].install()
    if state.tp_size is not None:
        trainer._tp_size = state.tp_size * ranks  # TRL divides the tokens of all ranks by it
    trainer.__dict__[SPREAD] = state


def _prepare_nothing(patched: Replacement[int, None], *args: Any) -> tuple[Any, ...]:
    """Leave the model without accelerate's hooks, which drop masks, and torch's settings as they are."""
    return args


def _leave_whole(patched: Replacement[int, None], model: Any, inputs: Any) -> tuple[Callable[[], Any], Any]:
    """Leave a batch whole, and attention as it is."""
    return contextlib.nullcontext, inputs


def _count_for_each_rank(patched: Replacement[int, None], *args: Any, **kwargs: Any) -> Any:
    """Count the labels of a step once for each rank of a group: each computes the loss of all of them."""
    count = patched.stock(*args, **kwargs)
    return None if count is None else count * patched.spec
