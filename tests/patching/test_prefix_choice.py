"""Prefix sharing: the models that may share, the batches that do, and the report's notes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adapter_cases import with_lora
from oracle import FLOAT32_BOUND, compare, flat, make_sequences, padded, relative, run_alone, run_batch
from patch_checks import fingerprint
from prefix_cases import SAVED, grouped, pairs, sharing, words
from rope_types import LONGROPE
from tiny import VOCAB, tiny_model
from torch import nn

import fastpack
from fastpack import PatchError
from fastpack.model.prefix_sharing import LEAST_SAVED
from fastpack.model.unwrap import find_parts
from fastpack.testing.record import Setting


def patched(model: Any) -> Any:
    return fastpack.patch(model, share_prefixes="auto")


def whole(model: Any) -> str:
    """Return the only reason for which batches of this model shared nothing."""
    stats = sharing(model).stats
    assert stats.shared == stats.saved == 0
    (reason,) = stats.whole
    return reason


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("mamba2", "Mamba2Mixer mix tokens too"),
        ("qwen3_next", "Qwen3NextGatedDeltaNet mix tokens too"),
        ("lfm2", "Lfm2ShortConv mix tokens too"),
        ("bloom", "BloomAttention mix tokens too"),
        ("bart", "BartLearnedPositionalEmbedding mix tokens too, or count positions"),
        ("xlnet", "rows of equal length"),
    ],
)
def test_refused_families(model_type: str, why: str) -> None:
    model = Setting().build(model_type)
    before = fingerprint(model)
    with pytest.raises(PatchError, match=why):
        patched(model)
    assert fingerprint(model) == before
    assert not fastpack.is_patched(model)


def test_frequencies_of_their_own_are_refused() -> None:
    model = tiny_model("phi3", **LONGROPE)
    before = fingerprint(model)
    with pytest.raises(PatchError, match="frequencies depend on the length"):
        patched(model)
    assert fingerprint(model) == before
    fastpack.patch(model)


def test_a_refused_option_leaves_the_patch_in_force() -> None:
    model = fastpack.patch(tiny_model("phi3", **LONGROPE))
    with pytest.raises(PatchError, match="Nothing was changed"):
        patched(model)
    assert fastpack.is_patched(model)


def test_options() -> None:
    model = tiny_model("llama")
    with pytest.raises(PatchError, match="graphs='auto' and share_prefixes='auto' exclude each other"):
        fastpack.patch(model, graphs="auto", share_prefixes="auto")
    with pytest.raises(PatchError, match="share_prefixes=True is not a choice"):
        fastpack.patch(model, share_prefixes=True)  # type: ignore[arg-type]
    assert not fastpack.is_patched(model)
    assert not any("prefixes" in note for note in fastpack.report(fastpack.patch(model)).notes)


@pytest.mark.parametrize("offload", [None, "checkpoints"])
@pytest.mark.parametrize("attention", ["auto", "reference", "segments"])
def test_with_other_options(offload: Any, attention: str) -> None:
    model, sequences = tiny_model("llama"), pairs()
    alone = run_alone(model, sequences)
    fastpack.patch(model, share_prefixes="auto", offload=offload, attention=attention, strict=True)
    assert compare(run_batch(model, sequences, "padded left"), alone).worst <= FLOAT32_BOUND
    assert sharing(model).stats.shared == 1


def test_verified() -> None:
    model = fastpack.patch(tiny_model("llama"), share_prefixes="auto", verify=True)
    assert sharing(model).stats.shared == 0, "patched anew behind the check, whose sequences have nothing in common"


def test_where_it_pays() -> None:
    """The limit is a twentieth of the tokens; with one shared token less, a batch is left unchanged."""
    model = patched(tiny_model("llama", max_position_embeddings=128))
    for prompt, shares in ((5, True), (4, False)):
        sequences = grouped([(50 - prompt,), (50 - prompt,)], prompts=(prompt,))
        assert (prompt >= LEAST_SAVED * sum(map(len, sequences))) == shares
        shared = sharing(model).stats.shared
        run_batch(model, sequences, "padded left")
        assert sharing(model).stats.shared - shared == shares
    assert list(sharing(model).stats.whole) == ["less than 5% of the tokens repeat a prefix of another sequence"]


def test_nothing_in_common() -> None:
    model, sequences = tiny_model("llama"), make_sequences(VOCAB)
    alone = run_alone(model, sequences)
    patched(model)
    assert compare(run_batch(model, sequences, "padded left"), alone).worst <= FLOAT32_BOUND
    assert whole(model).startswith("less than 5%")


@pytest.mark.parametrize("kind", ["padded left", "packed_seq_lens"])
def test_one_sequence(kind: str) -> None:
    model = patched(tiny_model("llama"))
    run_batch(model, [words(20, 0)], kind)
    assert whole(model) == "there is one sequence"


def test_padding_alone() -> None:
    model = patched(tiny_model("llama"))
    ids = torch.ones(2, 5, dtype=torch.long)
    assert not model(input_ids=ids, attention_mask=torch.zeros_like(ids)).logits.any()
    assert (sharing(model).stats.tokens, whole(model)) == (0, "there is one sequence")


DROPOUT = "is random, and differs between copies of a token"


@pytest.mark.parametrize(
    ("model_type", "settings", "what"),
    [
        ("llama", {"attention_dropout": 0.1}, "LlamaAttention.attention_dropout=0.1"),
        ("opt", {"dropout": 0.1}, "OPTDecoder.dropout=0.1"),
        ("mixtral", {"router_jitter_noise": 0.1}, "MixtralSparseMoeBlock.jitter_noise=0.1"),
    ],
)
def test_noise_in_training(model_type: str, settings: dict[str, Any], what: str) -> None:
    """Copies of a token would get one mask, so nothing is shared in training, but in evaluation it is."""
    model = patched(tiny_model(model_type, **settings))
    batch = padded(pairs(), "left")
    kwargs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    model(**kwargs)
    assert DROPOUT in whole(model)
    assert any(part in whole(model) for part in (what, model_type.upper()))
    model.eval()
    model(**kwargs)
    assert sharing(model).stats.shared == 1


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_lora_dropout(p: float) -> None:
    model = patched(with_lora(tiny_model("llama"), lora_dropout=p))
    run_batch(model, pairs(), "padded left")
    assert sharing(model).stats.shared == (p == 0)
    if p:
        assert whole(model) == f"Dropout.p=0.1 {DROPOUT}"


def test_noise_that_comes_later() -> None:
    model: Any = patched(tiny_model("llama"))
    run_batch(model, pairs(), "padded left")
    model.model.layers[1].self_attn.attention_dropout = 0.2
    run_batch(model, pairs(), "padded left")
    model.model.layers[1].self_attn.attention_dropout = 0.0
    model.model.embed_tokens.neftune_noise_alpha = 5.0
    run_batch(model, pairs(), "padded left")
    assert sharing(model).stats.shared == 1
    assert list(sharing(model).stats.whole) == [
        f"LlamaAttention.attention_dropout=0.2 {DROPOUT}",
        f"NEFTune's noise {DROPOUT}",
    ]


def test_other_inputs() -> None:
    """Embeddings can't be told apart by ids; other tensors may differ where ids don't."""
    model: Any = tiny_model("llama")
    batch = padded(pairs(), "left")
    embeds = model.get_input_embeddings()(batch["input_ids"])
    mask = batch["attention_mask"]
    fastpack.patch(model)
    expected = model(inputs_embeds=embeds, attention_mask=mask).logits
    patched(model)
    assert torch.equal(model(inputs_embeds=embeds, attention_mask=mask).logits, expected)
    assert whole(model) == "inputs_embeds came with the batch, and may differ between equal ids"


@pytest.mark.parametrize("columns", [True, False])
def test_what_else_comes(columns: bool) -> None:
    """Token types may differ for equal ids. Heads pass on arguments that no backbone reads."""
    model: Any = patched(tiny_model("llama"))
    batch = padded(pairs(), "left")
    further = torch.zeros_like(batch["input_ids"]) if columns else torch.zeros(4, dtype=torch.float64)
    model(**batch, **{"token_type_ids" if columns else "ref_chosen_logps": further})
    assert sharing(model).stats.shared == (not columns)
    if columns:
        assert whole(model).startswith("token_type_ids came with the batch")


def test_positions_of_their_own() -> None:
    """With learned positions, equal ids at other positions are not shared."""
    model, sequences = tiny_model("gpt2"), [words(20, 0), words(20, 0)]
    positions = torch.cat([torch.arange(20), torch.arange(30, 50)])[None]
    alone = [
        model(input_ids=s[None], position_ids=p[None], use_cache=False).logits[0]
        for s, p in zip(sequences, positions[0].split(20), strict=True)
    ]
    patched(model)
    ours = model(**flat(sequences), position_ids=positions, packed_seq_lens=[20, 20]).logits[0]
    assert relative(ours, torch.cat(alone)) <= FLOAT32_BOUND
    assert whole(model).startswith("less than 5%")
    model(**flat(sequences), position_ids=positions % 30, packed_seq_lens=[20, 20])
    assert sharing(model).stats.saved == 20


def test_generate() -> None:
    """With a cache the stock path runs, which shares nothing."""
    model: Any = tiny_model("llama").eval()
    batch = padded(pairs(), "left")
    kwargs = {"input_ids": batch["input_ids"][:-1], "attention_mask": batch["attention_mask"][:-1]}
    expected = model.generate(**kwargs, max_new_tokens=4, do_sample=False)
    patched(model)
    assert torch.equal(model.generate(**kwargs, max_new_tokens=4, do_sample=False), expected)


@pytest.mark.slow
def test_compiled(compile_anew: None) -> None:
    """Nothing is shared under ``torch.compile``, and results stay exact."""
    model, sequences = tiny_model("llama"), pairs()
    alone = run_alone(model, sequences)
    compiled: Any = torch.compile(patched(model), backend="eager")
    result = run_batch(compiled, sequences, "packed_seq_lens")
    assert relative(torch.cat(result.logits), torch.cat(alone.logits)) <= FLOAT32_BOUND
    assert sharing(model).stats.batches == 0


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_compiled_layers(model_type: str, compile_anew: None) -> None:
    """The backbone's forward is not compiled, and shares; attention in compiled layers still gets whole sequences."""
    model, sequences = tiny_model(model_type), pairs()
    alone = run_alone(model, sequences)
    patched(model)
    layers: Any = find_parts(model).backbone
    for layer in layers.layers if model_type == "llama" else layers.h:
        layer.compile(backend="aot_eager")
    for batch in (sequences, sequences[:-1]):
        result = run_batch(model, batch, "padded left")
        assert relative(torch.cat(result.logits), torch.cat(alone.logits[: len(batch)])) <= FLOAT32_BOUND
        if batch is sequences:
            assert compare(result, alone).worst <= FLOAT32_BOUND
    assert sharing(model).stats.shared == 2


