"""``PackedSeqLens``: where each sequence of a batch begins and ends.

Shape suffixes: B rows, S columns of the batch as it came; T tokens, N sequences.

One object a batch, built once (:mod:`fastpack.packing.inputs` reads it from what a batch carries) and handed down by
keyword. Where shapes have to repeat from batch to batch (CUDA graphs, ``torch.compile``),
:meth:`PackedSeqLens.bucketed` rounds them up to a :class:`Bucket`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastpack.errors import PackingError
from fastpack.ops.autograd import reshaped
from fastpack.ops.loss import IGNORE_INDEX

if TYPE_CHECKING:
    from fastpack.ops.row_count import RowCount
    from fastpack.ops.shared_rows import Copies

TOKEN_MULTIPLE = 64
TOKEN_STEPS = 16
"""Values of T between two powers of two."""
SEQUENCE_MINIMUM = 16
SEQUENCE_STEPS = 4
LENGTH_MINIMUM = 512


@dataclass(frozen=True)
class Bucket:
    """Sizes that batches share, so that shapes repeat from one to the next.

    Attributes:
        tokens: T. Between two powers of two there are sixteen values, evenly apart, below 1,024 the multiples of 64:
            from there on at most 6.3 % is added, 2.2 % on average over batches whose T is spread evenly on a
            logarithmic scale.
        sequences: N, from 16 on four values between two powers of two; those that are missing have no token.
        max_seqlen: what the longest length is at most; a power of two from 512 on, or T where that is less. Kernels
            take it for the size of their grid, in which blocks without a token end at once (but take a while: 15
            missing ones of 32 sequences cost FlashAttention-2 12 %).
    """

    tokens: int
    sequences: int
    max_seqlen: int

    @classmethod
    def of(cls, lengths: Sequence[int], *, steps: int = TOKEN_STEPS) -> Bucket:
        """The smallest that holds these lengths, and a tail to fill it.

        Args:
            lengths: tokens of each sequence.
            steps: values of T between two powers of two, where a coarser one is wanted.
        """
        total, longest = sum(lengths), max(lengths)
        tokens = _rounded_up(total, steps, TOKEN_MULTIPLE)
        bound = min(max(LENGTH_MINIMUM, _power_of_two(longest)), tokens)
        pieces = -(-(tokens - total) // bound)
        # one more in any case: whether there is a tail must not decide between two buckets
        sequences = max(SEQUENCE_MINIMUM, len(lengths) + max(pieces, 1))
        return cls(tokens, _rounded_up(sequences, SEQUENCE_STEPS), bound)

    def holds(self, lengths: Sequence[int]) -> bool:
        """True where these lengths and a tail fit."""
        rest = self.tokens - sum(lengths)
        fits = rest >= 0 and max(lengths) <= self.max_seqlen
        return fits and len(lengths) + -(-rest // self.max_seqlen) <= self.sequences

    def tail(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Lengths of the sequences that fill the bucket up: one, or several where one would be longer than the bound.

        Raises:
            PackingError: the lengths don't fit.
        """
        if not self.holds(lengths):
            raise PackingError(
                f"{len(lengths)} sequences of {sum(lengths)} tokens, the longest of {max(lengths)}, don't fit {self}. "
                "Leave the bucket out to have one made that holds them."
            )
        whole, part = divmod(self.tokens - sum(lengths), self.max_seqlen)
        return (self.max_seqlen,) * whole + ((part,) if part else ())


