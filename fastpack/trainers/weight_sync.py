"""The weight sync of online trainers: what goes to vLLM, and what it does to a LoRA adapter's base weights."""

from __future__ import annotations

from typing import Any


def note_on_weight_sync(trainer: Any) -> str | None:
    """Return a line on base weights that drift because vLLM gets merged weights at every sync, or None.

    They do if TRL's trainer uses vLLM and its adapters sit on weights in half precision.
    """
    if not getattr(getattr(trainer, "args", None), "use_vllm", False):
        return None
    from fastpack.patching.merges import rounding_merges  # heavy: it imports PEFT

    counts = rounding_merges(trainer.model)
    if not counts:
        return None
    which = " and ".join(f"{count} layers in {str(dtype).removeprefix('torch.')}" for dtype, count in counts.items())
    return (
        f"weight sync: {type(trainer).__name__} merges and unmerges the adapter of {which} at every sync with vLLM. "
        "Each one rounds, so the base weights drift, as in stock: fastpack.exact_merges(trainer.model) keeps them"
    )
