"""The weight sync of online trainers: what goes to vLLM, and what it does to a LoRA adapter's base weights."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from torch import Tensor

from fastpack.utils.replacement import Replacement, replaces
from fastpack.utils.sharding import is_sharded


def note_on_weight_sync(trainer: Any) -> str | None:
    """Return a line on base weights that drift because vLLM gets merged weights at every sync, or None.

    They do if TRL's trainer uses vLLM and its adapters sit on weights in half precision.
    """
    if not getattr(getattr(trainer, "args", None), "use_vllm", False):
        return None
    from fastpack.patching.merges import rounding_merges  # heavy: it imports PEFT

    gathered = _gathered_sync(trainer)
    counts = rounding_merges(trainer.model, among=None if gathered is None else gathered.spec)
    if not counts:
        return None
    which = " and ".join(f"{count} layers in {str(dtype).removeprefix('torch.')}" for dtype, count in counts.items())
    return (
        f"weight sync: {type(trainer).__name__} merges and unmerges the adapter of {which} at every sync with vLLM. "
        "Each one rounds, so the base weights drift, as in stock: fastpack.exact_merges(trainer.model) keeps them"
    )


def why_not_gathered(trainer: Any, *, in_4_bits: bool) -> str | None:
    """Return why a trainer can't generate while its base weights are sharded (in 4 bits, if so); None if it can."""
    if getattr(trainer, "use_transformers_continuous_batching", False):
        return "with continuous batching ranks don't generate in step: set use_transformers_continuous_batching=False"
    if not getattr(trainer.args, "use_vllm", False):
        return None
    if not hasattr(getattr(trainer, "vllm_generation", None), "sync_weights"):
        return "it syncs weights with vLLM by code of its own: set use_vllm=False"
    return "vLLM gets merged weights, and 4-bit ones can't be merged: load the base in bfloat16" if in_4_bits else None


def gather_for_sync(trainer: Any, whole: Set[Tensor]) -> None:
    """Let a trainer's weight sync with vLLM, if it has one, send whole weights where FSDP2 shards the base.

    Args:
        trainer: the trainer.
        whole: the weights that aren't sharded, which merges still round.
    """
    sender = getattr(trainer, "vllm_generation", None)
    if sender is not None and _gathered_sync(trainer) is None:
        Replacement(sender, "sync_weights", _gathered, whole, None).install()


def _gathered_sync(trainer: Any) -> Replacement[Set[Tensor], None] | None:
    sync = getattr(getattr(trainer, "vllm_generation", None), "sync_weights", None)
    return sync if replaces(sync, _gathered) else None


def _gathered(patched: Replacement[Set[Tensor], None]) -> None:
    """Gather all weights, sync as TRL does, and drop them with what was merged into them."""
    units: list[Any] = [module for module in patched.owner.model.modules() if is_sharded(module)]
    try:
        for unit in units:
            unit.unshard()
        patched.stock()
    finally:
        for unit in units:
            unit.reshard()
