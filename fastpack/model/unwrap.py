"""Find the head and the backbone inside a model, a PEFT or value-head wrapper, or a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from fastpack.errors import PatchError, UnsupportedModelError
from fastpack.families.registry import family_of
from fastpack.utils.protocols import HeadLike, ModelLike
from fastpack.utils.sharding import is_sharded

OTHER_MODELS = ("ref_model", "teacher_model")
"""The attributes of trainers that hold models beside the one that trains."""
STATE_ATTRIBUTE = "_fastpack_state"
"""The name of the backbone's attribute that holds the record of its patch."""


@dataclass(frozen=True, eq=False)
class Parts:
    """A model's head and backbone, and the composite that the backbone is the text model of.

    Attributes:
        head: the head; None for a bare backbone or composite.
        backbone: the decoder: the module that the head calls or, in a composite, the text model inside.
        composite: the module that calls a vision or audio tower and the text model, or None. It is the head itself if
            the text model inside it has a head of its own.
    """

    head: Any
    backbone: ModelLike
    composite: Any = None

    @property
    def outermost(self) -> Any:
        """The module that a user calls."""
        return self.head or self.composite or self.backbone


def models_of(target: Any) -> list[nn.Module]:
    """Return the models of a target: the module itself, or a trainer's model, its reference model and its teacher.

    Raises:
        TypeError: the target is neither a module nor a trainer.
        PatchError: the trainer has no model yet, for example in a callback that gets it in ``__init__``.
    """
    if isinstance(target, nn.Module):
        return [target]
    if isinstance(getattr(target, "model", None), nn.Module) and hasattr(target, "train"):
        others = [getattr(target, name, None) for name in OTHER_MODELS]
        return list(dict.fromkeys([target.model, *(other for other in others if isinstance(other, nn.Module))]))
    trains = not isinstance(target, type) and callable(getattr(target, "train", None))
    if trains and getattr(target, "model", None) is None:
        raise PatchError(
            f"this {type(target).__name__} holds no model yet, since its own __init__ has not ended: a callback may "
            "have got the trainer too early. Patch in the callback's on_init_end, which gets the model (def "
            "on_init_end(self, args, state, control, model=None, **kwargs): fastpack.patch(model)), or patch the "
            "trainer after it is built, before trainer.train()."
        )
    raise TypeError(
        f"fastpack takes a model (torch.nn.Module) or a trainer that holds one, not {type(target).__name__}."
    )


def packages_of(target: object) -> set[str]:
    """Return the import names of the packages that a target builds on.

    These packages define the classes of the trainer, of its accelerator and of its models' modules, or base classes of
    these.
    """
    parts = [target, getattr(target, "accelerator", None), *(m for model in models_of(target) for m in model.modules())]
    bases = {base for kind in set(map(type, parts)) for base in kind.__mro__}
    return {base.__module__.partition(".")[0] for base in bases}


def find_parts(model: nn.Module) -> Parts:
    """Look through wrappers (PEFT, value heads, DDP, FSDP, ZeRO, ``torch.compile``) for the head and the backbone.

    In a composite (a vision-language model) the backbone is the text model inside, found from the model's structure.

    Raises:
        UnsupportedModelError: there is no transformers model inside.
    """
    inner: Any = _innermost(model)
    if not hasattr(inner, "base_model_prefix") or not hasattr(inner, "config"):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a transformers model. Pass a ...ForCausalLM, a classifier or a backbone of "
            "transformers, or one that PEFT has wrapped."
        )
    backbone = _base(inner)
    head = None if backbone is inner else inner
    inside = None if family_of(backbone) is not None else _text_model(backbone)
    if inside is None:
        return Parts(head, backbone if head is None else _decoder(backbone))
    text = _base(inside)
    if text is inside:
        return Parts(head, text, composite=backbone)
    return Parts(inner, _decoder(text), composite=backbone)


def _base(model: Any) -> Any:
    """Return the module that a head calls; the model itself if it has no head."""
    base = _innermost(model.base_model)
    if base is model and hasattr(getattr(model, "model", None), "base_model_prefix"):
        return _innermost(model.model)  # base_model_prefix is wrong
    return base


def _text_model(composite: Any) -> Any:
    """Return the text model inside a composite, which may be a whole causal LM; None if there is none."""
    for name in ("language_model", "text_model"):
        inside = _innermost(getattr(composite, name, None))
        if hasattr(inside, "base_model_prefix") and not hasattr(_base(inside), "encoder"):
            return inside
    return None


