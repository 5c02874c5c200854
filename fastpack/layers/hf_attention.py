"""Packed attention for modules that keep their own forward: an implementation in transformers' interface.

Attention modules with a spec get a whole forward instead, from :mod:`fastpack.layers.attention`.
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
from fastpack.packing.two_way import TwoWay
from fastpack.utils.classes import stock_class
from fastpack.utils.protocols import ConfigLike
from fastpack.utils.replacement import Forward

INTERFACE_PREFIX = "fastpack_"
"""Fastpack's names in transformers' ``AttentionInterface`` are this prefix and the name of the requested backend."""
_IMPLEMENTATION = "_attn_implementation_internal"
"""The attribute of a config that names its attention."""
_LAST_VALUES = "_fastpack_last_values"
"""The attribute of a private config that holds the stock config's values when they were last copied."""
SCOPE = "_fastpack_scope"
"""The attribute of a private config that holds the packing context, or None if a keyword passes the packing."""
TWO_WAY = "_fastpack_two_way"
"""The attribute of a private config that says how its modules use the blocks of a batch, or None."""


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
    """Compute packed attention for transformers' ``AttentionInterface``, which modules of the varlen tier call.

    Args:
        attention: the requested backend, or ``auto``.
        module: the calling attention module.
        query: ``[1, heads, T, dim]``.
        key: the same shape as query, with key/value heads.
        value: as key.
        attention_mask: the placeholder (:func:`fastpack.packing.mask.mask_placeholder`) or None.
        scaling: multiplies the scores; None for ``dim ** -0.5``.
        dropout: probability that an attention weight is dropped.
        sliding_window: transformers' name for the window.
        softcap: c in ``c * tanh(score / c)``, or None.
        s_aux: transformers' name for the sinks, ``[heads]``.
        packed_seq_lens: the lengths of the sequences; None for the lengths in the packing context, if any.
        **kwargs: other arguments of the interface.

    Returns:
        ``[1, T, heads, dim]`` and None, as transformers' own implementations return.

    Raises:
        PatchError: the module asks for bidirectional attention, a position bias or a cache.
    """
    scope: PackingContext | None = getattr(module.config, SCOPE)
    if packed_seq_lens is None and scope is not None:
        packed_seq_lens = scope.required(module)
    require_packing(module, packed_seq_lens, attention_mask)
    if packed_seq_lens is None:
        stock = stock_interface(module)
        modifiers = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        kwargs |= {name: value for name, value in modifiers.items() if value is not None}
        return stock(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
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
            two_way=getattr(module.config, TWO_WAY),
        ),
        attention,
    )
    return out.contiguous()[None], None  # contiguous, as stock results are: some callers take a view of it


def stock_config(module: nn.Module) -> Any:
    """Return the stock config of a module that attends through fastpack's interface, or None for other modules."""
    return getattr(module.__dict__.get("config"), STOCK_CONFIG, None)


def naming_interface(config: ConfigLike, attention: str) -> Any:
    """Return a copy of a config that names fastpack's attention with this choice of backend."""
    copied = copy.copy(config)
    setattr(copied, _IMPLEMENTATION, interface_name(attention))
    return copied


def private_config(
    config: ConfigLike, attention: str, scope: PackingContext | None, two_way: TwoWay | None = None
) -> Any:
    """Copy a config. The copy names fastpack's attention, and holds the original config and the packing context.

    Args:
        config: the original config.
        attention: the requested backend, or ``auto``.
        scope: the packing context, or None if a keyword passes the packing.
        two_way: how the modules use the blocks of a batch; None if they are causal in any batch.
    """
    private = naming_interface(config, attention)
    setattr(private, _LAST_VALUES, dict(vars(config)))
    setattr(private, STOCK_CONFIG, config)  # set_attn_implementation() writes to this one
    setattr(private, SCOPE, scope)
    setattr(private, TWO_WAY, two_way)
    return private


def follow_stock_config(private: object) -> None:
    """Copy changed values of the stock config to the private config; values set on the private config stay."""
    mine = vars(private)
    last = mine[_LAST_VALUES]
    for name, value in vars(mine[STOCK_CONFIG]).items():
        if last.get(name, last) is not value:
            last[name] = value
            if name != _IMPLEMENTATION:
                mine[name] = value


def stock_interface(module: nn.Module) -> Forward:
    """Return the attention implementation that an unpatched ``module`` uses, for which the model builds its masks."""
    name = stock_config(module)._attn_implementation
    file = sys.modules[stock_class(module).__module__]
    eager = eager_function(file)
    if eager is None and name in (None, "eager"):
        raise PatchError(f"{type(module).__name__} has no eager attention; load it with attn_implementation='sdpa'.")
    return attention_table(file).get_interface(name, eager)


def interface_name(attention: str) -> str:
    """Return fastpack's name for this choice of backend in transformers' ``AttentionInterface``."""
    return INTERFACE_PREFIX + attention


def register_interface(attention: str) -> None:
    """Register fastpack's implementation through transformers' own extension point. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(interface_name(attention), functools.partial(packed_interface, attention))
