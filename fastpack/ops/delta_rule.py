"""The gated delta rule on packed tokens, with a decay per head or per key channel.

Per head, with a state S ``[K, V]`` that is zero before each sequence (Yang et al., "Gated Delta Networks",
arXiv:2412.06464, eq. 10; with a decay per channel, Kimi Delta Attention: arXiv:2510.26692, eq. 1):

    S' = exp(g_t) S_{t-1}
    S_t = S' + beta_t k_t (v_t - S'^T k_t)^T
    o_t = K ** -0.5 S_t^T q_t

Within a chunk all tokens are computed at once (the WY form: Yang et al., arXiv:2406.06484, section 3.2). With G the
sums of g from the chunk's start, and S the state there:

    A_ij = beta_i sum_c k_ic k_jc exp(G_ic - G_jc)   for j < i, else 0
    [w, u] = (I + A)^-1 [beta k exp(G), beta v]
    n = u - w S
    P_ij = sum_c q_ic k_jc exp(G_ic - G_jc)          for j <= i, else 0
    o = K ** -0.5 ((q exp(G)) S + P n)
    next S = exp(G_last) S + (k exp(G_last - G))^T n

Only exponents of 0 or less are ever raised, so nothing overflows, however strong a finite decay is.

Shape suffixes: T tokens, M chunks, C tokens of a chunk, H heads of values, K size of a key, V size of a value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastpack.ops.autograd import differentiable_once
from fastpack.ops.chunks import Chunks
from fastpack.ops.implementation import KERNEL_DTYPES, Implementation, kernel_serves, use_triton

EPS = 1e-6
"""Added to the squared length of queries and keys that are normalised."""


MAX_SIZE = 256
"""The largest K and V of the kernels."""


def delta_chunk(device: torch.device, dtype: torch.dtype) -> int:
    """Return C for values of this device and dtype.

    It is 64, as in transformers. What the kernels hold of a chunk takes twice the memory in float32, so that fewer GPUs
    could run them.
    """
    return 32 if device.type == "cuda" and dtype == torch.float32 else 64


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    chunks: Chunks,
    *,
    normalised: bool,
    implementation: Implementation = "auto",
) -> Tensor:
    """Run the gated delta rule in each sequence by itself.

    Args:
        q: ``[T, heads, K]``. Each head of q and k serves H / heads neighbouring heads of v.
        k: ``[T, heads, K]``.
        v: ``[T, H, V]``.
        g: ``[T, H]``, the logarithm of the decay, at most 0; or ``[T, H, K]``, one for each channel of a key.
        beta: ``[T, H]``, the rate.
        chunks: the chunks of the sequences. C is a power of two.
        normalised: whether q and k are first divided by their lengths.
        implementation: ``auto`` runs the kernels if :func:`use_triton` allows it and they support the inputs.

    Returns:
        ``[T, H, V]`` in v's dtype. The definition computes in float32, or in float64 if v is in float64.

    Raises:
        ValueError: ``implementation="triton"``, and the kernels don't support this dtype, size or GPU.
    """
    if use_triton(implementation, v):
        reason = _kernel_rejects(q, k, v, g, chunks)
        if kernel_serves(implementation, "the gated delta rule", reason):
            return _GatedDeltaRule.apply(q, k, v, g, beta, chunks, normalised)
    return _definition(q, k, v, g, beta, chunks, normalised)


def _kernel_rejects(q: Tensor, k: Tensor, v: Tensor, g: Tensor, chunks: Chunks) -> str | None:
    """Return the input that the kernels don't support, and what they support instead, or None."""
    if v.dtype not in KERNEL_DTYPES or not q.dtype == k.dtype == v.dtype:
        return f"{q.dtype}, {k.dtype} and {v.dtype}, but supports one of float32, bfloat16 and float16"
    if max(k.shape[2], v.shape[2]) > MAX_SIZE:
        return f"heads of {k.shape[2]} and {v.shape[2]}, but supports at most {MAX_SIZE}"
    if chunks.size not in (16, 32, 64):
        return f"chunks of {chunks.size} tokens, but supports 16, 32 and 64"
    if v.is_cuda and torch.cuda.get_device_capability(v.device) < (8, 0):
        return "a GPU that is older than Ampere"
    from fastpack.ops.kernels.delta_rule_backward import fits

    return (
        None
        if fits(k, v, chunks, by_channel=g.ndim == 3)
        else f"heads of {k.shape[2]} in {v.dtype}, too large for this GPU"
    )


