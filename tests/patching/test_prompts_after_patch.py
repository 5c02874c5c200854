"""PEFT's prompt learning, put over a model before it is patched, or after: exact, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from oracle import FLOAT32_BOUND, make_sequences, padded, positions, relative
from peft import (
    CartridgeConfig,
    CPTConfig,
    LoraConfig,
    MultitaskPromptTuningConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from preferences import alone, settings, word_tokenizer
from tiny import VOCAB, tiny_model
from torch import Tensor, nn
from trainer_cases import texts
from transformers import AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification, DynamicCache
from trl import SFTConfig, SFTTrainer

import fastpack

LENGTHS = (7, 5, 9)
CAUSAL: dict[str, Any] = {"task_type": "CAUSAL_LM"}
THREE: dict[str, Any] = {"num_virtual_tokens": 3}
PROMPTS: dict[str, Callable[..., Any]] = {
    "prompt tuning": lambda **task: PromptTuningConfig(**task, **THREE),
    "P-tuning": lambda **task: PromptEncoderConfig(**task, **THREE, encoder_hidden_size=16),
    "multitask": lambda **task: MultitaskPromptTuningConfig(**task, **THREE, num_tasks=2, num_ranks=1),
    "CPT": lambda **task: CPTConfig(
        **task, cpt_token_ids=[5, 6, 7], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[1, 2, 4]
    ),
    "prefix tuning": lambda **task: PrefixTuningConfig(**task, **THREE),
    "cartridge": lambda **task: CartridgeConfig(**task, **THREE, num_frozen_tokens=0),
}
IN_A_CACHE = ("prefix tuning", "cartridge")
REFUSED = "virtual tokens before each row|PEFT's prefix tuning passes too"


def wrapped(kind: str, *, patch: str = "", model: nn.Module | None = None, **task: Any) -> Any:
    """A model with prompts, patched ``"first"``, ``"after"`` PEFT wraps it, or not at all."""
    model = tiny_model("llama") if model is None else model
    if patch == "first":
        fastpack.patch(model)
    torch.manual_seed(1)
    result = get_peft_model(model, PROMPTS[kind](**(task or CAUSAL)))
    return fastpack.patch(result) if patch == "after" else result


def batch_of(kind: str, **batch: Any) -> dict[str, Any]:
    tasks = {"task_ids": torch.zeros(len(batch["input_ids"]), dtype=torch.long)} if kind == "multitask" else {}
    return {**batch, **tasks}


def packings(sequences: list[Tensor]) -> dict[str, dict[str, Any]]:
    """Every way to say where sequences end, TRL's and transformers' first."""
    ids = torch.cat(sequences)[None]
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    keywords = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 9, "max_length_k": 9}
    numbers = torch.cat([torch.full_like(s, i + 1) for i, s in enumerate(sequences)])[None]
    restarting = positions(sequences)
    message: dict[str, dict[str, Any]] = {
        "position_ids": {"position_ids": restarting},
        "with a mask of ones": {"position_ids": restarting, "attention_mask": torch.ones_like(ids)},
        "with cu_seq_lens": {"position_ids": restarting, **keywords},
        "cu_seq_lens": keywords,
        "packed_seq_lens": {"packed_seq_lens": list(LENGTHS)},
        "numbered mask": {"attention_mask": numbers},
    }
    return {name: {"input_ids": ids, "labels": ids, **how} for name, how in message.items()}


def loss_and_gradients(model: Any, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", PROMPTS)
def test_padded_on_the_right_is_exact(kind: str) -> None:
    batch = batch_of(kind, **padded(make_sequences(VOCAB, LENGTHS), "right"))
    loss, gradients = loss_and_gradients(wrapped(kind), batch)
    assert gradients
    for order in ("first", "after"):
        model = wrapped(kind, patch=order)
        result, its = loss_and_gradients(model, batch)
        assert relative(result, loss) <= FLOAT32_BOUND
        assert its.keys() == gradients.keys()
        assert max(relative(its[name], gradients[name]) for name in its) <= FLOAT32_BOUND
        (note,) = (note for note in fastpack.report(model).notes if "PEFT's prompts" in note)
        assert ("stock forward" in note) == (kind in IN_A_CACHE)


@pytest.mark.parametrize("kind", PROMPTS)
def test_packed_is_refused_at_the_first_forward(kind: str) -> None:
    sequences = make_sequences(VOCAB, LENGTHS)
    model = wrapped(kind, patch="first")
    for batch in packings(sequences).values():
        with pytest.raises(fastpack.PackingError, match=REFUSED):
            model(**batch_of(kind, **batch))
    with model.disable_adapter():  # the control: it is the prompts that are refused
        want = model(**padded(sequences, "right")).loss
        for batch in packings(sequences).values():
            assert relative(model(**batch).loss, want) <= FLOAT32_BOUND


@pytest.mark.parametrize("kind", PROMPTS)
def test_one_sequence_a_row_is_not_refused(kind: str) -> None:
    """Without a mask, and with one of ones; ``generate``, whose positions go on behind the prompts."""
    ids = torch.stack(make_sequences(VOCAB, (6, 6)))
    stock, model = wrapped(kind), wrapped(kind, patch="first")
    for further in ({}, {"attention_mask": torch.ones_like(ids)}):
        batch = batch_of(kind, input_ids=ids, labels=ids, **further)
        assert relative(model(**batch).loss, stock(**batch).loss) <= FLOAT32_BOUND
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    left = {name: value for name, value in padded(make_sequences(VOCAB, LENGTHS), "left").items() if name != "labels"}
    batch = batch_of(kind, **left)
    assert torch.equal(model.eval().generate(**batch, **settings), stock.eval().generate(**batch, **settings))


@pytest.mark.parametrize("kind", ["prompt tuning", "prefix tuning"])
def test_positions_that_say_nothing(kind: str) -> None:
    """PEFT drops them where prompts are embeddings, and the advice holds."""
    batch = padded(make_sequences(VOCAB, LENGTHS), "right")
    counted = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
    want = wrapped(kind)(**batch).loss
    for order in ("first", "after"):
        model = wrapped(kind, patch=order)
        if kind in IN_A_CACHE:
            assert relative(model(**batch, position_ids=counted).loss, want) <= FLOAT32_BOUND
        else:
            with pytest.raises(fastpack.PackingError, match="without position_ids"):
                model(**batch, position_ids=counted)
        assert relative(model(**batch).loss, want) <= FLOAT32_BOUND


@pytest.mark.parametrize("task", ["SEQ_CLS", "TOKEN_CLS", "FEATURE_EXTRACTION"])
def test_other_tasks(task: str) -> None:
    auto: Any = {
        "SEQ_CLS": AutoModelForSequenceClassification,
        "TOKEN_CLS": AutoModelForTokenClassification,
        "FEATURE_EXTRACTION": AutoModel,
    }[task]
    batch = padded(make_sequences(VOCAB, LENGTHS), "right")
    ids, labels = batch["input_ids"], batch.pop("labels")
    virtual = torch.ones(len(ids), 3, dtype=torch.long)
    if task == "SEQ_CLS":  # it sees embeddings, and pools the last slot
        batch = {"input_ids": ids[:3, :5], "labels": torch.tensor([0, 1, 1])}
    elif task == "TOKEN_CLS":
        batch["labels"] = torch.cat([-100 * virtual, labels.where(labels < 0, labels % 2)], dim=1)

    def run(patch: str, **further: Any) -> Tensor:
        model = wrapped("prompt tuning", patch=patch, model=tiny_model("llama", auto=auto), task_type=task)
        outputs = model(**{**batch, **further})
        if task == "FEATURE_EXTRACTION":
            return outputs.last_hidden_state[torch.cat([virtual, batch["attention_mask"]], dim=1) > 0]
        return outputs.loss

    assert relative(run("first"), run("")) <= FLOAT32_BOUND
    restarting = torch.arange(3).repeat(4)[: batch["input_ids"].shape[1]].expand_as(batch["input_ids"])
    with pytest.raises(fastpack.PackingError, match="virtual tokens before each row"):
        run("first", position_ids=restarting)


@pytest.mark.parametrize("kind", ["prompt tuning", "prefix tuning"])
def test_positions_that_an_old_peft_drops(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 0.19, and without a head, nothing tells a packed batch behind prefixes."""
    old = wrapped(kind, model=tiny_model("llama", auto=AutoModel), task_type="FEATURE_EXTRACTION")
    with monkeypatch.context() as older:
        older.setattr(peft, "__version__", "0.18.1")
        fastpack.patch(wrapped(kind))
        if kind in IN_A_CACHE:
            with pytest.raises(fastpack.PatchError, match=r"PEFT 0.18.1 drops position_ids"):
                fastpack.patch(old)
    fastpack.patch(old)


