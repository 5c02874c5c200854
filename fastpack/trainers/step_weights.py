"""Weights that make a step's loss the mean over the whole step, and the splitting of large micro-batches.

A trainer averages the means of micro-batches, over a step and over ranks. If micro-batches are uneven, the result is
not the mean over the step. So each micro-batch's mean is multiplied by n K W / N: n units in the micro-batch, N units
in the step on all ranks, K micro-batches a rank, W ranks. The factor is 1 if all micro-batches are even. A loss that is
a sum divided by a number of the whole step, such as SFT's with ``num_items_in_batch``, is already right and gets no
weight.

A micro-batch over the budget runs in pieces, each with its own forward and backward. The trainer itself runs the last
backward, so gradients are exchanged as often as without a split.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.errors import PackingError
from fastpack.trainers.loss_units import (
    Inputs,
    LabelCount,
    LossUnit,
    chosen_tokens,
    divides,
    lengths,
    piece,
)
from fastpack.trainers.prompt_groups import split_units
from fastpack.utils.protocols import TrainerLike
from fastpack.utils.replacement import Forward, Replacement


@dataclass
class StepWeights:
    """The weights of the current optimiser step's losses.

    Attributes:
        loss_unit: the unit that the trainer's loss is a mean over.
        split_at: the number of tokens above which a micro-batch is split; None to split none.
        examples_checked: whether each example's length was compared with the budget beforehand. Streams and generated
            batches can't be checked beforehand.
        label_count: the label count that the loss gets as ``num_items_in_batch``, if it is a mean over labels. Unless
            this is the step's label count, the loss is treated as a mean over its micro-batch.
        num_items: the trainer's label count of the step, if the loss gets the label count of its own micro-batch; else
            None.
        step_units: 0-d, the units of the whole step on all ranks; None if losses need no weight.
        step_chosen_tokens: 0-d, the trained tokens of chosen completions of the whole step on all ranks; None unless
            the loss has an ``sft`` term.
        micro_batches: the number of the step's micro-batches on each rank; 1 if the trainer adds up their losses.
        pieces: the number of pieces that have run so far, for the report.
        batches: the number of micro-batches that these pieces make up.
    """

    loss_unit: LossUnit
    split_at: int | None
    examples_checked: bool = False
    label_count: LabelCount = "the step's labels"
    num_items: Tensor | int | None = None
    step_units: Tensor | None = None
    step_chosen_tokens: Tensor | None = None
    micro_batches: int = 1
    pieces: int = 0
    batches: int = 0


def get_batch_samples(
    patched: Replacement[StepWeights, None], *args: Any, **kwargs: Any
) -> tuple[list[Any], Tensor | int | None]:
    """Run ``Trainer.get_batch_samples``, and count the units of the step's micro-batches on all ranks."""
    trainer, weights = patched.owner, patched.spec
    batches, num_items = patched.stock(*args, **kwargs)
    weights.step_units = weights.step_chosen_tokens = weights.num_items = None
    if weights.loss_unit.counts_labels and weights.label_count != "the step's labels":
        weights.num_items = num_items if weights.label_count == "its own labels" else None
        num_items = None  # given a count, the trainer would add up the means, as if they were shares of the step's loss
    summed = num_items is not None and weights.loss_unit.counts_labels
    if batches and not weights.loss_unit.pre_divided and weights.loss_unit.planned and not summed:
        device = trainer.accelerator.device
        counts = [sum(weights.loss_unit.count(batch) for batch in batches)]
        if "sft" in getattr(trainer, "loss_types", ()):
            counts.append(sum(chosen_tokens(batch) for batch in batches))
        totals = torch.stack([torch.as_tensor(count, device=device) for count in counts])
        units, *chosen = trainer.accelerator.gather(totals[None]).sum(0)
        weights.step_units, weights.micro_batches = units, len(batches) if divides(trainer, num_items) else 1
        weights.step_chosen_tokens = chosen[0] if chosen else None
    return batches, num_items


