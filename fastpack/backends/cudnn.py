"""The cuDNN attention kernel that comes with torch, for long sequences on Hopper.

cuDNN prepares a plan for each shape, which takes some 0.2 s, and no plan of torch's serves packed tokens. So sequences
are rows here: a long one alone, short ones in groups of one length. Lengths and numbers of rows are rounded up, so that
few shapes occur: padding comes after a sequence's last token, whose queries don't see it. It may be the sequence after
it, but for values, where it is zeros: a probability of zero times NaN would be NaN.

Shape suffixes: T tokens, n rows, P their length, H query heads, D head size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fastpack.backends.call import AttentionCall, AttentionShape, Kept, stored_or_computed
from fastpack.backends.limits import HALF_DTYPES, Limits, cuda_capability, lacks, needs_cuda, wrong_dtype, wrong_sizes
from fastpack.ops.autograd import differentiable_once
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.utils.compile import cached_constant
from fastpack.utils.tensors import send

SERVES = ()
LIMITS = Limits(
    "Hopper, fp16 or bf16, no window; auto prefers it if most tokens are in sequences of 4,096 or more, except to "
    "flash-attn 3 or 4",
    (),
    "comes with torch",
)

LONG = 4096
"""From this length of a token's sequence on, averaged over tokens, this kernel is preferred to fastpack's own."""
SHORTEST = 128
"""The least length of a row; lengths up to :data:`LONG` are rounded up to powers of two."""
STEPS = 32
"""Longer ones are rounded up to one of so many lengths between two powers of two."""
LONGEST = 2**15
"""Still longer ones are not rounded: a plan takes less time than a step then, and copies would take memory."""
VERSION = 91900
"""The version of cuDNN that was tested here."""


def rejects(shape: AttentionShape) -> str | None:
    """Return why cuDNN can't compute this, or None."""
    why = (
        lacks(shape, "torch's cuDNN kernel", "softcap", "attention sinks", "dropout")
        or needs_cuda(shape, (9, 0))
        or _elsewhere(shape)
        or wrong_dtype(shape, HALF_DTYPES)
        or wrong_sizes(shape, multiple=8, most=256)
    )
    if why is not None:
        return why
    if shape.value_dim != shape.head_dim:
        return f"keys and values must have one head size, not {shape.head_dim} and {shape.value_dim}"
    if not shape.knows_lengths:
        return "reads each batch's lengths on the host, and a CUDA graph knows them on the device alone"
    if _version() < VERSION:
        return f"needs cuDNN {VERSION}, this torch has {_version()}"
    if torch.are_deterministic_algorithms_enabled():
        return "adds up gradients in any order, and torch.use_deterministic_algorithms is on"
    return None


def _elsewhere(shape: AttentionShape) -> str | None:
    """Return why this GPU is none of those on which the kernel was tested, or None."""
    capability = cuda_capability(shape)
    if capability is None or capability[0] == 9:
        return None
    return f"was tested on Hopper alone, this GPU has compute capability {capability[0]}.{capability[1]}"


def wins(shape: AttentionShape) -> bool:
    """Return whether sequences are long enough for cuDNN to be faster than fastpack's own kernel and FlashAttention 2.

    Measured on an H100, one sequence, forward and backward, in ms, cuDNN / fastpack's kernel / torch's varlen kernel::

        tokens    32/8 heads of 128     32/8 heads of 64      16/2 heads of 256
        8,192     3.6 / 5.0 / 6.7       2.4 / 3.0 / 5.2       4.3 / 18.6
        32,768    55  / 88  / 92        35  / 49  / 53        70  / 298
        65,536    219 / 347             145 / 204             288 / 1,209
    """
    capability = cuda_capability(shape)
    hopper = capability is not None and capability[0] == 9
    return hopper and shape.head_dim >= 64 and shape.typical_length >= LONG and shape.knows_lengths


@cached_constant
def _version() -> int:
    return torch.backends.cudnn.version() or 0


def run(call: AttentionCall) -> Tensor:
    """Return ``[T, H, D]``; the kernel reads grouped key/value heads without repeating them."""
    packed = call.packed
    groups = packed.memo(("cudnn", call.q.device), lambda: _group(packed, call.q.device))
    kept = None if call.store is None else (call.store, call.operations)
    return _Cudnn.apply(call.q, call.k, call.v, call.scale, groups, kept)


@dataclass(frozen=True)
class _Alone:
    """A sequence alone in its row.

    Attributes:
        begin: its first token.
        tokens: how many it has.
        length: P.
    """

    begin: int
    tokens: int
    length: int

    def rows(self, x: Tensor, *, zeros: bool = False) -> Tensor:
        """Return ``[1, heads, P, D]`` from ``[T, heads, D]``.

        A sequence that fills its row is a slice, and is not copied. Nor is one whose padding may be the tokens after
        it, and need not be ``zeros``, if there are so many.
        """
        end = self.begin + self.length
        if end <= len(x) and (self.tokens == self.length or not zeros):
            row = x[self.begin : end]
        else:
            # with the steps of a slice, since these are part of a plan's key
            heads, size = x.shape[1:]
            step = x.stride(0) if x.stride()[1:] == (size, 1) else 0
            row = x.new_empty(self.length, max(step, heads * size))[:, : heads * size].unflatten(1, (heads, size))
            row[: self.tokens] = x[self.begin : self.begin + self.tokens]
            row[self.tokens :] = 0
        return row[None].transpose(1, 2)

    def put(self, rows: Tensor, x: Tensor | None, total: int) -> Tensor:
        """Write ``[1, heads, P, D]`` without padding to x ``[T, heads, D]``, and return that.

        If x is None, it is made; it is the row itself if that has all T tokens.
        """
        row = rows.transpose(1, 2)[0, : self.tokens]
        if self.tokens == total:
            return row
        x = row.new_empty(total, *row.shape[1:]) if x is None else x
        x[self.begin : self.begin + self.tokens] = row
        return x