def test_over_lora() -> None:
    """Prompts over LoRA over a patched model; and LoRA alone, whose wrapper passes the same keywords."""
    sequences = make_sequences(VOCAB, LENGTHS)
    model: Any = fastpack.patch(tiny_model("llama"))
    lora = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, **CAUSAL))
    want = lora(**padded(sequences, "right")).loss
    for batch in packings(sequences).values():
        assert relative(lora(**batch).loss, want) <= FLOAT32_BOUND
        embedded = {**batch, "inputs_embeds": model.get_input_embeddings()(batch["input_ids"])}
        del embedded["input_ids"]
        assert relative(lora(**embedded).loss, want) <= FLOAT32_BOUND
    prompted = get_peft_model(lora, PROMPTS["prompt tuning"](**CAUSAL))
    for name, batch in packings(sequences).items():
        with pytest.raises(fastpack.PackingError, match=None if "lens" in name else REFUSED):
            prompted(**batch)


def test_embeddings_of_ones_own() -> None:
    """Who passes embeddings as a model of images and text does, and names what did not come, sends no prompts."""
    model: Any = fastpack.patch(tiny_model("llama"))
    batch = padded(make_sequences(VOCAB, LENGTHS), "right")
    embeds = model.get_input_embeddings()(batch["input_ids"])
    named = ("position_ids", "past_key_values", "output_attentions", "output_hidden_states", "return_dict")
    result = model(inputs_embeds=embeds, attention_mask=batch["attention_mask"], **dict.fromkeys(named)).logits
    want = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert relative(result, want) <= FLOAT32_BOUND


