"""Metrics in real trainers, against counts worked out from the rows that the collator was given."""

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
from fastpack.bench.flops import step_flops
from fastpack.commands.meter import Meter
from fastpack.errors import FastpackWarning, PatchError
from fastpack.metrics import PREFIX, MetricsCallback, attach
from fastpack.metrics.callback import MetricsState, _reread
from fastpack.metrics.plan import read_plan

ROWS, STEPS, VOCAB, HIDDEN = 4, 3, 97, 32
FEEDS: dict[str, dict[str, Any]] = {
    "padded": {},
    "padding_free": {"padding_free": True, "max_length": None},
    "padding_free, multiple of 8": {"padding_free": True, "max_length": None, "pad_to_multiple_of": 8},
    "packing": {"packing": True, "max_length": 48},
}


def rows(count: int = 40, seed: int = 0, longest: int = 30) -> Dataset:
    """Sequences of 2 to 30 tokens, all of which are labels, but in every third the first half."""
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
    """Of each batch that is collated, each sequence's length and its labels that are predicted."""
    found: list[list[tuple[int, int]]] = []
    stock = trainer.data_collator

    def collate(examples: list[dict[str, Any]]) -> Any:
        batch = []
        for example in examples:
            lengths = example.get("seq_lengths", [len(example["input_ids"])])
            at = 0
            for length in lengths:
                batch.append((length, sum(label != -100 for label in example["labels"][at + 1 : at + length])))
                at += length
        found.append(batch)
        return stock(examples)

    trainer.data_collator = collate
    return found


def logged(trainer: Any) -> list[dict[str, float]]:
    """Train; what it logged of its steps, without the prefix."""
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{k.removeprefix(PREFIX): v for k, v in entry.items() if k.startswith(PREFIX)} for entry in entries]


