"""``verify``: proof, on a user's own model, that sequences don't see each other and that nothing else has changed.

The oracle is the stock model on each sequence alone. Compared are logits, the gradient of every token's embedding and
the gradient of everything that trains, by the rule of :mod:`fastpack.exactness.rule`. How far two right results may be
apart is measured on the stock model itself (:mod:`fastpack.exactness.runs`), and both are held to the same experts
(:mod:`fastpack.exactness.choices`), since a choice that flips with rounding says nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from fastpack.errors import PatchError
from fastpack.exactness.choices import choosers_of
from fastpack.exactness.probe import Probe
from fastpack.exactness.runs import DRAWS, Runs
from fastpack.exactness.verification import ContaminationError, InconclusiveError, Verification
from fastpack.families.registry import family_of
from fastpack.layers.read_projection import not_isolated
from fastpack.model.unwrap import find_parts, models_of, refuse_wrapped
from fastpack.patching.apply import disabled, uncovered
from fastpack.patching.state import is_patched
from fastpack.utils.modules import evaluating

LENGTHS = (13, 1, 20, 8, 17)
_VERIFY_FIRST = (
    "verify runs a plain patched model, in this process alone: call it before the model is wrapped (of a trainer, "
    "before train()), or on the one that DistributedDataParallel holds, fastpack.verify(model.module)."
)


def verify(target: object, *, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> Verification:
    """Check a patched model against itself unpatched, on random tokens.

    Packed, and padded on the right, each sequence must give what it gives alone: logits, and the gradients of its
    tokens' embeddings and of all that trains. Where the tokens of one sequence are others, no other sequence may move;
    and taken for one long sequence the same tokens must give something else, or the check could not have seen a leak.
    Takes some thirty forwards and backwards of so many tokens, 160 in half precision, and memory for the
    gradients of all that trains. The model is in evaluation mode meanwhile, and without what others have put over its
    forwards (TRL's loss, accelerate's autocast); it is left as it was found.

    Args:
        target: a patched model, or a trainer that holds one.
        lengths: tokens of each sequence, three or more of them.
        seed: of the tokens.

    Returns:
        Every figure with its bound: 1.5 times what two right results of the stock model are apart in its dtypes, and
        in float32 1e-5 of the largest value of a tensor where that is more.

    Raises:
        ContaminationError: a check failed. It holds the :class:`~fastpack.exactness.verification.Verification`.
        InconclusiveError: rounding moves this model by so much in its dtypes that a leak would not be seen.
        ValueError: fewer than three sequences, or one without a token.
        PatchError: the model is not patched, classifies whole sequences, has too small a vocabulary for so many
            different tokens, embeds them in several tables, or others beside them.
    """
    if len(lengths) < 3 or min(lengths) < 1:
        raise ValueError(f"lengths={tuple(lengths)}: verify takes three sequences or more, each of a token or more.")
    model = models_of(target)[0]
    refuse_wrapped(model, _VERIFY_FIRST)
    parts = find_parts(model)
    if type(parts.head).__name__.endswith("ForSequenceClassification"):
        raise PatchError(
            f"verify compares the logits of every token, and {type(parts.head).__name__} gives one result a row. "
            "Verify the causal LM of the same family."
        )
    if not is_patched(model):
        raise PatchError("verify compares a patched model with itself unpatched: call fastpack.patch(model) first.")
    family = family_of(parts.backbone)
    names = () if family is None else family.routers
    with torch.inference_mode(False), evaluating(model), uncovered(model) as state:
        probes = [Probe.of(model, parts.backbone, lengths, seed=DRAWS * seed + draw) for draw in range(DRAWS)]
        stock = functools.partial(disabled, state)
        result = Runs(probes, parts.head or model, stock, choosers_of(model, names)).compare()
    if result.verdict == "not exact":
        raise ContaminationError(result, "; ".join(not_isolated(parts.backbone)) or None)
    if result.verdict == "can't tell":
        raise InconclusiveError(result)
    return result
