"""Add columns of reference log-probabilities to data sets, including the data sets of TRL's trainers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import nn

from fastpack.data.token_budget import plan_batches
from fastpack.errors import MissingReferenceError, PatchError, ReferenceCacheError
from fastpack.trainers.reference.cache import ReferenceCache, identify, is_peft
from fastpack.trainers.reference.compute import Collator, Examples, Score, scoring
from fastpack.utils.protocols import TrainerLike

T = TypeVar("T")
SAVE_EVERY = 16
"""The number of batches that each rank computes between two writes of the cache."""


def with_reference_log_probs(
    dataset: Any,
    model: nn.Module,
    *,
    folder: str | Path,
    collator: Collator | None = None,
    adapter: str | None = None,
    ld_alpha: float | None = None,
    max_tokens: int = 16384,
    progress: bool = True,
) -> Any:
    """Return a tokenised data set with columns of log-probabilities under a reference model.

    They are read from a cache on disk, or computed without padding. The log-probability of a completion is the sum over
    its tokens, in nats: a float64 sum of float32 values.

    Each sequence is identified by a digest of its ids and its tokens' weights. So order, filters, batches and splits
    don't matter. A change of the ids (by template, tokenizer or truncation) makes another sequence. The folder has one
    reference (:mod:`~.cache` explains what identifies it). Missing values are computed and added every few batches, so
    little is lost if a run is killed. Under ``torch.distributed``, each rank computes a share, the first rank reads and
    writes the folder, and all ranks get all values.

    During the computation the model is patched, in evaluation mode and without gradients; afterwards it is restored.
    LLM.int8 always picks outliers over a whole batch, so its values depend on the batch.

    Args:
        dataset: a ``datasets.Dataset`` with TRL's columns: ``prompt_ids``, ``chosen_ids``, ``rejected_ids`` (or
            ``prompt_input_ids`` and so on), or KTO's ``prompt_ids``, ``completion_ids`` and perhaps
            ``KL_completion_ids``.
        model: the reference, a causal LM that :func:`fastpack.patch` covers: plain, 4-bit, or a PEFT model, whose base
            is then the reference. It computes under autocast if autocast is on.
        folder: the folder of the cache; it is created if it doesn't exist.
        collator: a collator of padded batches with ``input_ids``, ``attention_mask`` and ``completion_mask``, such as
            TRL's. Its sequences are scored, with its truncation. None to score the examples as they are.
        adapter: the name of the PEFT adapter that is on in the reference; None for the base alone.
        ld_alpha: LD-DPO's factor on tokens of a pair's longer completion beyond the shorter one's length; None for 1.
        max_tokens: the largest number of tokens in a batch; a longer sequence is a batch of its own.
        progress: whether to show a progress bar on a terminal.

    Returns:
        The data set with float64 columns ``ref_chosen_logps`` and ``ref_rejected_logps``, or ``ref_logps`` and perhaps
        ``ref_KL_logps``.

    Raises:
        ReferenceCacheError: the cache belongs to another reference (the message says what differs) or can't be read; it
            is not changed. Or a log-probability is not finite; ranks hold different models or data.
        PackingError: an example can't be read, or the data set already has columns of these names; ``max_tokens`` is
            not positive.
        UnsupportedModelError: fastpack doesn't cover the model, or the model has no head over a vocabulary.
        PatchError: the model can't be the reference in its present state; the message says why.

    Example:
        >>> from fastpack.reference import with_reference_log_probs
        >>> dataset = with_reference_log_probs(dataset, reference, folder="refs")
        >>> dataset["ref_chosen_logps"][0]
    """
    examples = Examples(dataset, "the data set", collator, ld_alpha)
    return _filled([examples], model, adapter, Path(folder), max_tokens, progress)[0]


def precompute(trainer: T, *, folder: str | Path, max_tokens: int = 16384, progress: bool = True) -> T:
    """Compute a ``DPOTrainer``'s or ``KTOTrainer``'s reference log-probabilities once, and free the reference model.

    TRL's ``precompute_ref_log_probs=True`` does this while the trainer is built. This function does it afterwards,
    without padding, and with a cache on disk that belongs to one model; build the trainer without that flag. The data
    sets get the columns, and the loss reads them. A reference model of the trainer's own (``trainer.ref_model``) is
    freed; the base of a PEFT policy (or TRL's copy of its adapter, ``ref``) stays.

    It scores the batches of ``trainer.data_collator``, with its truncation, under the trainer's autocast. If the
    reference is an unchanged part of the policy, a data set that is passed to ``trainer.evaluate`` later gets its
    columns too (PEFT's ``bias="all"`` changes the base). If the reference model was freed, ``evaluate`` raises: make
    the data set the trainer's ``eval_dataset`` beforehand.

    Args:
        trainer: the trainer as TRL built it, patched or not.
        folder: see :func:`with_reference_log_probs`.
        max_tokens: see there.
        progress: see there.

    Returns:
        ``trainer`` itself.

    Raises:
        PatchError: the trainer is of another class, has no reference, is sharded, or changes its reference during
            training (``sync_ref_model``). After this and all other errors, the trainer is unchanged.
        MissingReferenceError: raised later, by ``evaluate``, for a new data set after the reference was freed.

        All errors of :func:`with_reference_log_probs` may be raised too.

    Example:
        >>> trainer = DPOTrainer(model, args=DPOConfig(...), train_dataset=pairs)
        >>> fastpack.reference.precompute(trainer, folder="refs")
        >>> trainer.train()
    """
    owner: Any = trainer
    _check(owner)
    own = owner.ref_model is not None
    adapter = "ref" if not own and "ref" in owner.model.peft_config else None

    def filled(datasets: Mapping[str, Any]) -> list[Any]:
        model, ld_alpha = owner.ref_model if own else owner.model, getattr(owner, "ld_alpha", None)
        examples = [
            Examples(dataset, f"the trainer's data ({name})", owner.data_collator, ld_alpha)
            for name, dataset in datasets.items()
        ]
        with owner.accelerator.autocast():
            return _filled(examples, model, adapter, Path(folder), max_tokens, progress)

    evaluated = owner.eval_dataset
    splits = evaluated if isinstance(evaluated, dict) else {} if evaluated is None else {"": evaluated}
    eval_datasets = {f"eval {name}".strip(): dataset for name, dataset in splits.items()}
    owner.train_dataset, *evals = filled({"train": owner.train_dataset, **eval_datasets})
    if evaluated is not None:
        owner.eval_dataset = dict(zip(splits, evals, strict=True)) if isinstance(evaluated, dict) else evals[0]
    owner.precompute_ref_logps = True
    # evaluate() calls this for a data set without the columns
    owner._precompute_ref_logps = _refuse if own else lambda dataset, name, batch_size: filled({name: dataset})[0]
    if own:
        models = getattr(owner.accelerator, "_models", [])
        models[:] = [model for model in models if model is not owner.ref_model]
        owner.ref_model = None
    return trainer


def _refuse(dataset: Any, name: str, batch_size: int) -> Any:
    """Raise instead of TRL's ``_precompute_ref_logps``, since the reference was freed."""
    raise MissingReferenceError(
        f"the {len(dataset)} examples ({name}) that evaluate() got have no reference log-probabilities, and the "
        "reference model was freed. Make them part of the trainer's eval_dataset, which may be a dict, before "
        "precompute."
    )


def _check(trainer: TrainerLike) -> None:
    name = type(trainer).__name__
    if not hasattr(trainer, "_precompute_ref_logps"):
        raise PatchError(
            f"a {name} has no reference model: precompute takes a DPOTrainer or KTOTrainer of TRL, 1.15 or newer."
        )
    if trainer.ref_model is None and not is_peft(trainer.model):
        raise PatchError(
            f"this {name} has neither a ref_model nor adapters: there is no reference. (A trainer that was built with "
            "precompute_ref_log_probs=True, or passed to precompute before, has freed it.)"
        )
    if trainer.args.sync_ref_model:
        raise PatchError(
            "sync_ref_model=True changes the reference during training, so precomputed values would be stale. Build "
            "the trainer without it."
        )
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise PatchError(
            "the trainer runs on DeepSpeed or FSDP, where a model is sharded, or not on its device yet. Call "
            "with_reference_log_probs in a run without both, and pass the data sets that it returns to the trainer."
        )


Place = tuple[Examples, int, int]
"""The place of a sequence: its data set, row and column."""


def _filled(
    datasets: Sequence[Examples], model: nn.Module, adapter: str | None, folder: Path, max_tokens: int, progress: bool
) -> list[Any]:
    """Compute the values that the cache lacks, and return the data sets with their columns."""
    cache = ReferenceCache(folder, identify(model, adapter))
    places: dict[str, Place] = {}
    lengths: dict[str, int] = {}
    ids: list[list[list[str]]] = []
    for examples in datasets:
        rows = []
        for row in range(len(examples.dataset)):
            sequences = examples[row]
            rows.append([sequence.id for sequence in sequences])
            for column, sequence in enumerate(sequences):
                places.setdefault(sequence.id, (examples, row, column))
                lengths[sequence.id] = len(sequence.ids)
        ids.append(rows)
    facts = _gather((cache.reference, hashlib.sha256(repr(ids).encode()).hexdigest(), max_tokens))
    if any(theirs != facts[0] for theirs in facts):
        raise ReferenceCacheError("ranks hold different models or data, or were passed different arguments.")
    values = _gather(cache.load())[0]  # the first rank's, since only it writes
    missing = {key: place for key, place in places.items() if key not in values}
    if missing:
        with scoring(model, adapter) as score:
            for block in _computed(missing, lengths, score, max_tokens, progress):
                values |= block
                if _ranks()[0] == 0:
                    cache.add(block)
    return [_with_columns(examples, rows, values) for examples, rows in zip(datasets, ids, strict=True)]


def _computed(
    missing: Mapping[str, Place], lengths: Mapping[str, int], score: Score, max_tokens: int, progress: bool
) -> Iterator[dict[str, float]]:
    """Yield the missing values by the sequence's id, in blocks of ``SAVE_EVERY`` batches of each rank.

    The largest batches come first. So running out of memory shows at once, and batches that ranks compute at the same
    time cost about the same.
    """
    keys, (rank, ranks) = list(missing), _ranks()
    # "truncate" only affects the plan here: a sequence over max_tokens is a batch of its own, and is scored whole
    plan = plan_batches([lengths[key] for key in keys], max_tokens, seed=0, epoch=0, too_long="truncate")
    batches = [[keys[i] for i in batch] for batch in plan.batches[0]]
    batches.sort(key=lambda batch: -sum(lengths[key] for key in batch))
    starts = range(0, len(batches), ranks * SAVE_EVERY)
    hidden = not progress or rank > 0
    for start in track(starts, "reference log-probabilities", console=Console(stderr=True), disable=hidden):
        mine = batches[start : start + ranks * SAVE_EVERY][rank::ranks]
        places = [[missing[key] for key in batch] for batch in mine]
        sums = [score([examples[row][column] for examples, row, column in batch]) for batch in places]
        # read once a block, so that the host prepares batches while the device computes
        values = [value for batch_sums in sums for value in batch_sums.tolist()]
        here = dict(zip(chain.from_iterable(mine), values, strict=True))
        block = {key: value for theirs in _gather(here) for key, value in theirs.items()}
        bad = [key for key, value in block.items() if not isfinite(value)]
        if bad:
            examples, row, column = missing[bad[0]]
            raise ReferenceCacheError(
                f"the reference gives {len(bad)} log-probabilities that are not finite, for instance in example {row} "
                f"of {examples.name} ({examples.columns[column]}). No value of their block was "
                "saved. Try a wider dtype for the reference."
            )
        yield block


def _with_columns(examples: Examples, rows: list[list[str]], values: Mapping[str, float]) -> Any:
    from datasets import Value

    dataset = examples.dataset
    for i, name in enumerate(examples.columns):
        dataset = dataset.add_column(name, [values[ids[i]] for ids in rows], feature=Value("float64"))
    return dataset


def _ranks() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; 0 and 1 without ``torch.distributed``."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _gather(value: T) -> list[T]:
    """Return the values of all ranks, on every rank."""
    values = [value] * _ranks()[1]
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values
