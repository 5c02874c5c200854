"""TRL's unmodified ``SFTTrainer``: patched equals unpatched, step by step, with every form of batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from backbone_calls import Calls
from oracle import FLOAT32_BOUND, relative
from sft_cases import FEEDS, STEPS, check_equal, config, losses, plain_config, rows, tokenizer, train
from tiny import tiny_model
from transformers import Trainer, TrainerCallback
from trl import SFTTrainer

import fastpack


@pytest.mark.sample(2)
@pytest.mark.parametrize("patch", ["model", "trainer"])
@pytest.mark.parametrize("feed", FEEDS)
def test_patched_equals_unpatched(feed: str, patch: str, tmp_path: Path, calls: Calls) -> None:
    stock, _ = train(tiny_model("llama", attn_implementation="sdpa"), tmp_path, patch=None, **FEEDS[feed])
    assert not calls.all
    ours, _ = train(tiny_model("llama", attn_implementation="sdpa"), tmp_path, patch=patch, **FEEDS[feed])
    check_equal(ours, stock)
    assert len(calls.all) == 2 * STEPS, "both layers of every step went through the dispatch"


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text", "starcoder2"])
def test_other_families(model_type: str, tmp_path: Path) -> None:
    for feed in ("padded", "padding_free"):
        stock, _ = train(tiny_model(model_type, attn_implementation="sdpa"), tmp_path, patch=None, **FEEDS[feed])
        ours, _ = train(tiny_model(model_type, attn_implementation="sdpa"), tmp_path, patch="model", **FEEDS[feed])
        check_equal(ours, stock)


@pytest.mark.sample(1)
@pytest.mark.parametrize("patch", ["model", "trainer"])
def test_lora_and_checkpointing(patch: str, tmp_path: Path) -> None:
    from adapter_cases import with_lora

    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    stock, _ = train(with_lora(tiny_model("llama")), tmp_path, patch=None, **settings)
    ours, _ = train(with_lora(tiny_model("llama")), tmp_path, patch=patch, **settings)
    check_equal(ours, stock)


@pytest.mark.sample(1)
@pytest.mark.parametrize("feed", ["padded", "padding_free"])
def test_auxiliary_loss_of_experts(feed: str, tmp_path: Path) -> None:
    settings = {**FEEDS[feed], "router_aux_loss_coef": 0.5}
    results = {}
    for patch in (None, "model"):
        model = tiny_model("mixtral", attn_implementation="sdpa", output_router_logits=True)
        results[patch], trainer = train(model, tmp_path, patch=patch, **settings)
        assert any("aux_loss" in entry for entry in trainer.state.log_history)
    check_equal(results["model"], results[None])


def test_neftune_noise_is_the_same(tmp_path: Path) -> None:
    stock, _ = train(tiny_model("llama"), tmp_path, patch=None, neftune_noise_alpha=5.0)
    ours, _ = train(tiny_model("llama"), tmp_path, patch="trainer", neftune_noise_alpha=5.0)
    plain, _ = train(tiny_model("llama"), tmp_path, patch="trainer")
    check_equal(ours, stock)
    assert ours != plain


class GenerateMidway(TrainerCallback):
    """A callback that generates after each evaluation, as sample-logging callbacks do."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def on_evaluate(self, *_: Any, model: Any, **__: Any) -> None:
        prompt = torch.tensor([[5, 6, 7], [0, 8, 9]], device=model.device)
        out = model.generate(prompt, attention_mask=(prompt != 0).long(), max_new_tokens=5, do_sample=False)
        self.texts.append(out.flatten().tolist())


@pytest.mark.sample(1)
@pytest.mark.parametrize("feed", ["padded", "padding_free"])
def test_evaluation_prediction_and_generation_midway(feed: str, tmp_path: Path) -> None:
    results = {}
    for patched in (False, True):
        model = tiny_model("llama", attn_implementation="sdpa")
        callback = GenerateMidway()
        trainer = SFTTrainer(
            model,
            args=config(tmp_path, eval_strategy="steps", eval_steps=3, **FEEDS[feed]),
            train_dataset=rows(),
            eval_dataset=rows(7, seed=1),
            processing_class=tokenizer(),
            callbacks=[callback],
        )
        if patched:
            fastpack.patch(trainer)
        trained = losses(trainer)
        evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        prediction = trainer.predict(trainer.eval_dataset)
        results[patched] = (trained, evaluated, callback.texts, prediction)
    stock, ours = results[False], results[True]
    check_equal(ours[0], stock[0])
    assert len(stock[1]) >= 2
    assert ours[1] == pytest.approx(stock[1], rel=FLOAT32_BOUND)
    assert ours[2] == stock[2], "the same tokens"
    assert ours[3].metrics["test_loss"] == pytest.approx(stock[3].metrics["test_loss"], rel=FLOAT32_BOUND)


def test_plain_trainer_keeps_its_columns(tmp_path: Path) -> None:
    """transformers' own Trainer drops columns that ``forward`` does not name, and passes labels to the head."""

    def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        width = max(len(e["input_ids"]) for e in examples)
        ids = torch.tensor([e["input_ids"] + [0] * (width - len(e["input_ids"])) for e in examples])
        mask = (ids != 0).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    arguments = plain_config(tmp_path)
    results = []
    for patched in (False, True):
        model = tiny_model("llama", attn_implementation="sdpa")
        if patched:
            fastpack.patch(model)
        results.append(losses(Trainer(model, arguments, data_collator=collate, train_dataset=rows())))
    check_equal(results[1], results[0])


def test_bf16_autocast_over_float32_weights(tmp_path: Path) -> None:
    stock, _ = train(tiny_model("llama", attn_implementation="sdpa"), tmp_path, patch=None, bf16=True)
    ours, trainer = train(tiny_model("llama", attn_implementation="sdpa"), tmp_path, patch="model", bf16=True)
    check_equal(ours, stock, bound=2e-2)
    assert next(trainer.model.parameters()).dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_on_a_gpu(precision: str, tmp_path: Path, calls: Calls) -> None:
    real_heads = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    settings = {"bf16": precision == "bf16", "fp16": precision == "fp16", "learning_rate": 1e-4}
    stock, _ = train(tiny_model("llama", attn_implementation="sdpa", **real_heads), tmp_path, patch=None, **settings)
    ours, _ = train(tiny_model("llama", attn_implementation="sdpa", **real_heads), tmp_path, patch="model", **settings)
    check_equal(ours, stock, bound=2e-2)
    assert len(calls.tokens["torch_varlen"]) == 2 * STEPS, "q, k and v reached the kernel in half precision"


def test_a_users_own_collator_need_not_mask_first_labels() -> None:
    """With packed ``labels=input_ids``, each last token would otherwise be trained on the next sequence's first."""
    model = fastpack.patch(tiny_model("llama"))
    ids = torch.arange(3, 23)[None]
    labels = ids.clone()
    loss = model(input_ids=ids, packed_seq_lens=[8, 12], labels=labels).loss
    assert torch.equal(labels, ids), "on a copy"
    parts = [model(input_ids=part, labels=part).loss * (part.shape[1] - 1) for part in ids.split([8, 12], 1)]
    assert relative(loss, sum(parts) / 18) <= FLOAT32_BOUND
