"""Losses over a whole optimiser step, whatever is in which micro-batch; and micro-batches split where they are large.

A trainer takes the mean over a step's micro-batches, and over ranks, of each one's mean. What is wanted is the mean
over the step: with n units in a micro-batch, N in the step on all ranks, K micro-batches a rank and W ranks, each mean
is weighed by n K W / N, which is 1 where they are even. (Losses that are sums over a number that the step shares, such
as SFT's over ``num_items_in_batch``, are right already.)

A micro-batch over the budget is run in pieces, each with its own forward and backward; the last backward is left to the
trainer, so that gradients are exchanged as often as ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.data.bin_packing import split
from fastpack.data.token_budget import COST
from fastpack.errors import PackingError
from fastpack.trainers.kinds import GRPO_LOSSES, Inputs, Kind, Told, chosen_tokens, divides, lengths, piece, rows
from fastpack.utils.protocols import TrainerLike
from fastpack.utils.replacement import Forward, Replacement


@dataclass
class Weighing:
    """The weights of the current optimiser step's losses.

    Attributes:
        kind: the trainer's kind.
        split_at: the number of tokens above which a micro-batch is split; None if it never is.
        fits: whether each example was compared with the budget beforehand, which is impossible for a stream or a
            generation.
        told: the labels that a loss of labels is told of. Unless it is the step's, the loss is a mean over its
            micro-batch.
        num_items: the trainer's count of labels in the step, for a loss that gets its own labels' number.
        units: 0-d, the units of the whole step on all ranks; None if losses need no weight.
        chosen: the trained tokens of chosen completions, of the whole step on all ranks; None if nothing needs them.
        micro_batches: the number of the step's micro-batches on each rank; 1 if the trainer adds up their losses.
        pieces: the number of pieces that have run so far, for the report.
        wholes: the number of micro-batches that they were split from.
    """

    kind: Kind
    split_at: int | None
    fits: bool = False
    told: Told = "the step's labels"
    num_items: Tensor | int | None = None
    units: Tensor | None = None
    chosen: Tensor | None = None
    micro_batches: int = 1
    pieces: int = 0
    wholes: int = 0


def get_batch_samples(
    patched: Replacement[Weighing, None], *args: Any, **kwargs: Any
) -> tuple[list[Any], Tensor | int | None]:
    """``Trainer.get_batch_samples``: the micro-batches of an optimiser step; counts what they hold on all ranks."""
    trainer, weighing = patched.owner, patched.spec
    batches, num_items = patched.stock(*args, **kwargs)
    weighing.units = weighing.chosen = weighing.num_items = None
    if weighing.kind.of_labels and weighing.told != "the step's labels":
        weighing.num_items = num_items if weighing.told == "its own labels" else None
        num_items = None  # else the trainer takes the losses for shares of the step's, and adds up means
    summed = num_items is not None and weighing.kind.of_labels
    if batches and not weighing.kind.scaled and weighing.kind.planned and not summed:
        device = trainer.accelerator.device
        counts = [sum(weighing.kind.count(batch) for batch in batches)]
        if "sft" in getattr(trainer, "loss_types", ()):
            counts.append(sum(chosen_tokens(batch) for batch in batches))
        totals = torch.stack([torch.as_tensor(count, device=device) for count in counts])
        units, *chosen = trainer.accelerator.gather(totals[None]).sum(0)
        weighing.units, weighing.micro_batches = units, len(batches) if divides(trainer, num_items) else 1
        weighing.chosen = chosen[0] if chosen else None
    return batches, num_items


def compute_loss(
    patched: Replacement[Weighing, None],
    model: nn.Module,
    inputs: dict[str, Any],
    return_outputs: bool = False,
    num_items_in_batch: Tensor | int | None = None,
) -> Any:
    """``Trainer.compute_loss`` in training: weighed, and in pieces where the micro-batch is over the budget."""
    trainer, stock, weighing = patched.owner, patched.stock, patched.spec
    if return_outputs or not (trainer.model.training and torch.is_grad_enabled()):
        return stock(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
    parts = _pieces(trainer, weighing, inputs)
    weighing.wholes += 1
    weighing.pieces += len(parts)
    *earlier, last = parts
    before: Tensor | float = 0.0
    for part in earlier:
        with _not_the_last(trainer, model):
            loss = _weighed(trainer, stock, weighing, model, part, inputs, num_items_in_batch)
            before = before + loss.detach()
            _backward(trainer, loss, num_items_in_batch)
    return _weighed(trainer, stock, weighing, model, last, inputs, num_items_in_batch) + before


def _pieces(trainer: TrainerLike, weighing: Weighing, inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Parts of a micro-batch of at most the budget each, equally many on every rank."""
    if weighing.split_at is None:
        return [inputs]
    tokens = lengths(inputs, weighing.kind)
    if weighing.fits and len(tokens) == 1 and tokens[0] > weighing.split_at:  # no example has as many
        raise PackingError(
            f"the collator made one row of {tokens[0]} tokens, more than max_tokens={weighing.split_at}, and only rows "
            "can be split. Pass a collator that pads (a patched model runs without padding all the same), or leave "
            "same_steps out."
        )
    found = split(tokens, weighing.split_at, COST)
    if trainer.accelerator.num_processes > 1:
        count = torch.tensor([len(found)], device=trainer.accelerator.device)
        most = int(trainer.accelerator.gather(count).max())
        if most > len(found):
            found = split(tokens, weighing.split_at, COST, most)
    return [inputs] if len(found) == 1 else [piece(inputs, units, weighing.kind) for units in found]


