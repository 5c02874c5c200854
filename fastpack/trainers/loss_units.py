"""The unit over which each trainer's loss is a mean; functions to count a batch's units and to split a batch.

A micro-batch's loss is a mean over its tokens, pairs or sequences, and trainers average these means over an optimiser
step. If micro-batches are uneven, the result is not the mean over the step, so each loss is weighted by its share of
the units.

Shape suffixes: B rows of a batch, S padded length, P pairs (B = 2 P).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from fastpack.errors import PackingError
from fastpack.model.checks import MEDIA
from fastpack.model.labels import passes_loss_keywords, shifts_labels
from fastpack.model.unwrap import find_parts
from fastpack.packing.block_masks import real_slots
from fastpack.packing.seqlens import PackedSeqLens, check_lengths
from fastpack.utils.protocols import HeadLike, TrainerLike

Inputs = Mapping[str, Any]
Count = Callable[[Inputs], "Tensor | int"]


@dataclass(frozen=True)
class LossUnit:
    """The unit that a trainer's loss is a mean over.

    Attributes:
        name: the unit's name in the plural, such as ``pairs``.
        count: a function that counts a collated batch's units without waiting for the device.
        planned: whether batches come from a data set, whose lengths are known beforehand; False for generated batches.
        rows_per_unit: the number of rows that have to stay together: 2 if chosen and rejected are rows i and i + P.
        pre_divided: whether the trainer's loss is already divided by the number of a step's micro-batches, as GRPO's
            is. Then a whole micro-batch gets no weight, and a piece is weighted by its share of the micro-batch.
        piece_count: a function that returns, for a trainer of generated batches, how to count the units over which its
            loss is a mean in a micro-batch; None if the loss is a sum divided by a number of the whole step.
        always_mean: whether the model's own loss over labels is a mean over the micro-batch even if it gets the label
            count of the whole step.
        why_inexact: a function that returns why a trainer's settings rule out exact losses, or None.
        why_unsplittable: a function that returns why a trainer's micro-batches can't be split, or None.
    """

    name: str
    count: Count
    planned: bool = True
    rows_per_unit: int = 1
    pre_divided: bool = False
    piece_count: Callable[[Any], Count | None] = lambda trainer: rows
    always_mean: bool = False
    why_inexact: Callable[[Any], str | None] = lambda trainer: None
    why_unsplittable: Callable[[Any], str | None] = lambda trainer: None

    @property
    def counts_labels(self) -> bool:
        """True if the loss is a mean over ``labels``, so that trainers pass ``num_items_in_batch``."""
        return self.name in ("trained tokens", "labels")


def pairs(inputs: Inputs) -> int:
    """Return P, the number of pairs of a batch."""
    return rows(inputs) // 2


def rows(inputs: Inputs) -> int:
    """Return B, the number of rows of a batch."""
    name = "input_ids" if "input_ids" in inputs else "completion_ids"
    return int(inputs[name].shape[0])


def trained_tokens(inputs: Inputs) -> Tensor:
    """Count the predicted labels, 0-d int64: all except each row's first label and ignored labels."""
    labels = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"]
    if "shift_labels" not in inputs and labels.ndim > 1:  # 1-D labels are one class for each row
        labels = labels[..., 1:]
    return labels.ne(-100).sum()


def labels(inputs: Inputs) -> Tensor:
    """Count a classifier's labels, of rows or of tokens, without ignored labels. 0-d int64."""
    return inputs["labels"].ne(-100).sum()


def real_labels(inputs: Inputs) -> Tensor:
    """Count the labels at real tokens, without ignored labels. 0-d int64."""
    labelled = inputs["labels"].ne(-100)
    return (labelled & _real(inputs) if "attention_mask" in inputs else labelled).sum()


