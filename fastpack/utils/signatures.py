"""Read the arguments of a stock forward, passed by position or by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fastpack.errors import PackingError
from fastpack.utils.compile import cached_constant


def accepted(forward: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a class's forward takes, by name or in its ``**kwargs``."""
    names = _keywords(forward)
    return dict(arguments) if names is None else {name: arguments[name] for name in arguments if name in names}


@cached_constant
def _keywords(forward: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the names of a forward's parameters, or None if it has ``**kwargs``."""
    parameters = inspect.signature(forward).parameters.values()
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters) else tuple(p.name for p in parameters)


@cached_constant
def parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the positional parameters of a class's forward, without ``self``."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    names = [p.name for p in inspect.signature(forward).parameters.values() if p.kind in kinds]
    return tuple(names[1:])


def bind(cls: type[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call of ``cls.forward`` by name.

    Raises:
        TypeError: there are more positional arguments than parameters.
    """
    names = parameters(cls.forward)
    if len(args) > len(names):
        raise TypeError(f"{cls.__name__}.forward takes {len(names)} positional arguments, but got {len(args)}")
    return {**dict(zip(names, args, strict=False)), **kwargs}


def wants_tuple(module: nn.Module, arguments: dict[str, Any]) -> bool:
    """Remove ``return_dict`` from the arguments, and return whether a tuple is requested.

    PEFT passes None, which stands for the config's setting.
    """
    return_dict = arguments.pop("return_dict", None)
    return not (getattr(module.config, "return_dict", True) if return_dict is None else return_dict)


def keeps_some_logits(arguments: Mapping[str, Any]) -> bool:
    """Return whether ``logits_to_keep``, a number or a tensor of indices, asks for a part of the logits."""
    keep = arguments.get("logits_to_keep")
    return not (keep is None or (isinstance(keep, int) and keep == 0))


def source_of(arguments: Mapping[str, Any]) -> Any:
    """Return the ids of a batch, else its embeddings, else None."""
    ids = arguments.get("input_ids")
    return arguments.get("inputs_embeds") if ids is None else ids


def shape_of(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Return the shape ``(B, S)`` of a batch.

    Raises:
        ValueError: the batch has both ids and embeddings, or neither.
        PackingError: the ids are not ``[B, S]``, or the embeddings not ``[B, S, H]``.
    """
    ids, embeddings = arguments.get("input_ids"), arguments.get("inputs_embeds")
    if (ids is None) == (embeddings is None):
        raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
    source = source_of(arguments)
    if source.ndim != (3 if ids is None else 2):
        raise PackingError(
            f"inputs have shape {tuple(source.shape)}; pass input_ids [B, S] or inputs_embeds [B, S, H]."
        )
    return source.shape[0], source.shape[1]
