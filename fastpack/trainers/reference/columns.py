"""Data sets with the reference's log-probabilities beside each example, and trainers of TRL that read them."""

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
SAVE_EVERY = 16  # batches of each rank between two times that the cache is written


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
    """Return a tokenised data set with log-probabilities under a reference, from a cache or computed padding-free.

    The log-probability of a completion is the sum of those of its tokens behind the prompt, in nats, a float64 made
    from float32 ones.

    Each sequence is known by a digest of its ids and of how much each counts, so order, filtering, batching and splits
    don't matter, and whatever changes the ids (template, tokenizer, truncation) makes another sequence. The folder
    holds one reference (:mod:`~.cache` says what tells them apart); what is missing in it is computed
    and added, every few batches, so that little is lost when a run is killed. Under ``torch.distributed`` each rank
    computes a share, the first one reads and writes the folder, and all get everything.

    While it computes, the model is patched, in evaluation mode and without gradients; then it is as it was. LLM.int8
    picks outliers over a whole batch, so that its values depend on their batch, as elsewhere.

    Args:
        dataset: a ``datasets.Dataset`` with TRL's columns: ``prompt_ids``, ``chosen_ids``, ``rejected_ids`` (or
            ``prompt_input_ids`` and so on), or KTO's ``prompt_ids``, ``completion_ids`` and perhaps
            ``KL_completion_ids``.
        model: the reference: a causal LM that :func:`fastpack.patch` covers, plain, 4-bit, or PEFT's, of which the
            base is meant. Autocast, where it is on, is what it computes in.
        folder: where the cache is, or will be.
        collator: of padded batches with ``input_ids``, ``attention_mask`` and ``completion_mask``, as TRL's: what it
            sends of each example is scored, truncated as it truncates. None for examples as they are.
        adapter: the name of PEFT's adapter that is on in the reference; None for the base alone.
        ld_alpha: LD-DPO's: of pairs, the factor on tokens of the longer completion behind as many as the shorter one
            has.
        max_tokens: of a batch, at most; a longer sequence is a batch of its own.
        progress: show a bar, on a terminal.

    Returns:
        The data set with float64 columns ``ref_chosen_logps`` and ``ref_rejected_logps``, or ``ref_logps`` and perhaps
        ``ref_KL_logps``.

    Raises:
        ReferenceCacheError: the cache is of another reference (what differs is named) or can't be read, and was not
            touched; a log-probability is not finite; ranks hold different models or data.
        PackingError: an example can't be read, or has such columns already; ``max_tokens`` is not positive.
        UnsupportedModelError, PatchError: the model can't be the reference here; says why.
    """
    examples = Examples(dataset, "the data set", collator, ld_alpha)
    return _filled([examples], model, adapter, Path(folder), max_tokens, progress)[0]


def precompute(trainer: T, *, folder: str | Path, max_tokens: int = 16384, progress: bool = True) -> T:
    """Compute a ``DPOTrainer``'s or ``KTOTrainer``'s reference log-probabilities once, and free the reference model.

    TRL's ``precompute_ref_log_probs=True`` does this while the trainer is built. This function does it afterwards,
    without padding, and with a cache on disk that knows its model; build the trainer without that flag. The data sets
    get the columns, and the loss reads them. A reference model of the trainer's own (``trainer.ref_model``) is freed;
    the base of a PEFT policy (or TRL's copy of its adapter, ``ref``) stays.

    It scores the batches of ``trainer.data_collator``, with its truncation, under the trainer's autocast. A data set
    that is passed to ``trainer.evaluate`` later gets its columns too, if the reference is a part of the policy that did
    not change (PEFT's ``bias="all"`` trains the base). If the reference model was freed, this is an error: make the
    data set the trainer's ``eval_dataset`` before.

    Args:
        trainer: the trainer as TRL built it, patched or not.
        folder: see :func:`with_reference_log_probs`.
        max_tokens: see there.
        progress: see there.

    Returns:
        ``trainer`` itself.

    Raises:
        PatchError: it is another trainer, or one without a reference, or whose reference changes while it trains
            (``sync_ref_model``), or that is sharded. As for all errors, the trainer has not changed.
        MissingReferenceError: later, by ``evaluate``.

        All errors of :func:`with_reference_log_probs` may be raised too.

    Example:
        >>> trainer = DPOTrainer(model, args=DPOConfig(...), train_dataset=pairs)
        >>> fastpack.reference.precompute(trainer, folder="refs")
        >>> trainer.train()
    """
    held: Any = trainer
    _check(held)
    own = held.ref_model is not None
    adapter = "ref" if not own and "ref" in held.model.peft_config else None

    def filled(datasets: Mapping[str, Any]) -> list[Any]:
        model, ld_alpha = held.ref_model if own else held.model, getattr(held, "ld_alpha", None)
        wanted = [
            Examples(dataset, f"the trainer's data ({name})", held.data_collator, ld_alpha)
            for name, dataset in datasets.items()
        ]
        with held.accelerator.autocast():
            return _filled(wanted, model, adapter, Path(folder), max_tokens, progress)

    evaluated = held.eval_dataset
    splits = evaluated if isinstance(evaluated, dict) else {} if evaluated is None else {"": evaluated}
    named = {f"eval {name}".strip(): dataset for name, dataset in splits.items()}
    held.train_dataset, *found = filled({"train": held.train_dataset, **named})
    if evaluated is not None:
        held.eval_dataset = dict(zip(splits, found, strict=True)) if isinstance(evaluated, dict) else found[0]
    held.precompute_ref_logps = True
    # what evaluate() asks for a data set of its own
    held._precompute_ref_logps = _refuse if own else lambda dataset, name, batch_size: filled({name: dataset})[0]
    if own:
        models = getattr(held.accelerator, "_models", [])
        models[:] = [model for model in models if model is not held.ref_model]
        held.ref_model = None
    return trainer


