"""Any backend as one operator of a compiled graph, ``fastpack::packed_attention``.

``torch.compile`` can't trace most backends. Some read lengths on the host, so that torch would compile again for every
batch; others are autograd Functions around kernels. The compiled graph calls this operator without tracing it, and the
operator reads each batch's lengths from ``cu_seqlens``. On a GPU, the backends that take lengths as Python ints wait
for the device.

The backward runs the backend's forward again, under autograd. So a compiled region costs one more forward.

Importing this module registers the operator. Therefore it is imported only while a region is traced.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from fastpack.backends.call import AttentionCall
from fastpack.backends.registry import BACKENDS
from fastpack.errors import BackendUnavailableError
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.packing.two_way import TwoWay, TwoWayBlocks

READ_LENGTHS = ("cudnn", "segments", "reference")
"""Backends that take lengths as Python ints, even on a GPU."""
TENSORS = 8
"""The operator's first arguments, which are tensors."""


def run(backend: str, call: AttentionCall) -> Tensor:
    """Return ``[T, H, V]``, as ``BACKENDS[backend].run(call)`` does.

    Raises:
        BackendUnavailableError: the call has dropout; the second forward would drop other weights.
    """
    if call.dropout:
        raise BackendUnavailableError(
            f"attention dropout of {call.dropout:g} can't be compiled on {backend}: set attention_dropout=0 in the "
            "config, or leave the model uncompiled."
        )
    packed, blocks = call.packed, call.packed.two_way
    return torch.ops.fastpack.packed_attention(
        call.q,
        call.k,
        call.v,
        call.sinks,
        packed.cu_seqlens,
        packed.position_ids,
        None if blocks is None else blocks.first,
        None if blocks is None else blocks.end,
        packed.max_seqlen,
        call.scale,
        call.window,
        call.softcap,
        call.two_way,
        backend,
    )


@torch.library.custom_op("fastpack::packed_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens: Tensor,
    position_ids: Tensor,
    block_first: Tensor | None,
    block_end: Tensor | None,
    max_seqlen: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    two_way: str | None,
    backend: str,
) -> Tensor:
    packing = (cu_seqlens, position_ids, block_first, block_end, max_seqlen)
    return _attend(q, k, v, sinks, *packing, scale, window, softcap, two_way, backend)


@torch.library.custom_op("fastpack::packed_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens: Tensor,
    position_ids: Tensor,
    block_first: Tensor | None,
    block_end: Tensor | None,
    max_seqlen: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    two_way: str | None,
    backend: str,
) -> list[Tensor]:
    # An operator runs beneath autograd, but this one needs autograd to record its forward. The public way,
    # torch.func.vjp, takes no old-style Functions, and flash-attn's Functions are old-style.
    autograd_on = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with autograd_on, torch.enable_grad(), torch.autocast(q.device.type, enabled=False):
        inputs = [t.detach().requires_grad_() for t in (q, k, v, sinks) if t is not None]
        q, k, v = inputs[:3]
        last = None if sinks is None else inputs[3]
        packing = (cu_seqlens, position_ids, block_first, block_end, max_seqlen)
        out = _attend(q, k, v, last, *packing, scale, window, softcap, two_way, backend)
        return [g.contiguous() for g in torch.autograd.grad(out, inputs, grad)]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens: Tensor,
    position_ids: Tensor,
    block_first: Tensor | None,
    block_end: Tensor | None,
    max_seqlen: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    two_way: str | None,
    backend: str,
) -> Tensor:
    reads = q.device.type == "cpu" or backend in READ_LENGTHS
    lengths = tuple(length for length in cu_seqlens.diff().tolist() if length) if reads else ()
    blocks = None if block_first is None or block_end is None else TwoWayBlocks(block_first, block_end)
    packed = PackedSeqLens(lengths, cu_seqlens, position_ids, max_seqlen, two_way=blocks)
    with torch.autocast(q.device.type, enabled=False):  # the caller has already cast q, k and v
        call = AttentionCall(q, k, v, packed, scale, window, softcap, sinks, two_way=cast("TwoWay | None", two_way))
        return BACKENDS[backend].run(call).contiguous()


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_: Any) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v, sinks) if t is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:TENSORS])
    ctx.settings = inputs[TENSORS:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.fastpack.packed_attention_backward(grad, *ctx.saved_tensors, *ctx.settings)
    return (*grads, *(None,) * (TENSORS - len(grads) + len(ctx.settings)))


_forward.register_autograd(_differentiate, setup_context=_keep)
