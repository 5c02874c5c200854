"""Find the head and the backbone inside what a user holds: a model, a PEFT or value-head wrapper, a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from fastpack.errors import PatchError, UnsupportedModelError
from fastpack.families.registry import family_of
from fastpack.utils.protocols import HeadLike, ModelLike
from fastpack.utils.sharding import is_sharded

STATE = "_fastpack_state"
"""The attribute of the backbone under which the record of its patch is kept."""


@dataclass(frozen=True, eq=False)
class Parts:
    """The head (None for a bare backbone) and the backbone, which is the module that the head calls."""

    head: Any
    backbone: ModelLike


def models_of(target: Any) -> list[nn.Module]:
    """Return the models of a target: the module itself, or a trainer's policy and reference model.

    Raises:
        TypeError: the target is neither a module nor a trainer.
        PatchError: the trainer has no model yet, as for a callback that gets it in ``__init__``.
    """
    if isinstance(target, nn.Module):
        return [target]
    if isinstance(getattr(target, "model", None), nn.Module) and hasattr(target, "train"):
        reference = getattr(target, "ref_model", None)
        return [target.model, *([reference] if isinstance(reference, nn.Module) else [])]
    trains = not isinstance(target, type) and callable(getattr(target, "train", None))
    if trains and getattr(target, "model", None) is None:
        raise PatchError(
            f"this {type(target).__name__} holds no model yet: its own __init__ is not done, as where a callback is "
            "handed the trainer in its __init__. Patch in the callback's on_init_end, which is passed the model (def "
            "on_init_end(self, args, state, control, model=None, **kwargs): fastpack.patch(model)), or patch the "
            "trainer once it is built, before trainer.train()."
        )
    raise TypeError(
        f"fastpack takes a model (torch.nn.Module) or a trainer that holds one, not {type(target).__name__}."
    )


def packages_of(target: object) -> set[str]:
    """Return the import names of the packages that a target builds on.

    They define the classes of the trainer, of its accelerator and of its models' modules, or a base of one of these.
    """
    held = [target, getattr(target, "accelerator", None), *(m for model in models_of(target) for m in model.modules())]
    bases = {base for kind in set(map(type, held)) for base in kind.__mro__}
    return {base.__module__.partition(".")[0] for base in bases}


def find_parts(model: nn.Module) -> Parts:
    """Look through wrappers (PEFT, value heads, DDP, FSDP, ZeRO, ``torch.compile``) for the head and the backbone.

    Raises:
        UnsupportedModelError: there is no transformers model inside.
    """
    inner: Any = _innermost(model)
    if not hasattr(inner, "base_model_prefix") or not hasattr(inner, "config"):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a transformers model. Pass a ...ForCausalLM, a classifier or a backbone of "
            "transformers, or one that PEFT has wrapped."
        )
    backbone = _innermost(inner.base_model)
    if backbone is inner and hasattr(getattr(inner, "model", None), "base_model_prefix"):
        backbone = _innermost(inner.model)  # base_model_prefix names it wrongly
    if backbone is inner:
        return Parts(None, inner)
    decoder = _innermost(getattr(backbone, "decoder", None))
    if isinstance(decoder, nn.Module) and not hasattr(backbone, "encoder") and family_of(decoder) is not None:
        backbone = decoder  # which is what such heads call
    return Parts(inner, backbone)


def refuse_strange_backbone(head: HeadLike) -> Any:
    """Return the backbone of a patched head; raise where it is another than the one patched with it, which is stock."""
    backbone = find_parts(head).backbone
    if STATE not in backbone.__dict__:
        raise PatchError(
            f"the {type(backbone).__name__} inside this {type(head).__name__} is not patched: it took the place of the "
            "one that was, and would see packed sequences as one. Call fastpack.patch(model) again."
        )
    return backbone


_PATCH_FIRST = (
    "Patch the plain model first, then wrap it; trainers wrap it themselves when train() begins. (TRL shards a "
    "reference model when its trainer is built: give it one that is patched, ref_model=fastpack.patch(reference).)"
)


def refuse_wrapped(model: nn.Module, advice: str = _PATCH_FIRST) -> None:
    """Raise if a model was wrapped before the patch, when its class names and weights are already others.

    Args:
        model: the model.
        advice: how to mend it, for the message.

    Raises:
        PatchError: the model, or its backbone, is wrapped by FSDP, DataParallel, DistributedDataParallel, DeepSpeed or
            ``torch.compile``.
    """
    for module in (*way_in(model), *way_in(getattr(_innermost(model), "base_model", None))):
        how = _wrapping(module)
        if how is not None:
            raise PatchError(f"this model is already {how}. {advice}")


def refuse_kept_forward(model: nn.Module, head: HeadLike) -> None:
    """Raise where a wrapper calls the head's forward as it was when it wrapped it (PEFT's adaption prompts).

    Raises:
        PatchError: it would go on doing so.
    """
    for module in model.modules():
        if module is head:
            return
        if head is not None and getattr(module.__dict__.get("forward"), "__self__", None) is head:
            raise PatchError(
                f"{type(module).__name__} keeps the forward of the {type(head).__name__} inside it, and would go on "
                "calling the one from before the patch. Patch the plain model first, then wrap it."
            )


_WRAPPERS = {
    "OptimizedModule": ("compiled (torch.compile)", "_orig_mod"),
    "DataParallel": ("wrapped by nn.DataParallel", "module"),
    "DistributedDataParallel": ("wrapped by DistributedDataParallel", "module"),
    "FullyShardedDataParallel": ("wrapped by FSDP", "module"),
    "DeepSpeedEngine": ("wrapped by DeepSpeed", "module"),
}
"""The words for each wrapper, and the attribute that holds what is inside."""


def _wrapper(module: nn.Module) -> tuple[str, str] | None:
    names = (cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith(("torch.", "deepspeed.")))
    return next((_WRAPPERS[name] for name in names if name in _WRAPPERS), None)


def _wrapping(module: nn.Module) -> str | None:
    """Say what wraps a module, or has sharded it in place; None for a plain one."""
    wrapper = _wrapper(module)
    if wrapper is not None:
        return wrapper[0]
    return "sharded by FSDP2 (fully_shard)" if is_sharded(module) else None


def way_in(model: object) -> Iterator[Any]:
    """Return the module and all that its wrappers contain, from outside to inside, down to transformers' model."""
    while isinstance(model, nn.Module):
        yield model
        model = _held(model)


def _held(module: Any) -> Any:
    """Return the module that a wrapper contains; for other modules mostly None."""
    wrapper = _wrapper(module)
    if wrapper is not None:
        return getattr(module, wrapper[1])
    if hasattr(module, "peft_config") and hasattr(module, "get_base_model"):
        return module.get_base_model()
    if type(module).__name__ == "PeftMixedModel":  # which has no get_base_model
        return module.base_model.model
    return getattr(module, "pretrained_model", None)


def _innermost(model: Any) -> Any:
    """Return the innermost module inside wrappers; something else than a module is returned as it is."""
    return [model, *way_in(model)][-1]
