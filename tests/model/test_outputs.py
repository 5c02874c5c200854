"""A forward's tensors are freed once nothing refers to them: logits and graphs are most of a step's memory."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
from oracle import INPUT_KINDS, make_sequences

import fastpack
from fastpack.exactness.tiny import FIRST_PLAIN, build_tiny

pytestmark = pytest.mark.usefixtures("no_collection")


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", INPUT_KINDS)
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "bamba", "bloom"])
def test_nothing_waits_for_a_collection(model_type: str, kind: str) -> None:
    model: Any = fastpack.patch(build_tiny(model_type).train())
    batch = INPUT_KINDS[kind](make_sequences(76 + FIRST_PLAIN))
    for backward in (True, False):
        out = model(**batch, output_hidden_states=True)
        references = [weakref.ref(tensor) for tensor in (out.logits, *out.hidden_states)]
        if backward:
            out.loss.backward()
        del out
        assert not any(ref() is not None for ref in references)
