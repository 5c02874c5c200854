"""``precompute``: the reference of a trainer of TRL, asked once and padding-free, then not needed any more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastpack.errors import PatchError, ReferenceCacheError
from fastpack.reference.cache import ReferenceCache
from fastpack.reference.columns import with_columns
from fastpack.reference.compute import Score, is_peft, scoring
from fastpack.reference.examples import Examples
from fastpack.reference.identity import Identity, identify
from fastpack.reference.lookup import Compute, Work, look_up

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class _Source:
    """Where a trainer's data sets get their columns from.

    Attributes:
        trainer: whose reference is asked, while it is there.
        cache: of that reference.
        adapter: the one of the policy that is on in the reference.
        adapted: whether the policy is PEFT's.
    """

    trainer: Any
    cache: ReferenceCache
    work: Work
    adapter: str | None
    adapted: bool
    ld_alpha: float | None

    @classmethod
    def of(cls, trainer: Any, folder: Path, work: Work) -> _Source:
        adapted = is_peft(trainer.model)
        adapter = "ref" if trainer.ref_model is None and adapted and "ref" in trainer.model.peft_config else None
        ld_alpha = getattr(trainer, "ld_alpha", None)
        identity = _identity(trainer, adapter, ld_alpha)
        return cls(trainer, ReferenceCache(folder, identity), work, adapter, adapted, ld_alpha)

    def filled(self, datasets: Mapping[str, Any], *, again: bool = False) -> dict[str, Any]:
        """These data sets with their columns, in one go; ``again`` where the model may have been trained since."""
        wanted = [
            Examples(data, self.trainer.data_collator, self.ld_alpha is not None, f"the trainer's data ({name})")
            for name, data in datasets.items()
        ]
        gone = self.trainer.ref_model is None and not self.adapted
        found = look_up(wanted, self.cache, self.work, None if gone else partial(self._scoring, again))
        return {
            name: with_columns(examples, columns)
            for name, examples, columns in zip(datasets, wanted, found, strict=True)
        }

    @contextmanager
    def _scoring(self, again: bool) -> Iterator[Score]:
        if again:
            # PEFT trains some weights of the base where they are: biases of LoraConfig(bias="all")
            now = _identity(self.trainer, self.adapter, self.ld_alpha)
            differences = now.differences(self.cache.identity.parts)
            if differences:
                raise ReferenceCacheError(
                    f"the reference is not what it was when {self.cache.folder} was filled: {'; '.join(differences)}. "
                    "Have precompute look up this data set before training, as the trainer's eval_dataset. Nothing "
                    "was changed."
                )
        with (
            self.trainer.accelerator.autocast(),
            scoring(_reference(self.trainer), adapter=self.adapter, ld_alpha=self.ld_alpha) as score,
        ):
            yield score


def _reference(trainer: Any) -> Any:
    return trainer.model if trainer.ref_model is None else trainer.ref_model


def _identity(trainer: Any, adapter: str | None, ld_alpha: float | None) -> Identity:
    with trainer.accelerator.autocast():
        return identify(_reference(trainer), adapter=adapter, ld_alpha=ld_alpha)


def _serve(source: _Source, dataset: Any, name: str, batch_size: int) -> Any:
    """In the place of TRL's ``_precompute_ref_logps``."""
    return source.filled({name: dataset}, again=True)[name]


def _evaluate(source: _Source, stock: Any, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> Any:
    """In the place of ``evaluate`` where the reference was let go: TRL's own refuses other data once a step was taken.

    Prepares them as that does, looks them up, and hands them over as the trainer's own are.
    """
    if eval_dataset is None or isinstance(eval_dataset, str):
        return stock(eval_dataset, *args, **kwargs)
    trainer = source.trainer
    splits = eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}
    prepared = {
        name: trainer._prepare_dataset(data, trainer.processing_class, trainer.args, name)
        for name, data in splits.items()
    }
    filled = source.filled(prepared)
    before = trainer.eval_dataset
    trainer.eval_dataset = filled if isinstance(eval_dataset, dict) else filled["eval"]
    try:
        return stock(None, *args, **kwargs)
    finally:
        trainer.eval_dataset = before


