"""Metrics in real trainers, against counts of the rows that the collator got."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from preferences import alone, word_tokenizer
from preferences import settings as base_settings
from tiny import tiny_model
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

import fastpack
from fastpack.cli.meter import read_steps, summarize
from fastpack.errors import FastpackWarning, PatchError
from fastpack.trainers.metrics import PREFIX, MetricsCallback, attach
from fastpack.trainers.metrics.flops import read_flops

ROWS, STEPS, VOCAB = 4, 3, 97
LINEAR = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48) + 32 * VOCAB
"""Weights of the tiny Llama's linear layers and head."""
FEEDS: dict[str, dict[str, Any]] = {
    "padded": {},
    "padding_free": {"padding_free": True, "max_length": None},
    "padding_free, multiple of 8": {"padding_free": True, "max_length": None, "pad_to_multiple_of": 8},
    "packing": {"packing": True, "max_length": 48},
}


def rows(count: int = 40, seed: int = 0, longest: int = 30) -> Dataset:
    """Return sequences of 2 to 30 tokens; all are labels, except for the first half of every third sequence."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (count,), generator=generator).tolist()
    ids = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    labels = [[-100] * (len(row) // 2) + row[len(row) // 2 :] if i % 3 == 0 else row for i, row in enumerate(ids)]
    return Dataset.from_dict({"input_ids": ids, "labels": labels})


def sft(folder: Path, model: Any = None, *, data: Dataset | None = None, **further: Any) -> Any:
    callbacks, evaluated, peft = (further.pop(name, None) for name in ("callbacks", "eval_dataset", "peft_config"))
    settings = {**base_settings(folder), "per_device_train_batch_size": ROWS, "max_steps": STEPS, **further}
    return SFTTrainer(
        model=model or tiny_model("llama", attn_implementation="sdpa"),
        args=alone(SFTConfig(**settings)),
        train_dataset=rows() if data is None else data,
        eval_dataset=evaluated,
        processing_class=word_tokenizer(),
        callbacks=callbacks,
        peft_config=peft,
    )


def record(trainer: Any) -> list[list[tuple[int, int]]]:
    """Record each collated batch: each sequence's length and its number of predicted labels."""
    result: list[list[tuple[int, int]]] = []
    stock = trainer.data_collator

    def collate(examples: list[dict[str, Any]]) -> Any:
        batch = []
        for example in examples:
            lengths = example.get("seq_lengths", [len(example["input_ids"])])
            at = 0
            for length in lengths:
                batch.append((length, sum(label != -100 for label in example["labels"][at + 1 : at + length])))
                at += length
        result.append(batch)
        return stock(examples)

    trainer.data_collator = collate
    return result


def logged(trainer: Any) -> list[dict[str, float]]:
    """Train, and return the metrics of each log, without the prefix."""
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{k.removeprefix(PREFIX): v for k, v in entry.items() if k.startswith(PREFIX)} for entry in entries]


class Reporter(TrainerCallback):
    """A callback that records logs, in place of TensorBoard and others."""

    def __init__(self) -> None:
        self.received: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.received.append(dict(logs))


