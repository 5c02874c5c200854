"""Twins: tiny models on the CPU, built from a user's own config and the class that is in memory.

A twin's config is the user's, shrunk by :func:`fastpack.exactness.tiny.shrink`, with bounds and epsilons so large that
they have an effect. All parameters are drawn anew, whatever values the class gives them. So a twin is the same on every
rank and every machine, and under contexts that don't initialise parameters.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.exactness.family_settings import HEAD_DIM
from fastpack.exactness.inputs import LENGTHS
from fastpack.exactness.tiny import AFTER_PLAIN, FIRST_PLAIN, SPREAD, shrink

ACTING = {
    **{"softcap": 1.0, "softcapping": 1.0, "clip_qkv": 0.5, "limit": 0.5, "eps": 0.05, "epsilon": 0.05},
    "attention_multiplier": HEAD_DIM**-0.5,  # with a larger one, scores are so far apart that rounding is blown up
}
"""Values of float settings, by their name or its last word, that are large enough to have an effect."""
ACTING_IN_LAYERS = {"swiglu_limits": 0.5, "swiglu_limits_shared": 0.5}
"""Such values for settings that list one for each layer; layers with 0 or None have none."""
VECTOR = 0.3
"""The standard deviation of norms' weights about 1, and of biases, sinks and the like about 0."""
GRID = 16.0
"""Matrices are multiples of 1 / 16, so that in half precision sums of products are exact in any order."""


@contextmanager
def apart() -> Iterator[None]:
    """Compute on the CPU with default settings inside a ``with`` block, then restore the caller's settings.

    Inside, tensors are float32 by default and have gradients. The caller's gradient mode, inference mode, autocast,
    default device and dtype, and random state are put aside. So is an active ``zero.Init`` of DeepSpeed, since it would
    partition a new model. Warnings from transformers about small configs are dropped.
    """
    dtype, log = torch.get_default_dtype(), logging.getLogger("transformers")
    with (
        warnings.catch_warnings(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        ExitStack() as later,
    ):
        warnings.simplefilter("ignore")
        later.callback(log.setLevel, log.level)
        log.setLevel(logging.ERROR)
        later.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        zero: Any = sys.modules.get("deepspeed.runtime.zero.partition_parameters")  # an active zero.Init has loaded it
        if zero is not None:
            zero.shutdown_init_context()
            later.callback(zero.restore_init_context)
        yield


def build_twin(
    cls: Any, config: Any, dtype: torch.dtype = torch.float32, *, dropout: float = 0.0, **settings: Any
) -> Any:
    """Build a twin of a class in training mode, inside :func:`apart`; every call builds the same twin.

    Args:
        cls: The class of a backbone or a head of transformers.
        config: The user's config, which is not changed.
        dtype: The dtype of the twin.
        dropout: The probability of every kind of dropout.
        **settings: Settings that replace the small config's own.

    Errors from the classes of the config and of the model are raised unchanged.
    """
    small = shrink(config, **settings)
    small._attn_implementation = "eager"  # the family's own function, which honours all of its arguments
    small._experts_implementation = None  # by name, the user may have chosen one that runs instead of a fast forward
    for each in _with_parts(small):
        each.dtype = dtype
        for name, value in vars(each).items():
            if type(value) is float:
                setattr(each, name, _acting(name, value, dropout))
            elif name in ACTING_IN_LAYERS and value is not None:
                setattr(each, name, [ACTING_IN_LAYERS[name] if layer else layer for layer in value])
    torch.set_default_dtype(dtype)
    try:
        model = cls(small)
    finally:
        torch.set_default_dtype(torch.float32)
    _materialise(model)
    _draw(model, torch.Generator("cpu").manual_seed(0))
    return model.train()


def distinct_sequences(lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    """Return ids of these lengths, int64, no id twice, so that the embedding's gradients are the inputs' gradients."""
    generator = torch.Generator("cpu").manual_seed(0)
    ids = FIRST_PLAIN + torch.randperm(AFTER_PLAIN - FIRST_PLAIN, generator=generator)
    return list(ids[: sum(lengths)].split(list(lengths)))


def _with_parts(config: Any) -> Iterator[Any]:
    """Yield a config and its sub-configs."""
    yield config
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is not None:
            yield from _with_parts(inner)


def _acting(name: str, value: float, dropout: float) -> float:
    """Return a value of a setting that is large enough to have an effect."""
    if "drop" in name and "layer" not in name:
        return dropout
    return ACTING.get(name, ACTING.get(name.rpartition("_")[2], value))


def _materialise(model: nn.Module) -> None:
    """Give CPU memory to parameters that one of the caller's contexts left on ``meta``.

    Accelerate's ``init_empty_weights`` is such a context.

    Raises:
        ValueError: A buffer is on ``meta``, too, so its values are lost.
    """
    fresh_of: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type != "cpu":
                fresh = fresh_of.setdefault(id(parameter), nn.Parameter(torch.empty_like(parameter, device="cpu")))
                module._parameters[name] = fresh  # tied parameters stay tied
    off = [name for name, buffer in model.named_buffers() if buffer.device.type != "cpu"]
    if off:
        raise ValueError(f"{off[0]} is not on the CPU: an active context puts new buffers on another device")


@torch.no_grad()
def _draw(model: nn.Module, generator: torch.Generator) -> None:
    """Draw every parameter: norms about 1, vectors about 0, matrices so wide that attention is far from uniform.

    All values are bfloat16 numbers, so that twins of several dtypes have the same values.
    """
    norms = [module for module in model.modules() if "norm" in type(module).__name__.lower()]
    about_1 = {id(p) for norm in norms for name, p in norm.named_parameters(recurse=False) if name.endswith("weight")}
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
        if id(parameter) in about_1:
            value = 1.0 + VECTOR * noise
        elif parameter.ndim < 2:
            value = VECTOR * noise
        else:
            value = (SPREAD * GRID * noise).round() / GRID
        parameter.copy_(value.bfloat16())
