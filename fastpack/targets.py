"""From what a user holds (a model, a PEFT or value-head wrapper, a trainer) to the head and the backbone inside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from fastpack.errors import PatchError, UnsupportedModelError
from fastpack.families import family_of


@dataclass(frozen=True, eq=False)
class Parts:
    """The head (None for a bare backbone) and the backbone, which is the module that the head calls."""

    head: Any
    backbone: Any


def models_of(target: Any) -> list[nn.Module]:
    """The models that a target holds: itself, or a trainer's policy and reference model.

    Raises:
        TypeError: neither a module nor a trainer.
    """
    if isinstance(target, nn.Module):
        return [target]
    if isinstance(getattr(target, "model", None), nn.Module) and hasattr(target, "train"):
        reference = getattr(target, "ref_model", None)
        return [target.model, *([reference] if isinstance(reference, nn.Module) else [])]
    raise TypeError(
        f"fastpack.patch takes a model (torch.nn.Module) or a trainer that holds one, not {type(target).__name__}."
    )


def find_parts(model: nn.Module) -> Parts:
    """Look through PEFT and value-head wrappers for the head and the backbone.

    Raises:
        PatchError: the model is wrapped by FSDP, DataParallel, DistributedDataParallel or ``torch.compile``.
        UnsupportedModelError: there is no transformers model inside.
    """
    _refuse_wrapped(model)
    inner: Any = model
    if hasattr(inner, "peft_config") and hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    if isinstance(getattr(inner, "pretrained_model", None), nn.Module):
        return find_parts(inner.pretrained_model)
    _refuse_wrapped(inner)
    if not hasattr(inner, "base_model_prefix") or not hasattr(inner, "config"):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a transformers model. Pass a ...ForCausalLM, a classifier or a backbone of "
            "transformers, or one that PEFT has wrapped."
        )
    backbone = inner.base_model
    if backbone is inner and hasattr(getattr(inner, "model", None), "base_model_prefix"):
        backbone = inner.model  # Llama 4 and Mllama name it wrongly
    if backbone is inner:
        return Parts(None, inner)
    decoder = getattr(backbone, "decoder", None)
    if isinstance(decoder, nn.Module) and not hasattr(backbone, "encoder") and family_of(decoder) is not None:
        backbone = decoder  # which is what such heads call
    _refuse_wrapped(backbone)
    return Parts(inner, backbone)


def _refuse_wrapped(model: nn.Module) -> None:
    wrappers = {
        "OptimizedModule": "compiled (torch.compile)",
        "DataParallel": "wrapped by nn.DataParallel",
        "DistributedDataParallel": "wrapped by DistributedDataParallel",
        "FullyShardedDataParallel": "wrapped by FSDP",
    }
    kinds = {base.__name__ for base in type(model).__mro__ if base.__module__.startswith("torch.")}
    how = next((text for name, text in wrappers.items() if name in kinds), None)
    if how is None and "FSDPModule" in kinds:
        how = "sharded by FSDP2 (fully_shard)"
    if how is not None:
        raise PatchError(
            f"this model is already {how}. Patch the plain model first, then wrap it; trainers wrap it themselves "
            "when train() begins."
        )