@dataclass(frozen=True, eq=False)
class PackedSeqLens:
    """The lengths of the sequences of one batch, and what follows from them.

    Build one with :meth:`from_lengths`, or let the model build it from the batch. It is immutable; what is derived
    from it (a block mask, groups of equal length) is computed once and kept with it.

    Attributes:
        lengths: N Python ints, each at least 1: the tokens of each sequence, in order.
        cu_seqlens: int32 ``[N + 1]``, on the batch's device: offsets, from 0 to T.
        position_ids: int64 ``[1, T]``: the position of each token in its sequence.
        indices: int64 ``[T]``, where each token sits in the batch flattened to ``[B * S]``; None where every slot
            holds a real token.
        batch_shape: ``(B, S)`` of the batch that these lengths were read from; None where they were given alone.
        is_empty: True for a batch without a single real token. It is run as one throw-away token, whose results are
            dropped, so that gradients exist (and are zero) on every rank.
        bucket: the sizes that this batch was rounded up to, or None. Then T is the bucket's, ``cu_seqlens`` has the
            bucket's N + 1 entries (the last offset, repeated, ends sequences without a token), and ``max_seqlen`` is
            its bound; ``lengths`` are the real ones and those of the tail.
        tail: lengths of the sequences behind the real ones, made of copies of the batch's first token.
        max_seqlen: the longest length, or the bucket's bound on it; made from the others, as is the next.
        real_tokens: T without the tail.
        filler: how many of the batch's own last tokens are filler, which somebody has made of a tail before the model.
        filler_start: 0-d int32 on the batch's device, where they begin, for who may read no number that changes; None
            where nothing was rounded up.
        starts_rows: True where the host knows that every sequence begins in column 0 of its row.
        is_unwindowed: True where a 4-D mask lets each token see all of its sequence before it, whatever the model's
            window.
        prefixes: what the sequences have in common at their beginnings, where whoever read the batch found it.
        row_count: how many tokens are real, on the device, where only it knows: in a recording, whose lengths are those
            of whatever batch is replayed. The others are zeros at first, and products may leave them out.
        shared: for modules that run on each token of those prefixes once (:mod:`fastpack.packing.prefixes`); all else
            here is that of the whole batch. None where they run on all T tokens.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    position_ids: Tensor
    indices: Tensor | None = None
    batch_shape: tuple[int, int] | None = None
    is_empty: bool = False
    bucket: Bucket | None = None
    tail: tuple[int, ...] = ()
    max_seqlen: int = 0
    real_tokens: int = 0
    filler: int = 0
    filler_start: Tensor | None = None
    starts_rows: bool = False
    is_unwindowed: bool = False
    prefixes: Prefixes | None = None
    shared: SharedTokens | None = None
    row_count: RowCount | None = None
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        # kept, so that who reads them in a compiled region reads no length: it would be compiled anew for other ones
        if not self.max_seqlen:
            longest = max(self.lengths) if self.bucket is None else self.bucket.max_seqlen
            object.__setattr__(self, "max_seqlen", longest)
        if not self.real_tokens:
            object.__setattr__(self, "real_tokens", self.total_tokens - sum(self.tail))

    @classmethod
    def from_lengths(cls, lengths: Sequence[int] | Tensor, *, device: torch.device | str = "cpu") -> PackedSeqLens:
        """Build from the lengths of the sequences.

        Args:
            lengths: N ints, or a 1-D tensor of them. A tensor on a GPU costs one synchronisation.
            device: where the offsets and positions are made; the batch's device.

        Raises:
            PackingError: a length below 1, or no length at all.
        """
        return build_lengths(check_lengths(lengths), torch.device(device))

    @property
    def num_sequences(self) -> int:
        """N: how many sequences have a token."""
        return len(self.lengths)

    @property
    def total_tokens(self) -> int:
        """T."""
        return self.position_ids.shape[1]

    @cached_property
    def seq_idx(self) -> Tensor:
        """int32 ``[1, T]``: which sequence each token belongs to."""
        lengths = self.cu_seqlens.diff()
        order = torch.arange(lengths.numel(), dtype=torch.int32, device=lengths.device)
        return order.repeat_interleave(lengths, output_size=self.total_tokens)[None]

    @cached_property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """Neighbouring sequences of equal length, as ``(first token, how many sequences, length)``."""
        found: list[tuple[int, int, int]] = []
        offset = 0
        for length in self.lengths:
            if found and found[-1][2] == length:
                first, count, _ = found[-1]
                found[-1] = (first, count + 1, length)
            else:
                found.append((offset, 1, length))
            offset += length
        return tuple(found)

    def memo(self, key: Any, build: Any) -> Any:
        """What ``build()`` returns, computed once for this batch under ``key``."""
        if torch.compiler.is_compiling():
            return build()  # a compiler keeps what it has made already
        if key not in self._memo:
            # a reference may run in inference mode, whose tensors autograd would refuse in the policy's forward
            with torch.inference_mode(False):
                self._memo[key] = build()
        return self._memo[key]

    def to(self, device: torch.device | str | None, non_blocking: bool = False, **_: Any) -> PackedSeqLens:
        """The same lengths with their tensors on ``device``; None, which accelerate's hooks may pass, leaves them."""
        if device is None or torch.device(device) == self.cu_seqlens.device:
            return self
        indices, filler_start = self.indices, self.filler_start
        return replace(
            self,
            cu_seqlens=self.cu_seqlens.to(device, non_blocking=non_blocking),
            position_ids=self.position_ids.to(device, non_blocking=non_blocking),
            indices=None if indices is None else indices.to(device, non_blocking=non_blocking),
            filler_start=None if filler_start is None else filler_start.to(device, non_blocking=non_blocking),
            shared=None if self.shared is None else self.shared.to(device, non_blocking),
            _memo={},
        )

    def pin_memory(self) -> PackedSeqLens:
        """The same lengths in pinned memory (torch's data loader calls this), so that moving them waits for nobody."""
        indices, filler_start = self.indices, self.filler_start
        return replace(
            self,
            cu_seqlens=self.cu_seqlens.pin_memory(),
            position_ids=self.position_ids.pin_memory(),
            indices=None if indices is None else indices.pin_memory(),
            filler_start=None if filler_start is None else filler_start.pin_memory(),
            _memo={},
        )

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle leaves out what is only kept for speed: a block mask holds closures, which don't pickle.
        return {**self.__dict__, "_memo": {}}

    def bucketed(self, bucket: Bucket | None = None) -> PackedSeqLens:
        """The same batch with its sizes rounded up, so that they repeat from one batch to the next.

        A tail of further sequences fills T up. :meth:`unpad` makes its tokens from the batch's first one, whose values
        are as good as any (zeros may be divided by in a norm), and :meth:`repad` drops whatever becomes of
        them, so that their gradient is zero and nobody sees them. No sequence sees another's tokens, so the real ones
        are what they were.

        Args:
            bucket: the sizes; by default the smallest of :meth:`Bucket.of` that holds this batch.

        Raises:
            PackingError: the batch is in a bucket already, or does not fit this one.
        """
        if self.bucket is not None:
            raise PackingError(f"this batch is in {self.bucket} already.")
        if bucket is None:
            bucket = Bucket.of(self.lengths)
        tail = bucket.tail(self.lengths)
        indices = self.indices
        if tail:
            device = self.cu_seqlens.device
            real = torch.arange(self.total_tokens, device=device) if indices is None else indices
            indices = torch.cat([real, real[:1].expand(sum(tail))])
        cu_seqlens = self.cu_seqlens.new_empty(bucket.sequences + 1)
        position_ids = self.position_ids.new_empty(1, bucket.tokens)
        self.write_bucketed(bucket, cu_seqlens, position_ids)
        return replace(
            self,
            lengths=(*self.lengths, *tail),
            cu_seqlens=cu_seqlens,
            position_ids=position_ids,
            indices=indices,
            bucket=bucket,
            tail=tail,
            max_seqlen=bucket.max_seqlen,
            real_tokens=self.total_tokens,
            _memo={},
        )

    def write_bucketed(self, bucket: Bucket, cu_seqlens: Tensor, position_ids: Tensor) -> None:
        """Write the offsets ``[N + 1]`` and positions ``[1, T]`` of this batch in a bucket into tensors that exist."""
        device = self.cu_seqlens.device
        tail = bucket.tail(self.lengths)
        ends = list(accumulate(tail, initial=self.total_tokens))[1:]
        ends += [bucket.tokens] * (bucket.sequences - len(self.lengths) - len(tail))
        offsets = sent(torch.tensor(ends, dtype=torch.int32), device)
        torch.cat([self.cu_seqlens[: len(self.lengths) + 1], offsets], out=cu_seqlens)
        positions = torch.arange(sum(tail), device=device) % bucket.max_seqlen
        torch.cat([self.position_ids, positions[None]], 1, out=position_ids)

    def flattened(self) -> PackedSeqLens:
        """The same sequences as the one row ``[1, T]`` that :meth:`unpad` makes of them; the tail is filler there."""
        total, filler = self.total_tokens, self.filler + sum(self.tail)
        rounded_up = filler > 0 or self.bucket is not None  # whether a bucket has filler must not decide what is there
        return replace(
            self,
            indices=None,
            batch_shape=(1, total),
            tail=(),
            real_tokens=total,
            filler=filler,
            filler_start=self.cu_seqlens.new_full((), total - filler) if rounded_up else None,
            starts_rows=False,
            _memo={},
        )

    def without_filler(self) -> Tensor | None:
        """int64 ``[1, S]``, a mask of the batch that is 0 on its filler; None where nothing was rounded up."""
        if self.filler_start is None or self.batch_shape is None:
            return None
        slots = torch.arange(self.batch_shape[1], device=self.filler_start.device)
        return (slots < self.filler_start).long()[None]

    def padding_mask(self) -> Tensor | None:
        """int64 ``[B, S]``, 1 for real tokens and 0 for padding; None where every slot holds a real token."""
        if self.batch_shape is None or self.indices is None:
            return None
        real = 0 if self.is_empty else 1
        slots = self.indices.new_zeros(self.batch_shape[0] * self.batch_shape[1])
        return slots.index_fill(0, self.indices[: self.real_tokens], real).view(self.batch_shape)

    def unpad(self, x_BS: Tensor) -> Tensor:
        """``[B, S, ...]`` to ``[1, T, ...]``: the real tokens, in order, then the tail."""
        flat = x_BS.reshape(-1, *x_BS.shape[2:])
        return (flat if self.indices is None else flat.index_select(0, self.indices))[None]

    def repad(self, x_1T: Tensor) -> Tensor:
        """``[1, T, ...]`` to ``[B, S, ...]``: each token back in its slot, zeros in the others; without the tail."""
        if self.batch_shape is None:
            return x_1T[:, : self.real_tokens] if self.tail else x_1T
        shape = (*self.batch_shape, *x_1T.shape[2:])
        x_T = x_1T.squeeze(0)
        slots = self._scatter(x_T)
        return reshaped(slots, shape) if len(slots) > len(x_T) else slots.reshape(shape)  # new, or x itself

    def repad_flat(self, x_T: Tensor) -> Tensor:
        """``[T, ...]`` to ``[B * S, ...]``, for what a stock model returns without a batch dimension."""
        return self._scatter(x_T)

    def _scatter(self, x_T: Tensor) -> Tensor:
        if self.tail:
            x_T = x_T[: self.real_tokens]
        if self.batch_shape is None or self.indices is None:
            return x_T
        rows, columns = self.batch_shape
        if self.is_empty:
            # keeps the graph, with a gradient of zero, and drops the throw-away token, which may not be finite
            x_T = x_T.masked_fill(torch.ones_like(x_T, dtype=torch.bool), 0)
        elif rows * columns == len(x_T):
            return x_T  # every slot holds a real token: the indices are there for the tail
        slots = self.indices[: len(x_T)]
        return x_T.new_zeros(rows * columns, *x_T.shape[1:]).index_copy_(0, slots, x_T)

    def check_slots(self, labels_BS: Tensor) -> None:
        """Raise unless there is a label for each slot of the batch."""
        slots = self.real_tokens if self.batch_shape is None else self.batch_shape[0] * self.batch_shape[1]
        if labels_BS.numel() != slots:
            raise PackingError(
                f"labels hold {labels_BS.numel()} entries (shape {tuple(labels_BS.shape)}), but the batch has {slots} "
                "slots. Pass labels of the same shape as input_ids."
            )

    def mask_first_labels(self, labels_BS: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
        """A copy of ``labels`` in which the first label of each sequence is ignored.

        The loss shifts labels by one, so that label would be predicted from the last token of the sequence before.
        """
        self.check_slots(labels_BS)
        if self.is_empty:
            return labels_BS
        starts = self.cu_seqlens[:-1].long()
        if self.bucket is not None:
            # Sequences without a token, and those of the tail, stand for the first: so no length is read.
            starts = torch.where(starts < self.total_tokens, starts, 0)
        if self.indices is not None:
            starts = self.indices[starts]
        return labels_BS.reshape(-1).index_fill(0, starts, ignore_index).reshape(labels_BS.shape)


def sent(made: Tensor, device: torch.device) -> Tensor:
    """A tensor made on the host, on ``device``; from pinned memory, since a copy from other memory waits for a GPU."""
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


def _rounded_up(value: int, steps: int, multiple: int = 1) -> int:
    """The next of ``steps`` evenly spaced values between two powers of two, or of the multiples of a number."""
    step = max(multiple, 2 ** (value.bit_length() - 1) // steps)
    return -(-value // step) * step


def _power_of_two(value: int) -> int:
    """The smallest that is no less."""
    return 1 << (value - 1).bit_length()


def check_lengths(lengths: Sequence[int] | Tensor) -> list[int]:
    """The lengths as Python ints; raise unless there are some and each is at least 1."""
    if isinstance(lengths, Tensor):
        check_vector(lengths)
    try:
        given = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
        if any(isinstance(n, bool) for n in given):
            raise TypeError("a mask is no lengths")
        values = [operator.index(n) for n in given]
    except TypeError as error:
        raise PackingError(
            f"packed_seq_lens={str(lengths)[:80]} ({type(lengths).__name__}): pass the sequences' lengths, whole "
            "numbers such as [3, 2] in a list or a 1-D tensor, or a PackedSeqLens; a mask is attention_mask."
        ) from error
    if not values or min(values) < 1:
        raise PackingError(f"packed_seq_lens must be lengths of at least 1 token each; got {values[:8]}.")
    return values


def check_vector(lengths: Tensor) -> None:
    """Raise unless a tensor of lengths is 1-D and whole."""
    if lengths.ndim != 1 or lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise PackingError(
            f"packed_seq_lens is a tensor of shape {tuple(lengths.shape)} and {lengths.dtype}; pass a 1-D tensor of "
            "whole lengths (a mask is attention_mask)."
        )


def build_lengths(
    lengths: Sequence[int],
    device: torch.device,
    *,
    positions: Tensor | None = None,
    indices: Tensor | None = None,
    batch_shape: tuple[int, int] | None = None,
    is_empty: bool = False,
) -> PackedSeqLens:
    """Offsets and positions from lengths that were checked; ``positions`` and ``indices`` ``[T]`` as they are."""
    sizes = torch.tensor(lengths, dtype=torch.long)
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.long)
    torch.cumsum(sizes, 0, out=offsets[1:])
    if positions is None:
        total = int(offsets[-1])
        positions = torch.arange(total) - offsets[:-1].repeat_interleave(sizes, output_size=total)
    return PackedSeqLens(
        lengths=tuple(lengths),
        cu_seqlens=sent(offsets.to(torch.int32), device),
        position_ids=sent(positions[None], device),
        indices=None if indices is None else sent(indices, device),
        batch_shape=batch_shape,
        is_empty=is_empty,
    )


@dataclass(frozen=True)
class Prefixes:
    """What sequences have in common at their beginnings, as the host knows it.

    Attributes:
        order: numbers of the sequences, sorted so that those that begin alike are neighbours.
        shared: how many tokens each, in this order, begins with that the one before it begins with; the first 0.
    """

    order: tuple[int, ...]
    shared: tuple[int, ...]

    @property
    def saved(self) -> int:
        """T - U: tokens that need not be computed."""
        return sum(self.shared)


@dataclass(frozen=True, eq=False)
class SharedTokens:
    """A batch of which each token of a trie is kept once.

    Attributes:
        full: the whole batch, as attention sees it.
        copies: which of its T tokens are copies of which of the U that are kept.
        position_ids: int64 ``[1, U]``.
    """

    full: PackedSeqLens
    copies: Copies
    position_ids: Tensor

    @property
    def total_tokens(self) -> int:
        """U."""
        return self.position_ids.shape[1]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> SharedTokens:
        """The same with its tensors on ``device``."""
        return SharedTokens(
            self.full.to(device, non_blocking),
            self.copies.to(device, non_blocking),
            self.position_ids.to(device, non_blocking=non_blocking),
        )

    def keep_ids(self, ids_1T: Tensor) -> Tensor:
        """``[1, T]`` ids to ``[1, U]``, after a check that copies are copies.

        It waits for the device nowhere on CUDA, where a failed check raises with the kernels that follow it.

        Raises:
            PackingError: these are not the ids that the prefixes were found in.
        """
        ids_1U = ids_1T.index_select(1, self.copies.first)
        same = (ids_1U.index_select(1, self.copies.source) == ids_1T).all()
        if same.device.type == "cuda":
            torch._assert_async(same, _OTHER_IDS)
        elif not bool(same):
            raise PackingError(_OTHER_IDS)
        return ids_1U


_OTHER_IDS = (
    "input_ids are not those that the prefixes in packed_seq_lens were found in: sequences begin differently that are "
    "said to begin alike. Leave input_ids as the collator made them, or make packed_seq_lens anew from lengths."
)
