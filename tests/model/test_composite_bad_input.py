"""Composite models get images that don't fit: errors that say what is wrong, after which the model is as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from composite_cases import CAUSAL, results

import fastpack
from fastpack import PackingError
from fastpack.exactness.image_text import batch_of, build_image_text, flat_of, samples
from fastpack.model.model_runtime import runtime_of
from fastpack.model.unwrap import find_parts

NO_MATCH = "(?s)(do not match|don't match|not match|not divisible|shape mismatch|must match|mismatch)"


def check_intact(model: Any, batch: dict[str, Any], before: Any) -> None:
    """Check that a model computes what it did before the error, and holds nothing of the batch that failed."""
    parts = find_parts(model)
    runtime = runtime_of(parts.backbone)
    assert runtime is not None
    assert runtime.handover.entered is None
    assert not runtime.handover.is_pending
    assert parts.composite.config is model.config
    now = results(model, [batch])
    assert torch.equal(now[0], before[0])
    assert all(torch.equal(grad, before[1][name]) for name, grad in now[1].items())


def without_an_image_token(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch in which a token of an image is a word."""
    token = max(batch["input_ids"].unique().tolist())
    ids = batch["input_ids"].clone()
    row, column = (ids == token).nonzero()[-1].tolist()
    ids[row, column] = 5
    return {**batch, "input_ids": ids}


@pytest.mark.sample(3)
@pytest.mark.parametrize("model_type", CAUSAL)
def test_tokens_that_do_not_match_the_images(model_type: str) -> None:
    model = build_image_text(model_type).train()
    rows = samples(model)
    try:
        results(model, [without_an_image_token(model, batch_of(model, rows))])
    except (ValueError, RuntimeError):
        fastpack.patch(model)
    else:
        pytest.skip("this release of transformers drops features without a word")
    for batch in (batch_of(model, rows), flat_of(model, rows)):
        before = results(model, [batch])
        with pytest.raises((ValueError, RuntimeError), match=NO_MATCH):
            results(model, [without_an_image_token(model, batch)])
        check_intact(model, batch, before)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"position_ids": None}, r"\[4, B, S\]"),
        ({"packed_seq_lens": [20, 25]}, "sum to 45"),
        ({"moved": 1}, "packed_seq_lens and position_ids disagree"),
        ({"cut": 1}, "position_ids has shape"),
        ({"axes": 5}, "position_ids has shape"),
    ],
)
def test_a_flat_batch_that_contradicts_itself(change: dict[str, Any], match: str) -> None:
    model = fastpack.patch(build_image_text("qwen3_vl").train())
    batch = flat_of(model, samples(model))
    before = results(model, [batch])
    changed = {**batch, **{name: value for name, value in change.items() if name in batch}}
    if "moved" in change:  # the same number of tokens, but a boundary elsewhere
        first, second, *others = batch["packed_seq_lens"]
        changed["packed_seq_lens"] = [first - 1, second + 1, *others]
    if "cut" in change:
        changed["position_ids"] = batch["position_ids"][..., 1:]
    if "axes" in change:
        changed["position_ids"] = batch["position_ids"][[0, 0, 1, 2, 3]]
    with pytest.raises(PackingError, match=match):
        results(model, [changed])
    check_intact(model, batch, before)
