"""Compare an image-text model's logits and gradients on batches of rows with images with those of each row alone.

The oracle is the stock model on each row alone, in float32 and in training mode, by the rule of
:mod:`fastpack.exactness.rule`. Gradients are those of all weights: of the text model, the projector and the tower. The
text model is made to choose the experts that it chose for each row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.exactness.expert_choices import Choices, choosers_of, recorded, replayed
from fastpack.exactness.image_settings import PREFIX_TYPES
from fastpack.exactness.image_text import TOKEN_TYPES, Row, batch_of, flat_of, layout_of, samples
from fastpack.exactness.oracle import LEAKS, checkpointed, finer_copy, run_batches
from fastpack.exactness.rule import CONTROL, Error, Result, bound_of, compare
from fastpack.exactness.verification import Check, Verification
from fastpack.utils.modules import keeping_positions

Make = Callable[[Any, Sequence[Row]], Mapping[str, Any]]
IMAGE_KINDS: Mapping[str, Make] = {
    "images, padded right": lambda model, rows: batch_of(model, rows, "right"),
    "images, padded left": lambda model, rows: batch_of(model, rows, "left"),
    "images, flattened": flat_of,
}
"""The kinds of batches that rows with images come in."""


def without_boundaries(model: Any, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the control: the flattened rows as one sequence, in which each token sees all earlier tokens."""
    batch = flat_of(model, rows)
    tokens = batch["input_ids"].shape[1]
    text, *axes = _axes(batch["position_ids"])
    places = torch.arange(tokens).view_as(text)
    has_prefix = model.config.model_type in PREFIX_TYPES
    if has_prefix or layout_of(model).single:  # a sequence has one prefix, or one image
        for name in TOKEN_TYPES:
            if name in batch:
                batch[name][:, batch["packed_seq_lens"][0] :] = int(has_prefix)
    return {**batch, "position_ids": _joined([places, *axes]), "packed_seq_lens": [tokens]}


def with_text_positions(model: Any, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the control of several axes: the flattened rows, whose every axis counts tokens as in text."""
    batch = flat_of(model, rows)
    text, *axes = _axes(batch["position_ids"])
    return {**batch, "position_ids": _joined([text] * (1 + len(axes)))}


@dataclass(frozen=True, eq=False)
class ImageOracle:
    """The results of each row alone, and the bound of a batch's error.

    Attributes:
        rows: The arguments of the model for each row (:func:`fastpack.exactness.image_text.samples`).
        alone: The results of each row alone.
        bound: The largest error allowed.
        routers: The names of the classes that choose experts.
        choices: The experts chosen for each row alone, which batches are made to choose.
        checkpointing: The kinds of checkpointing with which the stock model keeps its gradients. (Reentrant ones lose
            those of some towers.)
    """

    rows: Sequence[Row]
    alone: Result
    bound: float
    routers: Sequence[str] = ()
    choices: Choices = ()
    checkpointing: Collection[str] = ()

    @classmethod
    def of(
        cls, build: Callable[[torch.dtype], nn.Module], routers: Sequence[str] = (), *, least: float = 0.0
    ) -> ImageOracle:
        """Run each row alone in float32, and set the bound by a copy in float64 where the model can run in it.

        Args:
            build: Makes the stock model in a dtype, in training mode, with the same weights each time but for rounding.
            routers: The names of the classes that choose experts.
            least: The least bound, if not the rule's.

        Errors from building or running the stock model in float32 are raised unchanged.
        """
        model: Any = _settled(build(torch.float32))
        rows = samples(model)
        with recorded(choosers_of(model, routers)) as chosen:
            alone = _run_alone(model, rows)
        try:
            wide = _settled(finer_copy(build, model, torch.float64))
            with replayed(choosers_of(wide, routers), chosen()):
                own = compare(alone, _run_alone(wide, [_wide(row) for row in rows])).of_tensors
        except (RuntimeError, TypeError):  # some models raise for a dtype that their own forward does not expect
            own = 0.0
        oracle = cls(rows, alone, max(bound_of(own, torch.float32), least), routers, chosen())
        return replace(oracle, checkpointing=[kind for kind in checkpointed(model) if oracle._is_kept(model)])

    def prove(self, model: Any) -> Verification:
        """Run a patched model in training mode on every kind of batch, with each kind of checkpointing, and controls.

        Errors of running the model are raised unchanged, those of a model that refuses images among them.
        """
        errors = {kind: self.error(model, make).of_tensors for kind, make in IMAGE_KINDS.items()}
        padded = IMAGE_KINDS["images, padded right"]
        kinds = (kind for kind in checkpointed(model) if kind in self.checkpointing)
        errors |= {f"images, {kind}": self.error(model, padded).of_tensors for kind in kinds}
        checks = [Check(kind, error, self.bound) for kind, error in errors.items()]
        controls = {"taken for one sequence": without_boundaries}
        if flat_of(model, self.rows)["position_ids"].ndim == 3:
            controls["positions of one axis"] = with_text_positions
        least = max(LEAKS, CONTROL * self.bound)
        checks += [
            Check(f"control, {what}: logits", self.error(model, make).logits, least, at_least=True)
            for what, make in controls.items()
        ]
        return Verification.of(model, torch.float32, checks)

    def _is_kept(self, stock: nn.Module) -> bool:
        """Return whether a stock model gives the same results in its present state, with checkpointing."""
        return compare(_run_alone(stock, self.rows), self.alone).of_tensors <= self.bound

    def error(self, model: Any, make: Make) -> Error:
        """Return the errors of a batch, made from the rows, against the rows alone."""
        with keeping_positions(model), replayed(choosers_of(model, self.routers), self.choices):
            batch = make(_settled(model), self.rows)
            result = run_batches(model, [(batch, [_ids(row) for row in self.rows])])
        return compare(result, self.alone)


def _settled(model: Any) -> Any:
    """Return the model, whose batch norms use their own statistics: in training those of a batch mix all its images."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model


def _run_alone(model: nn.Module, rows: Sequence[Row]) -> Result:
    with keeping_positions(model):
        return run_batches(model, [(row, [_ids(row)]) for row in rows])


def _ids(row: Row) -> Tensor:
    return row["input_ids"][0]


def _wide(row: Row) -> Row:
    """Return a row with floating-point inputs in float64."""
    return {name: value.double() if value.is_floating_point() else value for name, value in row.items()}


def _axes(positions: Tensor) -> list[Tensor]:
    """Return the axes of positions ``[1, T]`` or ``[A, 1, T]``, each ``[1, T]``."""
    return [positions] if positions.ndim == 2 else list(positions)


def _joined(axes: Sequence[Tensor]) -> Tensor:
    """Return axes ``[1, T]`` as one tensor of positions, the inverse of :func:`_axes`."""
    return axes[0] if len(axes) == 1 else torch.stack(list(axes))