def _refuse(dataset: Any, name: str, batch_size: int) -> Any:
    """In the place of TRL's ``_precompute_ref_logps`` where there is no reference any more."""
    raise MissingReferenceError(
        f"the {len(dataset)} examples ({name}) that evaluate() was handed have no reference log-probabilities, and the "
        "reference model was let go. Make them part of the trainer's eval_dataset, which may be a dict, before "
        "precompute."
    )


def _check(trainer: TrainerLike) -> None:
    name = type(trainer).__name__
    if not hasattr(trainer, "_precompute_ref_logps"):
        raise PatchError(
            f"a {name} has no references: precompute takes a DPOTrainer or KTOTrainer of TRL, 1.15 or newer."
        )
    if trainer.ref_model is None and not is_peft(trainer.model):
        raise PatchError(
            f"this {name} has neither a ref_model nor adapters: there is no reference. (One that was built with "
            "precompute_ref_log_probs=True, or given to precompute before, has let it go.)"
        )
    if trainer.args.sync_ref_model:
        raise PatchError(
            "sync_ref_model=True changes the reference while it trains: what is computed now would be stale. Build "
            "the trainer without it."
        )
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise PatchError(
            "the trainer runs on DeepSpeed or FSDP, where models are not whole, or not on their device yet. Call "
            "with_reference_log_probs on its data sets in a run without, and give them to the trainer."
        )


Place = tuple[Examples, int, int]  # where a sequence is: its data set, row and column


def _filled(
    wanted: Sequence[Examples], model: nn.Module, adapter: str | None, folder: Path, max_tokens: int, progress: bool
) -> list[Any]:
    """Return the data sets with their columns, from the cache, after computing what is missing there."""
    cache = ReferenceCache(folder, identify(model, adapter))
    places: dict[str, Place] = {}
    lengths: dict[str, int] = {}
    ids: list[list[list[str]]] = []
    for examples in wanted:
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
    values = _gather(cache.load())[0]  # the first rank's, which writes
    missing = {one: place for one, place in places.items() if one not in values}
    if missing:
        with scoring(model, adapter) as score:
            for found in _computed(missing, lengths, score, max_tokens, progress):
                values |= found
                if _ranks()[0] == 0:
                    cache.add(found)
    return [_with_columns(examples, rows, values) for examples, rows in zip(wanted, ids, strict=True)]


def _computed(
    missing: Mapping[str, Place], lengths: Mapping[str, int], score: Score, max_tokens: int, progress: bool
) -> Iterator[dict[str, float]]:
    """Compute the missing values on every rank, ``SAVE_EVERY`` batches of each at a time.

    The most expensive come first. So running out of memory shows at once, and neighbours, which ranks share, cost the
    same.
    """
    every, (rank, ranks) = list(missing), _ranks()
    # a sequence that is longer counts as a whole batch, and is one
    plan = plan_batches([lengths[one] for one in every], max_tokens, seed=0, epoch=0, too_long="truncate")
    batches = [[every[i] for i in batch] for batch in plan.batches[0]]
    batches.sort(key=lambda batch: -sum(lengths[one] for one in batch))
    starts = range(0, len(batches), ranks * SAVE_EVERY)
    hidden = not progress or rank > 0
    for start in track(starts, "reference log-probabilities", console=Console(stderr=True), disable=hidden):
        mine = batches[start : start + ranks * SAVE_EVERY][rank::ranks]
        places = [[missing[one] for one in batch] for batch in mine]
        sums = [score([examples[row][column] for examples, row, column in some]) for some in places]
        # read once a block, so that batches are made while the device computes
        values = [value for made in sums for value in made.tolist()]
        here = dict(zip(chain.from_iterable(mine), values, strict=True))
        found = {one: value for theirs in _gather(here) for one, value in theirs.items()}
        bad = [one for one, value in found.items() if not isfinite(value)]
        if bad:
            examples, row, column = missing[bad[0]]
            raise ReferenceCacheError(
                f"the reference gives {len(bad)} log-probabilities that are not finite, as of example {row} of "
                f"{examples.name} ({examples.columns[column]}). They were not kept, nor was what was computed with "
                "them. Is its dtype wide enough?"
            )
        yield found


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
    """Return every rank's value, on every rank."""
    found = [value] * _ranks()[1]
    if len(found) > 1:
        dist.all_gather_object(found, value)
    return found