class Reporter(TrainerCallback):
    """Stands for TensorBoard and the others: keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.told.append(dict(logs))


@pytest.mark.parametrize("patch", [False, True])
@pytest.mark.parametrize("feed", FEEDS)
def test_figures_by_hand(feed: str, patch: bool, tmp_path: Path) -> None:
    trainer = sft(tmp_path, **FEEDS[feed])
    batches = record(trainer)
    callback = attach(trainer, peak_flops=1e10)
    if patch:
        fastpack.patch(trainer)
    found = logged(trainer)
    assert len(found) == STEPS
    totals = {"real": 0, "trained": 0, "slots": 0, "without": 0, "flops": 0}
    for step, batch in zip(found, batches, strict=False):
        lengths = [length for length, _ in batch]
        real, trained = sum(lengths), sum(labels for _, labels in batch)
        without = len(lengths) * max(lengths)
        slots = without if feed == "padded" else -(-real // 8) * 8 if "multiple" in feed else real
        assert step["real_tokens"] == real
        assert step["trained_tokens"] == trained < real
        assert step["padding_tokens"] == slots - real
        assert step["padding_share"] == pytest.approx(1 - real / slots)
        assert step["padding_share_without"] == pytest.approx(1 - real / without)
        dropped = patch and feed == "padded"
        assert step["wasted_share"] == pytest.approx(0 if dropped else step["padding_share"])
        # TRL's head on a CPU: all positions that have a next one
        positions = len(lengths) * (max(lengths) - 1) if feed == "padded" else slots - 1
        needed = step_flops(trainer.model.config, lengths)
        totals["flops"] += needed.linear + needed.attention + 3 * 2 * positions * HIDDEN * VOCAB
        for name, value in (("real", real), ("trained", trained), ("slots", slots), ("without", without)):
            totals[name] += value
        assert step["total_real_tokens"] == totals["real"]
        assert step["total_trained_tokens"] == totals["trained"]
        assert step["total_padding_tokens"] == totals["slots"] - totals["real"]
        assert step["total_padding_share"] == pytest.approx(1 - totals["real"] / totals["slots"])
        assert step["total_padding_share_without"] == pytest.approx(1 - totals["real"] / totals["without"])
        assert step["step_seconds"] > 0
        assert 0 <= step["data_share"] <= step["outside_share"] < 1
        assert step["mfu"] == pytest.approx(step["tflops_per_gpu"] * 1e12 / 1e10)
        assert step["peak_memory_gib"] > 0.01
        assert "mfu_once" not in step
    assert callback.totals.flops == totals["flops"]
    assert callback.totals.steps == STEPS


def test_reaches_reporters_history_and_the_file(tmp_path: Path) -> None:
    """A reporter that stands before, as those of ``report_to`` do; without our place at the front it hears nothing."""
    reporter = Reporter()
    trainer = sft(tmp_path, callbacks=[reporter], save_strategy="steps", save_steps=STEPS)
    callback = attach(trainer)
    output = trainer.train()
    names = {f"{PREFIX}{name}" for name in ("real_tokens", "padding_share", "step_seconds", "total_real_tokens")}
    assert all(names <= told.keys() for told in reporter.told[:STEPS])
    assert f"{PREFIX}mfu" not in reporter.told[0], "a CPU has no peak"
    assert reporter.told[-1][f"{PREFIX}total_real_tokens"] == callback.totals.real
    assert output.metrics[f"{PREFIX}total_real_tokens"] == callback.totals.real
    saved = json.loads((tmp_path / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    assert all(names <= entry.keys() for entry in saved["log_history"][:STEPS])
    assert saved["stateful_callbacks"]["MetricsState"]["attributes"]["totals"]["real"] == callback.totals.real

    late = Reporter()
    trainer = sft(tmp_path, callbacks=[late])
    trainer.callback_handler.callbacks.append(MetricsCallback(trainer, None))
    trainer.train()
    assert not any(names & told.keys() for told in late.told), "a callback at the end is too late"


def test_accumulation_logging_and_evaluation(tmp_path: Path) -> None:
    """Two batches a step, logged every second step, evaluated in between: the same totals, means over two steps."""
    plain = sft(tmp_path, gradient_accumulation_steps=2, max_steps=4, logging_steps=2)
    batches = record(plain)
    alone = attach(plain)
    found = logged(plain)
    lengths = [sum(length for length, _ in batch) for batch in batches]
    assert [step["real_tokens"] for step in found] == [sum(lengths[:4]) / 2, sum(lengths[4:8]) / 2]
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
    assert any("eval_loss" in told for told in reporter.told)
    assert not any(name.startswith(PREFIX) for told in reporter.told if "eval_loss" in told for name in told)
    assert (both.totals.real, both.totals.flops) == (alone.totals.real, alone.totals.flops)
    # the control: what is called outside of a step would have been counted
    both._in_step = True
    both._watch(evaluated.model)
    evaluated.evaluate()
    both._pending = 1
    both.collect()
    assert both.totals.flops > alone.totals.flops
    both.close()


@pytest.mark.parametrize("restore", [False, True])
def test_resume(restore: bool, tmp_path: Path) -> None:
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "logging_steps": 3}
    trainer = sft(tmp_path, **settings)
    whole = attach(trainer)
    trainer.train()
    checkpoint = tmp_path / "checkpoint-2"
    half = json.loads((checkpoint / "trainer_state.json").read_text())
    saved = half["stateful_callbacks"]["MetricsState"]["attributes"]["totals"]
    assert 0 < saved["real"] < whole.totals.real, "saved between two logs"

    def resumed() -> MetricsCallback:
        trainer = sft(tmp_path / "again", restore_callback_states_from_checkpoint=restore, **settings)
        callback = attach(trainer)
        trainer.train(resume_from_checkpoint=str(checkpoint))
        assert trainer.callback_handler.callbacks[0] is callback
        return callback

    again = resumed()
    for name in ("steps", "real", "trained", "slots", "wasted", "padded_slots", "flops"):
        assert getattr(again.totals, name) == getattr(whole.totals, name), name
    assert again.totals.elapsed > 0
    del half["stateful_callbacks"]["MetricsState"]  # a run that had no metrics
    (checkpoint / "trainer_state.json").write_text(json.dumps(half))
    assert resumed().totals.real == whole.totals.real - saved["real"]


def test_a_second_run_begins_anew(tmp_path: Path) -> None:
    trainer = sft(tmp_path)
    callback = attach(trainer)
    trainer.train()
    first = callback.totals
    trainer.train()
    assert (callback.totals.steps, callback.totals.real) == (first.steps, first.real)


@pytest.mark.parametrize("loss", [None, "fused"])
def test_the_head_counts_where_it_is_computed(loss: Any, tmp_path: Path) -> None:
    """In transformers' own trainer: on every slot, or with our loss on those whose next token has a label."""
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

    model = tiny_model("llama", attn_implementation="sdpa")
    args = TrainingArguments(**base_settings(tmp_path, max_steps=1, per_device_train_batch_size=ROWS))
    collator = DataCollatorForSeq2Seq(word_tokenizer())
    trainer: Any = Trainer(model, args, train_dataset=rows(), data_collator=collator)
    batches = record(trainer)
    fastpack.patch(trainer, loss=loss)
    callback = attach(trainer)
    trainer.train()
    lengths, labels = zip(*batches[0], strict=True)
    positions = sum(labels) if loss == "fused" else len(lengths) * max(lengths)
    needed = step_flops(model.config, lengths)
    assert callback.totals.flops == needed.linear + needed.attention + 3 * 2 * positions * HIDDEN * VOCAB
    assert callback.totals.trained == sum(labels)


