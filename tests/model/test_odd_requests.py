"""Rare settings and arguments: as exact as the usual ones, or refused before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from oracle import make_sequences, run_alone
from patch_checks import check_exact
from tiny import VOCAB, tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastpack
from fastpack.errors import PackingError, UnsupportedModelError
from fastpack.exactness.tiny import build_tiny
from fastpack.families.registry import FAMILIES
from fastpack.model.checks import refuse_positions
from fastpack.packing.seqlens import PackedSeqLens

LENGTHS = (9, 7)
IDS = torch.randint(4, 80, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
CU = torch.tensor([0, 9, 16], dtype=torch.int32)
PACKED: dict[str, dict[str, Any]] = {
    "lengths": {"packed_seq_lens": [*LENGTHS]},
    "positions": {"position_ids": POSITIONS},
    "segments": {"attention_mask": torch.tensor([[1] * 9 + [2] * 7])},
    "offsets": {"cu_seq_lens_q": CU, "cu_seq_lens_k": CU, "max_length_q": 9, "max_length_k": 9},
}


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("asked", ["use_cache", "output_attentions"])
@pytest.mark.parametrize("how", PACKED)
@pytest.mark.parametrize("model_type", ["llama", "bloom", "gptj", "mamba", "trocr", "rwkv"])
def test_packed_batches_are_refused_on_the_stock_path(model_type: str, how: str, asked: str, labels: bool) -> None:
    """Heads that drop the packing would run the stock forward over the whole row."""
    model = fastpack.patch(build_tiny(model_type))
    batch = {"input_ids": IDS, **PACKED[how], **({"labels": IDS} if labels else {})}
    with pytest.raises(PackingError, match="These run the stock forward"):
        model(**batch, **{asked: True})
    out = model(input_ids=IDS, attention_mask=torch.ones_like(IDS), **{asked: True})
    assert out.logits.shape[:2] == IDS.shape


ROPE: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        "rope_theta": 1e4,
        "rope_type": "longrope",
        "factor": 2.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1 + 0.1 * i for i in range(8)],
        "long_factor": [2 + 0.3 * i for i in range(8)],
    },
}


class Operations(TorchDispatchMode):
    """Count the operations that run inside."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def with_rope(model_type: str, kind: str, **further: Any) -> Any:
    longest = {"max_position_embeddings": 16} if kind == "dynamic" else {}
    return build_tiny(model_type, rope_parameters={**ROPE[kind], **further}, **longest)


@pytest.mark.parametrize("kind", ROPE)
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text", "qwen4_exp"])
def test_frequencies_of_each_length_with_positions_along_several_axes(model_type: str, kind: str) -> None:
    shares = [1.0, 1.1, 1.2, 1.3]
    further = {"short_factor": shares, "long_factor": [2 * share for share in shares]} if kind == "longrope" else {}
    model = with_rope(model_type, kind, partial_rotary_factor=0.5, **further).train()
    alone = run_alone(model, make_sequences(VOCAB))
    fastpack.patch(model)
    check_exact(model, alone, 1e-4)  # the stock model's own error in float32, from its delta rule


@pytest.mark.parametrize("kind", ROPE)
def test_positions_that_go_on_are_refused_where_lengths_are_read_from_them(kind: str) -> None:
    model = fastpack.patch(with_rope("llama", kind))
    positions = torch.cat([torch.arange(9), torch.arange(7) + 12])[None]
    with pytest.raises(PackingError, match="continue above those of the sequence before"):
        model(input_ids=IDS, position_ids=positions, packed_seq_lens=[*LENGTHS])
    offsets = torch.cat([torch.arange(9) + 30, torch.arange(7) + 20])[None]
    assert model(input_ids=IDS, position_ids=offsets, packed_seq_lens=[*LENGTHS]).logits.isfinite().all()
    assert model(input_ids=IDS, **PACKED["positions"]).logits.isfinite().all()
    fixed = fastpack.patch(tiny_model("llama"))
    assert fixed(input_ids=IDS, position_ids=positions, packed_seq_lens=[*LENGTHS]).logits.isfinite().all()


def test_positions_that_go_on_are_refused_under_hooks_of_accelerate_too() -> None:
    model = fastpack.patch(with_rope("llama", "dynamic"))
    add_hook_to_module(model.model.rotary_emb, ModelHook())
    ids = torch.full((1, 7), 5)
    with pytest.raises(PackingError, match="continue above those of the sequence before"):
        model(input_ids=ids, packed_seq_lens=[3, 4], position_ids=torch.tensor([[0, 1, 2, 9, 10, 11, 12]]))


