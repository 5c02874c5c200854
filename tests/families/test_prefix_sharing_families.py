"""In every family in which attention alone mixes tokens, sharing prefixes changes nothing, and randomness is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import FLOAT32_BOUND, INPUT_KINDS, Result, compare, relative
from torch import Tensor

import fastpack
from fastpack.errors import PatchError
from fastpack.exactness.family_settings import NOT_BUILT
from fastpack.exactness.oracle import run_alone, run_batch
from fastpack.exactness.tiny import build_tiny, model_types, plain_tokens
from fastpack.families.registry import FAMILIES
from fastpack.model.model_runtime import runtime_of
from fastpack.model.prefix_sharing import PrefixSharing
from fastpack.model.unwrap import find_parts
from fastpack.testing.record import Setting

TINY = Setting()
BUILT = [name for name in model_types() if name in FAMILIES and name not in NOT_BUILT]
ELIGIBLE = [name for name in BUILT if not FAMILIES[name].mixers and not FAMILIES[name].repadded]
OTHERS = [name for name in BUILT if name not in ELIGIBLE]
KIND = "padded left"
IN_FLOAT64 = ("bert", "bert-generation", "biogpt", "ctrl", "electra", "ernie", "opt", "qwen3", "roc_bert")
"""Values that are sums of terms that cancel, so that float32 leaves rounding alone: the gradient of a key bias where
positions are added to the embeddings, and qwen3's loss."""
NO_NOISE = {
    # a setting with nothing behind it: modules are there that no token passes, or an attribute that nobody reads
    "dbrx": ("emb_pdrop",),
    "phi4_multimodal": ("embd_pdrop",),
    "diffllama": ("attention_dropout",),
}
LEFT_OUT = "layerdrop"
"""Draws a number for each layer, not for each token."""


def sequences() -> list[Tensor]:
    """Return two completions of three prompts, and one prompt alone."""
    prompts = [plain_tokens(1, n, seed=n)[0] for n in (9, 1, 14)]
    completions = [plain_tokens(1, n, seed=100 + n)[0] for n in (3, 8, 11, 5, 2, 7)]
    return [*(torch.cat([prompts[i % 3], c]) for i, c in enumerate(completions)), prompts[2]]


SAVED = 9 + 1 + 14 + 14


def together(model: Any) -> Result:
    return run_batch(model, INPUT_KINDS[KIND](sequences()), sequences())


@pytest.mark.parametrize("model_type", ELIGIBLE)
def test_exact(model_type: str) -> None:
    model = TINY.build(model_type)
    if model_type in IN_FLOAT64:
        model = model.double()
    expected = run_alone(model, sequences())
    fastpack.patch(model, share_prefixes="auto")
    result = compare(together(model), expected)
    runtime = runtime_of(find_parts(model).backbone)
    assert runtime is not None
    sharing = runtime.sharing
    assert sharing is not None
    assert (sharing.stats.shared, sharing.stats.saved) == (1, SAVED), sharing.stats
    bound = FLOAT32_BOUND
    if result.worst > bound:  # families that amplify rounding: no more than without
        fastpack.patch(model)
        bound = max(bound, 2 * compare(together(model), expected).worst)
    assert result.worst <= bound, result


@pytest.mark.parametrize("share_prefixes", [None, "auto"])
def test_several_streams_of_hidden_states(share_prefixes: Any) -> None:
    """Gemma 3n has four streams, ``[4, B, S, H]``, and each is re-padded."""
    model: Any = TINY.build("gemma3n_text")
    batch = INPUT_KINDS["padded right"](sequences())
    kwargs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    real = batch["attention_mask"].bool()
    stock = model(**kwargs, use_cache=False, output_hidden_states=True).hidden_states
    fastpack.patch(model, share_prefixes=share_prefixes)
    ours = model(**kwargs, output_hidden_states=True).hidden_states
    assert len(ours) == len(stock) > 1
    assert stock[0].shape == (4, *real.shape, model.config.hidden_size)
    for a, b in zip(ours, stock, strict=True):
        assert a.shape == b.shape
        assert relative(a[..., real, :], b[..., real, :]) <= FLOAT32_BOUND
        assert not a[..., ~real, :].any()


@pytest.mark.parametrize("model_type", OTHERS)
def test_refused(model_type: str) -> None:
    model = TINY.build(model_type)
    forwards = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    with pytest.raises((PatchError, fastpack.UnsupportedModelError)):
        fastpack.patch(model, share_prefixes="auto")
    assert not any(forwards.values())
    assert forwards == {name: module.__dict__.get("forward") for name, module in model.named_modules()}


@pytest.mark.parametrize("model_type", ELIGIBLE)
def test_what_is_random_is_seen(model_type: str) -> None:
    """For each of a config's probabilities and noises: a training forward draws numbers, and sharing finds it."""
    settings = find_parts(build_tiny(model_type)).backbone.config.to_dict()
    names = [name for name in settings if any(word in name for word in ("drop", "jitter", "noise"))]
    for name in {*names} - {*NO_NOISE.get(model_type, ())}:
        model = build_tiny(model_type, **{name: 0.25})
        result = list(PrefixSharing()._random(find_parts(model).backbone))
        assert not result, "nothing is, in evaluation"
        model.train()
        result = list(PrefixSharing()._random(find_parts(model).backbone))
        assert bool(result) == (draws(model) and name != LEFT_OUT), (name, result)


def draws(model: Any) -> bool:
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        model(input_ids=plain_tokens(1, 12), use_cache=False)
        return not torch.equal(before, torch.get_rng_state())