def _check(trainer: Any) -> None:
    name = type(trainer).__name__
    needed = ("model", "ref_model", "precompute_ref_logps", "data_collator", "train_dataset", "accelerator")
    missing = [attribute for attribute in needed if not hasattr(trainer, attribute)]
    if missing:
        raise PatchError(
            f"a {name} has no {', '.join(missing)}: precompute takes a DPOTrainer or KTOTrainer of TRL, 1.15 or newer."
        )
    if getattr(trainer, "_is_vision_dataset", False):
        raise PatchError("the data are images: reference log-probabilities are computed of text alone.")
    if getattr(trainer.args, "sync_ref_model", False):
        raise PatchError(
            "sync_ref_model=True changes the reference while it trains: what is computed now would be stale. Build "
            "the trainer without it."
        )
    if getattr(trainer, "is_deepspeed_enabled", False) or getattr(trainer, "is_fsdp_enabled", False):
        raise PatchError(
            "the trainer runs on DeepSpeed or FSDP, where models are not whole, or not on their device yet. Call "
            "with_reference_log_probs on its data sets in a run without, and give them to the trainer."
        )
    if trainer.ref_model is None and not is_peft(trainer.model) and not trainer.precompute_ref_logps:
        raise PatchError(f"this {name} has neither a ref_model nor adapters to leave out: there is no reference.")


def _set_free(trainer: Any) -> None:
    """Let go of the reference model; accelerate holds it too."""
    held = getattr(trainer.accelerator, "_models", None)
    if isinstance(held, list):
        held[:] = [model for model in held if model is not trainer.ref_model]
    trainer.ref_model = None


def precompute(
    trainer: T,
    *,
    folder: str | Path,
    compute: Compute = "new",
    max_tokens: int = 16384,
    save_every: int = 16,
    progress: bool = True,
) -> T:
    """Give a ``DPOTrainer`` or ``KTOTrainer`` that is built its reference's log-probabilities, and let the model go.

    What TRL's ``precompute_ref_log_probs=True`` does while the trainer is built, but without padding, and from a cache
    that knows which model it is of: build the trainer without that flag. Its data sets get the columns, and its loss
    reads them. A reference model of the trainer's own (``trainer.ref_model``) is set free; the base of a PEFT policy
    (or the copy of its adapter that TRL made, ``ref``) stays, as does a reference model beside a PEFT policy.

    What is scored is what ``trainer.data_collator`` sends, truncated as it truncates, under the trainer's autocast.
    A data set that is handed to ``trainer.evaluate`` later, before or after training, is looked up too (of KTO with
    the mismatched completions that it makes of that data set). What is missing then is an error where the model was
    let go, and computing it is one where training has changed the reference (biases, by PEFT's ``bias="all"``).

    Args:
        trainer: as TRL built it, patched or not, before or after training.

    For the others see :func:`fastpack.reference.with_reference_log_probs`.

    Returns:
        ``trainer`` itself.

    Raises:
        PatchError: no such trainer, or one whose reference changes while it trains (``sync_ref_model``), or whose data
            are images, or without a reference. As for all errors, the trainer is as it was.

    and what :func:`with_reference_log_probs` raises.
    """
    held: Any = trainer
    work = Work(compute, max_tokens, save_every, progress)
    _check(held)
    source = _Source.of(held, Path(folder), work)
    evaluated = held.eval_dataset
    splits = evaluated if isinstance(evaluated, dict) else {} if evaluated is None else {None: evaluated}
    filled = source.filled(
        {"train": held.train_dataset, **{f"eval {name or ''}".strip(): splits[name] for name in splits}}
    )
    held.train_dataset = filled.pop("train")
    if evaluated is not None:
        made = dict(zip(splits, filled.values(), strict=True))
        held.eval_dataset = made if isinstance(evaluated, dict) else made[None]
    held.precompute_ref_logps = True
    held._precompute_ref_logps = partial(_serve, source)  # what evaluate() asks for data sets of its own
    if not source.adapted:
        if held.ref_model is not None:
            _set_free(held)
        held.evaluate = partial(_evaluate, source, held.evaluate)
    return trainer
