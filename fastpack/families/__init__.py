"""The table of families: ``model_type`` to declaration.

Adding a family is one file of this folder (the fast rung) or one row of :mod:`fastpack.families.varlen`, one line in
the list below, and one row in the shared test's table.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
import textwrap
from types import FunctionType
from typing import Any

from torch import nn

from fastpack.families import (
    cohere,
    gemma,
    gemma2,
    gemma3_text,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
)
from fastpack.families.mixers import MIXER_FAMILIES
from fastpack.families.refused import REFUSED
from fastpack.families.repadded import REPADDED_FAMILIES
from fastpack.families.scoped import SCOPED_FAMILIES
from fastpack.families.spec import AttentionSpec, DecoderSpec, Family, HeadSpec, MlpSpec, NormSpec, Spec
from fastpack.families.varlen import VARLEN_FAMILIES

__all__ = [
    "FAMILIES",
    "FAST_FAMILIES",
    "MIXER_FAMILIES",
    "REFUSED",
    "REPADDED_FAMILIES",
    "SCOPED_FAMILIES",
    "VARLEN_FAMILIES",
    "AttentionSpec",
    "DecoderSpec",
    "Family",
    "HeadSpec",
    "MlpSpec",
    "NormSpec",
    "Spec",
    "family_of",
    "source_hash",
]

FAST_FAMILIES: tuple[Family, ...] = (
    cohere.FAMILY,
    gemma.FAMILY,
    gemma2.FAMILY,
    gemma3_text.FAMILY,
    granite.FAMILY,
    llama.FAMILY,
    mistral.FAMILY,
    mixtral.FAMILY,
    olmo2.FAMILY,
    phi3.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    smollm3.FAMILY,
)

ALL_FAMILIES = (*FAST_FAMILIES, *VARLEN_FAMILIES, *SCOPED_FAMILIES, *MIXER_FAMILIES, *REPADDED_FAMILIES)
FAMILIES: dict[str, Family] = {family.model_type: family for family in ALL_FAMILIES}


def family_of(backbone: nn.Module) -> Family | None:
    """The family whose backbone class this is, matched by its exact class, or None."""
    cls = type(backbone)
    for family in FAMILIES.values():
        if cls.__name__ == family.backbone and cls.__module__ == family.module:
            return family
    return None


# What a forward calls in its own module, and what decides its result with it.
_HELPERS = ("apply_rotary_pos_emb", "rotate_half")


@functools.cache
def source_hash(cls: Any) -> str:
    """Hash of what a class's forward computes: the forward and the rotary helpers that it calls.

    Taken over the syntax tree without docstrings and annotations, so that comments and formatting don't matter.
    """
    module = sys.modules[cls.__module__]
    forward = inspect.unwrap(cls.forward)
    parts = [_normal_form(forward)]
    names = forward.__code__.co_names
    for name in sorted({*_HELPERS} & {*names, *(["rotate_half"] if "apply_rotary_pos_emb" in names else [])}):
        helper = getattr(module, name, None)
        if helper is not None:
            parts.append(_normal_form(inspect.unwrap(helper)))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _normal_form(function: FunctionType) -> str:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
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
    return ast.unparse(tree)
