"""Packed attention for modules whose own forward is kept: an implementation in transformers' interface.

Attention whose form is known has a forward of its own instead, in :mod:`fastpack.layers.attention`.
"""

from __future__ import annotations

import copy
import functools
import sys
from typing import Any

from torch import Tensor, nn

from fastpack.attention_dispatch import AttentionCall, attend
from fastpack.errors import PatchError
from fastpack.layers.stock_attention import STOCK_CONFIG, attention_table, eager_function
from fastpack.packing.context import PackingContext
from fastpack.packing.mask import require_packing
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.utils.classes import stock_class
from fastpack.utils.protocols import ConfigLike
from fastpack.utils.replacement import Forward

INTERFACE_PREFIX = "fastpack_"
"""Our names in transformers' ``AttentionInterface`` are this and the name of the backend asked for."""
_IMPLEMENTATION = "_attn_implementation_internal"
"""Where a config keeps the name of its attention."""
_SEEN = "_fastpack_seen"
"""What that one held when it was last looked at."""
SCOPE = "_fastpack_scope"
"""And where it is told of the packing that no keyword brings; None where none has to."""


def packed_interface(
    attention: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packed_seq_lens: PackedSeqLens | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention for the varlen tier, as an implementation in transformers' ``AttentionInterface``.

    Args:
        attention: the name of the requested backend, or ``auto``.
        module: the attention module.
        query: ``[1, H, T, D]``.
        key: ``[1, K, T, D]``.
        value: ``[1, K, T, E]``.
        attention_mask: the placeholder (:func:`fastpack.packing.mask.mask_placeholder`) or None.
        scaling: the factor on the scores; None for ``D ** -0.5``.
        dropout: the probability with which scores are dropped.
        sliding_window: transformers' name for the window.
        softcap: the softcap on the scores, or None.
        s_aux: transformers' name for sinks.
        packed_seq_lens: the batch's packing.
        kwargs: further keywords of transformers, which are ignored.

    Returns:
        ``[1, T, H, E]`` and None, as transformers' own implementations return.
    """
    scope: PackingContext | None = getattr(module.config, SCOPE)
    if packed_seq_lens is None and scope is not None:
        packed_seq_lens = scope.required(module)
    require_packing(module, packed_seq_lens, attention_mask)
    if packed_seq_lens is None:
        stock = stock_interface(module)
        modifiers = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        given = {name: what for name, what in modifiers.items() if what is not None}
        return stock(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **given, **kwargs)
    unknown = [name for name in ("position_bias", "cache") if kwargs.get(name) is not None]
    if unknown or kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise PatchError(
            f"{type(module).__name__} asks for {unknown or ['bidirectional']} attention, which packed attention does "
            "not compute. fastpack.unpatch(model) restores the stock model; please report the family."
        )
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    out = attend(
        AttentionCall(
            q,
            k,
            v,
            packed_seq_lens,
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=sliding_window,
            softcap=softcap or None,
            sinks=s_aux,
            dropout=dropout,
        ),
        attention,
    )
    return out.contiguous()[None], None  # as stock implementations return it: some take a view of it


def stock_config(module: nn.Module) -> Any:
    """Return the config that a module's private one replaces, or None if it does not attend through our interface."""
    return getattr(module.__dict__.get("config"), STOCK_CONFIG, None)


def private_config(config: ConfigLike, attention: str, scope: PackingContext | None) -> Any:
    """Return a copy of a config that names our attention, refers to the original, and has the packing's context."""
    private = copy.copy(config)
    setattr(private, _SEEN, dict(vars(config)))
    setattr(private, STOCK_CONFIG, config)  # set_attn_implementation() names another attention there
    setattr(private, SCOPE, scope)
    setattr(private, _IMPLEMENTATION, interface_name(attention))
    return private


def follow_stock_config(private: object) -> None:
    """Take over what was changed since in the config that a private one stands for; what was set on that one stays."""
    mine = vars(private)
    seen = mine[_SEEN]
    for name, value in vars(mine[STOCK_CONFIG]).items():
        if seen.get(name, seen) is not value:
            seen[name] = value
            if name != _IMPLEMENTATION:
                mine[name] = value


def stock_interface(module: nn.Module) -> Forward:
    """Return the attention implementation that ``module`` would use without the patch: masks are built for it."""
    name = stock_config(module)._attn_implementation
    file = sys.modules[stock_class(module).__module__]
    eager = eager_function(file)
    if eager is None and name in (None, "eager"):
        raise PatchError(f"{type(module).__name__} has no eager attention; load it with attn_implementation='sdpa'.")
    return attention_table(file).get_interface(name, eager)


def interface_name(attention: str) -> str:
    """Our name for this choice of backend in transformers' ``AttentionInterface``."""
    return INTERFACE_PREFIX + attention


def register_interface(attention: str) -> None:
    """Register our implementation under its name, through transformers' own extension point. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(interface_name(attention), functools.partial(packed_interface, attention))