def test_a_model_wrapped_meanwhile_keeps_its_plan() -> None:
    """A shard's sizes are not the weight's: what was read before is kept, but for whether layers are checkpointed."""
    model: Any = tiny_model("qwen3_moe")
    before = read_plan(model)
    wrapped = torch.nn.DataParallel(model)
    model.model.layers[0].mlp.experts.down_proj = torch.nn.Parameter(torch.zeros(5))
    args = SFTConfig(gradient_checkpointing=False, use_cpu=True, bf16=False)
    assert _reread(wrapped, before, args) == before != _reread(model, before, args)
    args.gradient_checkpointing = True
    again = _reread(wrapped, before, args)
    assert again is not None
    assert [layer.checkpointed for layer in again.layers] == [False, True, True]


def test_checkpointing_is_told_apart(tmp_path: Path) -> None:
    trainer = sft(tmp_path, gradient_checkpointing=True)
    batches = record(trainer)
    callback = attach(trainer, peak_flops=1e10)
    found = logged(trainer)
    needed = [
        step_flops(trainer.model.config, [n for n, _ in batch], checkpointing=True) for batch in batches[: len(found)]
    ]
    assert callback.totals.recomputed == sum(step.recomputed for step in needed) > 0
    share = callback.totals.flops / (callback.totals.flops + callback.totals.recomputed)
    assert found[0]["mfu_once"] / found[0]["mfu"] == pytest.approx(share, rel=0.01)


def test_nothing_is_read_between_two_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for a value does so through one of these; counted are those that our code calls."""
    import sys

    reads: list[str] = []
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
        stock = getattr(torch.Tensor, name)

        def asked(self: Any, *args: Any, _stock: Any = stock, _name: str = name, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            while "/torch/" in frame.f_code.co_filename and frame.f_back is not None:
                frame = frame.f_back
            if "fastpack/metrics/" in frame.f_code.co_filename:
                reads.append(_name)
            return _stock(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, asked)
    trainer = sft(tmp_path, max_steps=6, logging_steps=3)
    attach(trainer)
    trainer.train()
    assert reads == ["tolist", "tolist"], "once for each log, and none in any step"


def test_time_goes_where_it_belongs(tmp_path: Path) -> None:
    """A slow collator is data loading; a slow callback is outside the step, and no data loading."""

    class Slow(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            time.sleep(0.1)

    def shares(prepare: Callable[[Any], None]) -> dict[str, float]:
        trainer = sft(tmp_path, max_steps=4, logging_steps=4)
        prepare(trainer)
        attach(trainer)
        return logged(trainer)[0]

    def slow_loading(trainer: Any) -> None:
        stock = trainer.data_collator

        def collate(examples: Any) -> Any:
            time.sleep(0.1)
            return stock(examples)

        trainer.data_collator = collate

    loading, outside = shares(slow_loading), shares(lambda trainer: trainer.add_callback(Slow()))
    assert loading["data_share"] > 0.4
    assert outside["data_share"] < 0.2
    assert outside["outside_share"] > 0.4
    assert loading["outside_share"] >= loading["data_share"]
    assert loading["tokens_per_second_per_gpu"] < outside["tokens_per_second_per_gpu"]


def test_the_meter_counts_the_same(tmp_path: Path) -> None:
    trainer = sft(tmp_path)
    meter = Meter(trainer)
    callback = attach(trainer)
    trainer.train()
    summary = meter.summary(meter.records_of_all_ranks(trainer.accelerator))
    assert (summary.real_tokens, summary.slots, summary.steps) == (
        callback.totals.real,
        callback.totals.slots,
        callback.totals.steps,
    )


def test_everything_is_taken_off(tmp_path: Path) -> None:
    trainer = sft(tmp_path)
    before = list(trainer.callback_handler.callbacks)
    callback = attach(trainer)
    trainer.train()
    assert not trainer.model._forward_hooks
    assert not trainer.model._forward_pre_hooks
    assert "get_batch_samples" not in vars(trainer)
    trainer.remove_callback(MetricsCallback)
    trainer.remove_callback(MetricsState)
    assert trainer.callback_handler.callbacks == before
    assert callback.totals.steps == STEPS


def test_what_is_refused(tmp_path: Path) -> None:
    trainer = sft(tmp_path)
    with pytest.raises(TypeError, match="Trainer"):
        attach(trainer.model)
    for wrong in (0, -1.0, float("nan"), "fast"):
        with pytest.raises(ValueError, match="peak_flops"):
            attach(trainer, peak_flops=wrong)  # type: ignore[arg-type]
    attach(trainer, peak_flops="measured")
    with pytest.raises(PatchError, match="already"):
        attach(trainer)


def test_a_model_without_a_formula_warns(tmp_path: Path) -> None:
    trainer = sft(tmp_path, tiny_model("diffllama", attn_implementation="eager"), max_steps=1)
    attach(trainer, peak_flops=1e10)
    with pytest.warns(FastpackWarning, match="leaves out how DiffLlamaAttention mixes tokens"):
        found = logged(trainer)
    assert found[0]["mfu"] > 0
