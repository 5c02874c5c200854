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
from fastpack.ops.exchange_heads import to_heads, to_tokens
from fastpack.ops.shared_rows import first_copies, spread
from fastpack.packing.prefixes import SharedTokens
from fastpack.packing.shards import TokenShards

__all__ = [
    "BACKENDS",
    "AttentionCall",
    "AttentionShape",
    "Visibility",
    "attend",
    "attend_on_copies",
    "attend_on_heads",
    "check_heads",
    "choose",
    "choose_for_tree",
    "explain",
    "heads_reject",
]

LEAST_RATIO = 1.5
"""How many times less work a tree must be for a backend that is not the fastest on whole sequences. Our own kernel
takes 1.5 times as long as FlashAttention 4 on one sequence of 8,192 tokens, and less on shorter ones."""


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
            scores. If sequences share tokens, the inputs and the result hold each shared token once. If the ranks of a
            group share the batch, they hold this rank's tokens, and every rank calls this at once.
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
    if call.packed.shards is not None:
        return attend_on_heads(call, call.packed.shards, attention)
    shared = call.packed.shared
    if shared is not None:
        name = choose_for_tree(call.shape, shared, attention)
        return attend_on_copies(call, shared, attention) if name is None else BACKENDS[name].run(call)
    if torch.compiler.is_compiling():
        return _attend_compiled(call, attention)
    return BACKENDS[choose(call.shape, attention)].run(call)


def choose_for_tree(shape: AttentionShape, shared: SharedTokens, attention: str = "auto") -> str | None:
    """Return the backend that attends on shared tokens as they are, or None if each sequence gets copies of them.

    A backend that serves segments need not be the fastest on whole sequences. If another one is, ``auto`` takes the
    first only where sharing saves enough work.

    Args:
        shape: the attention to compute, with :attr:`Visibility.segments`.
        shared: the shared tokens.
        attention: ``auto`` or the name of a backend.
    """
    if torch.compiler.is_compiling():
        return None  # a compiled region has operators for whole sequences alone
    names = in_order(shape) if attention == "auto" else [attention]
    name = next((name for name in names if why_not(name, shape) is None), None)
    if name is None or attention != "auto":
        return name
    whole = replace(shape, visibility=replace(shape.visibility, segments=False))
    if choose(whole) == name:
        return name
    tree = shared.tree
    ratio = tree.pairs_alone / tree.pairs
    if shape.visibility.window is not None:  # then the work grows as the number of tokens
        ratio = shape.total_tokens / shared.total_tokens
    return name if ratio >= LEAST_RATIO else None


def attend_on_copies(call: AttentionCall, shared: SharedTokens, attention: str) -> Tensor:
    """Copy shared tokens into every sequence, attend, and keep one result of each token."""
    copies = shared.copies
    # only the first copy's result is kept, so the queries of the other copies have no gradient
    q = spread(call.q, copies, only_first=True)
    k, v = spread(call.k, copies), spread(call.v, copies)
    return first_copies(attend(replace(call, q=q, k=k, v=v, packed=call.packed.whole), attention), copies)


def heads_reject(heads: int, kv_heads: int, ranks: int, *, what: str = "attention") -> str | None:
    """Return why so many ranks can't have equally many heads each, or None.

    Args:
        heads: the number of heads of queries, or of channels.
        kv_heads: the number of heads of keys, each for equally many neighbours of the others.
        ranks: the size of the group.
        what: what has these heads, for the message.
    """

    def can_share(n: int) -> bool:
        return heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)

    if can_share(ranks):
        return None
    fit = list(filter(can_share, range(2, heads + 1)))
    allowed = f"{', '.join(map(str, fit))} ranks" if fit else "no group of ranks"
    numbers = f"{heads} heads" if heads == kv_heads else f"{heads} heads, of keys {kv_heads},"
    return f"{what} of {numbers} can be spread over {allowed}, not {ranks}"


def check_heads(heads: int, kv_heads: int, ranks: int, *, what: str = "attention") -> None:
    """Raise a BackendUnavailableError if :func:`heads_reject` has a reason."""
    reason = heads_reject(heads, kv_heads, ranks, what=what)
    if reason is not None:
        raise BackendUnavailableError(f"{reason}. Pass a context_mesh of such a size.")


def attend_on_heads(call: AttentionCall, shards: TokenShards, attention: str) -> Tensor:
    """Give each rank all tokens of some heads, attend there, and give each rank its tokens of all heads.

    This is Ulysses (Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509, section 3). A head of keys that several ranks
    need goes to each of them.
    """
    check_heads(call.q.shape[1], call.k.shape[1], shards.ranks)
    k, v = call.k, call.v
    if k.shape[1] < shards.ranks:
        k, v = (x.repeat_interleave(shards.ranks // x.shape[1], 1) for x in (k, v))
    q, k, v = to_heads([call.q, k, v], shards.sizes, shards.group)
    sinks = None if call.sinks is None else call.sinks.chunk(shards.ranks)[shards.rank]
    out = attend(replace(call, q=q, k=k, v=v, sinks=sinks, packed=call.packed.whole), attention)
    return to_tokens(out, shards.sizes, shards.rank, shards.group)


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
