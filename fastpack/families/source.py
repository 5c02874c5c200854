"""Hashes of what upstream's classes compute, as they are in memory; :mod:`fastpack.families.lock` has those proved."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
import textwrap
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from fastpack.utils.classes import unwrapped

_LEFT_OUT = ("eager_attention_forward",)
"""Attention itself, which is read from the call of the interface."""


UNREADABLE = "no source"
_CACHE = {"past_key_values": "cache", "cache_params": "cache"}
_ROTATIONS = {("liger_kernel.transformers.rope", f"liger_rotary_pos_emb{which}") for which in ("", "_gpt_oss")}
"""Liger's, each of which stands for the family's own."""


def source_hash(cls: Any) -> str:
    """Hash of what a class's forward computes: the forward, and what it calls of its own class and module.

    Taken over the syntax tree without docstrings and annotations, so that comments and formatting don't matter, with
    one name for a cache, whatever the version of transformers calls it; and each time anew: others replace forwards
    and helpers. A helper for which Liger's stands is read where it was written. :data:`UNREADABLE` where one of them
    has no source to read.
    """
    module = sys.modules[cls.__module__]
    parts: dict[str, str] = {}
    waiting = [("forward", _read(unwrapped(cls.forward)))]
    while waiting:
        name, said = waiting.pop()
        if said is None:
            return UNREADABLE
        parts[name] = said.text
        called = [(n, vars(module).get(n)) for n in said.names] + [
            (f"self.{n}", getattr(cls, n, None)) for n in said.own
        ]
        for other, found in called:
            if inspect.isfunction(found) and other not in (*parts, *_LEFT_OUT):
                helper = unwrapped(found)
                if helper.__module__ == module.__name__:
                    waiting.append((other, _read(helper)))
                elif (helper.__globals__.get("__name__"), helper.__name__) in _ROTATIONS:
                    waiting.append((other, _read_as_written(module, other)))
    return _short_hash("\n".join(parts[name] for name in sorted(parts)))


def forward_hash(forward: Any) -> str:
    """Hash of a forward alone, under whatever decorators; :data:`UNREADABLE` where its source is not there."""
    said = _read(unwrapped(forward))
    return UNREADABLE if said is None else _short_hash(said.text)


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class _Said(NamedTuple):
    """What a function's source says: its normal form, and which names it uses, plain ones and those of ``self``."""

    text: str
    names: tuple[str, ...]
    own: tuple[str, ...]


@functools.cache
def _read(function: FunctionType) -> _Said | None:
    """None for a function of ``exec``, a lambda or a callable object. Others replace functions, not their sources."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.__code__))).body[0]  # wrapped by nobody
    except (AttributeError, OSError, TypeError, SyntaxError):
        return None
    return _said(tree) if isinstance(tree, ast.FunctionDef) else None


@functools.cache
def _read_as_written(module: ModuleType, name: str) -> _Said | None:
    """Of a function that somebody has replaced since; None where the module's source has none of this name."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return None
    return next((_said(n) for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name), None)


def _name_caches_alike(tree: ast.FunctionDef) -> None:
    """transformers 5.24 says ``cache`` for ``past_key_values`` and ``cache_params``, and hands ``update`` keywords."""
    nodes = list(ast.walk(tree))
    for node in nodes:
        for place in ("id", "attr", "arg"):
            name = getattr(node, place, None)
            if name in _CACHE:
                setattr(node, place, _CACHE[name])
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "cache.update":
            node.keywords = [each for each in node.keywords if ast.unparse(each) != "kwargs=kwargs"]


def _said(tree: ast.FunctionDef) -> _Said:
    _name_caches_alike(tree)
    tree.decorator_list = []
    tree.returns = None
    for argument in ast.walk(tree.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            node.annotation = ast.Constant(None)
    first = tree.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        tree.body = tree.body[1:] or [ast.Pass()]
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    attributes = [n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    own = {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "self"}
    return _Said(ast.unparse(tree), tuple(sorted(names)), tuple(sorted(own)))
