"""The lock file: which sources of upstream's classes were proved, and in which releases of transformers they are.

``proved.json`` is data, written by ``fastpack families --from RUN.json --lock``: a class's name, the hashes of its
sources, and the releases that have each. A class is proved with the form that its family's row gives it; a form of
``earlier`` releases has an entry of its own. Classes without a form are those that mix tokens in their stock forward.
A mixer whose forward runs packed over kernels has a second entry, ``(packed)``: no run shows that it mixes tokens
nowhere else, so that a new hash is entered there by hand, once it was read and
``tests/layers/mixers/test_packed_mixer.py`` passes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.version import Version

from fastpack.families.source import forward_hash, source_hash
from fastpack.families.spec import Family, Spec

LOCK = Path(__file__).with_name("proved.json")

Proved = dict[str, dict[str, list[str]]]
"""Releases by hash, by name."""


@functools.cache
def proved() -> Proved:
    """Return what the lock file holds."""
    found: Proved = json.loads(LOCK.read_text(encoding="utf-8"))
    return found


def is_proved(name: str, found: str) -> bool:
    """Return whether a class, of this name, was proved on a source of this hash."""
    return found in proved().get(name, ())


def proved_form(cls: Any, family: Family) -> Spec | None:
    """Return what a class of a family computes, where its source was proved to; else None."""
    found = source_hash(cls)
    forms = ((name, form) for name, cls_name, form in forms_of(family) if cls_name == cls.__name__)
    return next((form for name, form in forms if is_proved(name, found)), None)


def forms_of(family: Family) -> Iterator[tuple[str, str, Spec]]:
    """Return each form of a family: its name in the lock file, its class's name, and the form."""
    yield from ((name, name, form) for name, form in family.fast.items())
    yield from ((f"{name} (earlier)", name, form) for name, form in family.earlier.items())


def packed_name(name: str) -> str:
    """Return the name in the lock file of a mixer's forward that may run packed."""
    return f"{name} (packed)"


def stock_mixing(family: Family) -> tuple[str, ...]:
    """Return the names of the classes that mix tokens in their stock forward."""
    return (*(name for name in family.attention if name not in family.fast), *family.mixers)


def hash_of(cls: Any, family: Family) -> str:
    """Return the hash of a class's source in the lock file.

    Of a mixer that is its forward's alone: which kernels stand behind the names that it calls differs by machine.
    """
    return forward_hash(cls.forward) if cls.__name__ in family.mixers else source_hash(cls)


def with_release(before: Proved, found: Mapping[str, str], release: str) -> Proved:
    """Return what is proved once these classes are, by name and hash, in a release; of others all stays."""
    after = {name: dict(by) for name, by in before.items()}
    for name, source in found.items():
        others = {h: [r for r in releases if r != release] for h, releases in after.get(name, {}).items()}
        others[source] = [*others.get(source, ()), release]
        after[name] = {h: releases for h, releases in others.items() if releases}
    return after


def as_text(found: Proved) -> str:
    """Return the lock file's text: a line a class, sorted, releases from the oldest to the newest."""
    lines = (
        f" {json.dumps(name)}: {json.dumps({h: sorted(by[h], key=Version) for h in sorted(by)})}"
        for name, by in sorted(found.items())
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"