def test_positions_are_looked_at_only_where_somebody_needs_it() -> None:
    """Each check would wait for the device, at every step of a trainer that passes positions."""
    packed = PackedSeqLens.from_lengths([*LENGTHS])
    usual, by_length = fastpack.patch(tiny_model("llama")), fastpack.patch(with_rope("llama", "dynamic"))
    looks = []
    for model in (usual, by_length):
        with Operations() as seen:
            refuse_positions(model.model, FAMILIES["llama"], {"position_ids": POSITIONS}, packed)
        looks.append(seen.count)
    assert looks[0] == 0
    assert looks[1] > 0


@pytest.mark.parametrize("model_type", ["llama4_text", "deepseek_v2"])
def test_complex_tables_of_each_length_are_refused(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match="complex tables"):
        fastpack.patch(with_rope(model_type, "dynamic"))


def test_frequencies_of_each_length_for_a_kind_of_layer_that_there_is_none_of() -> None:
    kinds = {"sliding_attention": ROPE["dynamic"], "full_attention": {"rope_theta": 1e4, "rope_type": "default"}}
    model = build_tiny("gemma3_text", layer_types=["full_attention"] * 2, rope_parameters=kinds).train()
    alone = run_alone(model, make_sequences(VOCAB))
    check_exact(fastpack.patch(model), alone)
    mixed = build_tiny("gemma3_text", layer_types=[*kinds], rope_parameters=kinds)
    with pytest.raises(UnsupportedModelError, match=r"\(sliding_attention: dynamic\), .* Nothing was changed"):
        fastpack.patch(mixed)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "minicpm3"])
def test_latent_attention_with_more_key_value_heads_than_heads(model_type: str) -> None:
    """The module ignores this setting, whose default suits more heads."""
    model = build_tiny(model_type, num_key_value_heads=128).train()
    alone = run_alone(model, make_sequences(VOCAB))
    check_exact(fastpack.patch(model), alone)


@pytest.mark.parametrize("setting", ["use_bidirectional_attention", "rope_parameters"])
def test_what_a_composite_sets_for_its_text_is_read(setting: str) -> None:
    nested = dict.fromkeys(("full_attention", "sliding_attention"), ROPE["dynamic"])
    model = build_tiny("gemma3")
    assert model.config.get_text_config() is not model.config
    fastpack.unpatch(fastpack.patch(model))
    setattr(model.config.get_text_config(), setting, nested if setting == "rope_parameters" else True)
    with pytest.raises(UnsupportedModelError):
        fastpack.patch(model)


@pytest.mark.parametrize("model_type", ["big_bird", "mllama", "xlm", "zaya", "roberta", "xmod"])
def test_positions_of_ones_own_are_refused_where_a_model_counts_anew(model_type: str) -> None:
    model = fastpack.patch(build_tiny(model_type))
    assert model(input_ids=IDS, **PACKED["positions"]).logits.shape[1] == IDS.shape[1]
    for positions in (POSITIONS + 5, POSITIONS + (POSITIONS > 3)):
        with pytest.raises(PackingError, match="do not count 0, 1, 2"):
            model(input_ids=IDS, position_ids=positions, packed_seq_lens=[*LENGTHS])


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("doge", {"sliding_window": 8}),
    ("roformer", {"rotary_value": True}),
    ("roformer", {"max_position_embeddings": 40}),
]


@pytest.mark.parametrize(("model_type", "settings"), VARIANTS)
def test_variants_of_a_family(model_type: str, settings: dict[str, Any]) -> None:
    """Their modules mix tokens elsewhere, or count tokens of the whole batch, so they run on rows."""
    model = build_tiny(model_type, **settings).train()
    alone = run_alone(model, make_sequences(VOCAB))
    fastpack.patch(model)
    assert fastpack.report(model).tier == "re-padded model"
    check_exact(model, alone)


def test_routing_over_a_whole_batch_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="is_moe in its config can't be patched: its routing mixes"):
        fastpack.patch(build_tiny("doge", is_moe=True))


@pytest.mark.parametrize("lengths", [(9, 7), (8, 8), (6, 5, 5)])
def test_xlnet_makes_no_cache_in_evaluation(lengths: tuple[int, ...]) -> None:
    model = build_tiny("xlnet").eval()
    parts: list[Tensor] = list(IDS[0].split(lengths))
    with torch.no_grad():
        alone = [model(input_ids=part[None]).logits[0] for part in parts]
        fastpack.patch(model)
        together = model(input_ids=IDS, packed_seq_lens=[*lengths])
    assert torch.allclose(together.logits[0], torch.cat(alone), atol=1e-5)
    assert together.mems is None
