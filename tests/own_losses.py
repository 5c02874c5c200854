"""Users' own losses for trainers: means over a micro-batch, shares of the step's labels, calls of stock's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import functional


def cross_entropy(logits: Tensor, labels: Tensor, **how: Any) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **how)


def a_mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return cross_entropy(outputs.logits, labels)


def a_share(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


def mean_of(self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
    outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    loss = cross_entropy(outputs.logits, inputs["labels"])
    return (loss, outputs) if return_outputs else loss


def mean_of_any(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
    return mean_of(self, model, inputs, return_outputs)


def share_of(self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
    outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    return a_share(outputs, inputs["labels"], num_items_in_batch)


def handed_on(self: Any, *args: Any, **kwargs: Any) -> Any:
    return super(type(self), self).compute_loss(*args, **kwargs)


def mixed(self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
    loss = share_of(self, model, inputs, num_items_in_batch=num_items_in_batch)
    return 0.7 * loss + 0.3 * mean_of(self, model, inputs)


OWN: dict[str, tuple[dict[str, Any], bool]] = {
    "compute_loss": ({"compute_loss": mean_of}, True),
    "compute_loss of any keywords": ({"compute_loss": mean_of_any}, True),
    "compute_loss, said to be a mean": ({"compute_loss": mean_of, "loss_is_scaled_for_ga": False}, True),
    "compute_loss, a share": ({"compute_loss": share_of}, False),
    "compute_loss, said to be a share": ({"compute_loss": share_of, "loss_is_scaled_for_ga": True}, False),
    "compute_loss, handed on": ({"compute_loss": handed_on}, False),
    "compute_loss, a mean and a share": ({"compute_loss": mixed}, False),
    "compute_loss_func": ({"compute_loss_func": a_mean}, True),
    "compute_loss_func, a share": ({"compute_loss_func": a_share}, False),
}
"""The attributes that are set on a subclass, and whether its loss is a mean over a micro-batch."""


def with_own_loss(build: Any, what: str, folder: Path, **further: Any) -> Any:
    trainer = build(folder, **further)
    own = dict(OWN[what][0])
    if "compute_loss_func" in own:
        trainer.compute_loss_func = own.pop("compute_loss_func")
    trainer.__class__ = type(f"Own{type(trainer).__name__}", (type(trainer),), {**own, "__module__": __name__})
    return trainer
