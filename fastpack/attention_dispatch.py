"""Packed causal attention: one call, whichever kernel this machine has.

Shape suffixes: T tokens of all sequences, N sequences, H query heads, K key/value heads, D head size, V value size.

A forward builds an :class:`AttentionCall` and hands it to :func:`attend`; the table in
:mod:`fastpack.backends.registry` says which backend runs it.
No backend ever builds a mask of size T x T, and none waits for the device.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fastpack.backends.call import AttentionCall, AttentionShape, Visibility
from fastpack.backends.registry import BACKENDS, TRACED, in_order, why_not
from fastpack.errors import BackendUnavailableError
from fastpack.ops.shared_rows import first_copies, spread
from fastpack.packing.prefixes import SharedTokens

__all__ = ["BACKENDS", "AttentionCall", "AttentionShape", "Visibility", "attend", "choose", "explain"]


def explain(shape: AttentionShape) -> dict[str, str | None]:
    """Return the backends in order of preference, each with the reason why it can't serve this shape, or None."""
    return {name: why_not(name, shape) for name in in_order(shape)}


def check_name(attention: str) -> None:
    """Raise unless ``attention`` is ``auto`` or the name of a backend."""
    if attention != "auto" and attention not in BACKENDS:
        raise BackendUnavailableError(
            f"attention={attention!r} is not a backend. Choose 'auto' or one of: {', '.join(BACKENDS)}."
        )


def choose(shape: AttentionShape, attention: str = "auto") -> str:
    """Return the name of the backend that serves ``shape``.

    Args:
        shape: the attention to compute, and its device.
        attention: ``auto`` for the first backend that can serve, or a backend's name.

    Raises:
        BackendUnavailableError: the named backend rejects the shape, or for ``auto`` every backend does.
    """
    check_name(attention)
    if attention != "auto":
        reason = why_not(attention, shape)
        if reason is None:
            return attention
        others = [name for name, why in explain(shape).items() if why is None]
        raise BackendUnavailableError(
            f"attention={attention!r} can't serve {shape.describe()}: {reason}. "
            f"Backends that can: {', '.join(others) or 'none'}. Or pass attention='auto'."
        )
    for name in in_order(shape):
        if why_not(name, shape) is None:
            return name
    reasons = "; ".join(f"{name}: {why}" for name, why in explain(shape).items())
    raise BackendUnavailableError(f"no attention backend can serve {shape.describe()}: {reasons}")


def attend(call: AttentionCall, attention: str = "auto") -> Tensor:
    """Run packed causal attention.

    Args:
        call: queries, keys and values ``[T, heads, dim]``, the lengths of the sequences, and what modifies the
            scores. If sequences share tokens, the inputs and the result hold each shared token once.
        attention: ``auto`` or the name of a backend.

    Returns:
        ``[T, H, V]`` in the dtype that the kernel ran in: autocast's dtype under autocast, else that of ``call.q``.

    Raises:
        BackendUnavailableError: see :func:`choose`.

    Example:
        >>> packed = PackedSeqLens.from_lengths([3, 5])
        >>> q, k, v = torch.randn(3, 8, 4, 16).unbind()
        >>> attend(AttentionCall(q, k, v, packed, scale=16**-0.5)).shape
        torch.Size([8, 4, 16])
    """
    call = _under_autocast(call)
    if call.packed.shared is not None:
        return _attend_whole(call, call.packed.shared, attention)
    if torch.compiler.is_compiling():
        return _attend_compiled(call, attention)
    return BACKENDS[choose(call.shape, attention)].run(call)


def _attend_whole(call: AttentionCall, shared: SharedTokens, attention: str) -> Tensor:
    """Copy shared tokens into every sequence, attend, and keep one result of each token: no backend serves segments."""
    copies = shared.copies
    # only the first copy's result is kept, so the queries of the other copies have no gradient
    q = spread(call.q, copies, only_first=True)
    k, v = spread(call.k, copies), spread(call.v, copies)
    return first_copies(attend(replace(call, q=q, k=k, v=v, packed=call.packed.whole), attention), copies)


def _attend_compiled(call: AttentionCall, attention: str) -> Tensor:
    shape = call.shape
    for name in TRACED:
        if attention in ("auto", name) and why_not(name, shape) is None:
            return BACKENDS[name].run(call)
    from fastpack.backends import custom_op  # the import registers the operator

    return custom_op.run(choose(shape, attention), call)


def _under_autocast(call: AttentionCall) -> AttentionCall:
    # RoPE's float32 tables promote q and k; transformers' own flash path casts q and k back in the same way.
    device = call.q.device.type
    if not torch.is_autocast_enabled(device):
        return call
    dtype = torch.get_autocast_dtype(device)
    if call.q.dtype == call.k.dtype == call.v.dtype == dtype:
        return call
    return call.with_qkv(call.q.to(dtype), call.k.to(dtype), call.v.to(dtype))
