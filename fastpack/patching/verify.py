"""Verify on a user's own model that sequences don't see each other and that results have not changed.

The oracle is the stock model on each sequence alone. It is compared with the patched model by logits, by the gradient
of every token's embedding, and by the gradients of all trained weights; :mod:`fastpack.exactness.rule` defines the
errors. How far two correct results may differ is measured on the stock model itself (:mod:`fastpack.exactness.runs`).
Both models are made to choose the same experts (:mod:`fastpack.exactness.expert_choices`), since a choice that flips
with rounding says nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from fastpack.errors import PatchError
from fastpack.exactness.expert_choices import choosers_of
from fastpack.exactness.probe import Probe
from fastpack.exactness.runs import DRAWS, Runs
from fastpack.exactness.verification import ContaminationError, InconclusiveError, Verification
from fastpack.families.registry import family_of
from fastpack.layers.mxfp4_experts import mxfp4_experts
from fastpack.layers.read_projection import not_isolated
from fastpack.model.unwrap import find_parts, models_of, refuse_wrapped
from fastpack.patching.apply import disabled, without_wrappers
from fastpack.patching.state import is_patched, state_of
from fastpack.utils.modules import evaluating

LENGTHS = (13, 1, 20, 8, 17)
SPREAD = (
    "verify compares gradients of one process, and context parallelism spreads this model's batches over ranks: patch "
    "a copy without it, and verify that. Nothing was changed."
)
"""Why there is no verification under context parallelism."""
_VERIFY_FIRST = (
    "verify runs a plain patched model, in one process: call it before the model is wrapped (for a trainer, before "
    "train()), or on the model inside DistributedDataParallel, fastpack.verify(model.module)."
)


def verify(target: object, *, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> Verification:
    """Check a patched model against its own stock forward, on random tokens.

    Three things are checked. Packed or padded on the right, each sequence must give the same results as alone: logits,
    the gradients of its tokens' embeddings, and the gradients of all trained weights. If the tokens of one sequence are
    replaced, the results of the other sequences must not change. And if the same tokens are treated as one long
    sequence, the results must change, since otherwise the check could not see a leak.

    This takes about thirty forwards and backwards on all tokens (160 in half precision), and memory for the gradients
    of all trained weights. Meanwhile the model is in evaluation mode, and wrappers of other code around its forwards
    (TRL's loss, accelerate's autocast) are removed. The model is restored afterwards.

    Example:
        >>> fastpack.patch(model)  # doctest: +SKIP
        >>> print(fastpack.verify(model))  # a table of all checks  # doctest: +SKIP

    Args:
        target: A patched model, or a trainer that holds one.
        lengths: The number of tokens of each sequence, for three or more sequences.
        seed: The seed of the tokens.

    Returns:
        Every error with its bound. The bound is 1.5 times the distance of two correct results of the stock model in its
        dtypes, and in float32 at least 1e-5 of the largest value of a tensor.

    Raises:
        ContaminationError: A check failed. The error holds the :class:`~fastpack.exactness.verification.Verification`.
        InconclusiveError: Rounding in the model's dtypes changes its results so much that a leak could go unseen.
        ValueError: There are fewer than three sequences, or one has no token.
        PatchError: The model is not patched; or its stock experts return no gradient (MXFP4 as transformers loads it);
            or its batches are spread over ranks; or it classifies whole sequences; or its vocabulary has too few
            different tokens; or it embeds tokens in several tables, or embeds ids that are not in the batch.
    """
    if len(lengths) < 3 or min(lengths) < 1:
        raise ValueError(f"lengths={tuple(lengths)}: verify takes three or more sequences, each of one or more tokens.")
    model = models_of(target)[0]
    refuse_wrapped(model, _VERIFY_FIRST)
    parts = find_parts(model)
    if type(parts.head).__name__.endswith("ForSequenceClassification"):
        raise PatchError(
            f"verify compares the logits of every token, and {type(parts.head).__name__} returns one result per row. "
            "Verify the causal LM of the same family."
        )
    if not is_patched(model):
        raise PatchError("verify compares a patched model with itself unpatched: call fastpack.patch(model) first.")
    state = state_of(parts.backbone)
    if state is not None and state.options.spreads:
        raise PatchError(SPREAD)
    family = family_of(parts.backbone)
    if family is not None and any(mxfp4_experts(parts.backbone, family)):
        raise PatchError(
            "verify compares gradients with those of the stock model, whose kernels for MXFP4 return none. Verify the "
            "same model after fastpack.quantize_experts(model), which keeps the values and runs without these kernels."
        )
    names = () if family is None else family.routers
    recurrent = family is not None and any(spec.scan not in (None, "conv") for spec in family.mixers.values())
    with torch.inference_mode(False), evaluating(model), without_wrappers(model) as state:
        probes = [Probe.of(model, parts.backbone, lengths, seed=DRAWS * seed + draw) for draw in range(DRAWS)]
        stock = functools.partial(disabled, state)
        result = Runs(probes, parts.head or model, stock, choosers_of(model, names), recurrent).compare()
    if result.verdict == "not exact":
        raise ContaminationError(result, "; ".join(not_isolated(parts.backbone)) or None)
    if result.verdict == "can't tell":
        raise InconclusiveError(result)
    return result