class _GatedDeltaRule(torch.autograd.Function):
    """The autograd Function of :func:`gated_delta_rule`. Its backward computes the states again."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Chunks, normalised: bool
    ) -> Tensor:
        from fastpack.ops.kernels import delta_rule as kernels

        out, saved = kernels.forward(q, k, v, g, beta, chunks, EPS if normalised else None)
        ctx.save_for_backward(*vars(saved).values())
        ctx.chunks, ctx.g_dtype = chunks, g.dtype
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from fastpack.ops.kernels import delta_rule_backward as kernels
        from fastpack.ops.kernels.delta_rule_parts import Saved

        grads = kernels.backward(grad, Saved(*ctx.saved_tensors), ctx.chunks, ctx.g_dtype)
        return *grads, None, None


def _definition(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Chunks, normalised: bool) -> Tensor:
    wide = torch.promote_types(v.dtype, torch.float32)
    size, group = k.shape[2], v.shape[1] // k.shape[1]
    order, counts = chunks.steps
    with torch.autocast(q.device.type, enabled=False):
        # in transformers' order, so that float32 rounds alike
        q, k = (x.to(wide).repeat_interleave(group, 1) for x in (q, k))
        q, k = (_unit(x) if normalised else x for x in (q, k))
        q = q * size**-0.5
        g = g.unsqueeze(-1) if g.ndim == 2 else g
        q, k, v_MHCV, g, beta = (
            chunks.gather(x.to(wide))[order].transpose(1, 2) for x in (q, k, v, g, beta.unsqueeze(-1))
        )
        rated = beta * k
        sums = g.cumsum(2)  # of zeros after a chunk's end, so the last one is always the sum of all
        last = sums[:, :, -1:]
        A, P = _decayed_products(torch.stack([rated, q]), k, sums)
        rates = torch.cat([rated * sums.exp(), beta * v_MHCV], -1)
        solved = torch.linalg.solve_triangular(A.tril(-1), rates, upper=False, unitriangular=True)
        w, u = solved.split([size, v.shape[2]], -1)
        by_step = (x.split(counts) for x in (q * sums.exp(), k * (last - sums).exp(), last.exp().mT, w, u, P))
        state = u.new_zeros(counts[0], v.shape[1], size, v.shape[2])
        results = []
        for q_n, k_n, kept_n, w_n, u_n, P_n in zip(*by_step, strict=True):
            state = state[: len(u_n)]
            new = u_n - w_n @ state
            results.append(q_n @ state + P_n @ new)
            state = kept_n * state + k_n.mT @ new
        out = torch.cat(results)[order.argsort()].transpose(1, 2)
        return chunks.scatter(out, len(v)).to(v.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()


def _decayed_products(x: Tensor, y: Tensor, sums: Tensor) -> Tensor:
    """Return ``sum_c x_ic y_jc exp(sums_ic - sums_jc)`` for j <= i, else 0: ``[..., C, C]``.

    With a decay per channel, blocks on the diagonal double in size. Rows of a block's second half see columns of its
    first half past the middle: the decay up to the middle goes to the columns, the decay from there on to the rows.

    Args:
        x: ``[..., C, K]``.
        y: ``[..., C, K]``.
        sums: ``[..., C, 1]`` or ``[..., C, K]``, which never rise from one token to the next.
    """
    C = y.shape[-2]
    if sums.shape[-1] == 1:
        later = torch.ones(C, C, dtype=torch.bool, device=y.device).triu(1)
        return x @ y.mT * (sums - sums.mT).masked_fill(later, -torch.inf).exp()
    blocks = (x * y).sum(-1)[..., None, None]
    while blocks.shape[-3] > 1:
        half = blocks.shape[-1]
        (_, x_rows), (y_columns, _), (before, after) = (z.unflatten(-2, (-1, 2, half)).unbind(-3) for z in (x, y, sums))
        middle = before[..., -1:, :]
        below = (x_rows * (after - middle).exp()) @ (y_columns * (middle - before).exp()).mT
        first, second = blocks.unflatten(-3, (-1, 2)).unbind(-3)
        upper = torch.cat([first, torch.zeros_like(first)], -1)
        blocks = torch.cat([upper, torch.cat([below, second], -1)], -2)
    return blocks[..., 0, :, :]
