"""``PackedSeqLens``: where each sequence of a batch begins and ends.

Shape suffixes: B rows, S columns of the batch as it came; T tokens, N sequences.

One object a batch, built once (:mod:`fastpack.packing.inputs` reads it from what a batch carries) and handed down by
keyword. Its parts are in files of their own: :mod:`fastpack.packing.padding` un-pads,
:mod:`fastpack.packing.buckets` rounds sizes up so that they repeat from batch to batch,
:mod:`fastpack.packing.prefixes` keeps tokens once that several sequences begin with.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from fastpack.errors import PackingError
from fastpack.ops.loss import IGNORE_INDEX
from fastpack.packing.buckets import Bucket
from fastpack.packing.padding import Padding
from fastpack.packing.prefixes import Prefixes, SharedTokens, find_prefixes
from fastpack.utils.tensors import map_tensors, send

if TYPE_CHECKING:
    from fastpack.ops.row_count import RowCount

Found = TypeVar("Found")


@dataclass(frozen=True, eq=False)
class PackedSeqLens:
    """The lengths of the sequences of one batch, and what follows from them.

    Build one with :meth:`from_lengths`, or let the model build it from the batch. It is immutable; what is derived
    from it (a block mask, groups of equal length) is computed once and kept with it.

    Attributes:
        lengths: N Python ints, each at least 1: the tokens of each sequence, in order.
        cu_seqlens: int32 ``[N + 1]``, on the batch's device: offsets, from 0 to T. In a bucket there are as many as
            the bucket has: the last one, repeated, ends sequences without a token.
        position_ids: int64 ``[1, T]``: the position of each token in its sequence.
        max_seqlen: the longest length, or the bucket's bound on it. Kept, so that who reads it in a compiled region
            reads no length: it would be compiled anew for other ones.
        padding: the slots of the batch that these lengths were read from.
        bucket: the sizes that this batch was rounded up to, or None.
        bucket_padding: lengths of the last sequences, which fill the bucket up.
        is_unwindowed: True where a 4-D mask lets each token see all of its sequence before it, whatever the model's
            window.
        prefixes: what the sequences have in common at their beginnings, where whoever read the batch found it.
        shared: for modules that run on each token of those prefixes once; all else here is that of the whole batch.
            None where they run on all T tokens.
        row_count: how many tokens are real, on the device, where only it knows: in a recording, whose lengths are those
            of whatever batch is replayed. The others are zeros at first, and products may leave them out.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    position_ids: Tensor
    max_seqlen: int
    padding: Padding = field(default_factory=Padding)
    bucket: Bucket | None = None
    bucket_padding: tuple[int, ...] = ()
    is_unwindowed: bool = False
    prefixes: Prefixes | None = None
    shared: SharedTokens | None = None
    row_count: RowCount | None = None
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

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

    @property
    def real_tokens(self) -> int:
        """T without the bucket padding that un-padding makes."""
        return self.total_tokens if self.padding.real_tokens is None else self.padding.real_tokens

    @cached_property
    def seq_idx(self) -> Tensor:
        """int32 ``[1, T]``: which sequence each token belongs to."""
        lengths = self.cu_seqlens.diff()
        order = torch.arange(lengths.numel(), dtype=torch.int32, device=lengths.device)
        return order.repeat_interleave(lengths, output_size=self.total_tokens)[None]

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Neighbouring sequences of equal length, as ``(how many sequences, length)``."""
        return tuple((len(list(run)), length) for length, run in groupby(self.lengths))

    def memo(self, key: Any, build: Callable[[], Found]) -> Found:
        """Return what ``build()`` makes, computed once for this batch under ``key``."""
        if torch.compiler.is_compiling():
            return build()  # a compiler keeps what it has made already
        if key not in self._memo:
            # a reference may run in inference mode, whose tensors autograd would refuse in the policy's forward
            with torch.inference_mode(False):
                self._memo[key] = build()
        found: Found = self._memo[key]
        return found

    @cached_property
    def whole(self) -> PackedSeqLens:
        """The same batch with all T tokens, for attention between modules that run on shared ones."""
        return replace(self, shared=None)

    def to(self, device: torch.device | str | None, non_blocking: bool = False, **_: Any) -> PackedSeqLens:
        """Return the same lengths with their tensors on ``device``; None, which accelerate may pass, leaves them."""
        if device is None or torch.device(device) == self.cu_seqlens.device:
            return self
        return replace(map_tensors(self, lambda x: x.to(device, non_blocking=non_blocking)), _memo={})

    def pin_memory(self) -> PackedSeqLens:
        """Return the same lengths in pinned memory, for torch's data loader, so that moving them waits for nobody."""
        return replace(map_tensors(self, Tensor.pin_memory), _memo={})

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle leaves out what is only kept for speed: a block mask holds closures, which don't pickle.
        return {**self.__dict__, "_memo": {}}

    def unpad(self, x_BS: Tensor) -> Tensor:
        """``[B, S, ...]`` to ``[1, T, ...]``: the real tokens, in order, then bucket padding."""
        return self.padding.unpad(x_BS)

    def repad(self, x_1T: Tensor) -> Tensor:
        """``[1, T, ...]`` to ``[B, S, ...]``: each token back in its slot, zeros in the others; no bucket padding."""
        return self.padding.repad(x_1T)

    def bucketed(self, bucket: Bucket | None = None) -> PackedSeqLens:
        """Return the same batch with its sizes rounded up, so that they repeat from one batch to the next.

        Further sequences, its bucket padding, fill T up. :meth:`unpad` makes their tokens from the batch's first one,
        whose values are as good as any (zeros may be divided by in a norm), and :meth:`repad` drops whatever becomes
        of them, so that their gradient is zero and nobody sees them. No sequence sees another's tokens, so the real
        ones are what they were.

        Args:
            bucket: the sizes; by default the smallest of :meth:`Bucket.of` that holds this batch.

        Raises:
            PackingError: the batch is in a bucket already, or does not fit this one.
        """
        if self.bucket is not None:
            raise PackingError(f"this batch is in {self.bucket} already.")
        bucket = Bucket.of(self.lengths) if bucket is None else bucket
        bucket_padding, padding = bucket.padding(self.lengths), self.padding
        if bucket_padding:
            total, device = self.total_tokens, self.cu_seqlens.device
            real = torch.arange(total, device=device) if padding.indices is None else padding.indices
            indices = torch.cat([real, real[:1].expand(sum(bucket_padding))])
            padding = replace(padding, indices=indices, real_tokens=total)
        cu_seqlens = self.cu_seqlens.new_empty(bucket.sequences + 1)
        position_ids = self.position_ids.new_empty(1, bucket.tokens)
        self.write_bucketed(bucket, cu_seqlens, position_ids)
        return replace(
            self,
            lengths=(*self.lengths, *bucket_padding),
            cu_seqlens=cu_seqlens,
            position_ids=position_ids,
            max_seqlen=bucket.max_seqlen,
            padding=padding,
            bucket=bucket,
            bucket_padding=bucket_padding,
            _memo={},
        )

    def write_bucketed(self, bucket: Bucket, cu_seqlens: Tensor, position_ids: Tensor) -> None:
        """Write the offsets ``[N + 1]`` and positions ``[1, T]`` of this batch in a bucket into tensors that exist."""
        device, bucket_padding = self.cu_seqlens.device, bucket.padding(self.lengths)
        ends = list(accumulate(bucket_padding, initial=self.total_tokens))[1:]
        ends += [bucket.tokens] * (bucket.sequences - len(self.lengths) - len(bucket_padding))
        offsets = send(torch.tensor(ends, dtype=torch.int32), device)
        torch.cat([self.cu_seqlens[: len(self.lengths) + 1], offsets], out=cu_seqlens)
        positions = torch.arange(sum(bucket_padding), device=device) % bucket.max_seqlen
        torch.cat([self.position_ids, positions[None]], 1, out=position_ids)

    def flattened(self) -> PackedSeqLens:
        """Return the same sequences as the one row ``[1, T]``, bucket padding and all, that :meth:`unpad` makes."""
        row = Padding((1, self.total_tokens))
        if self.bucket is not None:  # whether a bucket needs padding must not decide what is there
            row = replace(row, bucket_start=self.cu_seqlens.new_full((), self.total_tokens - sum(self.bucket_padding)))
        return replace(self, padding=row, _memo={})

    def prefixes_in(self, ids_1T: Tensor) -> Prefixes:
        """Return the prefixes found where the batch was read, else find them now, in ids and positions.

        Then it waits for the device, once, if the ids are on one.

        Args:
            ids_1T: int64 ``[1, T]``, un-padded.
        """
        if self.prefixes is not None:
            return self.prefixes
        return find_prefixes(self.lengths, *torch.cat([ids_1T, self.position_ids]).to(torch.int32).cpu())

    def share(self, prefixes: Prefixes) -> PackedSeqLens:
        """Return the same batch with each token of its prefixes kept once, for modules inside a backbone.

        Attention takes and gives ``[U, heads, dim]`` with it. A policy and its reference may be given one and the same
        object, and share what is made here.
        """

        def build() -> PackedSeqLens:
            copies = prefixes.copies(self.lengths, self.cu_seqlens.device)
            positions = self.position_ids.index_select(1, copies.first)
            # another memo: what is kept in one must not keep it
            return replace(self, shared=SharedTokens(copies, positions), _memo={})

        return self.memo(("shared", prefixes), build)

    def check_slots(self, labels_BS: Tensor) -> None:
        """Raise unless there is a label for each slot of the batch."""
        shape = self.padding.batch_shape
        slots = self.real_tokens if shape is None else shape[0] * shape[1]
        if labels_BS.numel() != slots:
            raise PackingError(
                f"labels hold {labels_BS.numel()} entries (shape {tuple(labels_BS.shape)}), but the batch has {slots} "
                "slots. Pass labels of the same shape as input_ids."
            )

    def mask_first_labels(self, labels_BS: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
        """Return a copy of ``labels`` in which the first label of each sequence is ignored.

        The loss shifts labels by one, so that label would be predicted from the last token of the sequence before.
        """
        self.check_slots(labels_BS)
        if self.padding.is_empty:
            return labels_BS
        starts = self.cu_seqlens[:-1].long()
        if self.bucket is not None:
            # Sequences without a token, and bucket padding, stand for the first: so no length is read.
            starts = torch.where(starts < self.total_tokens, starts, 0)
        if self.padding.indices is not None:
            starts = self.padding.indices[starts]
        return labels_BS.reshape(-1).index_fill(0, starts, ignore_index).reshape(labels_BS.shape)


def check_lengths(lengths: Sequence[int] | Tensor) -> list[int]:
    """Return the lengths as Python ints; raise unless there are some and each is at least 1."""
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


def build_lengths(lengths: Sequence[int], device: torch.device, positions: Tensor | None = None) -> PackedSeqLens:
    """Build from lengths that were checked; ``positions`` ``[T]``, where they don't restart at 0, as they are."""
    offsets = torch.tensor([*accumulate(lengths, initial=0)])
    if positions is None:
        positions = torch.arange(sum(lengths)) - offsets[:-1].repeat_interleave(offsets.diff())
    return PackedSeqLens(
        tuple(lengths), send(offsets.to(torch.int32), device), send(positions[None], device), max(lengths)
    )