@pytest.mark.sample(2)
@pytest.mark.parametrize("patch", [False, True])
@pytest.mark.parametrize("feed", FEEDS)
def test_metrics_against_counts_by_hand(feed: str, patch: bool, tmp_path: Path) -> None:
    trainer = sft(tmp_path, **FEEDS[feed])
    batches = record(trainer)
    callback = attach(trainer, peak_flops=1e10)
    if patch:
        fastpack.patch(trainer)
    result = logged(trainer)
    assert len(result) == STEPS
    totals = {"real": 0, "trained": 0, "slots": 0, "flops": 0}
    for step, batch in zip(result, batches, strict=False):
        lengths = [length for length, _ in batch]
        real, trained = sum(lengths), sum(labels for _, labels in batch)
        slots = len(lengths) * max(lengths) if feed == "padded" else -(-real // 8) * 8 if "multiple" in feed else real
        assert step["real_tokens"] == real
        assert step["trained_tokens"] == trained < real
        assert step["padding_tokens"] == slots - real
        assert step["padding_share"] == pytest.approx(1 - real / slots)
        # 6 operations for each weight; two layers of 4 heads of 8, twice as much backward
        pairs = sum(n * (n + 1) // 2 for n in lengths)
        totals["flops"] += 6 * LINEAR * real + 3 * 2 * 4 * 4 * 8 * pairs
        for name, value in (("real", real), ("trained", trained), ("slots", slots)):
            totals[name] += value
        assert step["total_real_tokens"] == totals["real"]
        assert step["total_trained_tokens"] == totals["trained"]
        assert step["total_padding_tokens"] == totals["slots"] - totals["real"]
        assert step["total_padding_share"] == pytest.approx(1 - totals["real"] / totals["slots"])
        assert step["step_seconds"] > 0
        assert step["mfu"] > 0
        assert step["peak_memory_gib"] > 0.01
    assert {name: callback.totals[name] for name in totals} == totals
    assert callback.totals["steps"] == STEPS
    seconds = (callback.totals["inside"] + callback.totals["waiting"]) / 1e9
    time_of_each = [step["real_tokens"] / step["tokens_per_second_per_gpu"] for step in result]
    assert sum(time_of_each) == pytest.approx(seconds)
    used = sum(step["mfu"] * 1e10 * took for step, took in zip(result, time_of_each, strict=True))
    assert used == pytest.approx(totals["flops"])


def test_reaches_reporters_history_and_the_file(tmp_path: Path) -> None:
    """A reporter that comes first, as those of ``report_to`` do, gets the metrics only since ours runs before it."""
    reporter = Reporter()
    trainer = sft(tmp_path, callbacks=[reporter], save_strategy="steps", save_steps=STEPS)
    callback = attach(trainer)
    output = trainer.train()
    names = {f"{PREFIX}{name}" for name in ("real_tokens", "padding_share", "step_seconds", "total_real_tokens")}
    assert all(names <= entry.keys() for entry in reporter.received[:STEPS])
    assert f"{PREFIX}mfu" not in reporter.received[0], "a CPU has no peak"
    assert reporter.received[-1][f"{PREFIX}total_real_tokens"] == callback.totals["real"]
    assert output.metrics[f"{PREFIX}total_real_tokens"] == callback.totals["real"]
    saved = json.loads((tmp_path / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    assert all(names <= entry.keys() for entry in saved["log_history"][:STEPS])
    assert saved["stateful_callbacks"]["fastpack.metrics"]["real"] == callback.totals["real"]

    late = Reporter()
    trainer = sft(tmp_path, callbacks=[late])
    trainer.callback_handler.callbacks.append(MetricsCallback(trainer, None))
    trainer.train()
    assert not any(names & entry.keys() for entry in late.received), "a callback at the end is too late"


def test_accumulation_logging_and_evaluation(tmp_path: Path) -> None:
    """With two batches a step and a log every second step, totals are the same, and means are over two steps."""
    plain = sft(tmp_path, gradient_accumulation_steps=2, max_steps=4, logging_steps=2)
    batches = record(plain)
    alone = attach(plain)
    result = logged(plain)
    lengths = [sum(length for length, _ in batch) for batch in batches]
    assert [step["real_tokens"] for step in result] == [sum(lengths[:4]) / 2, sum(lengths[4:8]) / 2]
    evaluated = sft(
        tmp_path,
        gradient_accumulation_steps=2,
        max_steps=4,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
        eval_dataset=rows(seed=3),
    )
    reporter = Reporter()
    evaluated.add_callback(reporter)
    both = attach(evaluated)
    evaluated.train()
    assert any("eval_loss" in entry for entry in reporter.received)
    assert not any(name.startswith(PREFIX) for entry in reporter.received if "eval_loss" in entry for name in entry)
    for name in ("steps", "real", "trained", "slots"):
        assert both.totals[name] == alone.totals[name], name
    # the control: the same model called with a backward is counted
    both.on_train_begin(evaluated.args, evaluated.state, evaluated.control)
    evaluated.model.eval()(**evaluated._prepare_inputs(next(iter(evaluated.get_eval_dataloader()))))
    assert both._counts[0] == 0
    evaluated.model.train()(**evaluated._prepare_inputs(next(iter(evaluated.get_eval_dataloader()))))
    assert both._counts[0] > 0
    both.close()


@pytest.mark.slow
@pytest.mark.parametrize("restore", [False, True])
def test_resume(restore: bool, tmp_path: Path) -> None:
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "logging_steps": 3}
    trainer = sft(tmp_path, **settings)
    whole = attach(trainer)
    trainer.train()
    checkpoint = tmp_path / "checkpoint-2"
    half = json.loads((checkpoint / "trainer_state.json").read_text())
    saved = half["stateful_callbacks"]["fastpack.metrics"]
    assert 0 < saved["real"] < whole.totals["real"], "saved between two logs"

    def resumed() -> MetricsCallback:
        trainer = sft(tmp_path / "again", restore_callback_states_from_checkpoint=restore, **settings)
        callback = attach(trainer)
        trainer.train(resume_from_checkpoint=str(checkpoint))
        assert callback in trainer.callback_handler.callbacks
        return callback

    again = resumed()
    for name in ("steps", "real", "trained", "slots"):
        assert again.totals[name] == whole.totals[name], name
    assert again.totals["inside"] > saved["inside"]
    del half["stateful_callbacks"]["fastpack.metrics"]  # a run that had no metrics
    (checkpoint / "trainer_state.json").write_text(json.dumps(half))
    assert resumed().totals["real"] == whole.totals["real"] - saved["real"]


@pytest.mark.slow
def test_a_second_run_begins_anew(tmp_path: Path) -> None:
    trainer = sft(tmp_path)
    callback = attach(trainer)
    trainer.train()
    first = callback.totals
    trainer.train()
    assert callback.totals is not first
    for name in ("steps", "real"):
        assert callback.totals[name] == first[name], name


def test_in_the_stock_trainer_with_the_fused_loss(tmp_path: Path) -> None:
    """The token counts are the same whatever computes the loss."""
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

    model = tiny_model("llama", attn_implementation="sdpa")
    args = TrainingArguments(**base_settings(tmp_path, max_steps=1, per_device_train_batch_size=ROWS))
    collator = DataCollatorForSeq2Seq(word_tokenizer())
    trainer: Any = Trainer(model, args, train_dataset=rows(), data_collator=collator)
    batches = record(trainer)
    fastpack.patch(trainer, loss="fused")
    callback = attach(trainer)
    trainer.train()
    lengths, labels = zip(*batches[0], strict=True)
    assert (callback.totals["real"], callback.totals["trained"]) == (sum(lengths), sum(labels))


def test_checkpointing_does_not_count_twice(tmp_path: Path) -> None:
    trainer = sft(tmp_path, gradient_checkpointing=True)
    batches = record(trainer)
    callback = attach(trainer, peak_flops=1e10)
    lengths = [n for batch in batches[: len(logged(trainer))] for n, _ in batch]
    flops = read_flops(trainer.model)
    assert callback.totals["flops"] == flops.of(sum(lengths), [sum(n * (n + 1) // 2 for n in lengths)])


def test_nothing_is_read_between_two_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read of a tensor's value goes through one of these methods; those that our code calls are counted."""
    import sys

    reads: list[str] = []
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
        stock = getattr(torch.Tensor, name)

        def asked(self: Any, *args: Any, _stock: Any = stock, _name: str = name, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            while "/torch/" in frame.f_code.co_filename and frame.f_back is not None:
                frame = frame.f_back
            if "fastpack/trainers/metrics/" in frame.f_code.co_filename:
                reads.append(_name)
            return _stock(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, asked)
    trainer = sft(tmp_path, max_steps=6, logging_steps=3)
    attach(trainer)
    trainer.train()
    assert reads == ["tolist", "tolist"], "once for each log, and none in any step"


@pytest.mark.slow
def test_time_goes_where_it_belongs(tmp_path: Path) -> None:
    """A slow collator counts as time between steps; logging, evaluating and saving don't count."""

    class Slow(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            time.sleep(0.1)

    def totals(prepare: Callable[[Any], None], **further: Any) -> dict[str, float]:
        trainer = sft(tmp_path, max_steps=4, logging_steps=4, **further)
        prepare(trainer)
        callback = attach(trainer)
        (result,) = logged(trainer)
        seconds = (callback.totals["inside"] + callback.totals["waiting"]) / 1e9
        assert result["tokens_per_second_per_gpu"] == pytest.approx(callback.totals["real"] / seconds)
        assert result["step_seconds"] == pytest.approx(callback.totals["inside"] / 1e9 / 4)
        return {name: callback.totals[name] / 1e9 for name in ("inside", "waiting")}

    def slow_loading(trainer: Any) -> None:
        stock = trainer.data_collator

        def collate(examples: Any) -> Any:
            time.sleep(0.1)
            return stock(examples)

        trainer.data_collator = collate

    def slow_evaluation(trainer: Any) -> None:
        trainer.callback_handler.callbacks.insert(0, Slow())

    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": rows(8, seed=3)}
    loading, outside = totals(slow_loading), totals(slow_evaluation, **evaluation)
    assert loading["waiting"] > 0.35
    assert outside["waiting"] < 0.2


@pytest.mark.parametrize("quiet", [False, True])
def test_what_the_command_line_reads(quiet: bool, tmp_path: Path) -> None:
    """Steps that were not logged are counted too, and a callback with ``logs=False`` keeps its metrics."""
    trainer = sft(tmp_path, max_steps=5, logging_steps=2)
    batches = record(trainer)
    callback = attach(trainer)
    callback.logs = not quiet
    result = logged(trainer)
    assert [not step for step in result] == [quiet, quiet]
    lengths = [[length for length, _ in batch] for batch in batches[:5]]
    real, slots = [sum(one) for one in lengths], [len(one) * max(one) for one in lengths]
    steps = read_steps(callback)
    assert [each["step"] for each in steps] == [2, 4, 5]
    assert [each["real_tokens"] for each in steps] == [sum(real[:2]) / 2, sum(real[2:4]) / 2, real[4]]
    assert [each["slots"] for each in steps] == [sum(slots[:2]) / 2, sum(slots[2:4]) / 2, slots[4]]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [each["loss"] for each in steps] == [*losses, None]
    summary = summarize(trainer, callback)
    assert (summary.real_tokens, summary.slots, summary.steps) == (sum(real), sum(slots), 5)
    assert (summary.first_loss, summary.last_loss) == (losses[0], losses[-1])
    seconds = 2 * steps[1]["seconds"] + steps[2]["seconds"]
    assert summary.tokens_per_second == pytest.approx(sum(real[2:]) / seconds)


def test_everything_is_taken_off(tmp_path: Path) -> None:
    trainer = sft(tmp_path)
    before = list(trainer.callback_handler.callbacks)
    callback = attach(trainer)
    trainer.train()
    assert not trainer.model._forward_hooks
    assert not trainer.model._forward_pre_hooks
    trainer.remove_callback(MetricsCallback)
    assert trainer.callback_handler.callbacks == before
    assert callback.totals["steps"] == STEPS


def test_what_is_refused(tmp_path: Path) -> None:
    trainer = sft(tmp_path)
    with pytest.raises(TypeError, match="Trainer"):
        attach(trainer.model)
    for wrong in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="peak_flops"):
            attach(trainer, peak_flops=wrong)
    attach(trainer)
    with pytest.raises(PatchError, match="already"):
        attach(trainer)


def test_a_model_without_a_formula_warns(tmp_path: Path) -> None:
    trainer = sft(tmp_path, tiny_model("diffllama", attn_implementation="eager"), max_steps=1)
    with pytest.warns(
        FastpackWarning, match="mfu is left out: there is no formula for everything that a DiffLlamaModel"
    ):
        attach(trainer, peak_flops=1e10)
    result = logged(trainer)
    assert "mfu" not in result[0]
    assert result[0]["tokens_per_second_per_gpu"] > 0