@dataclass(frozen=True, eq=False)
class _Group:
    """Short sequences whose rows have one length.

    Attributes:
        count: n, some of them without a sequence.
        length: P.
        tokens: int64, the tokens of all sequences.
        slots: int64, their slots in ``[n * P]``.
    """

    count: int
    length: int
    tokens: Tensor
    slots: Tensor

    def rows(self, x: Tensor, *, zeros: bool = False) -> Tensor:
        """Return ``[n, heads, P, D]`` from ``[T, heads, D]``, with zeros as padding whether or not these are needed."""
        flat = x.new_zeros(self.count * self.length, *x.shape[1:])
        flat.index_copy_(0, self.slots, x.index_select(0, self.tokens))
        return flat.unflatten(0, (self.count, self.length)).transpose(1, 2)

    def put(self, rows: Tensor, x: Tensor | None, total: int) -> Tensor:
        """Write ``[n, heads, P, D]`` without padding to x ``[T, heads, D]``, which is made if None, and return that."""
        flat = rows.transpose(1, 2).flatten(0, 1)
        x = flat.new_empty(total, *flat.shape[1:]) if x is None else x
        return x.index_copy_(0, self.tokens, flat.index_select(0, self.slots))


def row_length(tokens: int) -> int:
    """Return the length of a row for a sequence of so many tokens.

    Example:
        >>> [row_length(tokens) for tokens in (1, 129, 8192, 8193, 100_000)]
        [128, 256, 8192, 8448, 100000]
    """
    if tokens > LONGEST:
        return tokens
    power = 1 << (tokens - 1).bit_length()
    if power <= LONG:
        return max(SHORTEST, power)
    step = power // 2 // STEPS
    return -(-tokens // step) * step


def row_count(sequences: int) -> int:
    """Return the number of rows for so many short sequences: a power of two, or 1.5 times one.

    Example:
        >>> [row_count(sequences) for sequences in (1, 2, 3, 5, 7, 13)]
        [1, 2, 3, 6, 8, 16]
    """
    power = 1 << (sequences - 1).bit_length()
    return power * 3 // 4 if 3 <= sequences <= power * 3 // 4 else power


def _group(packed: PackedSeqLens, device: torch.device) -> tuple[_Alone | _Group, ...]:
    """Return rows for a batch's sequences: one for each long one, and groups of one length for the others."""
    begins = list(accumulate(packed.lengths, initial=0))
    members = defaultdict(list)
    groups: list[_Alone | _Group] = []
    for index, tokens in enumerate(packed.lengths):
        length = row_length(tokens)
        if length >= LONG:
            groups.append(_Alone(begins[index], tokens, length))
        else:
            members[length].append(index)
    for length, indices in members.items():
        if len(indices) == 1:
            groups.append(_Alone(begins[indices[0]], packed.lengths[indices[0]], length))
            continue
        places = [torch.arange(begins[i], begins[i + 1]) for i in indices]
        slots = [torch.arange(packed.lengths[i]) + row * length for row, i in enumerate(indices)]
        at, to = (send(torch.cat(parts), device) for parts in (places, slots))
        groups.append(_Group(row_count(len(indices)), length, at, to))
    return tuple(groups)


class _Cudnn(torch.autograd.Function):
    """The kernel's forward and backward on each group; saves the result and log-sum-exps."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        groups: Sequence[_Alone | _Group],
        kept: Kept,
    ) -> Tensor:
        def compute() -> list[Tensor]:
            out, lses = None, []
            for group in groups:
                rows, lse = kernel_forward(group.rows(q), group.rows(k), group.rows(v, zeros=True), scale)
                out = group.put(rows, out, len(q))
                lses.append(lse)
            assert out is not None, "a batch has a sequence"
            return [out, *lses]

        out, *lses = stored_or_computed(kept, compute)
        ctx.save_for_backward(q, k, v, out, *lses)
        ctx.scale, ctx.groups = scale, groups
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *lses = ctx.saved_tensors
        gradients: list[Tensor | None] = [None] * 3
        for group, lse in zip(ctx.groups, lses, strict=True):
            qkv = [group.rows(x) for x in (q, k, v)]
            # queries in the padding see the sequence, and have no gradient
            parts = kernel_backward(group.rows(grad, zeros=True), qkv, group.rows(out), lse, ctx.scale)
            gradients = [group.put(part, x, len(q)) for part, x in zip(parts, gradients, strict=True)]
        return *gradients, None, None, None


def kernel_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return causal attention ``[n, H, P, D]`` and its log-sum-exps, float32 ``[n, H, P, 1]``."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, scale=scale)
    return out, lse


def kernel_backward(
    grad: Tensor, qkv: Sequence[Tensor], out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v from the gradient of ``out``."""
    seed = torch.empty((), dtype=torch.int64, device=grad.device)  # of dropout, which there is none of
    tokens = grad.shape[2]
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, *qkv, out, lse, seed, seed, None, None, None, tokens, tokens, 0.0, True, scale=scale
    )
    return gradients
