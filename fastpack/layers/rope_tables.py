"""Rotary tables whose frequencies depend on a sequence's length (dynamic NTK, LongRoPE), for packed sequences.

Stock modules choose frequencies by the longest position of the batch, so that the results of a short sequence depend on
its neighbours. Here each sequence gets the frequencies of its own length, as it does alone. Fastpack makes only this
choice: transformers' own initialisers compute the frequencies, and the family's own forward computes the tables.

Sources: Ding et al., "LongRoPE", arXiv:2402.13753 (short and long factors); Peng et al., "YaRN", arXiv:2309.00071,
section 3.1 (dynamic NTK: the base grows with ``factor * length / trained length - (factor - 1)``).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.layers.runtime import Runtime
from fastpack.utils.classes import replaced_forward, stock_class
from fastpack.utils.hooks import carries_hooks
from fastpack.utils.replacement import FORWARDS, Replacement, replaces

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""The rope types whose frequencies depend on the length."""


def rotates_by_length(backbone: nn.Module) -> bool:
    """Return whether any module of a backbone has a rotary type whose frequencies depend on the length."""
    return any(getattr(module, "rope_type", None) in LENGTH_DEPENDENT for module in backbone.modules())


def depends_on_length(module: nn.Module) -> bool:
    """Return whether a rotary module's frequencies depend on the length."""
    rope_type = getattr(module, "rope_type", None)
    return isinstance(rope_type, str) and rope_type in LENGTH_DEPENDENT and hasattr(module, "original_inv_freq")


def is_rotary(module: nn.Module) -> bool:
    """Return whether a module makes the tables of cos and sin, judged by its class name."""
    return any(cls.__name__.endswith("RotaryEmbedding") for cls in type(module).__mro__)


def gives_known_tables(module: nn.Module) -> bool:
    """Return whether a rotary module is transformers' own, whose tables hold each angle in both halves.

    A replaced class or forward, or a hook, may return any tables.
    """
    if stock_class(module).__module__.split(".")[0] != "transformers" or replaced_forward(module) is not None:
        return False
    return "_hf_hook" in module.__dict__ or not carries_hooks(module)


def unknown_tables(backbone: nn.Module) -> str | None:
    """Return why this backbone's tables may not be rotations, or None if each rotary module is recognised."""
    unknown = [type(m).__name__ for m in backbone.modules() if is_rotary(m) and not gives_known_tables(m)]
    return f"its cos and sin may be any of {unknown[0]}'s" if unknown else None


def is_served(module: nn.Module) -> bool:
    """Return whether a module uses :func:`rotary_forward`, also under accelerate's hooks."""
    return any(replaces(module.__dict__.get(name), rotary_forward) for name in FORWARDS)


def unserved(backbone: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return the length-dependent rotary modules that were added after the patch, each with a remedy."""
    why = (
        "put into the model after the patch, so that sequences get the frequencies of the longest in the batch: "
        "patch(unpatch(model))"
    )
    return tuple(
        (type(module).__name__, f"rotary type {module.rope_type!r}, {why}")
        for module in backbone.modules()
        if depends_on_length(module) and not is_served(module)
    )


def rotary_forward(patched: Replacement[None, Runtime], x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin, ``[1, T, R]`` or with several rows.

    Dynamic NTK waits for the device once per batch, to read which lengths are long.

    Args:
        patched: the replacement on a rotary module.
        x: a tensor of the result's dtype and device.
        position_ids: ``[1, T]``, or ``[axes, 1, T]``, whose first axis is read. A position that is not larger than
            the position before it begins a new sequence. Several rows with equal positions are re-padded rows; rows
            with different positions come from the stock path and get the stock result. If ranks share the batch,
            these are the positions of this rank's tokens.
    """
    module, context = patched.owner, patched.runtime.context
    rows = position_ids if position_ids.ndim == 2 else position_ids[0]
    if len(rows) != 1 and bool((rows != rows[:1]).any()):
        return patched.stock(x, position_ids)
    packed = None if context is None else context.packed
    if packed is None or packed.shards is None:
        length = _lengths(rows[0])
    else:
        length = packed.shards.keep(_lengths(packed.position_ids[0])[None])[0]

    if module.rope_type == "longrope":
        trained = module.config.rope_parameters["original_max_position_embeddings"]
        kinds = torch.where(length > trained, trained + 1, 0)
        values = [0, trained + 1]
        # some modules choose by the longest position among their inputs
        inputs = [position_ids.clamp(max=trained - 1), position_ids]
    else:
        kinds = torch.where(length > module.config.max_position_embeddings, length, 0)
        values = kinds.unique().tolist()
        inputs = [position_ids] * len(values)
    tables = [_tables(module, x, positions, value) for positions, value in zip(inputs, values, strict=True)]
    cos, sin = tables[0]
    for value, (other_cos, other_sin) in zip(values[1:], tables[1:], strict=True):
        chosen = (kinds == value)[None, :, None]
        cos, sin = torch.where(chosen, other_cos, cos), torch.where(chosen, other_sin, sin)
    return cos, sin


def _lengths(positions: Tensor) -> Tensor:
    """Return the length of each token's sequence, one more than the largest position in it."""
    positions = positions.long()
    sequence = torch.zeros_like(positions)
    torch.cumsum(positions.diff() <= 0, 0, out=sequence[1:])
    return torch.zeros_like(positions).scatter_reduce(0, sequence, positions + 1, "amax")[sequence]


class _With:
    """A view of a rotary module with other frequencies, for the module's own forward."""

    def __init__(self, module: Any, inv_freq: Tensor) -> None:
        self.module, self.inv_freq = module, inv_freq

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def _tables(module: Any, x: Tensor, position_ids: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the tables of the family's own forward with the frequencies of ``length`` (0 for short sequences).

    For short sequences, these are the frequencies with which the module was built. They need not come from
    transformers' initialiser (HunYuan's don't).
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inv_freq = module.original_inv_freq
    if length:
        inv_freq, _ = ROPE_INIT_FUNCTIONS[module.rope_type](module.config, x.device, seq_len=length)
    settings = _With(module, inv_freq)
    own_forward: Any = inspect.unwrap(type(module).forward)
    with torch.no_grad():
        tables: tuple[Tensor, Tensor] = own_forward(settings, x, position_ids)
    return tables
