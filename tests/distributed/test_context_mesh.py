"""Batches spread over the ranks of a mesh: the losses and gradients of one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composite_cases import CAUSAL
from oracle import FLOAT32_BOUND, INPUT_KINDS
from ranks import Ranks
from rope_types import ROPE
from spread_work import (
    LENGTHS,
    batches_refused,
    by_length,
    convolved,
    copies,
    exact_or_refused,
    exactness,
    fused_loss,
    images_in_the_backbone,
    images_or_refused,
    left_alone,
    mixed_dtypes,
    noise,
    refused,
    verify_refused,
    wrapped,
)
from tiny import FAST

import fastpack
from fastpack.attention_dispatch import heads_reject
from fastpack.exactness.image_settings import LAYOUTS
from fastpack.exactness.image_text import image_text_types, not_built
from fastpack.exactness.tiny import NOT_BUILT, build_tiny, model_types
from fastpack.families.registry import FAMILIES
from fastpack.layers.mixers.shares import mixer_rejects
from fastpack.packing.shards import share_sizes
from fastpack.patching.options import PatchOptions

KINDS = tuple(INPUT_KINDS)
NAMED = ("llama", "gemma2", "gpt_oss", "qwen3_moe", "deepseek_v3")
"""Grouped heads; windows and softcap; sinks and experts; norms of heads; latent attention."""
HYBRIDS = (
    "bamba",
    "falcon_h1",
    "kimi_linear",
    "lfm2",
    "mamba2",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_text",
    "qwen3_next",
)
HYBRID_BOUND = 1e-4


def check(results: list[dict[str, Any]], ranks: int, bound: float = FLOAT32_BOUND) -> None:
    for result in results:
        assert max(result["errors"].values()) <= bound, result
        assert result["control"] > 100 * bound, result
    assert {tokens for result in results for tokens in result["tokens"]} == {*share_sizes(sum(LENGTHS), ranks)}


@pytest.mark.sample(6)
@pytest.mark.parametrize("family", NAMED)
def test_two_ranks(family: str, ranks: Ranks) -> None:
    check(ranks.run(exactness, family, KINDS), 2)


@pytest.mark.sample(4)
@pytest.mark.parametrize("family", sorted({*FAST} - {*NAMED}))
def test_every_form_of_attention(family: str, ranks: Ranks) -> None:
    check(ranks.run(exactness, family, ("padded left",)), 2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", NAMED)
def test_four_ranks(family: str, four: Ranks) -> None:
    """There are more ranks than heads of keys."""
    check(four.run(exactness, family, KINDS), 4)


@pytest.mark.sample(5)
@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrids(family: str, ranks: Ranks) -> None:
    """Recurrences exchange heads, too, and convolutions get the tokens before a rank's own."""
    check(ranks.run(exactness, family, ("packed_seq_lens", "padded left")), 2, HYBRID_BOUND)


@pytest.mark.parametrize("lengths", [(30, 45), (7,), (2, 1, 4)], ids=str)
@pytest.mark.parametrize("family", ["lfm2", "bamba"])
def test_convolutions_meet_the_tokens_of_ranks_before(family: str, lengths: tuple[int, ...], four: Ranks) -> None:
    """Shares of one or two tokens are shorter than a convolution."""
    for result in four.run(convolved, family, lengths):
        assert result["error"] <= HYBRID_BOUND
        assert result["control"] > 100 * HYBRID_BOUND


@pytest.mark.sample(2)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("rope", ROPE)
def test_frequencies_that_depend_on_the_length(rope: str, checkpointing: bool, ranks: Ranks) -> None:
    """A rank knows the lengths of sequences of which it has a part."""
    for result in ranks.run(by_length, rope, KINDS, checkpointing=checkpointing):
        assert max(result["errors"].values()) <= FLOAT32_BOUND, result
        assert result["control"] > 100 * FLOAT32_BOUND


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", CAUSAL)
def test_images(model_type: str, ranks: Ranks) -> None:
    """Each rank runs the tower on all images. Positions of several axes and features for layers go with tokens."""
    for result in ranks.run(images_or_refused, model_type):
        assert isinstance(result, dict), result
        assert result.pop("control") > 0.1
        assert max(result.values()) <= HYBRID_BOUND, result


