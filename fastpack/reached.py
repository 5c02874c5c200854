"""Names that a piece of somebody's code mentions: its own, and those of whatever it refers to."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from fastpack.classes import package_of, place_of, unwrapped

_KNOWN = ("torch", "transformers", "accelerate", "builtins", "fastpack")
"""Packages whose code is named, and not looked into."""
_ENOUGH = 2000
"""Objects that are looked at, at most."""

_SPREADS = re.compile(
    r"(context|sequence)_?parallel|ulysses|ring_?(flash|attn|attention)|all_?to_?all|all_?gather|reduce_?scatter"
    r"|isend|irecv|p2pop|tensor\.experimental\._attention",
    re.IGNORECASE,
)
_ATTENTION = re.compile(r"scaled_dot|sdpa|attention|attn", re.IGNORECASE)
_NAME = re.compile(r"[\w.:]+")


def spreads_sequences(code: Any) -> bool:
    """True for code that mentions context or sequence parallelism, or what exchanges tensors among processes."""
    return any(_SPREADS.search(name) for name in names_reached(code))


def concerns_attention(code: Any) -> bool:
    """True for code that mentions attention, as whatever reroutes it must."""
    return any(_ATTENTION.search(name.rpartition(".")[2]) for name in names_reached(code))


def names_reached(code: Any) -> Iterator[str]:
    """Yield the names in a function, an object or a container, and in all that these refer to, strings included.

    Code of torch, transformers and accelerate is named and not looked into.
    """
    waiting, seen = [code], dict[int, Any]()
    while waiting and len(seen) < _ENOUGH:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing  # held, so that nothing else gets its id
        if isinstance(thing, str):
            yield from _NAME.findall(thing) if " " not in thing else ()
        elif isinstance(thing, ModuleType):
            yield thing.__name__
        elif isinstance(thing, CodeType):
            waiting += [*thing.co_names, *thing.co_consts]
        elif isinstance(thing, Mapping):
            waiting += [*thing.keys(), *thing.values()]
        elif isinstance(thing, tuple | list | set | frozenset):
            waiting += thing
        else:
            yield place_of(thing)
            waiting += _parts(thing)


def _parts(thing: Any) -> list[Any]:
    """What a function, a class or another object is made of."""
    if isinstance(thing, functools.partial):
        return [thing.func, thing.args, thing.keywords]
    if isinstance(thing, MethodType):
        return [thing.__func__, thing.__self__]
    thing = unwrapped(thing) if isinstance(thing, FunctionType) else thing
    if package_of(thing) in _KNOWN:
        return [getattr(thing, "__name__", "")]
    if isinstance(thing, FunctionType):
        used = [thing.__globals__.get(name) for name in _all_names(thing.__code__)]
        return [thing.__code__, used, _held(thing), thing.__defaults__, thing.__kwdefaults__]
    own = [value for name, value in getattr(thing, "__dict__", {}).items() if not _is_special(name)]
    return [own, list(thing.__bases__) if isinstance(thing, type) else type(thing)]


def _held(function: FunctionType) -> list[Any]:
    """What a function's closure holds."""
    found = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # of a name that has no value yet
            found.append(cell.cell_contents)
    return found


def _is_special(name: str) -> bool:
    """True for names that Python gives a meaning, but those of the handlers of modes, and of calls."""
    return name.startswith("__") and name not in ("__call__", "__torch_function__", "__torch_dispatch__")


def _all_names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function uses, and those that functions inside it do."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _all_names(constant)