def test_a_cache_with_packed_positions_is_refused() -> None:
    """Prefix tuning is one who passes a cache; so may anybody."""
    model: Any = fastpack.patch(tiny_model("llama"))
    sequences = make_sequences(VOCAB, LENGTHS)
    batch = packings(sequences)["position_ids"]
    with pytest.raises(fastpack.PackingError, match="position_ids restart or jump inside a row"):
        model(**batch, past_key_values=DynamicCache())
    model(**{**batch, "position_ids": torch.arange(sum(LENGTHS))[None]}, past_key_values=DynamicCache())
    prefixed = wrapped("prefix tuning", patch="first").eval()
    with torch.no_grad():
        del batch["labels"]
        with pytest.raises(fastpack.PackingError, match="position_ids restart or jump inside a row"):
            prefixed(**batch)
        prefixed(input_ids=batch["input_ids"], position_ids=torch.arange(sum(LENGTHS))[None])


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["prompt tuning", "prefix tuning"])
def test_a_trainer_that_wraps_a_patched_model(kind: str, tmp_path: Path) -> None:
    def train(patch: bool, padding_free: bool) -> list[float]:
        model = tiny_model("llama", attn_implementation="sdpa")
        tokenizer = word_tokenizer()
        tokenizer.padding_side = "right"
        torch.manual_seed(1)
        trainer = SFTTrainer(
            fastpack.patch(model) if patch else model,
            args=alone(SFTConfig(**settings(tmp_path, max_length=None, max_steps=3, padding_free=padding_free))),
            train_dataset=texts(),
            processing_class=tokenizer,
            peft_config=PROMPTS[kind](**CAUSAL),
        )
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    want = train(patch=False, padding_free=False)
    assert want
    assert train(patch=True, padding_free=False) == pytest.approx(want, rel=1e-5)
    with pytest.raises(fastpack.PackingError, match=REFUSED):
        train(patch=True, padding_free=True)


def test_compiled() -> None:
    model = wrapped("prompt tuning", patch="first")
    model.base_model = torch.compile(model.base_model, backend="eager")
    with pytest.raises(fastpack.PackingError, match=REFUSED):
        model(**packings(make_sequences(VOCAB, LENGTHS))["position_ids"])
