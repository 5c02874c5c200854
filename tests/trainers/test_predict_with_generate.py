"""Batches with ``packed_seq_lens`` reach ``generate`` too, with the same tokens and metrics as stock."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_cases import with_lora
from preferences import pairs, settings, word_tokenizer
from tiny import tiny_model
from torch import Tensor
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

import fastpack
from fastpack import PackedSeqLens, PackingError
from fastpack.data.collators import stock_collator

NEW = {"max_new_tokens": 5, "do_sample": False}


def examples() -> list[dict[str, list[int]]]:
    """Return prompts whose first labels are ignored; stock would predict each first token from padding."""
    rows = [word_tokenizer()(row["prompt"])["input_ids"] for row in pairs(8)]
    return [{"input_ids": row, "attention_mask": [1] * len(row), "labels": [-100, *row[1:]]} for row in rows]


def build(folder: Path, *, lora: bool = False, **further: Any) -> Any:
    model = tiny_model("llama", attn_implementation="sdpa")
    model.generation_config.max_length = None
    model.generation_config.update(**NEW)
    return Seq2SeqTrainer(
        with_lora(model) if lora else model,
        args=Seq2SeqTrainingArguments(
            **settings(folder, predict_with_generate=True, per_device_eval_batch_size=4, **further)
        ),
        train_dataset=examples(),
        eval_dataset=examples(),
        data_collator=DataCollatorForSeq2Seq(word_tokenizer()),
        compute_metrics=lambda result: {"sum": float(result.predictions.sum())},
    )


def patched(trainer: Any) -> Any:
    fastpack.patch(trainer)
    trainer.data_collator = fastpack.with_packed_seq_lens(trainer.data_collator)
    return trainer


def figures(result: dict[str, float]) -> tuple[float, float]:
    return result["eval_loss"], result["eval_sum"]


@pytest.mark.parametrize("lora", [False, True])
def test_every_evaluation_is_stock(lora: bool, tmp_path: Path) -> None:
    stock, ours = build(tmp_path, lora=lora), patched(build(tmp_path, lora=lora))
    want = figures(stock.evaluate())
    tokens = stock.predict(examples()).predictions
    assert len(np.unique(tokens)) > 10
    for _ in range(2):
        assert figures(ours.evaluate()) == pytest.approx(want, rel=1e-5)
    assert np.array_equal(ours.predict(examples()).predictions, tokens)
    fastpack.unpatch(ours)
    with pytest.raises(ValueError, match="not used by the model"):  # the stock model knows no such keyword
        ours.evaluate()
    ours.data_collator = stock_collator(ours.data_collator)
    assert figures(ours.evaluate()) == pytest.approx(want, rel=1e-5)


def test_within_training(tmp_path: Path) -> None:
    further = {"eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0.1}
    logs = []
    for trainer in (build(tmp_path, **further), patched(build(tmp_path, **further))):
        trainer.train()
        logs.append([figures(entry) for entry in trainer.state.log_history if "eval_sum" in entry])
    assert len(logs[0]) == 3
    assert len(set(logs[0])) == 3, "it learns"
    for ours, stock in zip(logs[1], logs[0], strict=True):
        assert ours == pytest.approx(stock, rel=1e-4)


def batch_of(lengths: tuple[int, ...] = (4, 9, 6)) -> dict[str, Any]:
    """Return a batch that is padded on the left, with its packing."""
    rows = [torch.arange(3, 3 + n) for n in lengths]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    result: dict[str, Any] = fastpack.with_packed_seq_lens(lambda _: dict(batch))(None)
    return result


def test_generate_takes_the_batch() -> None:
    model: Any = tiny_model("llama").eval()
    batch = batch_of()
    bare = {key: value for key, value in batch.items() if key != "packed_seq_lens"}
    further = {**NEW, "pad_token_id": 0}
    stock, beams = model.generate(**bare, **further), model.generate(**bare, **further, num_beams=2)
    signatures = inspect.signature(model.generate), inspect.signature(model.forward)
    with pytest.raises(ValueError, match="packed_seq_lens"):
        model.generate(**batch, **further)
    fastpack.patch(model)
    assert (inspect.signature(model.generate), inspect.signature(model.forward)) == signatures
    for lengths in (batch["packed_seq_lens"], [4, 9, 6], torch.tensor([4, 9, 6])):
        assert torch.equal(model.generate(**{**batch, "packed_seq_lens": lengths}, **further), stock)
    ids: Tensor = batch.pop("input_ids")
    assert torch.equal(model.generate(ids, **batch, **further), stock)
    assert torch.equal(model.generate(inputs=ids, **batch, **further, num_beams=2), beams)
    embedded = model.generate(inputs_embeds=model.get_input_embeddings()(ids), **batch, **further)
    assert torch.equal(embedded, stock[:, ids.shape[1] :])
    with pytest.raises(ValueError, match=r"not used by the model: \['packed_seqlens'\]"):
        model.generate(ids, **further, packed_seqlens=[4])
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin.generate(ids, **batch, **further), stock)
        assert twin.generate.owner is twin
    twin.model = tiny_model("llama").model  # and all that was known of the patch is gone with the backbone
    for each in (model, twin):
        fastpack.unpatch(each)
        assert "generate" not in each.__dict__


def test_a_packed_batch_is_refused() -> None:
    """It is refused too if only packed_seq_lens says that it is packed, or if another row is empty."""
    model: Any = fastpack.patch(tiny_model("llama").eval())
    ids = torch.arange(3, 13)[None]
    for lengths in ([4, 6], PackedSeqLens.from_lengths([4, 6])):
        with pytest.raises(PackingError, match=r"generate got packed_seq_lens of 2 sequences in 1 row\(s\)"):
            model.generate(ids, **NEW, packed_seq_lens=lengths)
    rows = torch.cat([ids, torch.zeros_like(ids)])
    with pytest.raises(PackingError, match=r"generate got packed_seq_lens of 2 sequences in 2 row\(s\)"):
        model.generate(rows, attention_mask=(rows != 0).long(), **NEW, packed_seq_lens=[4, 6])
    one_each = torch.cat([ids, ids])
    result = model.generate(one_each, **NEW, pad_token_id=0, packed_seq_lens=[10, 10])
    assert torch.equal(result, model.generate(one_each, **NEW, pad_token_id=0))
    packed = {"input_ids": ids, "position_ids": torch.cat([torch.arange(4), torch.arange(6)])[None]}
    with pytest.raises(PackingError, match=r"generate got packed_seq_lens of 2 sequences in 1 row\(s\)"):
        model.generate(**fastpack.with_packed_seq_lens(lambda _: dict(packed))(None), **NEW)


def test_somebody_elses_generate_is_kept() -> None:
    model: Any = tiny_model("llama").eval()
    seen: list[tuple[str, ...]] = []
    model.generate = lambda *args, **kwargs: seen.append(tuple(kwargs))
    own = model.generate
    fastpack.patch(model)
    model.generate(**batch_of())
    assert seen == [("input_ids", "attention_mask")]
    fastpack.unpatch(model)
    assert model.generate is own
