"""Hash what upstream's classes compute, as loaded in memory; :mod:`fastpack.families.lock` has the proved hashes."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import re
import sys
import textwrap
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from fastpack.utils.classes import unwrapped

UNREADABLE = "no source"
_CACHE = re.compile(r"\b(past_key_values|cache_params)\b")
_CACHE_UPDATE = re.compile(r"(?<![\w.])(cache\.update\(.*), kwargs=kwargs\)")
"""Transformers 5.24 calls caches of both names ``cache``, and passes keywords to ``update``."""
_ROTATIONS = {("liger_kernel.transformers.rope", f"liger_rotary_pos_emb{which}") for which in ("", "_gpt_oss")}
"""Liger's rotary functions, each of which replaces a family's own."""


def source_hash(cls: Any) -> str:
    """Return a hash of what a class's forward computes: the forward, and its helpers in the class and the module.

    The hash is of the syntax tree without docstrings and annotations, so comments and formatting don't matter. Caches
    have the same name in it, whatever this release of transformers calls them. The hash is computed anew each time,
    since users and libraries replace forwards and helpers. If Liger has replaced a helper, the module's own helper is
    read from its file. The result is :data:`UNREADABLE` if one of the functions has no source.
    """
    module = sys.modules[cls.__module__]
    parts: dict[str, str] = {}
    waiting = [("forward", _read(unwrapped(cls.forward)))]
    while waiting:
        name, source = waiting.pop()
        if source is None:
            return UNREADABLE
        parts[name] = source.text
        called = [(n, vars(module).get(n)) for n in source.names] + [
            (f"self.{n}", getattr(cls, n, None)) for n in source.own
        ]
        for other, function in called:
            # attention itself is recognised by the call of the interface
            if inspect.isfunction(function) and other not in (*parts, "eager_attention_forward"):
                helper = unwrapped(function)
                if helper.__module__ == module.__name__:
                    waiting.append((other, _read(helper)))
                elif (helper.__globals__.get("__name__"), helper.__name__) in _ROTATIONS:
                    waiting.append((other, _read_as_written(module, other)))
    return _short_hash("\n".join(parts[name] for name in sorted(parts)))


def forward_hash(forward: Any) -> str:
    """Return a hash of a forward alone, beneath its decorators, or :data:`UNREADABLE` if it has no source."""
    source = _read(unwrapped(forward))
    return UNREADABLE if source is None else _short_hash(source.text)


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class _Source(NamedTuple):
    """A function's source in normal form, and the names that it uses: globals, and attributes of ``self``."""

    text: str
    names: tuple[str, ...]
    own: tuple[str, ...]


@functools.cache
def _read(function: FunctionType) -> _Source | None:
    """Read a function's source; None for a lambda, a callable object, or a function that ``exec`` made.

    The result can be cached: a function keeps its source, since users and libraries replace whole functions.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.__code__))).body[0]  # without its wrappers
    except (AttributeError, OSError, TypeError, SyntaxError):
        return None
    return _normalise(tree) if isinstance(tree, ast.FunctionDef) else None


@functools.cache
def _read_as_written(module: ModuleType, name: str) -> _Source | None:
    """Read a function that was replaced in memory from its module's source; None if it is not there."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return None
    return next((_normalise(n) for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name), None)


def _normalise(tree: ast.FunctionDef) -> _Source:
    tree.decorator_list = []
    tree.returns = None
    for argument in ast.walk(tree.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            node.annotation = ast.Constant(None)
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:] or [ast.Pass()]
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    own = {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "self"}
    text = _CACHE.sub("cache", ast.unparse(tree))
    return _Source(_CACHE_UPDATE.sub(r"\1)", text), tuple(sorted(names)), tuple(sorted(own)))
