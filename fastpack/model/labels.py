"""Labels: what each token predicts; the first of a sequence, which nothing does, and what a loss divides by then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional

from fastpack.families.registry import UNSHIFTED
from fastpack.ops.loss import IGNORE_INDEX
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.utils.classes import mentions, names_in, stock_class
from fastpack.utils.protocols import HeadLike
from fastpack.utils.signatures import keeps_some_logits


def shifts_labels(head: HeadLike) -> bool:
    """Return whether a head's own loss compares logits with the next label, so that no token predicts a first label."""
    if stock_class(head).__name__ in UNSHIFTED:
        return False
    return not hands_on(head) or getattr(head.loss_function, "__name__", "") != "ForMaskedLMLoss"


def without_first_labels(head: HeadLike, arguments: dict[str, Any]) -> dict[str, Any]:
    """Ignore the first label of each sequence, on a copy, where the packing was read.

    Where every sequence begins its row, labels stay as they are: what shifts them reads no first column, and a loss of
    the user's own may not shift.

    The ``num_items_in_batch`` of transformers' ``Trainer`` counts every label but those in column 0, and so the first
    ones of sequences that begin further right: padded left, or packed. It is scaled by the share of this batch's
    counted labels that is kept. Where a step is one micro-batch on one rank, that makes it the number of labels kept;
    where it is several, or ranks divide by the labels of all, each is corrected by its own share. A number below what
    the ``Trainer`` would count in this batch alone is somebody's own, and divides as it came. Of heads whose loss the
    ``Trainer`` doesn't know it counts column 0 too: all first labels, wherever sequences begin, and that
    stays as it is.
    """
    packed, labels = arguments.get("packed_seq_lens"), arguments.get("labels")
    if not isinstance(packed, PackedSeqLens) or not isinstance(labels, Tensor):
        return arguments
    if keeps_some_logits(arguments) and labels.shape != packed.padding.batch_shape:
        return arguments  # those of the logits that are kept, which nobody but the caller knows
    ignore_index = ignore_index_of(head, arguments)
    if packed.padding.starts_rows:
        packed.check_slots(labels)
        return arguments
    masked = packed.mask_first_labels(labels, ignore_index)
    num_items = arguments.get("num_items_in_batch")
    as_it_is = arguments.get("shift_labels") is not None or packed.padding.is_empty
    if num_items is None or as_it_is or _column_0_counts(head):
        return {**arguments, "labels": masked}
    counted, kept = (_trained(each[..., 1:], ignore_index) for each in (labels, masked))
    return {**arguments, "labels": masked, "num_items_in_batch": _share_of(num_items, counted, kept)}


def without_padding(head: HeadLike, arguments: Mapping[str, Any], targets_1T: Tensor) -> Tensor:
    """``num_items_in_batch`` where labels at padding are dropped, which transformers' ``Trainer`` has counted.

    Scaled as in :func:`without_first_labels`, by the share of this batch's counted labels that real tokens predict.
    """
    labels, ignore_index = arguments["labels"], ignore_index_of(head, arguments)
    predicted = _trained(labels[..., 1:] if shifts_labels(head) else labels, ignore_index)
    counted = _trained(labels if _column_0_counts(head) else labels[..., 1:], ignore_index)
    kept = counted - predicted + _trained(targets_1T, ignore_index)
    return _share_of(arguments["num_items_in_batch"], counted, kept)


def targets_of(packed: PackedSeqLens, labels_BS: Tensor, ignore_index: int) -> Tensor:
    """``[1, T]``: what each token predicts, the label of the next slot of its row, whether that is padding or not.

    A label is not dropped with the slot that it stands in: where an end token is padding too, and its slot has mask 0,
    the last token of the text learns it all the same. Tokens that stand for none predict nothing.
    """
    targets = packed.unpad(functional.pad(labels_BS, (0, 1), value=ignore_index)[:, 1:])
    total, real = packed.total_tokens, 0 if packed.padding.is_empty else packed.real_tokens
    return targets if real == total else functional.pad(targets[:, :real], (0, total - real), value=ignore_index)


def ignore_index_of(head: HeadLike, arguments: Mapping[str, Any]) -> int:
    """Return the label that is ignored in a call of this head."""
    given: int = arguments.get("ignore_index", IGNORE_INDEX)
    return given if hands_on(head) else IGNORE_INDEX


def hands_on(head: HeadLike) -> bool:
    """Return whether a head passes keywords on to transformers' loss."""
    return mentions(head, "loss_function")


def _column_0_counts(head: HeadLike) -> bool:
    """Return whether transformers' ``Trainer`` counts the labels in column 0 of this head's batches."""
    from transformers import Trainer
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    if "_loss_shifts_labels" not in names_in(Trainer.__init__):
        return False  # older ones leave column 0 out whatever the loss
    known: Any = LOSS_MAPPING
    return known.get(getattr(head, "loss_type", None)) is not ForCausalLMLoss


def _trained(labels: Tensor, ignore_index: int) -> Tensor:
    """Return the number of labels that are not ignored, 0-d int64."""
    return (labels != ignore_index).sum()


def _share_of(num_items: int | Tensor, counted: Tensor, kept: Tensor) -> Tensor:
    """``num_items`` times the share of this batch's labels that are kept, on their device, for which nobody waits."""
    if isinstance(num_items, Tensor):
        num_items = num_items.to(counted.device)
    share = kept.float() / counted.clamp(min=1)
    return num_items * share.masked_fill((counted > num_items) | (kept == 0), 1.0)
