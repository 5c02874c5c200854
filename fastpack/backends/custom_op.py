"""Any backend as one operator of a compiled graph, ``fastpack::packed_attention``.

``torch.compile`` can't look into most backends: they read lengths on the host, for which it would compile anew with
every batch, or are Functions around kernels. As an operator one is called, and left alone; the lengths of each batch it
finds in ``cu_seqlens``. The backends that take them as Python ints wait for the device, if that is a GPU.

The backward runs the backend once more, with autograd: one forward more than outside a compiled region.

Imported where a region is traced, since it registers the operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastpack.backends.call import AttentionCall
from fastpack.backends.registry import BACKENDS
from fastpack.errors import BackendUnavailableError
from fastpack.packing.seqlens import PackedSeqLens

READ_LENGTHS = ("segments", "reference")
"""Backends that take lengths as Python ints, also on a GPU."""


def run(backend: str, call: AttentionCall) -> Tensor:
    """``[T, H, V]``, as ``BACKENDS[backend].run(call)``.

    Raises:
        BackendUnavailableError: there is dropout, which the second forward would draw anew.
    """
    if call.dropout:
        raise BackendUnavailableError(
            f"attention dropout of {call.dropout:g} can't be compiled on {backend}: set attention_dropout=0 in the "
            "config, or leave the model uncompiled."
        )
    packed = call.packed
    out: Tensor = torch.ops.fastpack.packed_attention(
        call.q,
        call.k,
        call.v,
        call.sinks,
        packed.cu_seqlens,
        packed.position_ids,
        packed.max_seqlen,
        call.scale,
        call.window,
        call.softcap,
        backend,
    )
    return out


@torch.library.custom_op("fastpack::packed_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens: Tensor,
    position_ids: Tensor,
    max_seqlen: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    backend: str,
) -> Tensor:
    return _attend(q, k, v, sinks, cu_seqlens, position_ids, max_seqlen, scale, window, softcap, backend)


@torch.library.custom_op("fastpack::packed_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens: Tensor,
    position_ids: Tensor,
    max_seqlen: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    backend: str,
) -> list[Tensor]:
    # An operator runs beneath autograd; what happens here is to be seen by it. torch.func.vjp, the public way, takes no
    # Functions of the old style, which flash-attn's are.
    seen = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with seen, torch.enable_grad(), torch.autocast(q.device.type, enabled=False):
        wanted = [t.detach().requires_grad_() for t in (q, k, v, sinks) if t is not None]
        q, k, v = wanted[:3]
        last = None if sinks is None else wanted[3]
        out = _attend(q, k, v, last, cu_seqlens, position_ids, max_seqlen, scale, window, softcap, backend)
        return [g.contiguous() for g in torch.autograd.grad(out, wanted, grad)]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens: Tensor,
    position_ids: Tensor,
    max_seqlen: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    backend: str,
) -> Tensor:
    reads = q.device.type == "cpu" or backend in READ_LENGTHS
    lengths = tuple(length for length in cu_seqlens.diff().tolist() if length) if reads else ()
    packed = PackedSeqLens(lengths, cu_seqlens, position_ids, max_seqlen)
    with torch.autocast(q.device.type, enabled=False):  # whoever made q, k and v has seen to their dtype
        call = AttentionCall(q, k, v, packed, scale, window=window, softcap=softcap, sinks=sinks)
        return BACKENDS[backend].run(call).contiguous()


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_: Any) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v, sinks) if t is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.settings = inputs[6:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.fastpack.packed_attention_backward(grad, *ctx.saved_tensors, *ctx.settings)
    return (*grads, *(None,) * (6 - len(grads) + len(ctx.settings)))


_forward.register_autograd(_differentiate, setup_context=_keep)
