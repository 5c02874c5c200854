"""``PackedSeqLens``: the lengths of a batch's sequences, and the values that are derived from them.

Shape suffixes: B rows and S columns of the original batch; T tokens; N sequences.

Each batch has one ``PackedSeqLens``. :mod:`fastpack.packing.inputs` builds it from the batch's tensors, and the
forwards pass it on as the keyword ``packed_seq_lens``. Its parts have files of their own:
:mod:`fastpack.packing.padding` un-pads, :mod:`fastpack.packing.buckets` rounds sizes up so that they repeat from batch
to batch, and :mod:`fastpack.packing.prefixes` keeps each token of a shared prefix once.
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
from fastpack.ops.chunks import Chunks
from fastpack.ops.exchange import Group
from fastpack.ops.loss import IGNORE_INDEX
from fastpack.packing.buckets import Bucket
from fastpack.packing.padding import Padding
from fastpack.packing.prefixes import Prefixes, SharedTokens, find_prefixes
from fastpack.packing.shards import TokenShards, share_sizes
from fastpack.packing.two_way import TwoWayBlocks
from fastpack.utils.tensors import map_tensors, send

if TYPE_CHECKING:
    from fastpack.ops.row_count import RowCount, RowsOfRanks

Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class PackedSeqLens:
    """The lengths of the sequences of one batch, and the values that are derived from them.

    Build it with :meth:`from_lengths`, or let the model read it from the batch. It is immutable. Values that are
    derived from it (a block mask, groups of equal length) are computed once and kept with it.

    A patched model reads where the sequences of a batch begin and end from these inputs:

    - A padded batch ``[B, S]``, padded on the right, the left or both: an ``attention_mask`` of 0 and 1.
    - A flattened batch ``[1, T]``: ``packed_seq_lens=[...]``, ``cu_seq_lens_q`` and ``cu_seq_lens_k``, ``seq_idx``, or
      ``position_ids`` that restart.
    - Several packed rows ``[B, S]``: the same, or an ``attention_mask`` that numbers the segments (1, 1, 2, 2, 0), or a
      4-D mask ``[B, 1, S, S]`` with one causal block for each sequence.

    Of the following inputs, the first one that a batch has says where sequences begin. Every row begins a sequence,
    too.

    1. A ``PackedSeqLens`` that a collator read from a batch of this shape. The model trusts it: code that masks or
       permutes the batch afterwards must remove it.
    2. ``packed_seq_lens``, ``cu_seq_lens_q``, ``cu_seq_lens_k`` and ``seq_idx``, which must agree.
    3. An ``attention_mask`` that numbers segments, or a 4-D mask.
    4. ``position_ids``: a position that does not grow begins a sequence. Positions of padding are ignored.
    5. None of these: each row is one sequence, without the slots that the mask hides.

    Inputs that contradict each other raise a :class:`fastpack.PackingError` that names both. The following inputs raise
    it too:

    - lengths or offsets that don't sum to the number of real tokens, and sequences that run over the end of a row;
    - a mask of another shape, with padding inside a sequence, or with negative or fractional values;
    - positions that repeat inside a sequence, are negative or are not whole numbers. Positions that skip need
      ``packed_seq_lens`` if no slot is padding, since a jump may also be a new sequence;
    - ``max_length_q`` or ``max_length_k`` below the longest sequence;
    - a packed batch that asks for a cache or for attention weights, which run the stock forward, or that reaches a
      sequence classifier, which returns one result for each row.

    The first label of each sequence is ignored in a packed batch: the loss shifts labels, so it would be predicted from
    the last token of the sequence before. Outputs per token go back to the batch's shape, with zeros in padding.

    The model reads the lengths once a step, and the host waits for the device meanwhile, unless a collator has read
    them (:func:`fastpack.with_packed_seq_lens`).

    Attributes:
        lengths: N Python ints, each at least 1: the tokens of each sequence, in order.
        cu_seqlens: int32 ``[N + 1]``, on the batch's device: offsets, from 0 to T. In a bucket, N is the bucket's
            number of sequences; the last offset is repeated for sequences without a token.
        position_ids: int64 ``[1, T]``: the position of each token in its sequence.
        max_seqlen: the longest length, or the bucket's bound on it. It is stored so that a compiled region need not
            read ``lengths``, since it would compile anew for each of them.
        padding: the slots of the batch that the lengths were read from.
        bucket: the sizes that the batch was rounded up to, or None.
        bucket_padding: the lengths of the last sequences, which fill the bucket up.
        is_unwindowed: whether a 4-D mask lets each token see all of its sequence before it, whatever the model's
            window.
        prefixes: the prefixes that the sequences share, if they were looked for when the batch was read.
        two_way: the blocks of tokens that see each other in both directions (images), in layers whose attention uses
            them; None if every token sees only tokens up to itself.
        shared: the tokens of those prefixes, for modules that run on each of these tokens once; None if modules run on
            all T tokens. All other attributes describe the whole batch.
        shards: the shares of the tokens that the ranks of a context-parallel group keep, if modules run on one share;
            not together with ``shared``.
        rows_of_ranks: the number of tokens that modules run on, on each rank, in this forward; None if no experts are
            spread over ranks.
        row_count: the number of real tokens, as a tensor on the device; None outside of CUDA graphs. A graph is
            replayed with batches of other lengths. The tokens after the real ones begin as zeros, and matmuls may skip
            them.

    Example:
        >>> packed = PackedSeqLens.from_lengths([3, 2])
        >>> packed.cu_seqlens.tolist(), packed.position_ids.tolist()
        ([0, 3, 5], [[0, 1, 2, 0, 1]])
        >>> loss = model(input_ids=ids_1T, labels=labels_1T, packed_seq_lens=packed).loss  # patched
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
    two_way: TwoWayBlocks | None = None
    shared: SharedTokens | None = None
    shards: TokenShards | None = None
    rows_of_ranks: RowsOfRanks | None = None
    row_count: RowCount | None = None
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_lengths(cls, lengths: Sequence[int] | Tensor, *, device: torch.device | str = "cpu") -> PackedSeqLens:
        """Build from the lengths of the sequences.

        Args:
            lengths: N ints, or a 1-D tensor of them. A tensor on a GPU costs one synchronisation.
            device: the device of the batch, on which the offsets and positions are made.

        Raises:
            PackingError: a length below 1, or no length at all.
        """
        return build_lengths(check_lengths(lengths), torch.device(device))

    @property
    def knows_lengths(self) -> bool:
        """True if ``lengths`` can be read; the lengths of a CUDA graph's next batch are on the device alone."""
        return True

    @property
    def num_sequences(self) -> int:
        """N, the number of sequences that have a token."""
        return len(self.lengths)

    @property
    def total_tokens(self) -> int:
        """T, the number of tokens, bucket padding included."""
        return self.position_ids.shape[1]

    @property
    def real_tokens(self) -> int:
        """The number of tokens without the bucket padding that un-padding adds."""
        return self.total_tokens if self.padding.real_tokens is None else self.padding.real_tokens

    @cached_property
    def seq_idx(self) -> Tensor:
        """The sequence that each token belongs to, int32 ``[1, T]``."""
        lengths = self.cu_seqlens.diff()
        order = torch.arange(lengths.numel(), dtype=torch.int32, device=lengths.device)
        return order.repeat_interleave(lengths, output_size=self.total_tokens)[None]

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """The runs of neighbouring sequences of equal length, as ``(number of sequences, length)``."""
        return tuple((len(list(run)), length) for length, run in groupby(self.lengths))

    def memo(self, key: Any, build: Callable[[], Value]) -> Value:
        """Return the result of ``build()``, computed once for this batch and kept under ``key``."""
        if torch.compiler.is_compiling():
            return build()  # the compiler keeps equal results itself
        if key not in self._memo:
            # a reference model may run in inference mode, whose tensors autograd refuses in the policy's forward
            with torch.inference_mode(False):
                self._memo[key] = build()
        value: Value = self._memo[key]
        return value

    def chunks(self, size: int) -> Chunks:
        """Return the sequences cut into chunks of ``size`` tokens, for recurrences; computed once for this batch."""
        return self.memo(("chunks", size), lambda: Chunks.of(self.cu_seqlens, size, self._chunk_count(size)))

    def _chunk_count(self, size: int) -> int:
        """Return the number of chunks of ``size`` tokens."""
        return sum(-(-length // size) for length in self.lengths)

    @property
    def kept(self) -> SharedTokens | TokenShards | None:
        """The tokens that modules inside a backbone run on, or None if they run on all T tokens."""
        return self.shards if self.shared is None else self.shared

    @property
    def run_tokens(self) -> int:
        """The number of tokens that modules inside a backbone run on."""
        return self.total_tokens if self.kept is None else self.kept.total_tokens

    @cached_property
    def whole(self) -> PackedSeqLens:
        """The same batch with all T tokens, for attention between modules that run on some of them."""
        return replace(self, shared=None, shards=None)

    def to(self, device: torch.device | str | None, non_blocking: bool = False, **_: Any) -> PackedSeqLens:
        """Return the same lengths with their tensors on ``device``; accelerate may pass None, which changes nothing."""
        if device is None or torch.device(device) == self.cu_seqlens.device:
            return self
        return replace(map_tensors(self, lambda x: x.to(device, non_blocking=non_blocking)), _memo={})

    def pin_memory(self) -> PackedSeqLens:
        """Return the same lengths in pinned memory, for torch's data loader, so that their copy is asynchronous."""
        return replace(map_tensors(self, Tensor.pin_memory), _memo={})

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields without the memo: a block mask in it holds closures, which can't be pickled."""
        return {**self.__dict__, "_memo": {}}

    def unpad(self, x_BS: Tensor) -> Tensor:
        """Un-pad ``[B, S, ...]`` to ``[1, T, ...]``: the real tokens in order, then bucket padding."""
        return self.padding.unpad(x_BS)

    def unpad_axes(self, x_ABS: Tensor) -> Tensor:
        """Un-pad ``[A, B, S]`` to ``[A, 1, T]``: positions of several axes. One row stands for all B rows."""
        shape = self.padding.batch_shape
        rows = x_ABS.shape[1] if shape is None else shape[0]
        return torch.stack([self.unpad(axis) for axis in x_ABS.expand(-1, rows, -1)])

    def repad(self, x_1T: Tensor) -> Tensor:
        """Re-pad ``[1, T, ...]`` to ``[B, S, ...]``: each real token in its slot, zeros in the other slots."""
        return self.padding.repad(x_1T)

    def bucketed(self, bucket: Bucket | None = None) -> PackedSeqLens:
        """Return the same batch with its sizes rounded up, so that they repeat from one batch to the next.

        Extra sequences, the bucket padding, fill T up. For their tokens, :meth:`unpad` copies the batch's first token,
        since a norm could divide by zero otherwise. :meth:`repad` drops them, so that their gradient is zero. No
        sequence sees another's tokens, so the results of real tokens don't change.

        Args:
            bucket: the sizes; by default those of :meth:`Bucket.of`, the smallest that hold this batch.

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
            two_way=None if self.two_way is None else self.two_way.padded(bucket.tokens),
            _memo={},
        )

    def write_bucketed(self, bucket: Bucket, cu_seqlens: Tensor, position_ids: Tensor) -> None:
        """Write the batch's offsets ``[N + 1]`` and positions ``[1, T]`` in a bucket into existing tensors."""
        device, bucket_padding = self.cu_seqlens.device, bucket.padding(self.lengths)
        ends = list(accumulate(bucket_padding, initial=self.total_tokens))[1:]
        ends += [bucket.tokens] * (bucket.sequences - len(self.lengths) - len(bucket_padding))
        offsets = send(torch.tensor(ends, dtype=torch.int32), device)
        torch.cat([self.cu_seqlens[: len(self.lengths) + 1], offsets], out=cu_seqlens)
        positions = torch.arange(sum(bucket_padding), device=device) % bucket.max_seqlen
        torch.cat([self.position_ids, positions[None]], 1, out=position_ids)

    def flattened(self) -> PackedSeqLens:
        """Return the same sequences as a batch of one row ``[1, T]``, which is what :meth:`unpad` makes."""
        row = Padding((1, self.total_tokens))
        if self.bucket is not None:  # set for each bucket, padded or not, so that its compiled graph is the same
            row = replace(row, bucket_start=self.cu_seqlens.new_full((), self.total_tokens - sum(self.bucket_padding)))
        return replace(self, padding=row, _memo={})

    def prefixes_in(self, ids_1T: Tensor) -> Prefixes:
        """Return the prefixes that were found when the batch was read, or else find them now in ids and positions.

        Finding them waits for the device once, if the ids are not on the host.

        Args:
            ids_1T: int64 ``[1, T]``, the un-padded ids.
        """
        if self.prefixes is not None:
            return self.prefixes
        return find_prefixes(self.lengths, *torch.cat([ids_1T, self.position_ids]).to(torch.int32).cpu())

    def share(self, prefixes: Prefixes) -> PackedSeqLens:
        """Return the same batch with each token of its prefixes kept once, for modules inside a backbone.

        Attention then takes and returns ``[U, heads, dim]``, where U counts the kept tokens. A policy and its reference
        model may get the same object, and then share the result.

        Args:
            prefixes: the prefixes; in a batch with blocks (:attr:`two_way`) they cut none of these
                (:func:`fastpack.packing.prefixes.without_cut_blocks`).
        """

        def build() -> PackedSeqLens:
            copies = prefixes.copies(self.lengths, self.cu_seqlens.device)
            tree = prefixes.tree(self.lengths, self.cu_seqlens.device)
            positions = self.position_ids.index_select(1, copies.first)
            # a memo of its own, since an entry of this memo must not refer to it
            return replace(self, shared=SharedTokens(copies, positions, tree), _memo={})

        return self.memo(("shared", prefixes), build)

    def shard(self, rank: int, ranks: int, group: Group) -> PackedSeqLens:
        """Return the same batch for modules that run on one rank's share of its tokens.

        Attention then takes and returns ``[U, heads, dim]``, where U counts that rank's tokens.

        Args:
            rank: the rank's place in the group.
            ranks: the size of the group.
            group: the process group, whose ranks have the same batch.

        Raises:
            PackingError: there are fewer tokens than ranks.
        """
        sizes = share_sizes(self.total_tokens, ranks)
        positions = self.position_ids.narrow(1, sum(sizes[:rank]), sizes[rank])
        return replace(self, shards=TokenShards(sizes, rank, group, positions), _memo={})

    def part(self, begin: int, end: int) -> PackedSeqLens:
        """Return the packing of the tokens from ``begin`` up to ``end``, in which sequences may be cut off.

        Example:
            >>> PackedSeqLens.from_lengths([3, 2]).part(1, 4).lengths
            (2, 1)
        """
        ends = tuple(accumulate(self.lengths))
        cut = (min(last, end) - max(last - n, begin) for last, n in zip(ends, self.lengths, strict=True))
        return PackedSeqLens.from_lengths([n for n in cut if n > 0], device=self.cu_seqlens.device)

    def check_slots(self, labels_BS: Tensor) -> None:
        """Raise a PackingError unless there is a label for each slot of the batch."""
        shape = self.padding.batch_shape
        slots = self.real_tokens if shape is None else shape[0] * shape[1]
        if labels_BS.numel() != slots:
            raise PackingError(
                f"labels hold {labels_BS.numel()} entries (shape {tuple(labels_BS.shape)}), but the batch has {slots} "
                "slots. Pass labels of the same shape as input_ids."
            )

    def mask_first_labels(self, labels_BS: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
        """Return a copy of ``labels`` in which the first label of each sequence is ignored.

        The loss shifts labels by one, so the first label would be predicted from the last token of the sequence before.

        Args:
            labels_BS: int64, one label for each slot of the batch, in any shape.
            ignore_index: the label that is ignored.

        Raises:
            PackingError: there is not one label for each slot.
        """
        self.check_slots(labels_BS)
        if self.padding.is_empty:
            return labels_BS
        starts = self.cu_seqlens[:-1].long()
        if self.bucket is not None:
            # Sequences without a token begin at T: they are masked at slot 0 instead, so that no length is read.
            starts = torch.where(starts < self.total_tokens, starts, 0)
        if self.padding.indices is not None:
            starts = self.padding.indices[starts]
        return labels_BS.reshape(-1).index_fill(0, starts, ignore_index).reshape(labels_BS.shape)


def check_lengths(lengths: Sequence[int] | Tensor) -> list[int]:
    """Return the lengths as Python ints.

    Raises:
        PackingError: there is no length, a length is below 1, or one is not a whole number.
    """
    if isinstance(lengths, Tensor):
        check_vector(lengths)
    try:
        numbers = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
        if any(isinstance(n, bool) for n in numbers):
            raise TypeError("these are bools, as of a mask")
        values = [operator.index(n) for n in numbers]
    except TypeError as error:
        raise PackingError(
            f"packed_seq_lens={str(lengths)[:80]} ({type(lengths).__name__}): pass the sequences' lengths, whole "
            "numbers such as [3, 2] in a list or a 1-D tensor, or a PackedSeqLens. A mask goes into attention_mask."
        ) from error
    if not values or min(values) < 1:
        raise PackingError(f"packed_seq_lens must be lengths of at least 1 token each; got {values[:8]}.")
    return values


def check_vector(lengths: Tensor) -> None:
    """Raise a PackingError unless a tensor of lengths is 1-D and of an integer dtype."""
    if lengths.ndim != 1 or lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise PackingError(
            f"packed_seq_lens is a tensor of shape {tuple(lengths.shape)} and {lengths.dtype}; pass a 1-D tensor of "
            "whole lengths (a mask goes into attention_mask)."
        )


def build_lengths(lengths: Sequence[int], device: torch.device, positions: Tensor | None = None) -> PackedSeqLens:
    """Build a PackedSeqLens from checked lengths; ``positions`` ``[T]`` replace positions that restart at 0."""
    offsets = torch.tensor([*accumulate(lengths, initial=0)])
    if positions is None:
        positions = torch.arange(sum(lengths)) - offsets[:-1].repeat_interleave(offsets.diff())
    return PackedSeqLens(
        tuple(lengths), send(offsets.to(torch.int32), device), send(positions[None], device), max(lengths)
    )
