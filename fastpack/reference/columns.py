"""``with_reference_log_probs``: a data set with the reference's log-probabilities beside each example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fastpack.reference.cache import ReferenceCache
from fastpack.reference.compute import scoring
from fastpack.reference.examples import Collator, Examples
from fastpack.reference.identity import identify
from fastpack.reference.lookup import Compute, Work, look_up


def with_reference_log_probs(
    dataset: Any,
    model: nn.Module,
    *,
    folder: str | Path,
    collator: Collator | None = None,
    adapter: str | None = None,
    ld_alpha: float | None = None,
    compute: Compute = "new",
    max_tokens: int = 16384,
    save_every: int = 16,
    progress: bool = True,
) -> Any:
    """A tokenised data set with columns of log-probabilities under a reference, from a cache or computed padding-free.

    The log-probability of a completion is the sum of those of its tokens behind the prompt, in nats, a float64 made
    from float32 ones.

    Each sequence is known by a digest of its ids and of which of them are scored, so order, filtering, batching and
    splits don't matter, and whatever changes the ids (template, tokenizer, truncation) makes another sequence. The
    folder holds one reference (:mod:`fastpack.reference.identity` says what tells them apart) and grows shard by shard:
    what was computed before a run was killed is not computed again. Under ``torch.distributed`` each rank computes a
    share, the first one writes, and all get everything.

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
        ld_alpha: LD-DPO's, see :mod:`fastpack.preference`: of pairs, the factor on tokens of the longer completion
            behind as many as the shorter one has.
        compute: ``new`` computes what is missing where the folder has no cache, or one that was left unfinished; in a
            complete one something missing is an error. ``missing`` computes it there too. ``never`` looks up alone.
        max_tokens: of a batch, at most; a longer sequence is a batch of its own.
        save_every: a shard is written after this many batches of each rank.
        progress: show a bar, on a terminal.

    Returns:
        The data set with float64 columns ``ref_chosen_logps`` and ``ref_rejected_logps``, or ``ref_logps`` and perhaps
        ``ref_KL_logps``.

    Raises:
        MissingReferenceError: examples are not in the cache, and not to be computed; some are named.
        ReferenceCacheError: the cache is of another reference (what differs is named) or damaged, and was not touched;
            a log-probability is not finite; ranks hold different models or data.
        PackingError: an example can't be read, or has such columns already.
        UnsupportedModelError, PatchError: the model can't be the reference here; says why.
        ValueError: an argument has a value that it doesn't take.
    """
    work = Work(compute, max_tokens, save_every, progress)
    if ld_alpha is not None and not 0 <= ld_alpha <= 1:
        raise ValueError(f"ld_alpha={ld_alpha}; pass a factor from 0 to 1, or None.")
    examples = Examples(dataset, collator, paired=ld_alpha is not None)
    if examples.kind == "judged":
        ld_alpha = None
    cache = ReferenceCache(Path(folder), identify(model, adapter=adapter, ld_alpha=ld_alpha))
    found = look_up([examples], cache, work, partial(scoring, model, adapter=adapter, ld_alpha=ld_alpha))
    return with_columns(examples, found[0])


def with_columns(examples: Examples, columns: Mapping[str, Sequence[float]]) -> Any:
    """The data set with these float64 columns."""
    from datasets import Value

    dataset = examples.dataset
    for name, values in columns.items():
        dataset = dataset.add_column(name, values, feature=Value("float64"))
    return dataset
