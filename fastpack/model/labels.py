"""Labels: the target of each token, ignored first labels of sequences, and the count that a loss divides by."""

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
    return not passes_loss_keywords(head) or getattr(head.loss_function, "__name__", "") != "ForMaskedLMLoss"


def without_first_labels(head: HeadLike, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with the first label of each sequence ignored, in a copy, if the packing was read.

    If every sequence begins its row, labels stay unchanged: a loss that shifts labels never reads the first column, and
    a user's own loss may not shift them.

    The ``num_items_in_batch`` of transformers' ``Trainer`` counts all labels except those in column 0. So it counts the
    first labels of sequences that begin further right: in batches that are packed or padded on the left. The number is
    multiplied by the share of this batch's counted labels that is kept. The result is exact if a step is one
    micro-batch on one rank. If a step has several micro-batches, or ranks divide by the labels of all ranks, each
    micro-batch is corrected by its own share.

    The number stays unchanged in two cases. If it is smaller than the ``Trainer``'s count for this batch alone, a user
    has made it. If the ``Trainer`` doesn't know the head's loss, the number counts column 0 too, and with it all first
    labels, wherever sequences begin.

    Args:
        head: the head.
        arguments: its arguments.
    """
    packed, labels = arguments.get("packed_seq_lens"), arguments.get("labels")
    if not isinstance(packed, PackedSeqLens) or not isinstance(labels, Tensor):
        return arguments
    if keeps_some_logits(arguments) and labels.shape != packed.padding.batch_shape:
        return arguments  # labels of the kept logits, whose places only the caller knows
    ignore_index = ignore_index_of(head, arguments)
    if packed.padding.starts_rows:
        packed.check_slots(labels)
        return arguments
    masked = packed.mask_first_labels(labels, ignore_index)
    num_items = arguments.get("num_items_in_batch")
    unscaled = arguments.get("shift_labels") is not None or packed.padding.is_empty
    if num_items is None or unscaled or _column_0_counts(head):
        return {**arguments, "labels": masked}
    all_labels, kept_labels = (_trained(each[..., 1:], ignore_index) for each in (labels, masked))
    return {**arguments, "labels": masked, "num_items_in_batch": _share_of(num_items, all_labels, kept_labels)}


def without_padding(head: HeadLike, arguments: Mapping[str, Any], targets_1T: Tensor) -> Tensor:
    """Return ``num_items_in_batch`` without the labels at padding, which transformers' ``Trainer`` counts too.

    The number is scaled as in :func:`without_first_labels`, by the share of this batch's counted labels that real
    tokens predict.

    Args:
        head: the head.
        arguments: its arguments.
        targets_1T: ``[1, T]``, the targets of the real tokens.
    """
    labels, ignore_index = arguments["labels"], ignore_index_of(head, arguments)
    predicted = _trained(labels[..., 1:] if shifts_labels(head) else labels, ignore_index)
    all_labels = _trained(labels if _column_0_counts(head) else labels[..., 1:], ignore_index)
    kept_labels = all_labels - predicted + _trained(targets_1T, ignore_index)
    return _share_of(arguments["num_items_in_batch"], all_labels, kept_labels)


def targets_of(packed: PackedSeqLens, labels_BS: Tensor, ignore_index: int) -> Tensor:
    """Return the target of each token, ``[1, T]``: the label of the next slot in its row, even if that is padding.

    A dropped slot still gives its label: if the end token is also the padding token, and its slot has mask 0, the last
    token of the text learns it nevertheless. Bucket padding predicts nothing.

    Args:
        packed: the batch's packing.
        labels_BS: int64 ``[B, S]``.
        ignore_index: the label that is ignored.
    """
    targets = packed.unpad(functional.pad(labels_BS, (0, 1), value=ignore_index)[:, 1:])
    total, real = packed.total_tokens, 0 if packed.padding.is_empty else packed.real_tokens
    return targets if real == total else functional.pad(targets[:, :real], (0, total - real), value=ignore_index)


def ignore_index_of(head: HeadLike, arguments: Mapping[str, Any]) -> int:
    """Return the label that is ignored in a call of this head."""
    ignore_index: int = arguments.get("ignore_index", IGNORE_INDEX)
    return ignore_index if passes_loss_keywords(head) else IGNORE_INDEX


def passes_loss_keywords(head: HeadLike) -> bool:
    """Return whether a head passes keywords on to transformers' loss."""
    return mentions(head, "loss_function")


def _column_0_counts(head: HeadLike) -> bool:
    """Return whether transformers' ``Trainer`` counts the labels in column 0 of this head's batches."""
    from transformers import Trainer
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    if "_loss_shifts_labels" not in names_in(Trainer.__init__):
        return False  # older releases leave column 0 out for every loss
    losses: Any = LOSS_MAPPING
    return losses.get(getattr(head, "loss_type", None)) is not ForCausalLMLoss


def _trained(labels: Tensor, ignore_index: int) -> Tensor:
    """Return the number of labels that are not ignored, 0-d int64."""
    return (labels != ignore_index).sum()


def _share_of(num_items: int | Tensor, all_labels: Tensor, kept_labels: Tensor) -> Tensor:
    """Return ``num_items`` times the share of this batch's labels that is kept, on their device, without a wait."""
    if isinstance(num_items, Tensor):
        num_items = num_items.to(all_labels.device)
    share = kept_labels.float() / all_labels.clamp(min=1)
    return num_items * share.masked_fill((all_labels > num_items) | (kept_labels == 0), 1.0)
