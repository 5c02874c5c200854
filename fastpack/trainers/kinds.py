"""How each trainer's loss is a mean: over what units, how they are counted in a batch, and how a batch is cut.

A micro-batch's loss is a mean over its tokens, pairs or sequences, and trainers take the mean of these means over an
optimiser step. With uneven micro-batches that is not the mean over the step, so each loss is weighted by its share.

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

from fastpack.model.labels import hands_on, shifts_labels
from fastpack.model.unwrap import find_parts
from fastpack.packing.block_masks import real_slots
from fastpack.packing.seqlens import PackedSeqLens, check_lengths
from fastpack.utils.protocols import HeadLike, TrainerLike

Inputs = Mapping[str, Any]
Count = Callable[[Inputs], "Tensor | int"]


@dataclass(frozen=True)
class Kind:
    """One trainer's way.

    Attributes:
        unit: what the loss is a mean of, for people.
        count: how many of them a collated batch has, without waiting for the device.
        planned: batches are drawn from a data set whose lengths are known beforehand.
        rows_of_a_unit: rows that have to stay together: 2 where chosen and rejected are rows i and i + P.
        scaled: the loss comes divided by the number of micro-batches of a step (GRPO's); a whole micro-batch is left as
            it is then, and the pieces of one are weighed by their share of it.
        means: the model's own loss of labels is a mean over the micro-batch, whatever it is told of the whole step.
        refuses: why these settings of a trainer can't be kept exact, or None.
        whole: why one of its micro-batches can't be split, or None.
    """

    unit: str
    count: Count
    planned: bool = True
    rows_of_a_unit: int = 1
    scaled: bool = False
    means: bool = False
    refuses: Callable[[Any], str | None] = lambda trainer: None
    whole: Callable[[Any], str | None] = lambda trainer: None

    @property
    def of_labels(self) -> bool:
        """Whether the loss is a mean over ``labels``, so that trainers pass ``num_items_in_batch``."""
        return self.unit in ("trained tokens", "labels")


def pairs(inputs: Inputs) -> int:
    """P."""
    return rows(inputs) // 2


def rows(inputs: Inputs) -> int:
    """B."""
    name = "input_ids" if "input_ids" in inputs else "completion_ids"
    return int(inputs[name].shape[0])


def trained_tokens(inputs: Inputs) -> Tensor:
    """Labels that something predicts: all but the first of each row, and those that are ignored. 0-d int64."""
    labels = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"]
    if "shift_labels" not in inputs and labels.ndim > 1:  # one for each row where rows are classified
        labels = labels[..., 1:]
    return labels.ne(-100).sum()


def labels(inputs: Inputs) -> Tensor:
    """Labels of a classifier, of rows or of tokens, but for those that are ignored. 0-d int64."""
    return inputs["labels"].ne(-100).sum()


def labels_of_tokens(inputs: Inputs) -> Tensor:
    """Labels in the places of real tokens, but for those that are ignored. 0-d int64."""
    counted = inputs["labels"].ne(-100)
    return (counted & _real(inputs) if "attention_mask" in inputs else counted).sum()


def chosen_tokens(inputs: Inputs) -> Tensor:
    """Tokens of the chosen completions that something predicts. 0-d int64."""
    mask: Tensor = inputs["completion_mask"]
    return mask[: mask.shape[0] // 2, 1:].sum()


def completion_tokens(inputs: Inputs) -> Tensor:
    """0-d; TRL's own mask, with tools' answers left out."""
    mask: Tensor = inputs["completion_mask"]
    return (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).sum()


def _no_dpo(trainer: TrainerLike) -> str | None:
    for name in trainer.loss_types:
        if name.startswith("aot"):
            return f"loss_type {name!r} sorts the pairs of a micro-batch, and changes with them: leave max_tokens out"
    return None


def _whole_sft(trainer: TrainerLike) -> str | None:
    if getattr(trainer, "padding_free", False) and getattr(trainer.args, "packing", False):
        return "packing makes one row of a batch; leave it off, or leave same_steps out: full batches take packed rows"
    if getattr(trainer, "padding_free", False):
        return "padding_free makes one row of a batch; leave it off, a patched model runs without padding all the same"
    return _whole_experts(trainer)


def _whole_trainer(trainer: TrainerLike) -> str | None:
    if getattr(trainer.model.config, "output_router_logits", False):
        return f"{_EXPERTS}: set output_router_logits=False in the model's config, or leave same_steps out"
    return None


def _whole_experts(trainer: TrainerLike, option: str = "same_steps") -> str | None:
    """TRL's trainers; ``option`` is the one that splits."""
    if getattr(trainer, "aux_loss_enabled", False):
        return f"{_EXPERTS}: set router_aux_loss_coef=0.0, or leave {option} out"
    return None


_EXPERTS = "the auxiliary loss of experts would be added once for each piece"


def _whole_kto(trainer: TrainerLike) -> str | None:
    if getattr(trainer, "calculate_KL", False):
        kind = trainer.loss_type
        return f"loss_type {kind!r} compares with a KL that is a mean over a micro-batch: leave same_steps out"
    return _whole_experts(trainer)


def _whole_generated(trainer: TrainerLike) -> str | None:
    return _whole_experts(trainer, "max_tokens")


def _no_grpo(trainer: TrainerLike) -> str | None:
    if getattr(trainer, "top_entropy_quantile", 1.0) < 1.0:
        return "top_entropy_quantile takes its threshold from the whole batch, which a part of it doesn't know"
    if getattr(trainer, "_entropy_bonus_enabled", False):
        return "the entropy bonus is a mean over other tokens than the loss"
    if trainer.loss_type not in GRPO_LOSSES:
        return f"loss_type {trainer.loss_type!r} is not known to fastpack: what it is a mean of"
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
"""What each loss of GRPO is a mean of within a micro-batch; None where it is a sum over a number of the whole step."""

KINDS: dict[str, Kind] = {
    "DPOTrainer": Kind("pairs", pairs, rows_of_a_unit=2, refuses=_no_dpo, whole=_whole_experts),
    "RewardTrainer": Kind("pairs", pairs, rows_of_a_unit=2),
    "KTOTrainer": Kind("sequences", rows, whole=_whole_kto),
    "RLOOTrainer": Kind("sequences", rows, planned=False, whole=_whole_generated),
    "GRPOTrainer": Kind("sequences", rows, planned=False, scaled=True, refuses=_no_grpo, whole=_whole_generated),
    "SFTTrainer": Kind("trained tokens", trained_tokens, whole=_whole_sft),
    "Trainer": Kind("trained tokens", trained_tokens, whole=_whole_trainer),
}
"""By the name of the class, or of the nearest one that it inherits from."""
CLASSIFYING = Kind("labels", labels, means=True)
"""transformers' ``Trainer`` of a classifier: such models' losses take no ``num_items_in_batch``."""


Told = Literal["the step's labels", "its own labels", "nothing"]
"""The meaning of ``num_items_in_batch`` for a loss of labels."""


def told(trainer: TrainerLike, kind: Kind) -> Told:
    """Decide which labels the loss of a micro-batch is told of.

    A stock loss divides by the labels of the step, or is a mean over the micro-batch. Of a user's own neither is known,
    unless ``loss_is_scaled_for_ga`` says it: told of its own labels alone, it is a mean over these either way.
    """
    compute_loss = trainer.__dict__.get("compute_loss", type(trainer).compute_loss)
    library = getattr(compute_loss, "__module__", "").split(".")[0]
    if trainer.compute_loss_func is None and library in ("transformers", "trl", "fastpack"):
        return "nothing" if kind.means else "the step's labels"
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


def kind_of(trainer: TrainerLike) -> Kind | None:
    """Return the kind of a trainer, or None if it is unknown."""
    for base in type(trainer).__mro__:
        library, name = base.__module__.split(".")[0], base.__name__
        if library == "trl" and name.endswith("Trainer") and name.lstrip("_") != "BaseTrainer":
            return KINDS.get(name)  # what another of TRL's trainers computes from its batches is not known
        if library == "transformers" and name == "Trainer":
            return _of_head(find_parts(trainer.model).head)
    return None


def _of_head(head: HeadLike) -> Kind:
    """Return the kind of transformers' ``Trainer`` with this head."""
    if "Classification" in type(head).__name__:
        return CLASSIFYING
    if head is None or hands_on(head):
        return KINDS["Trainer"]
    return replace(KINDS["Trainer"], means=True, count=trained_tokens if shifts_labels(head) else labels_of_tokens)


def lengths(inputs: Inputs, kind: Kind) -> list[int]:
    """Real tokens of each unit of a collated batch. Waits for the device, once."""
    return _row_tokens(inputs).view(kind.rows_of_a_unit, -1).sum(0).tolist()


def _real(inputs: Inputs) -> Tensor:
    """Bool ``[B, S]``: which slots hold real tokens, by the mask."""
    mask: Tensor = inputs["attention_mask"]
    return real_slots(mask, (rows(inputs), mask.shape[-1]))


def _row_tokens(inputs: Inputs) -> Tensor:
    """Real tokens of each row, int64 ``[B]``."""
    if "attention_mask" in inputs:
        return _real(inputs).sum(-1)
    if "prompt_mask" in inputs:
        prompts: Tensor = inputs["prompt_mask"].sum(-1)
        return prompts + inputs["completion_mask"].sum(-1)
    return torch.full((rows(inputs),), inputs["input_ids"].shape[-1])


def piece(inputs: Inputs, units: list[int], kind: Kind) -> dict[str, Any]:
    """Return a batch of some units only: their rows of every tensor and list that has one for each row or each unit.

    Its ``packed_seq_lens`` are the lengths of its own sequences; the model reads from the mask where they are.
    """
    total = rows(inputs)
    count = total // kind.rows_of_a_unit
    each = [unit + count * part for part in range(kind.rows_of_a_unit) for unit in units]

    def taken(value: object) -> Any:
        if isinstance(value, Tensor):
            if value.ndim == 0 or len(value) not in (total, count):
                return value
            chosen = each if len(value) == total else units
            return value.index_select(0, torch.tensor(chosen, device=value.device))
        if isinstance(value, list) and len(value) in (total, count):
            return [value[i] for i in (each if len(value) == total else units)]
        return value

    part = {name: taken(value) for name, value in inputs.items() if name != "packed_seq_lens"}
    if inputs.get("packed_seq_lens") is not None:
        of_rows = _sequences(inputs)
        part["packed_seq_lens"] = [length for row in each for length in of_rows[row]] or None
    return part


def _sequences(inputs: Inputs) -> list[list[int]]:
    """Lengths of the sequences in each row, from ``packed_seq_lens``. Waits for the device, once."""
    packed = inputs["packed_seq_lens"]
    ours = isinstance(packed, PackedSeqLens)
    given = (() if packed.padding.is_empty else packed.lengths) if ours else check_lengths(packed)
    ends = list(accumulate(_row_tokens(inputs).tolist()))
    found: list[list[int]] = [[] for _ in ends]
    for start, length in zip(accumulate(given, initial=0), given, strict=False):
        found[min(bisect_right(ends, start), len(ends) - 1)].append(length)
    return found