COUNTS_ROWS = "emu3"
"""Its tower's batch norm counts the images of all rows, so that a batch is not each row alone, stock or not."""
NOT_SPREAD = {
    *("chameleon", "dots3_note", "glm5_next", "hy_v4_vl", "inkling2", "inkling2_loop", "kosmos-2", "kosmos-2.5"),
    *("minimax_m3_vl", "mistral_large4", "qwen4_exp"),
}
"""Composites whose batches with images can't be spread."""


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted({*LAYOUTS} - {*CAUSAL, COUNTS_ROWS}))
def test_images_of_every_family(model_type: str, ranks: Ranks) -> None:
    if model_type not in image_text_types() or not_built(model_type) is not None:
        pytest.skip("not in this release of transformers")
    for result in ranks.run(images_or_refused, model_type):
        assert isinstance(result, str) == (model_type in NOT_SPREAD), result
        assert isinstance(result, str) or (result.pop("control") > 0.1 and max(result.values()) <= HYBRID_BOUND)


def test_images_that_the_backbone_itself_takes(ranks: Ranks) -> None:
    """Each rank raises, and none waits."""
    said = ranks.run(images_in_the_backbone, on_all=True) + ranks.run(images_or_refused, "chameleon")
    assert all("puts pixel_values in place of the tokens of images" in each for each in said)
    for each in ranks.run(images_in_the_backbone, on_all=False):
        assert "1 argument with images" in each


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in model_types() if name not in NOT_BUILT])
def test_every_family(family: str, ranks: Ranks) -> None:
    """Nothing is silently wrong: a family is exact, or refused before anything changes."""
    for result in ranks.run(exact_or_refused, family):
        assert isinstance(result, str) or result <= HYBRID_BOUND


@pytest.mark.parametrize("checkpointing", [False, True])
def test_with_lora(checkpointing: bool, ranks: Ranks) -> None:
    kinds = ("packed_seq_lens", "padded right")
    check(ranks.run(exactness, "llama", kinds, lora=True, checkpointing=checkpointing), 2)


def test_with_lora_on_4_bits(checkpoint: Path, ranks: Ranks) -> None:
    check(ranks.run(exactness, "llama", ("padded right",), checkpointing=True, in_4bit=checkpoint), 2)


@pytest.mark.sample(9)
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("prompt", [0, 40])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_each_rank_computes_the_loss_of_its_own_tokens(family: str, prompt: int, lora: bool, ranks: Ranks) -> None:
    """With a long prompt, the first rank's tokens have no labels."""
    results = ranks.run(fused_loss, family, prompt=prompt, lora=lora)
    assert [result["tokens"] for result in results] == [*share_sizes(sum(LENGTHS), 2)]
    for result in results:
        assert result["error"] <= FLOAT32_BOUND, result
    assert max(result["control"] for result in results) > 100 * FLOAT32_BOUND, "without the other ranks' losses"


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_engines_take_the_mean(how: str, lora: bool, ranks: Ranks, four: Ranks) -> None:
    """On four ranks, two batches are spread over two ranks each."""
    for group in (ranks, *([four] if ranks.backend == "gloo" else [])):
        for result in group.run(wrapped, how, lora=lora):
            assert result["error"] <= FLOAT32_BOUND


@pytest.mark.parametrize("what", ["other ids", "other lengths", "other labels", "other embeddings", "an empty share"])
def test_batches_that_no_group_can_share(what: str, ranks: Ranks) -> None:
    """Every rank raises the same, and nothing hangs."""
    said = ranks.run(batches_refused, what)
    assert len({*said}) == 1
    assert ("can't be spread" if what == "an empty share" else "must have the same batch") in said[0]