def compute_loss(
    patched: Replacement[StepWeights, None],
    model: nn.Module,
    inputs: dict[str, Any],
    return_outputs: bool = False,
    num_items_in_batch: Tensor | int | None = None,
) -> Any:
    """Run ``Trainer.compute_loss``; in training, weight the loss and split a batch that is over the budget."""
    trainer, stock, weights = patched.owner, patched.stock, patched.spec
    if return_outputs or not (trainer.model.training and torch.is_grad_enabled()):
        return stock(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
    parts = _pieces(trainer, weights, inputs)
    weights.batches += 1
    weights.pieces += len(parts)
    *first, last = parts
    total: Tensor | float = 0.0
    for part in first:
        with _inside_step(trainer, model):
            loss = _weighted_loss(trainer, stock, weights, model, part, inputs, num_items_in_batch)
            total = total + loss.detach()
            _backward(trainer, loss, num_items_in_batch)
    return _weighted_loss(trainer, stock, weights, model, last, inputs, num_items_in_batch) + total


def _pieces(trainer: TrainerLike, weights: StepWeights, inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pieces of a micro-batch, each within the budget; their number is the same on every rank."""
    if weights.split_at is None:
        return [inputs]
    tokens = lengths(inputs, weights.loss_unit)
    if weights.examples_checked and len(tokens) == 1 and tokens[0] > weights.split_at:  # longer than any example
        raise PackingError(
            f"the collator made one row of {tokens[0]} tokens, more than max_tokens={weights.split_at}, and a batch "
            "can only be split between rows. Pass a collator that pads (a patched model runs without padding anyway), "
            "or leave same_steps out."
        )
    groups = split_units(trainer.model, inputs, tokens, weights.split_at)
    if trainer.accelerator.num_processes > 1:
        count = torch.tensor([len(groups)], device=trainer.accelerator.device)
        most = int(trainer.accelerator.gather(count).max())
        if most > len(groups):
            groups = split_units(trainer.model, inputs, tokens, weights.split_at, most)
    return [inputs] if len(groups) == 1 else [piece(inputs, units, weights.loss_unit) for units in groups]


def _weighted_loss(
    trainer: TrainerLike,
    stock: Forward,
    weights: StepWeights,
    model: nn.Module,
    part: dict[str, Any],
    whole: dict[str, Any],
    num_items: Tensor | int | None,
) -> Tensor:
    weight, sft = _weights(trainer, weights, part, whole)
    if weights.num_items is not None and weights.step_units is not None:
        num_items = _own_labels(trainer, weights, part, weights.num_items, weights.step_units)
    with _sft_weight_scaled(trainer, sft):
        loss: Tensor = stock(model, part, num_items_in_batch=num_items)
    return loss if weight is None else loss * weight


def _weights(
    trainer: TrainerLike, weights: StepWeights, part: Inputs, whole: Inputs
) -> tuple[Tensor | float | None, Tensor | None]:
    """Return the factor on a piece's loss, and another factor on DPO's ``sft`` term, which is a mean over tokens."""
    loss_unit = weights.loss_unit
    if weights.step_units is not None:
        parts_of_step = weights.micro_batches * _ranks(trainer, weights)
        weight = loss_unit.count(part) * parts_of_step / weights.step_units.clamp(min=1)
        if weights.step_chosen_tokens is None:
            return weight, None
        return weight, chosen_tokens(part) * parts_of_step / weights.step_chosen_tokens.clamp(min=1) / weight
    if part is whole or loss_unit.planned:  # without step units, the loss of a planned batch is a sum
        return None, None
    count = loss_unit.piece_count(trainer)
    if count is None:
        return None, None
    share = torch.as_tensor(count(part)) / torch.as_tensor(count(whole)).clamp(min=1)
    return share.to(trainer.accelerator.device), None


def _own_labels(
    trainer: TrainerLike, weights: StepWeights, part: Inputs, num_items: Tensor | int, units: Tensor
) -> Tensor:
    """Return the label count that the trainer would compute if each rank's step had only this piece, 0-d float."""
    ratio = num_items / units.clamp(min=1)  # the trainer's count over ours: 1 if both count the same labels
    labels = torch.as_tensor(weights.loss_unit.count(part)).to(ratio.device)
    return labels.clamp(min=1) * _ranks(trainer, weights) * ratio


def _ranks(trainer: TrainerLike, weights: StepWeights) -> int:
    """Return the number of ranks, or 1 if the trainer itself multiplies the loss by it.

    The trainer multiplies if it has a ``compute_loss_func``. A custom ``compute_loss`` that divides by the labels of
    all ranks has to multiply by the number of ranks itself.
    """
    func, averages = trainer.compute_loss_func, getattr(trainer.args, "average_tokens_across_devices", True)
    if weights.num_items is not None and func is not None and averages:
        return 1
    return trainer.accelerator.num_processes


@contextlib.contextmanager
def _sft_weight_scaled(trainer: TrainerLike, factor: Tensor | None) -> Iterator[None]:
    """Scale the weight of DPO's ``sft`` term by ``factor`` for one micro-batch; None doesn't change it."""
    if factor is None:
        yield
        return
    saved = trainer.loss_weights
    trainer.loss_weights = [
        weight * factor if name == "sft" else weight for name, weight in zip(trainer.loss_types, saved, strict=True)
    ]
    try:
        yield
    finally:
        trainer.loss_weights = saved


@contextlib.contextmanager
def _inside_step(trainer: TrainerLike, model: nn.Module) -> Iterator[None]:
    """Keep gradients on this rank, and mark the backward as one that doesn't end a step."""
    state = trainer.accelerator.gradient_state
    saved = state.sync_gradients
    state._set_sync_gradients(False)
    try:
        with trainer.accelerator.no_sync(model):
            yield
    finally:
        state._set_sync_gradients(saved)


def _backward(trainer: TrainerLike, loss: Tensor, num_items: Tensor | int | None) -> None:
    """Run the backward as ``Trainer.training_step`` does with the loss of ``compute_loss``."""
    if divides(trainer, num_items):
        loss = loss / trainer.current_gradient_accumulation_steps
    trainer.accelerator.backward(loss)


def gather(patched: Replacement[None, None], tensor: object) -> Any:
    """Run ``Accelerator.gather``, also for a tensor whose first dimension differs between ranks, unlike stock."""
    accelerator, stock = patched.owner, patched.stock
    if accelerator.num_processes == 1 or not isinstance(tensor, Tensor) or tensor.ndim == 0:
        return stock(tensor)
    sizes = stock(torch.tensor([len(tensor)], device=tensor.device)).tolist()
    if len(set(sizes)) == 1:
        return stock(tensor)
    padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    parts = stock(padded).split(max(sizes))
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
