"""Choose the forwards of classes with unproved sources: fast if a twin matches, else their own, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from fastpack.errors import FastpackWarning, UntriedVersionWarning
from fastpack.families.lock import proved_spec
from fastpack.families.spec import Family, HeadSpec, Spec
from fastpack.model.unwrap import Parts
from fastpack.patching.recognise import Recognised, Skipped, own_class, with_specs
from fastpack.patching.support import covered_family
from fastpack.utils.classes import replaced_forward, stock_class
from fastpack.utils.versions import version_of

Match = Callable[[nn.Module, Family, Mapping[str, Spec]], Mapping[str, str]]
"""A function that returns for each class why its spec doesn't match, or an empty string if it matches."""


def settle(recognised: Recognised, match: Match, *, head: bool) -> Recognised:
    """Match the classes whose source was not proved.

    Args:
        recognised: The model.
        match: Tries specs against the model's classes.
        head: Whether to match the head's class, too.

    Returns:
        The model, with the specs of the classes that matched.

    Warns:
        FastpackWarning: A class does not compute what its row says, and keeps its own forward.
        UntriedVersionWarning: A class mixes tokens in its stock forward, and fastpack was not tried with its source.
    """
    if recognised.untried:
        warnings.warn(
            f"{', '.join(recognised.untried)} of transformers {version_of('transformers')} mix tokens, but "
            "fastpack was not tried with their sources. fastpack.verify(model) checks your model.",
            UntriedVersionWarning,
            stacklevel=5,
        )
    names = [name for name in recognised.unknown if head or not isinstance(recognised.family.fast[name], HeadSpec)]
    specs, skipped = match_specs(recognised.backbone, recognised.family, names, match)
    return with_specs(
        recognised, {**recognised.specs, **specs}, matched=tuple(specs), skipped=recognised.skipped + skipped
    )


def match_specs(
    backbone: nn.Module, family: Family, names: Sequence[str], match: Match
) -> tuple[dict[str, Spec], Skipped]:
    """Return the matching spec of each class, in its present or an earlier spec, and why other classes don't match.

    Warns:
        FastpackWarning: A class does not match.
    """
    matched: dict[str, Spec] = {}
    reasons: dict[str, str] = {}
    for specs in (family.fast, family.earlier):
        candidates = {name: specs[name] for name in names if name in specs and name not in matched}
        results = match(backbone, family, candidates) if candidates else {}
        matched |= {name: candidates[name] for name, why in results.items() if not why}
        reasons = {name: why for name, why in {**results, **reasons}.items() if name not in matched}
    for name, why in reasons.items():
        warnings.warn(
            f"{name} of transformers {version_of('transformers')} is not the version that fastpack was proved on, "
            f"and a twin of it does not match: {why}. Its own forward runs: just as exact, but slower.",
            FastpackWarning,
            stacklevel=6,
        )
    return matched, tuple(
        (name, f"its source was not proved, and {why}: stock forward") for name, why in reasons.items()
    )


def head_spec(parts: Parts, match: Match) -> HeadSpec | None:
    """Return the spec of a model's head, or None if its class is not the family's own, or not proved or matched.

    Warns:
        FastpackWarning: The head does not compute what its row says.
    """
    family, head = covered_family(parts), parts.head
    cls: Any = type(None) if head is None else stock_class(head)
    if head is None or own_class(head, family) not in family.fast or replaced_forward(head) is not None:
        return None
    spec = proved_spec(cls, family) or match_specs(parts.backbone, family, [cls.__name__], match)[0].get(cls.__name__)
    return spec if isinstance(spec, HeadSpec) else None
