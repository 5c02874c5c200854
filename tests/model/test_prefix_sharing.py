"""``patch(model, share_prefixes="auto")``: the common start of sequences runs once, and nothing else changes.

All families are in ``tests/families/test_prefix_sharing_families.py``, the search for prefixes in
``tests/packing/test_prefixes.py``, trainers in ``tests/trainers/test_prefix_trainers.py``. Refused and unshared cases
are in ``tests/patching/test_prefix_choice.py``.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import quantised, with_lora
from backbone_calls import Calls
from oracle import (
    FLOAT32_BOUND,
    GPU_FLOAT32_BOUND,
    INPUT_KINDS,
    Result,
    check_repadded,
    compare,
    flat,
    padded,
    relative,
    run_alone,
    run_batch,
)
from packing_cases import filled_up
from prefix_cases import PROMPTS, SAVED, grouped, nodes, pairs, sharing, words
from tiny import tiny_model
from torch import Tensor, nn

import fastpack
from fastpack import PackingError
from fastpack.attention_dispatch import BACKENDS
from fastpack.cuda_graphs.recorder import no_synchronisation
from fastpack.data.packed_collators import PackedPreferenceCollator, PackedSFTCollator
from fastpack.packing.prefixes import Prefixes, find_prefixes

NAIVE_BOUND = 1e-2
FAMILIES = ("llama", "qwen3", "gemma2", "gpt_oss", "deepseek_v3", "mixtral", "gpt2", "gpt_neox", "opt")
"""Families of the fast and the varlen tier: windows, softcap, sinks, latents, experts, learned positions."""
SETTINGS: dict[str, dict[str, Any]] = {"opt": {"dropout": 0.0}}


def build(model_type: str) -> nn.Module:
    model = tiny_model(model_type, **SETTINGS.get(model_type, {}))
    return model.double() if model_type == "opt" else model  # its key biases' gradients are only rounding


def patched(model: Any) -> Any:
    return fastpack.patch(model, share_prefixes="auto")


def seen_by(layers: Any) -> list[int]:
    """Record the number of tokens of each call of a decoder layer from now on."""
    result: list[int] = []
    for layer in layers:
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: result.append((args[0] if args else kwargs["hidden_states"]).shape[1]),
            with_kwargs=True,
        )
    return result


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_kind_of_input(model_type: str) -> None:
    model, sequences = build(model_type), pairs()
    alone = run_alone(model, sequences)
    patched(model)
    for number, kind in enumerate(INPUT_KINDS):
        error = compare(run_batch(model, sequences, kind), alone)
        assert error.worst <= FLOAT32_BOUND, (kind, error)
        assert sharing(model).stats.saved == (number + 1) * SAVED


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_layers_see_each_token_once_and_attention_every_sequence(model_type: str, calls: Calls) -> None:
    model, sequences = build(model_type), pairs()
    patched(model)
    backbone: Any = model.base_model
    seen = seen_by(backbone.layers if model_type == "llama" else backbone.h)
    run_batch(model, sequences, "padded left")
    total = sum(map(len, sequences))
    assert seen == [total - SAVED] * 2 == [nodes(sequences)] * 2
    assert calls.all == [total] * 2
    fastpack.patch(model)
    seen.clear()
    run_batch(model, sequences, "padded left")
    assert seen == [total] * 2, "without the option every token is seen"


def differing(at: int) -> list[Tensor]:
    """Return two completions of each of three prompts that are equal but for the token at this place."""
    prompts = [words(12, 0) for _ in range(3)]
    for number, prompt in enumerate(prompts):
        prompt[at] = 3 + number
    return [torch.cat([prompt, words(6 + n, 9)]) for n in (0, 4) for prompt in prompts]


CASES: dict[str, list[Tensor]] = {
    "chosen and rejected are the same": [words(20, 0), words(9, 1), words(20, 0), words(9, 1)],
    "one is the beginning of the other": [words(20, 0), words(9, 1), words(20, 0)[:13], words(9, 1)],
    "the longer one comes last": [words(20, 0)[:7], words(9, 1), words(20, 0), words(9, 1)[:1]],
    "prompts of one token": grouped([(5, 8), (7, 3)], prompts=(1, 1)),
    "groups of five": grouped([(5, 8), (7, 3), (1, 9), (2, 2), (10, 4)], prompts=(12, 6)),
    "a system prompt before everything": [torch.cat([words(15, 9), s]) for s in pairs()],
    "side by side": [s for pair in zip(pairs()[:4], pairs()[4:], strict=True) for s in pair],
    "one that stands alone": [*pairs(), words(23, 77)],
    "prompts that differ in their first token": differing(0),
    "prompts that differ in a token in between": differing(7),
    "prompts that differ in their last token": differing(11),
    "single tokens": [words(1, 3), words(1, 3), words(1, 4)],
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_shared(name: str) -> None:
    model, sequences = tiny_model("llama", max_position_embeddings=128), CASES[name]
    alone = run_alone(model, sequences)
    patched(model)
    for kind in ("padded both sides", "packed_seq_lens"):
        result = run_batch(model, sequences, kind)
        if name == "single tokens":  # nothing is predicted
            assert relative(torch.cat(result.logits), torch.cat(alone.logits)) <= FLOAT32_BOUND
        else:
            error = compare(result, alone)
            assert error.worst <= FLOAT32_BOUND, (kind, error)
    assert sharing(model).stats.saved == 2 * (sum(map(len, sequences)) - nodes(sequences)) > 0


@pytest.mark.parametrize("kind", ["first", "longer", "other"])
def test_negative_control(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one shared token too many, or the wrong sequences, the comparison fails, and so does the check of ids."""
    model, sequences = tiny_model("llama"), pairs()
    alone = run_alone(model, sequences)
    true = find_prefixes([len(s) for s in sequences], torch.cat(sequences))
    longer = tuple(n + (n == max(true.shared)) for n in true.shared)
    wrong = {
        "first": Prefixes((0, 1), (0, 1)),  # two prompts' first tokens
        "longer": Prefixes(true.order, longer),
        "other": Prefixes((0, 5), (0, 4)),
    }[kind]
    monkeypatch.setattr("fastpack.packing.reading.find_prefixes", lambda *_: wrong)
    monkeypatch.setattr("fastpack.packing.seqlens.find_prefixes", lambda *_: wrong)
    patched(model)
    sharing(model).least_saved = 0.0
    with pytest.raises(PackingError, match="sequences that began alike now differ"):
        run_batch(model, sequences, "padded left")
    monkeypatch.setattr(
        fastpack.packing.prefixes.SharedTokens, "keep_ids", lambda self, ids: ids.index_select(1, self.copies.first)
    )
    assert compare(run_batch(model, sequences, "padded left"), alone).logits > NAIVE_BOUND


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2", "opt"])
def test_gradient_checkpointing(model_type: str, use_reentrant: bool, calls: Calls) -> None:
    model: Any = build(model_type)
    sequences = pairs()
    alone = run_alone(model, sequences)
    patched(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    for kind in ("padded left", "TRL's keywords"):
        assert compare(run_batch(model, sequences, kind), alone).worst <= FLOAT32_BOUND
    assert len(calls.all) == 4 * 2, "each layer ran forward, and again in the backward pass"
    assert sharing(model).stats.shared == 2


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora(checkpointing: bool) -> None:
    model, sequences = with_lora(tiny_model("llama")), pairs()
    alone = run_alone(model, sequences)
    patched(model)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    for kind in ("padded left", "TRL's keywords"):
        assert compare(run_batch(model, sequences, kind), alone).worst <= FLOAT32_BOUND
    assert sharing(model).stats.shared == 2
    batch = padded(sequences, "left")
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    with model.disable_adapter(), torch.no_grad():  # the reference model, as in trainers
        ours = model(**inputs).logits[batch["attention_mask"] != 0]
        assert sharing(model).stats.shared == 3
        fastpack.unpatch(model)
        stock = torch.cat([model(input_ids=s[None], use_cache=False).logits[0] for s in sequences])
    assert relative(ours, stock) <= FLOAT32_BOUND


def test_four_bits(tmp_path: Path) -> None:
    model = with_lora(quantised(tmp_path, load_in_4bit=True, bnb_4bit_quant_type="nf4"))
    sequences = pairs()
    alone = run_alone(model, sequences)
    patched(model)
    assert compare(run_batch(model, sequences, "padded left"), alone).worst <= FLOAT32_BOUND
    assert sharing(model).stats.saved == SAVED


def test_fused_loss() -> None:
    model, sequences = tiny_model("llama"), pairs()
    alone = run_alone(model, sequences)
    fastpack.patch(model, share_prefixes="auto", loss="fused")
    for number, kind in enumerate(INPUT_KINDS):
        batch = INPUT_KINDS[kind](sequences)
        model.zero_grad(set_to_none=True)
        out = model(**batch, num_items_in_batch=sum(len(s) - 1 for s in sequences))
        assert out.logits is None
        out.loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert compare(Result(alone.logits, out.loss, grads), alone).worst <= FLOAT32_BOUND
        assert sharing(model).stats.shared == number + 1


@pytest.mark.parametrize("model_type", ["mixtral", "granitemoe"])
@pytest.mark.parametrize("loss", [None, "fused"])
def test_router_logits_and_hidden_states(model_type: str, loss: Any) -> None:
    """The load-balancing loss counts every token of every sequence, as without sharing."""
    model: Any = tiny_model(model_type, router_aux_loss_coef=0.5)
    batch = padded(pairs(), "right")
    real = batch["attention_mask"].bool()
    expected: dict[str, Any] = {"output_hidden_states": True, "output_router_logits": True, "use_cache": False}

    def run() -> Any:
        model.zero_grad(set_to_none=True)
        out = model(**batch, **expected)
        out.loss.backward()
        return out, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    stock, stock_grads = run()
    fastpack.patch(model, share_prefixes="auto", loss=loss)
    ours, grads = run()
    assert sharing(model).stats.saved == SAVED
    assert relative(ours.aux_loss, stock.aux_loss) <= FLOAT32_BOUND
    logits = [stock.logits[real].detach()]
    error = compare(Result(logits, ours.loss, grads), Result(logits, stock.loss, stock_grads))
    assert error.worst <= FLOAT32_BOUND, error
    assert len(ours.hidden_states) == len(stock.hidden_states) == 3
    check_repadded(ours, stock, real)


def test_a_classifier() -> None:
    from transformers import AutoModelForSequenceClassification

    model = tiny_model("llama", auto=AutoModelForSequenceClassification, num_labels=1)
    sequences = pairs()
    alone = torch.cat([model(input_ids=s[None], use_cache=False).logits for s in sequences])
    patched(model)
    batch = padded(sequences, "right")
    ours = model(input_ids=batch["input_ids"][:-1], attention_mask=batch["attention_mask"][:-1]).logits
    assert relative(ours, alone) <= FLOAT32_BOUND
    assert sharing(model).stats.saved == SAVED


def examples() -> list[dict[str, Any]]:
    sequences = pairs()
    prompts = [(s[:n].tolist(), s[n:].tolist()) for s, n in zip(sequences, 2 * PROMPTS, strict=True)]
    return [
        {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": prompts[i + 4][1]}
        for i, (prompt, chosen) in enumerate(prompts[:4])
    ]


@pytest.mark.parametrize("size", ["its own", "filled up"])
def test_the_collator_of_pairs(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collator finds prefixes with the batch: the model finds none, and reads no ids."""
    model = tiny_model("llama", max_position_embeddings=256)
    sequences = pairs()
    alone = run_alone(model, sequences)
    batch = PackedPreferenceCollator()(examples())
    if size == "filled up":
        assert batch["packed_seq_lens"].total_tokens < 200
        batch = filled_up(batch, 200)
    assert batch["packed_seq_lens"].prefixes.saved == SAVED
    patched(model)
    monkeypatch.setattr("fastpack.packing.seqlens.find_prefixes", lambda *_: pytest.fail("they were found before"))
    batch["labels"] = batch["packed_seq_lens"].mask_first_labels(batch["input_ids"])
    batch["labels"][:, sum(map(len, sequences)) :] = -100
    model.zero_grad(set_to_none=True)
    out = model(**batch, num_items_in_batch=sum(len(s) - 1 for s in sequences))
    out.loss.backward()
    logits = list(out.logits[0].detach()[: sum(map(len, sequences))].split([len(s) for s in sequences]))
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    error = compare(Result(logits, out.loss.detach(), grads), alone)
    assert error.worst <= FLOAT32_BOUND, error
    assert sharing(model).stats.saved == SAVED


def test_a_batch_that_was_changed_behind_its_collator() -> None:
    model = patched(tiny_model("llama"))
    batch = PackedPreferenceCollator()(examples())
    batch["input_ids"][0, 3] += 1
    with pytest.raises(PackingError, match="input_ids changed after"):
        model(**batch)


def test_other_collators() -> None:
    """Supervised examples with a system prompt, and any wrapped collator."""
    rows = [{"input_ids": torch.cat([words(15, 9), s]).tolist()} for s in pairs()]
    assert PackedSFTCollator()(rows)["packed_seq_lens"].prefixes.saved == SAVED + 7 * 15
    wrapped = fastpack.with_packed_seq_lens(lambda sequences: padded(sequences, "left"))
    assert wrapped(pairs())["packed_seq_lens"].prefixes.saved == SAVED


@pytest.mark.parametrize("kind", INPUT_KINDS)
def test_ids_come_with_the_lengths(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy brings both. Prefixes are found again only if lengths were made without ids."""
    model = patched(tiny_model("llama"))
    looked: list[int] = []
    original = find_prefixes
    monkeypatch.setattr("fastpack.packing.seqlens.find_prefixes", lambda *a: looked.append(1) or original(*a))
    run_batch(model, pairs(), kind)
    assert not looked
    lengths = fastpack.PackedSeqLens.from_lengths([len(s) for s in pairs()])
    model(**flat(pairs()), packed_seq_lens=lengths)
    assert looked == [1]
    assert sharing(model).stats.shared == 2


def test_copies_of_the_model() -> None:
    """Copies are patched too, and count by themselves; undoing the patch undoes all of it."""
    model, sequences = tiny_model("llama"), pairs()
    alone = run_alone(model, sequences)
    patched(model)
    run_batch(model, sequences, "padded left")
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert sharing(same).stats.batches == 0
        assert compare(run_batch(same, sequences, "padded left"), alone).worst <= FLOAT32_BOUND
        assert sharing(same).stats.shared == 1
    assert sharing(model).stats.batches == 1
    fastpack.unpatch(model)
    assert "forward" not in model.model.__dict__


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_float32_on_a_gpu(model_type: str) -> None:
    sequences = pairs()
    model = tiny_model(model_type).cuda()
    alone = run_alone(model, sequences)
    fastpack.patch(model)
    bound = max(GPU_FLOAT32_BOUND, 2 * compare(run_batch(model, sequences, "padded left"), alone).worst)
    patched(model)
    for number, kind in enumerate(INPUT_KINDS):
        error = compare(run_batch(model, sequences, kind), alone)
        assert error.worst <= bound, (kind, error)
        assert sharing(model).stats.shared == number + 1


@pytest.mark.gpu
@pytest.mark.parametrize("attention", BACKENDS)
def test_bfloat16_on_a_gpu(attention: str) -> None:
    """On every backend the error is at most 1.5 times plain torch's own."""
    from gpu_cases import build as build_real
    from gpu_cases import check

    sequences = grouped([(50, 80, 13, 140), (70, 30, 90, 160)], prompts=(120, 1, 190, 70))
    wide = run_alone(build_real("llama", torch.float32), sequences)
    plain = compare(run_alone(build_real("llama", torch.bfloat16), sequences), wide, half=True)
    model = build_real("llama", torch.bfloat16)
    try:
        fastpack.patch(model, share_prefixes="auto", attention=attention)
    except fastpack.BackendUnavailableError as error:
        pytest.skip(str(error))
    for number, kind in enumerate(("padded right", "TRL's keywords")):
        check(compare(run_batch(model, sequences, kind), wide, half=True), plain)
        assert sharing(model).stats.shared == number + 1


@pytest.mark.gpu
def test_a_collated_batch_waits_for_nobody() -> None:
    model = patched(tiny_model("llama").to("cuda", torch.bfloat16))

    def step() -> None:
        batch = PackedPreferenceCollator()(examples())
        ids = batch["input_ids"].pin_memory().to("cuda", non_blocking=True)
        packed = batch["packed_seq_lens"].pin_memory().to("cuda", non_blocking=True)
        model.model(input_ids=ids, packed_seq_lens=packed).last_hidden_state.float().sum().backward()

    step()
    torch.cuda.synchronize()
    with no_synchronisation():
        step()
    assert sharing(model).stats.shared == 2
