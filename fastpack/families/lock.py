"""The lock file: the proved sources of upstream's classes, and the releases of transformers that have them.

``fastpack families --from RUN.json --lock`` writes ``proved.json``: for each class its name, the hashes of its sources,
and the releases that have each hash. A class is proved with the spec that its family's row gives it; a spec of
``earlier`` releases has its own entry. The file also has classes without a spec, which mix tokens in their stock
forward. A mixer has a second entry, ``(packed)``, if kernels run its forward on packed tokens. No run shows that such a
forward mixes tokens in the kernels alone, so a new hash is entered by hand, after its source was read and
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
"""For each class's name: the releases that have each hash."""


@functools.cache
def proved() -> Proved:
    """Return the contents of the lock file."""
    entries: Proved = json.loads(LOCK.read_text(encoding="utf-8"))
    return entries


def is_proved(name: str, source: str) -> bool:
    """Return whether a class of this name was proved with a source of this hash."""
    return source in proved().get(name, ())


def proved_spec(cls: Any, family: Family) -> Spec | None:
    """Return the spec that the source of a family's class was proved with, or None."""
    source = source_hash(cls)
    specs = ((name, spec) for name, cls_name, spec in specs_of(family) if cls_name == cls.__name__)
    return next((spec for name, spec in specs if is_proved(name, source)), None)


def specs_of(family: Family) -> Iterator[tuple[str, str, Spec]]:
    """Yield each spec of a family: its name in the lock file, its class's name, and the spec."""
    for name, spec in family.fast.items():
        yield f"{name} ({family.model_type})" if name in family.namesakes else name, name, spec
    yield from ((f"{name} (earlier)", name, spec) for name, spec in family.earlier.items())


def packed_name(name: str) -> str:
    """Return the name in the lock file of a mixer's forward that may run packed."""
    return f"{name} (packed)"


def stock_mixing(family: Family) -> tuple[str, ...]:
    """Return the names of the classes that mix tokens in their stock forward."""
    return (*(name for name in family.attention if name not in family.fast), *family.mixers)


def hash_of(cls: Any, family: Family) -> str:
    """Return the hash of a class's source in the lock file.

    A mixer's hash is that of its forward alone, since the functions that it calls differ with the installed kernels.
    """
    return forward_hash(cls.forward) if cls.__name__ in family.mixers else source_hash(cls)


def with_release(before: Proved, sources: Mapping[str, str], release: str) -> Proved:
    """Return the entries, with the hashes in ``sources`` (by class name) added as proved in this release."""
    after = {name: dict(by) for name, by in before.items()}
    for name, source in sources.items():
        others = {h: [r for r in releases if r != release] for h, releases in after.get(name, {}).items()}
        others[source] = [*others.get(source, ()), release]
        after[name] = {h: releases for h, releases in others.items() if releases}
    return after


def as_text(entries: Proved) -> str:
    """Return the lock file's text: a line for each class, sorted, with releases from the oldest to the newest."""
    lines = (
        f" {json.dumps(name)}: {json.dumps({h: sorted(by[h], key=Version) for h in sorted(by)})}"
        for name, by in sorted(entries.items())
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"