def _decoder(backbone: Any) -> Any:
    """Return the decoder inside a backbone without an encoder, which heads of such models call; else the backbone."""
    decoder = _innermost(getattr(backbone, "decoder", None))
    has_decoder = isinstance(decoder, nn.Module) and not hasattr(backbone, "encoder")
    return decoder if has_decoder and family_of(decoder) is not None else backbone


def patched_backbone(head: HeadLike) -> Any:
    """Return the backbone of a patched head.

    Raises:
        PatchError: a stock backbone replaced the patched one after the patch.
    """
    backbone = find_parts(head).backbone
    if STATE_ATTRIBUTE not in backbone.__dict__:
        raise PatchError(
            f"the {type(backbone).__name__} inside this {type(head).__name__} is not patched: it replaced the "
            "patched one, and would take packed sequences for one sequence. Call fastpack.patch(model) again."
        )
    return backbone


_PATCH_FIRST = (
    "Patch the plain model first, then wrap it; trainers wrap it themselves when train() begins. (TRL shards a "
    "reference model when its trainer is built: pass a patched one, ref_model=fastpack.patch(reference).)"
)


def refuse_wrapped(model: nn.Module, advice: str = _PATCH_FIRST) -> None:
    """Raise if a model was wrapped before the patch, so that its class names and weights have changed.

    Args:
        model: the model.
        advice: the end of the message, which says how to mend the problem.

    Raises:
        PatchError: the model, or its backbone, is wrapped by FSDP, DataParallel, DistributedDataParallel, DeepSpeed or
            ``torch.compile``.
    """
    for module in (*wrapper_chain(model), *wrapper_chain(getattr(_innermost(model), "base_model", None))):
        wrapping = _wrapping(module)
        if wrapping is not None:
            raise PatchError(f"this model is already {wrapping}. {advice}")


def refuse_captured_forward(model: nn.Module, head: HeadLike) -> None:
    """Raise if a wrapper holds the forward that the head had before the patch, as PEFT's adaption prompts do.

    Args:
        model: the model.
        head: the head inside it.

    Raises:
        PatchError: the wrapper would call the stock forward after the patch, too.
    """
    for module in model.modules():
        if module is head:
            return
        if head is not None and getattr(module.__dict__.get("forward"), "__self__", None) is head:
            raise PatchError(
                f"{type(module).__name__} holds the forward of the {type(head).__name__} inside it, and would "
                "call the stock forward after the patch, too. Patch the plain model first, then wrap it."
            )


_WRAPPERS = {
    "OptimizedModule": ("compiled (torch.compile)", "_orig_mod"),
    "DataParallel": ("wrapped by nn.DataParallel", "module"),
    "DistributedDataParallel": ("wrapped by DistributedDataParallel", "module"),
    "FullyShardedDataParallel": ("wrapped by FSDP", "module"),
    "DeepSpeedEngine": ("wrapped by DeepSpeed", "module"),
}
"""For each wrapper: its description in messages, and the attribute that holds the module inside."""


def _wrapper(module: nn.Module) -> tuple[str, str] | None:
    names = (cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith(("torch.", "deepspeed.")))
    return next((_WRAPPERS[name] for name in names if name in _WRAPPERS), None)


def _wrapping(module: nn.Module) -> str | None:
    """Return how a module is wrapped, or sharded in place, in words; None for a plain module."""
    wrapper = _wrapper(module)
    if wrapper is not None:
        return wrapper[0]
    return "sharded by FSDP2 (fully_shard)" if is_sharded(module) else None


def wrapper_chain(model: object) -> Iterator[Any]:
    """Yield a module and the modules inside its wrappers, from outside to inside, down to transformers' model."""
    while isinstance(model, nn.Module):
        yield model
        model = _inside(model)


def _inside(module: Any) -> Any:
    """Return the module inside a wrapper; None for most other modules."""
    wrapper = _wrapper(module)
    if wrapper is not None:
        return getattr(module, wrapper[1])
    if hasattr(module, "peft_config") and hasattr(module, "get_base_model"):
        return module.get_base_model()
    if type(module).__name__ == "PeftMixedModel":  # it has no get_base_model
        return module.base_model.model
    return getattr(module, "pretrained_model", None)


def _innermost(model: Any) -> Any:
    """Return the innermost module inside wrappers; an object that is no module is returned unchanged."""
    return [model, *wrapper_chain(model)][-1]
