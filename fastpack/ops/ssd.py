"""Mamba-2's scan (state space duality) of packed sequences, chunk by chunk.

Definition (Dao & Gu, "Transformers are SSMs", arXiv:2405.21060), for each head and the tokens t of one sequence, with
h a state ``[K, V]`` that is zero before the first token:

    h[t] = exp(A dt[t]) h[t - 1] + dt[t] B[t] x[t]^T,  y[t] = C[t]^T h[t]

In chunks (their section 6), with a_i = A dt_i, ``L[i, j] = exp(a_{j+1} + ... + a_i)`` for j <= i, and h the state
before a chunk:

    y[i] = sum over j <= i of L[i, j] (C[i] B[j]) dt[j] x[j]  +  exp(a_1 + ... + a_i) C[i]^T h
    h'   = exp(a_1 + ... + a_last) h + sum over j of L[last, j] dt[j] B[j] x[j]^T

A and dt are such that no a_i is positive, so that no exponential here overflows.

Shape suffixes: T tokens, N sequences, M chunks, L tokens of a chunk, H heads, G groups of R = H / G heads that share B
and C, K state size, V head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastpack.ops.autograd import differentiable_once
from fastpack.ops.chunks import Chunks
from fastpack.ops.implementation import KERNEL_DTYPES, Implementation, kernel_serves, use_triton

CHUNK = 64
"""The tokens of a chunk. A longer one needs fewer states, but more work inside."""


def ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunks: Chunks, *, implementation: Implementation = "auto"
) -> Tensor:
    """Run the scan in each sequence by itself.

    Args:
        x: ``[T, H, V]``.
        dt: float32 ``[T, H]``, at least 0 (after bias, softplus and limits).
        A: ``[H]``, at most 0.
        B: ``[T, G, K]``, where G divides H.
        C: ``[T, G, K]``.
        chunks: the chunks of the sequences, of any size.
        implementation: ``auto`` runs the kernels if :func:`use_triton` allows it and they support the inputs.

    Returns:
        ``[T, H, V]`` in float32, or in float64 if x is.

    Raises:
        ValueError: ``implementation="triton"``, and the kernels don't support the GPU, a dtype or a size.
    """
    if use_triton(implementation, x) and _kernel_serves(implementation, x, B, C, chunks):
        return _SSD.apply(x, dt, A, B, C, chunks)
    return _scan(x, dt, A, B, C, chunks)


class _SSD(torch.autograd.Function):
    """The autograd Function of :func:`ssd`. It saves only its inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunks: Chunks) -> Tensor:
        from fastpack.ops.kernels import ssd as kernels

        ctx.save_for_backward(x, dt, A, B, C)
        ctx.chunks = chunks
        return kernels.forward(kernels.Inputs.of(x, dt, A, B, C, chunks))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from fastpack.ops.kernels.ssd import Inputs
        from fastpack.ops.kernels.ssd_backward import backward

        x, dt, A, B, C = ctx.saved_tensors
        dx, ddt, dA, dB, dC = backward(Inputs.of(x, dt, A, B, C, ctx.chunks), grad)
        return dx, ddt.to(dt.dtype), dA.to(A.dtype), dB, dC, None


def _scan(x_THV: Tensor, dt_TH: Tensor, A_H: Tensor, B_TGK: Tensor, C_TGK: Tensor, chunks: Chunks) -> Tensor:
    """Compute :func:`ssd` by the formulas above."""
    with torch.autocast(x_THV.device.type, enabled=False):
        dtype = torch.promote_types(x_THV.dtype, torch.float32)
        groups = B_TGK.shape[1]
        # a missing token at the end of a chunk has dt = 0: it adds nothing, and nothing decays
        dt, x, B, C = (chunks.gather(y.to(dtype)) for y in (dt_TH, x_THV, B_TGK, C_TGK))
        u_MLGRV = (x * dt[..., None]).unflatten(2, (groups, -1))
        a_MGRL = (A_H.to(dtype) * dt).unflatten(2, (groups, -1)).permute(0, 2, 3, 1)
        decay_MGRLL = _decays(a_MGRL)

        score_MGLL = torch.einsum("migk,mjgk->mgij", C, B)
        y_MLGRV = torch.einsum("mgrij,mjgrv->migrv", decay_MGRLL * score_MGLL[:, :, None], u_MLGRV)

        to_end_MLGR = decay_MGRLL[..., -1, :].permute(0, 3, 1, 2)
        new_MGRKV = torch.einsum("mjgk,mjgrv->mgrkv", B, u_MLGRV * to_end_MLGR[..., None])
        from_start_MGRL = a_MGRL.cumsum(-1).exp()
        before_MGRKV = _states_before(new_MGRKV, from_start_MGRL[..., -1], chunks)
        y_MLGRV = y_MLGRV + torch.einsum("migk,mgrkv,mgri->migrv", C, before_MGRKV, from_start_MGRL)
        return chunks.scatter(y_MLGRV.flatten(2, 3), len(x_THV))


def _decays(a: Tensor) -> Tensor:
    """Return ``L[..., i, j]``, 0 where j > i. Each sum is taken by itself: a difference of two sums would cancel."""
    size = a.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=a.device).tril(-1)
    sums = torch.where(later, a[..., :, None], 0).cumsum(-2)
    return torch.where(later.T, -torch.inf, sums).exp()


def _states_before(new_MGRKV: Tensor, decay_MGR: Tensor, chunks: Chunks) -> Tensor:
    """Return the state before each chunk from what each chunk adds to it, and its decay over the chunk."""
    order, counts = chunks.steps
    state = new_MGRKV.new_zeros(counts[0], *new_MGRKV.shape[1:])
    before: list[Tensor] = []
    for new, decay in zip(new_MGRKV[order].split(counts), decay_MGR[order].split(counts), strict=True):
        state = state[: len(new)]
        before.append(state)
        state = decay[..., None, None] * state + new
    return torch.zeros_like(new_MGRKV).index_copy(0, order, torch.cat(before))


def _kernel_serves(implementation: Implementation, x: Tensor, B: Tensor, C: Tensor, chunks: Chunks) -> bool:
    """Return whether the kernels support these inputs.

    Raises:
        ValueError: they don't, and ``implementation="triton"``.
    """
    from fastpack.ops.kernels.ssd import CHUNK_SIZES, MAX_HEAD, MAX_STATE

    reason = None
    if x.dtype not in KERNEL_DTYPES or not x.dtype == B.dtype == C.dtype:
        reason = f"{[x.dtype, B.dtype, C.dtype]}, but supports float32, bfloat16 and float16, the same for x, B and C"
    elif B.shape[2] > MAX_STATE or x.shape[2] > MAX_HEAD:
        reason = f"K={B.shape[2]} and V={x.shape[2]}, but supports up to {MAX_STATE} and {MAX_HEAD}"
    elif chunks.size not in CHUNK_SIZES:
        reason = f"chunks of {chunks.size} tokens, but supports {CHUNK_SIZES}"
    elif x.is_cuda and torch.version.cuda is not None and torch.cuda.get_device_capability(x.device) < (8, 0):
        reason = "a GPU before Ampere"
    return kernel_serves(implementation, "Mamba-2's scan", reason)
