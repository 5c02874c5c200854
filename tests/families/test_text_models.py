"""The text models of vision-language models, as backbones of their own, equal each sequence alone."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from text_models import text_model
from transformers import CONFIG_MAPPING

import fastpack
from fastpack.errors import FastpackWarning, UntriedVersionWarning
from fastpack.exactness.inputs import INPUT_KINDS
from fastpack.exactness.oracle import Oracle, checkpointings
from fastpack.exactness.tiny import model_types
from fastpack.families.registry import FAMILIES

HERE = sorted(name for name in FAMILIES if name not in model_types() and name in CONFIG_MAPPING)
"""The text models that only a vision-language model holds, of those that the installed transformers has."""


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", HERE)
def test_exact(name: str) -> None:
    """Each kind of input is exact, with both kinds of checkpointing; taken for one sequence, it is not."""
    family, model = FAMILIES[name], text_model(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FastpackWarning)
        warnings.simplefilter("ignore", UntriedVersionWarning)
        fastpack.patch(model)
    report = fastpack.report(model)
    assert report.tier == family.tier
    assert not report.skipped
    oracle = Oracle.of(lambda dtype: text_model(name, dtype), torch.float32, family.routers)
    result = oracle.prove(model)
    assert result.problem is None
    assert len(result.checks) == len(INPUT_KINDS) + len(checkpointings(model)) + 1


@pytest.mark.skipif("molmo2_text" not in HERE, reason="not in this transformers")
@pytest.mark.parametrize("settings", [{"qk_norm_type": "olmo"}, {"norm_after": True}], ids=str)
def test_settings_of_molmo_2(settings: dict[str, Any]) -> None:
    """Norms of whole projections, and norms behind each branch, are fast too."""
    model = fastpack.patch(text_model("molmo2_text", **settings))
    assert fastpack.report(model).tier == "fast"
    assert Oracle.of(lambda dtype: text_model("molmo2_text", dtype, **settings), torch.float32).prove(model).passed


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [name for name in HERE if not any(m.scan for m in FAMILIES[name].mixers.values())])
def test_the_stock_model_leaks(name: str) -> None:
    """The same proof fails for the stock model, which takes packed sequences for one; recurrences refuse them."""
    oracle = Oracle.of(lambda dtype: text_model(name, dtype), torch.float32, FAMILIES[name].routers)
    result = oracle.prove(text_model(name))
    assert {check.what: check.error for check in result.checks}["packed_seq_lens"] > 0.01