def test_one_packing_for_a_reference_in_inference_mode() -> None:
    """Tensors cached in inference mode with the reference's batch also serve the policy's forward after it."""
    model, sequences = patched(tiny_model("gpt2")), pairs()
    batch = fastpack.with_packed_seq_lens(lambda examples: padded(examples, "left"))(sequences)
    kwargs = {"input_ids": batch["input_ids"], "packed_seq_lens": batch["packed_seq_lens"]}
    with torch.inference_mode():
        expected = model(**kwargs).logits
    ours = model(**kwargs).logits
    ours.sum().backward()
    assert torch.equal(ours, expected)
    assert sharing(model).stats.shared == 2


def notes(model: nn.Module) -> list[str]:
    return [note for note in fastpack.report(model).notes if note.startswith("prefixes:")]


def test_report() -> None:
    model = patched(tiny_model("llama"))
    assert notes(model) == ["prefixes: on"]
    total = sum(map(len, pairs()))
    run_batch(model, pairs(), "padded left")
    run_batch(model, pairs(), "packed_seq_lens")
    run_batch(model, [words(20, 0)], "padded left")
    assert notes(model) == [
        f"prefixes: shared in 2 of 3 batches, {2 * SAVED} of {2 * total + 20} tokens saved; nothing shared in 1: "
        "there is one sequence"
    ]
    assert f"{2 * SAVED} of {2 * total + 20} tokens" in str(fastpack.report(model))
    assert fastpack.report(model).to_dict()["notes"] == fastpack.report(model).notes
    fastpack.patch(model)
    assert not notes(model)
