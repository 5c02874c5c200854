"""The table of families: ``model_type`` to declaration.

Adding a family is a row of one of the tables that are put together below. What its classes compute is known by their
sources (:mod:`fastpack.families.known_sources`); a source that is new there needs a form, and a proof.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
import textwrap
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from fastpack.families.fast import FAST_FAMILIES
from fastpack.families.known_sources import FORMS
from fastpack.families.recurrent import MIXER_FAMILIES
from fastpack.families.refused import REFUSED
from fastpack.families.repadded import REPADDED_FAMILIES
from fastpack.families.scoped import SCOPED_FAMILIES
from fastpack.families.spec import (
    RUNGS,
    AnyAttentionSpec,
    AttentionSpec,
    DecoderSpec,
    Family,
    HeadSpec,
    LatentAttentionSpec,
    MixerSpec,
    MlpSpec,
    NormSpec,
    Rung,
    SharedAttentionSpec,
    Spec,
)
from fastpack.families.varlen import VARLEN_FAMILIES
from fastpack.utils.classes import stock_class, unwrapped

__all__ = [
    "FAMILIES",
    "FAST_FAMILIES",
    "FORMS",
    "MIXER_FAMILIES",
    "REFUSED",
    "REPADDED_FAMILIES",
    "RUNGS",
    "SCOPED_FAMILIES",
    "UNSHIFTED",
    "VARLEN_FAMILIES",
    "AnyAttentionSpec",
    "AttentionSpec",
    "DecoderSpec",
    "Family",
    "HeadSpec",
    "LatentAttentionSpec",
    "MixerSpec",
    "MlpSpec",
    "NormSpec",
    "Rung",
    "SharedAttentionSpec",
    "Spec",
    "family_of",
    "forward_hash",
    "source_hash",
]

ALL_FAMILIES = (*FAST_FAMILIES, *VARLEN_FAMILIES, *SCOPED_FAMILIES, *MIXER_FAMILIES, *REPADDED_FAMILIES)
FAMILIES: dict[str, Family] = {family.model_type: family for family in ALL_FAMILIES}
UNSHIFTED = frozenset(family.unshifted for family in ALL_FAMILIES if family.unshifted)
"""Class names of heads whose own loss compares each token's logits with the label in the same place."""


def family_of(backbone: nn.Module) -> Family | None:
    """The family whose backbone class this is, matched by its exact class, or None."""
    cls = stock_class(backbone)
    for family in FAMILIES.values():
        if cls.__name__ == family.backbone and cls.__module__ == family.module:
            return family
    return None


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


def forward_hash(forward: object) -> str:
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


class _OneNameForCaches(ast.NodeTransformer):
    """transformers 5.24 says ``cache`` for ``past_key_values`` and ``cache_params``, and hands ``update`` keywords."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = _CACHE.get(node.id, node.id)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        node.attr = _CACHE.get(node.attr, node.attr)
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg = _CACHE.get(node.arg, node.arg)
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        node.arg = None if node.arg is None else _CACHE.get(node.arg, node.arg)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if ast.unparse(node.func) == "cache.update":
            node.keywords = [each for each in node.keywords if ast.unparse(each) != "kwargs=kwargs"]
        return node


def _said(tree: ast.FunctionDef) -> _Said:
    tree = _OneNameForCaches().visit(tree)
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