def _weighed(
    trainer: TrainerLike,
    stock: Forward,
    weighing: Weighing,
    model: nn.Module,
    part: dict[str, Any],
    whole: dict[str, Any],
    num_items: Tensor | int | None,
) -> Tensor:
    weight, sft = _weights(trainer, weighing, part, whole)
    if weighing.num_items is not None and weighing.units is not None:
        num_items = _own_labels(trainer, weighing, part, weighing.num_items, weighing.units)
    with _sft_weighed(trainer, sft):
        loss: Tensor = stock(model, part, num_items_in_batch=num_items)
    return loss if weight is None else loss * weight


def _weights(
    trainer: TrainerLike, weighing: Weighing, part: Inputs, whole: Inputs
) -> tuple[Tensor | float | None, Tensor | None]:
    """Return a piece's weight on its loss, and the further weight on DPO's ``sft`` term, a mean over tokens."""
    kind = weighing.kind
    if weighing.units is not None:
        times = weighing.micro_batches * _ranks(trainer, weighing)
        weight = kind.count(part) * times / weighing.units.clamp(min=1)
        if weighing.chosen is None:
            return weight, None
        return weight, chosen_tokens(part) * times / weighing.chosen.clamp(min=1) / weight
    if part is whole or kind.planned:  # of planned ones only sums are without a weight
        return None, None
    count = GRPO_LOSSES[trainer.loss_type] if kind.scaled else rows
    if count is None:
        return None, None
    share = torch.as_tensor(count(part)) / torch.as_tensor(count(whole)).clamp(min=1)
    return share.to(trainer.accelerator.device), None


def _own_labels(
    trainer: TrainerLike, weighing: Weighing, part: Inputs, num_items: Tensor | int, units: Tensor
) -> Tensor:
    """Return the trainer's count of labels if this piece were the whole step of every rank, 0-d float."""
    counted = num_items / units.clamp(min=1)  # 1, or what the trainer counts of each such label
    labels = torch.as_tensor(weighing.kind.count(part)).to(counted.device)
    return labels.clamp(min=1) * _ranks(trainer, weighing) * counted


def _ranks(trainer: TrainerLike, weighing: Weighing) -> int:
    """Return the number of ranks, or 1 if the trainer has already multiplied the loss by it.

    A user's own ``compute_loss`` does so itself, if it divides by the labels of all ranks.
    """
    func, averages = trainer.compute_loss_func, getattr(trainer.args, "average_tokens_across_devices", True)
    if weighing.num_items is not None and func is not None and averages:
        return 1
    return trainer.accelerator.num_processes


@contextlib.contextmanager
def _sft_weighed(trainer: TrainerLike, factor: Tensor | None) -> Iterator[None]:
    """DPO's loss weights for one micro-batch, with the ``sft`` term's times ``factor``."""
    if factor is None:
        yield
        return
    before = trainer.loss_weights
    trainer.loss_weights = [
        weight * factor if name == "sft" else weight for name, weight in zip(trainer.loss_types, before, strict=True)
    ]
    try:
        yield
    finally:
        trainer.loss_weights = before


@contextlib.contextmanager
def _not_the_last(trainer: TrainerLike, model: nn.Module) -> Iterator[None]:
    """Gradients stay on this rank, and nobody takes this for the end of a step."""
    state = trainer.accelerator.gradient_state
    before = state.sync_gradients
    state._set_sync_gradients(False)
    try:
        with trainer.accelerator.no_sync(model):
            yield
    finally:
        state._set_sync_gradients(before)


def _backward(trainer: TrainerLike, loss: Tensor, num_items: Tensor | int | None) -> None:
    """Do what ``Trainer.training_step`` does with a loss that ``compute_loss`` returns."""
    if divides(trainer, num_items):
        loss = loss / trainer.current_gradient_accumulation_steps
    trainer.accelerator.backward(loss)


def gather(patched: Replacement[None, None], tensor: object) -> Any:
    """``Accelerator.gather`` of a tensor whose first size differs between ranks, which the stock one can't do."""
    accelerator, stock = patched.owner, patched.stock
    if accelerator.num_processes == 1 or not isinstance(tensor, Tensor) or tensor.ndim == 0:
        return stock(tensor)
    sizes = stock(torch.tensor([len(tensor)], device=tensor.device)).tolist()
    if len(set(sizes)) == 1:
        return stock(tensor)
    padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    found = stock(padded).split(max(sizes))
    return torch.cat([part[:size] for part, size in zip(found, sizes, strict=True)])
