"""The choice of a head's kind, and of its fused loss."""

from __future__ import annotations

from torch import nn

from fastpack.errors import UnsupportedModelError
from fastpack.families.spec import HeadSpec
from fastpack.model.head import HeadKind
from fastpack.model.loss import fused_loss_rejects
from fastpack.patching.options import PatchOptions
from fastpack.patching.recognise import Recognised, own_class
from fastpack.utils.protocols import HeadLike


def head_loss(
    head: HeadLike, kind: HeadKind, options: PatchOptions, recognised: Recognised
) -> tuple[HeadSpec | None, str | None]:
    """Return the spec of the head's fused loss, or None, and why it can't be fused, or None."""
    if options.loss is None:
        return None, None
    spec = recognised.specs.get(own_class(head, recognised.family) or "")
    reason = fused_loss_rejects(head, kind, spec)
    loss = spec if reason is None and isinstance(spec, HeadSpec) else None
    return loss, reason


def head_kind(head: nn.Module) -> HeadKind:
    """Return what a head computes, by its name.

    Raises:
        UnsupportedModelError: it finds spans, as in question answering.
    """
    name = type(head).__name__
    if name.endswith("ForSequenceClassification"):
        return "sequence_classification"
    if name.endswith("ForTokenClassification"):
        return "token_classification"
    if name.endswith("ForQuestionAnswering"):
        raise UnsupportedModelError(
            f"{name} finds spans in a row, which is not covered; causal LMs, sequence and token classifiers are."
        )
    return "causal_lm"
