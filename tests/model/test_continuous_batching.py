"""transformers' continuous batching, whose paged cache keeps sequences apart: a patched model generates as stock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import make_sequences
from tiny import VOCAB
from transformers import DynamicCache, GenerationConfig

import fastpack
from fastpack.exactness.tiny import build_tiny

configurations = pytest.importorskip("transformers.generation.configuration_utils")
if not hasattr(configurations, "ContinuousBatchingConfig"):
    pytest.skip("this release of transformers has no configuration of it", allow_module_level=True)


def generated(model: Any) -> list[tuple[list[int], str | None]]:
    """Return the new tokens of each prompt, and the error that ended it."""
    result = model.generate_batch(
        inputs=[s.tolist() for s in make_sequences(VOCAB, (3, 2, 30))],
        generation_config=GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=configurations.ContinuousBatchingConfig(
            page_size=8, num_blocks=32, max_batch_tokens=64
        ),
        progress_bar=False,
    )
    return [(result[name].generated_tokens, result[name].error) for name in sorted(result)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt2", "gemma3", "persimmon"])
def test_it_is_stock(model_type: str) -> None:
    """This holds on the fast and the varlen tier, with windows, and with a packing context."""
    model = build_tiny(model_type).eval()
    stock = generated(model)
    assert all(len(tokens) == 5 and error is None for tokens, error in stock)
    assert generated(fastpack.patch(model)) == stock


def test_other_caches_are_refused_beside_a_packed_batch() -> None:
    model = fastpack.patch(build_tiny("llama"))
    for name in ("cache", "past_key_values"):
        with pytest.raises(fastpack.PackingError, match="These run the stock forward"):
            model(input_ids=torch.full((1, 9), 5), packed_seq_lens=[4, 5], **{name: DynamicCache()})