def test_a_rank_that_does_not_come(four: Ranks) -> None:
    """The others get torch's error within their group's time limit."""
    *others, last = four.run(left_alone, 4.0)
    assert last == ("", 0.0)
    for said, seconds in others:
        assert said
        assert seconds < 12


@pytest.mark.parametrize(
    ("family", "options", "why"),
    [
        ("rwkv", {}, "mix tokens too"),
        ("opt", {}, "skips layers at random"),
        ("llama", {"graphs": "auto"}, "exclude each other"),
        ("llama", {"share_prefixes": "auto"}, "exclude each other"),
    ],
)
def test_refused_before_anything_changes(family: str, options: dict[str, Any], why: str, ranks: Ranks) -> None:
    assert all(why in said for said in ranks.run(refused, family, **options))


def test_noise_of_the_whole_row(ranks: Ranks) -> None:
    for whole, spread in ranks.run(noise):
        assert spread == pytest.approx(whole, rel=0.1)


@pytest.mark.parametrize(("with_the_patch", "tier"), [(True, "stock"), (False, "fast")])
def test_verify_says_that_it_cant(with_the_patch: bool, tier: str, ranks: Ranks) -> None:
    for said, left in ranks.run(verify_refused, with_the_patch=with_the_patch):
        assert "patch a copy without it" in said
        assert left == tier


def test_a_mesh_of_one_rank_spreads_nothing() -> None:
    one: Any = SimpleNamespace(size=lambda: 1)
    options = PatchOptions(context_mesh=one, graphs="auto")
    options.check()
    assert not options.spreads


@pytest.mark.parametrize("family", HYBRIDS)
def test_heads_of_mixers_are_known_before(family: str) -> None:
    """The same numbers decide at the patch and at a batch: what three ranks can't share, the patch refuses."""
    model: Any = build_tiny(family)
    row = FAMILIES[family]
    found = [(m, row.mixers[type(m).__name__]) for m in model.modules() if type(m).__name__ in row.mixers]
    assert found
    for module, spec in found:
        assert mixer_rejects(module, spec.fast, 2) is None
        assert (spec.scan == "conv") == (mixer_rejects(module, spec.fast, 7) is None)


def test_copies_and_pickles(ranks: Ranks) -> None:
    for result in ranks.run(copies):
        assert max(result["copied"], result["again"], result["restored"]) <= FLOAT32_BOUND
        assert "Patch it again" in result["said"]
        assert result["report"] == ["context parallelism: each batch is spread over 2 ranks"]


@pytest.mark.parametrize("mesh", ["cp", 2, torch.ones(2)])
def test_no_mesh(mesh: Any) -> None:
    model = build_tiny("llama")
    with pytest.raises(fastpack.PatchError, match="pass a DeviceMesh of one dimension"):
        fastpack.patch(model, context_mesh=mesh)
    assert not fastpack.is_patched(model)


def test_heads_that_ranks_can_share() -> None:
    assert heads_reject(32, 8, 16) is None
    assert heads_reject(14, 2, 2) is None
    assert heads_reject(14, 2, 4) == ("attention of 14 heads, of keys 2, can be spread over 2, 14 ranks, not 4")
    assert heads_reject(7, 7, 2) == "attention of 7 heads can be spread over 7 ranks, not 2"


def test_shares() -> None:
    assert share_sizes(8, 4) == (2, 2, 2, 2)
    with pytest.raises(fastpack.PackingError, match="a batch of 3 tokens can't be spread over the 4 ranks"):
        share_sizes(3, 4)


@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize(
    ("first", "second"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)],
)
def test_heads_of_two_dtypes(first: torch.dtype, second: torch.dtype, size: int, ranks: Ranks) -> None:
    ranks.run(mixed_dtypes, first, second, size)
