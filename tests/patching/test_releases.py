"""Upstream modules with unknown sources: edited by hand, or rewritten by machine as a future release might be."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from oracle import make_sequences, run_alone
from patch_checks import check_exact
from tiny import VOCAB, tiny_config

import fastpack
from fastpack.errors import FastpackWarning
from fastpack.exactness.tiny import build
from fastpack.families.lock import is_proved
from fastpack.families.registry import FAMILIES
from fastpack.families.source import UNREADABLE, source_hash


@pytest.fixture
def released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function: ``released(model_type, rewrite)`` replaces a family's upstream module by a rewritten one."""

    def put(model_type: str, rewrite: Any) -> ModuleType:
        upstream = importlib.import_module(FAMILIES[model_type].module)
        before = Path(str(upstream.__file__)).read_text(encoding="utf-8")
        source = rewrite(before)
        assert source != before
        path = tmp_path / "models" / model_type / f"modeling_{model_type}.py"
        path.parent.mkdir(parents=True)
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(upstream.__name__, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, upstream.__name__, module)
        spec.loader.exec_module(module)
        return module

    return put


def model_of(module: ModuleType, model_type: str) -> Any:
    (name,) = (name for name in FAMILIES[model_type].fast if name.endswith("ForCausalLM"))
    config = tiny_config(model_type)
    config._attn_implementation = "eager"
    return build(getattr(module, name)._from_config, config, dtype=torch.float32).train()


def edit(before: str, after: str) -> Any:
    def rewrite(source: str) -> str:
        assert before in source
        return source.replace(before, after)

    return rewrite


class Renamed(ast.NodeTransformer):
    """A rewrite that renames every variable that a function sets, and swaps the operands of every sum."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        arguments = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
        stored = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
        for each in ast.walk(node):
            if isinstance(each, ast.Name) and each.id in stored - arguments:
                each.id = f"new_{each.id}"
            if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mult):
                each.left, each.right = each.right, each.left
        return node


def renamed(source: str) -> str:
    return ast.unparse(ast.fix_missing_locations(Renamed().visit(ast.parse(source))))


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma2", "olmo2", "mixtral"])
def test_a_release_that_only_renames_is_matched(model_type: str, released: Any) -> None:
    """Every fast class has an unknown source. A warning is an error here."""
    module, family = released(model_type, renamed), FAMILIES[model_type]
    unseen = [name for name in family.fast if not is_proved(name, source_hash(getattr(module, name)))]
    assert UNREADABLE not in {source_hash(getattr(module, name)) for name in family.fast}
    assert any(name.endswith("Attention") for name in unseen)
    model = model_of(module, model_type)
    alone = run_alone(model, make_sequences(VOCAB))
    fastpack.patch(model, loss="fused", strict=True)
    report = fastpack.report(model)
    assert (report.tier, report.skipped, set(report.matched)) == ("fast", (), set(unseen))
    fastpack.patch(model)
    check_exact(model, alone)


EDITS: dict[str, tuple[str, str, str]] = {
    "LlamaRMSNorm": ("variance + self.variance_epsilon", "variance + 0.5 + self.variance_epsilon", "fast"),
    "LlamaMLP": ("self.act_fn(self.gate_proj(x)) * self.up_proj(x)", "self.act_fn(self.gate_proj(x))", "fast"),
    "LlamaAttention": (
        "query_states = self.q_proj(hidden_states)",
        "query_states = -self.q_proj(hidden_states)",
        "varlen",
    ),
    "LlamaDecoderLayer": (
        "hidden_states = residual + hidden_states",
        "hidden_states = residual - hidden_states",
        "fast",
    ),
}


@pytest.mark.parametrize("cls", EDITS)
def test_a_line_edited_by_hand_that_computes_something_else(cls: str, released: Any) -> None:
    """Only this class falls to a lower tier, by name, and the model is exact for its new results."""
    before, after, tier = EDITS[cls]
    model = model_of(released("llama", edit(before, after)), "llama")
    alone = run_alone(model, make_sequences(VOCAB))
    with pytest.warns(FastpackWarning, match=rf"{cls} of transformers .* a twin of it does not match"):
        fastpack.patch(model)
    report = fastpack.report(model)
    assert report.tier == tier
    assert cls in dict(report.skipped)
    assert cls not in report.matched
    check_exact(model, alone)


def test_a_line_edited_by_hand_that_computes_the_same(released: Any) -> None:
    module = released(
        "llama",
        edit("self.act_fn(self.gate_proj(x)) * self.up_proj(x)", "self.up_proj(x) * self.act_fn(self.gate_proj(x))"),
    )
    model = model_of(module, "llama")
    fastpack.patch(model, strict=True)
    assert fastpack.report(model).matched == ("LlamaMLP",)


def test_a_module_as_it_was_is_proved(released: Any) -> None:
    """Control: with other comments and blank lines, a class needs no match."""
    model = model_of(released("llama", lambda source: f"# another copy\n{source}"), "llama")
    assert fastpack.report(fastpack.patch(model, strict=True)).matched == ()
