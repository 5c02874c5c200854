"""The sources of a family's classes, as the lock file names them."""

from __future__ import annotations

import warnings
from typing import Any

from fastpack.errors import UntriedVersionWarning
from fastpack.exactness.tiny import build_tiny
from fastpack.families.lock import forms_of, hash_of, is_proved, packed_name, stock_mixing
from fastpack.families.source import UNREADABLE
from fastpack.model.unwrap import find_parts
from fastpack.patching.match import settle
from fastpack.patching.recognise import recognise
from fastpack.patching.twin import match_by_twin
from fastpack.utils.classes import stock_class


def sources_of(model_type: str) -> dict[str, str]:
    """Return the hashes of the classes of a family's tiny model: those whose forms are proved, or matched now, and
    those that mix tokens in their stock forward; packed only those that were read.

    Warns:
        FastpackWarning: a class does not compute what its row says; it is left out.
    """
    parts = find_parts(build_tiny(model_type))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntriedVersionWarning)  # they are entered
        known = settle(recognise(parts), match_by_twin, head=True)
    family, specs = known.family, known.specs
    modules = [*known.backbone.modules(), *([] if parts.head is None else [parts.head])]
    classes: dict[str, Any] = {
        cls.__name__: cls for cls in map(stock_class, modules) if cls.__module__ == family.module
    }
    entries = {name: classes[cls] for name, cls, form in forms_of(family) if cls in classes and specs.get(cls) == form}
    entries |= {name: classes[name] for name in stock_mixing(family) if name in classes}
    found = {name: hash_of(cls, family) for name, cls in entries.items()}
    found |= {packed_name(name): h for name, h in found.items() if is_proved(packed_name(name), h)}
    return {name: source for name, source in found.items() if source != UNREADABLE}