def chosen_tokens(inputs: Inputs) -> Tensor:
    """Count the predicted tokens of chosen completions. 0-d int64."""
    mask: Tensor = inputs["completion_mask"]
    return mask[: mask.shape[0] // 2, 1:].sum()


def completion_tokens(inputs: Inputs) -> Tensor:
    """Count the completion tokens in TRL's own mask, without the answers of tools. 0-d."""
    mask: Tensor = inputs["completion_mask"]
    return (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).sum()


def _inexact_dpo(trainer: TrainerLike) -> str | None:
    for name in trainer.loss_types:
        if name.startswith("aot"):
            return f"loss_type {name!r} sorts pairs within a micro-batch, so batches change it: leave max_tokens out"
    return None


def _unsplittable_sft(trainer: TrainerLike) -> str | None:
    if getattr(trainer, "padding_free", False) and getattr(trainer.args, "packing", False):
        return "packing joins a batch into one row; turn it off, or leave same_steps out: full batches take packed rows"
    if getattr(trainer, "padding_free", False):
        return "padding_free joins a batch into one row; turn it off, since a patched model runs without padding anyway"
    return _unsplittable_experts(trainer)


def _unsplittable_trainer(trainer: TrainerLike) -> str | None:
    if getattr(trainer.model.config, "output_router_logits", False):
        return f"{_EXPERTS}: set output_router_logits=False in the model's config, or leave same_steps out"
    return None


def _unsplittable_experts(trainer: TrainerLike, option: str = "same_steps") -> str | None:
    """Return why TRL can't split a batch of a model with experts, or None; ``option`` is what asks for the split."""
    if getattr(trainer, "aux_loss_enabled", False):
        return f"{_EXPERTS}: set router_aux_loss_coef=0.0, or leave {option} out"
    return None


_EXPERTS = "the auxiliary loss of experts would be added once for each piece"


def _unsplittable_kto(trainer: TrainerLike) -> str | None:
    if getattr(trainer, "calculate_KL", False):
        kind = trainer.loss_type
        return f"loss_type {kind!r} compares with a KL that is a mean over a micro-batch: leave same_steps out"
    return _unsplittable_experts(trainer)


def _unsplittable_generated(trainer: TrainerLike) -> str | None:
    return _unsplittable_experts(trainer, "max_tokens")


def _inexact_grpo(trainer: TrainerLike) -> str | None:
    if getattr(trainer, "top_entropy_quantile", 1.0) < 1.0:
        return "top_entropy_quantile takes its threshold from the whole batch, but a piece has only a part of it"
    if getattr(trainer, "_entropy_bonus_enabled", False):
        return "the entropy bonus is a mean over different tokens than the loss"
    if trainer.loss_type not in GRPO_LOSSES:
        return f"fastpack doesn't know what loss_type {trainer.loss_type!r} is a mean over"
    return None


GRPO_LOSSES: dict[str, Count | None] = {
    "grpo": rows,
    "sapo": rows,
    "luspo": rows,
    "dr_grpo": rows,
    "bnpo": completion_tokens,
    "dapo": None,
    "cispo": None,
    "vespo": None,
}
"""For each GRPO loss, the function that counts the units over which it is a mean in a micro-batch; None if the loss is
a sum divided by a number of the whole step."""

LOSS_UNITS: dict[str, LossUnit] = {
    "DPOTrainer": LossUnit(
        "pairs", pairs, rows_per_unit=2, why_inexact=_inexact_dpo, why_unsplittable=_unsplittable_experts
    ),
    "RewardTrainer": LossUnit("pairs", pairs, rows_per_unit=2),
    "KTOTrainer": LossUnit("sequences", rows, why_unsplittable=_unsplittable_kto),
    "RLOOTrainer": LossUnit("sequences", rows, planned=False, why_unsplittable=_unsplittable_generated),
    "GRPOTrainer": LossUnit(
        "sequences",
        rows,
        planned=False,
        pre_divided=True,
        piece_count=lambda trainer: GRPO_LOSSES[trainer.loss_type],
        why_inexact=_inexact_grpo,
        why_unsplittable=_unsplittable_generated,
    ),
    "DistillationTrainer": LossUnit(
        "completion tokens",
        completion_tokens,
        planned=False,
        pre_divided=True,
        piece_count=lambda trainer: None,
        why_unsplittable=_unsplittable_generated,
    ),
    "SFTTrainer": LossUnit("trained tokens", trained_tokens, why_unsplittable=_unsplittable_sft),
    "Trainer": LossUnit("trained tokens", trained_tokens, why_unsplittable=_unsplittable_trainer),
}
"""The loss unit of a trainer, by the name of its class or of the nearest base class in this table."""
CLASSIFYING = LossUnit("labels", labels, always_mean=True)
"""The loss unit of transformers' ``Trainer`` with a classifier, whose loss takes no ``num_items_in_batch``."""


LabelCount = Literal["the step's labels", "its own labels", "nothing"]
"""The label count that a loss over labels gets as ``num_items_in_batch``."""


def label_count_for(trainer: TrainerLike, loss_unit: LossUnit) -> LabelCount:
    """Return the label count that a micro-batch's loss has to get as ``num_items_in_batch``.

    A stock loss divides by the labels of the step, or is a mean over the micro-batch. A custom loss may do either, and
    only the trainer's ``loss_is_scaled_for_ga`` says which. Without that attribute, the loss gets the label count of
    its own micro-batch, so it is a mean over these labels in both cases.
    """
    compute_loss = trainer.__dict__.get("compute_loss", type(trainer).compute_loss)
    library = getattr(compute_loss, "__module__", "").split(".")[0]
    if trainer.compute_loss_func is None and library in ("transformers", "trl", "fastpack"):
        return "nothing" if loss_unit.always_mean else "the step's labels"
    scaled: bool | None = getattr(trainer, "loss_is_scaled_for_ga", None)
    if scaled is None:
        return "its own labels"
    return "the step's labels" if scaled else "nothing"


def divides(trainer: TrainerLike, num_items: Tensor | int | None) -> bool:
    """Return whether ``Trainer.training_step`` divides a loss by the number of micro-batches of the step."""
    scaled: bool | None = getattr(trainer, "loss_is_scaled_for_ga", None)
    if scaled is None:
        scaled = trainer.compute_loss_func is not None or (trainer.model_accepts_loss_kwargs and num_items is not None)
    return not scaled


def loss_unit_of(trainer: TrainerLike) -> LossUnit | None:
    """Return a trainer's loss unit, or None if it is unknown."""
    for base in type(trainer).__mro__:
        library, name = base.__module__.split(".")[0], base.__name__
        if library == "trl" and name.endswith("Trainer") and name.lstrip("_") != "BaseTrainer":
            return LOSS_UNITS.get(name)  # None: how TRL's other trainers use a batch is unknown
        if library == "transformers" and name == "Trainer":
            return _of_head(find_parts(trainer.model).head)
    return None


def _of_head(head: HeadLike) -> LossUnit:
    """Return the loss unit of transformers' ``Trainer`` with this head."""
    if "Classification" in type(head).__name__:
        return CLASSIFYING
    if head is None or passes_loss_keywords(head):
        return LOSS_UNITS["Trainer"]
    return replace(
        LOSS_UNITS["Trainer"], always_mean=True, count=trained_tokens if shifts_labels(head) else real_labels
    )


def lengths(inputs: Inputs, loss_unit: LossUnit) -> list[int]:
    """Return the number of real tokens of each unit of a collated batch. Waits for the device, once."""
    return _row_tokens(inputs).view(loss_unit.rows_per_unit, -1).sum(0).tolist()


def _real(inputs: Inputs) -> Tensor:
    """Return the mask as bool ``[B, S]``, True at real tokens."""
    mask: Tensor = inputs["attention_mask"]
    return real_slots(mask, (rows(inputs), mask.shape[-1]))


def _row_tokens(inputs: Inputs) -> Tensor:
    """Return the number of real tokens of each row, int64 ``[B]``."""
    if "attention_mask" in inputs:
        return _real(inputs).sum(-1)
    if "prompt_mask" in inputs:
        prompts: Tensor = inputs["prompt_mask"].sum(-1)
        return prompts + inputs["completion_mask"].sum(-1)
    return torch.full((rows(inputs),), inputs["input_ids"].shape[-1])


def piece(inputs: Inputs, units: list[int], loss_unit: LossUnit) -> dict[str, Any]:
    """Return a part of a batch, with the given units only.

    A tensor or list with one entry for each row, or for each unit, keeps the entries of these units. Other values don't
    change. Images are divided by TRL's ``num_images``, as its own trainers do. ``packed_seq_lens`` become the lengths
    of the remaining sequences. The model reads from the mask where these sequences are.

    Raises:
        PackingError: the batch has images, and doesn't say which row they belong to.
    """
    media = [name for name in MEDIA if inputs.get(name) is not None]
    if media:
        return _piece_with_images(inputs, units, loss_unit, media)
    return _select(inputs, units, loss_unit)


def _piece_with_images(inputs: Inputs, units: list[int], loss_unit: LossUnit, media: list[str]) -> dict[str, Any]:
    """Return a part of a batch of TRL's trainers that has images."""
    from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

    if inputs.get("num_images") is None:
        raise PackingError(
            f"{', '.join(media)} came with a batch over the budget, which doesn't say which row they belong to, so it "
            "can't be split. Leave same_steps out, or pass smaller batches."
        )
    by_row = split_pixel_values_by_grid({name: value for name, value in inputs.items() if value is not None})
    part = unsplit_pixel_values_by_grid(_select(by_row, units, loss_unit))
    # rows without images leave tensors without entries, which no model takes
    return {name: value for name, value in part.items() if not isinstance(value, Tensor) or value.numel()}


def _select(inputs: Inputs, units: list[int], loss_unit: LossUnit) -> dict[str, Any]:
    """Return the entries of these units."""
    total = rows(inputs)
    count = total // loss_unit.rows_per_unit
    rows_of_units = [unit + count * part for part in range(loss_unit.rows_per_unit) for unit in units]

    def select(value: object) -> Any:
        if isinstance(value, Tensor):
            if value.ndim == 0 or len(value) not in (total, count):
                return value
            indices = rows_of_units if len(value) == total else units
            return value.index_select(0, torch.tensor(indices, device=value.device))
        if isinstance(value, list) and len(value) in (total, count):
            return [value[i] for i in (rows_of_units if len(value) == total else units)]
        return value

    part = {name: select(value) for name, value in inputs.items() if name != "packed_seq_lens"}
    if inputs.get("packed_seq_lens") is not None:
        lengths_by_row = _sequences(inputs)
        part["packed_seq_lens"] = [length for row in rows_of_units for length in lengths_by_row[row]] or None
    return part


def _sequences(inputs: Inputs) -> list[list[int]]:
    """Return the lengths of the sequences in each row, from ``packed_seq_lens``. Waits for the device, once."""
    packed = inputs["packed_seq_lens"]
    ours = isinstance(packed, PackedSeqLens)
    seq_lens = (() if packed.padding.is_empty else packed.lengths) if ours else check_lengths(packed)
    ends = list(accumulate(_row_tokens(inputs).tolist()))
    by_row: list[list[int]] = [[] for _ in ends]
    for start, length in zip(accumulate(seq_lens, initial=0), seq_lens, strict=False):
        by_row[min(bisect_right(ends, start), len(ends) - 1)].append(length)
    return by_row
