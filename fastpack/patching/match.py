"""Settle the classes whose sources were not proved: fast where a twin matches, else their own forwards, aloud."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from fastpack.errors import FastpackWarning, UntriedVersionWarning
from fastpack.families.lock import proved_form
from fastpack.families.spec import Family, HeadSpec, MixerSpec, Spec
from fastpack.patching.recognise import Recognised, Skipped
from fastpack.utils.classes import replaced_forward, stock_class
from fastpack.utils.versions import version_of

Match = Callable[[nn.Module, Family, Mapping[str, Spec]], Mapping[str, str]]
"""Say of each class of a backbone's family why a forward of this form does not compute what it does, or nothing."""


def settle(found: Recognised, match: Match) -> Recognised:
    """Match the classes whose source is unknown.

    Warns:
        FastpackWarning: a class does not compute what its row says, and keeps its own forward.
        UntriedVersionWarning: a class mixes tokens in its stock forward, and has a source that was not tried.
    """
    if found.untried:
        warnings.warn(
            f"{', '.join(found.untried)} of transformers {version_of('transformers')} mix tokens, and have sources "
            "that fastpack was not tried with. fastpack.verify(model) tries yours.",
            UntriedVersionWarning,
            stacklevel=5,
        )
    forms, left = match_forms(found.backbone, found.family, found.unknown, match)
    return with_forms(replace(found, skipped=found.skipped + left), forms)


def with_forms(found: Recognised, forms: Mapping[str, Spec]) -> Recognised:
    """Return what a model is known to be, where these of its classes, whose source is unknown, compute this."""
    specs = {**found.specs, **forms}
    return replace(found, family=_keeping_windows(found.family, specs), specs=specs, matched=tuple(forms))


def match_forms(
    backbone: nn.Module, family: Family, names: Sequence[str], match: Match
) -> tuple[dict[str, Spec], Skipped]:
    """Return the forms of these classes that match, today's or an earlier one; and why the others don't.

    Warns:
        FastpackWarning: one of them does not match.
    """
    matched: dict[str, Spec] = {}
    reasons: dict[str, str] = {}
    for forms in (family.fast, family.earlier):
        candidates = {name: forms[name] for name in names if name in forms and name not in matched}
        found = match(backbone, family, candidates) if candidates else {}
        matched |= {name: candidates[name] for name, why in found.items() if not why}
        reasons = {name: why for name, why in {**found, **reasons}.items() if name not in matched}
    for name, why in reasons.items():
        warnings.warn(
            f"{name} of transformers {version_of('transformers')} is not as fastpack was proved on, and a twin of it "
            f"does not match: {why}. Its own forward runs: as exact, and slower.",
            FastpackWarning,
            stacklevel=6,
        )
    return matched, tuple(
        (name, f"its source was not proved, and {why}: stock forward") for name, why in reasons.items()
    )


def head_spec(head: nn.Module, backbone: nn.Module, family: Family, match: Match) -> HeadSpec | None:
    """Return how a head makes logits, where its class is the family's, and proved or matched; else None.

    Warns:
        FastpackWarning: it does not compute what its row says.
    """
    cls: Any = stock_class(head)
    if cls.__module__ != family.module or cls.__name__ not in family.fast or replaced_forward(head) is not None:
        return None
    spec = proved_form(cls, family) or match_forms(backbone, family, [cls.__name__], match)[0].get(cls.__name__)
    return spec if isinstance(spec, HeadSpec) else None


def _keeping_windows(family: Family, specs: Mapping[str, Spec]) -> Family:
    """Where windows are in upstream's masks alone, attention without a fast form runs on rows, which have masks."""
    if family.mask_window is None or all(name in specs for name in family.attention):
        return family
    masked = MixerSpec("added", window=f"config.{family.mask_window}")
    return replace(family, attention=(), mixers=dict.fromkeys(family.attention, masked))
