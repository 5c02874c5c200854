"""Metrics on a GPU are counted without waiting, and times are measured on the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_metrics import logged, sft
from tiny import tiny_model

from fastpack.trainers.metrics import attach
from fastpack.trainers.metrics.counting import count_batch
from fastpack.trainers.metrics.stopwatch import Stopwatch

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_counting_waits_for_nothing(no_waiting: None, tmp_path: Path) -> None:
    torch.cuda.set_sync_debug_mode("default")
    ids = torch.ones(4, 64, dtype=torch.long, device=CUDA)
    flat = torch.arange(64, device=CUDA)[None]
    batches: list[dict[str, Any]] = [
        {"input_ids": ids, "attention_mask": ids, "labels": ids},
        {"input_ids": ids[:1], "position_ids": flat, "labels": ids[:1]},
        {"input_ids": ids[:1], "cu_seq_lens_q": flat[0, :3].int(), "shift_labels": ids[:1]},
    ]
    model = tiny_model("gemma2").to(CUDA).train()
    trainer = sft(tmp_path, model)
    callback = attach(trainer, peak_flops=1e13)
    callback.on_train_begin(trainer.args, trainer.state, trainer.control)
    torch.cuda.set_sync_debug_mode("error")
    for batch in batches:
        count_batch(batch, (None, 8))
        callback._count(model, (), batch)
    callback.on_step_begin(trainer.args, trainer.state, trainer.control)
    callback.on_step_end(trainer.args, trainer.state, trainer.control)
    with pytest.raises(RuntimeError, match="synchronizing"):
        int(ids.sum())


def test_time_is_the_devices() -> None:
    """A pause of the host takes no time while the device is busy."""
    busy, idle = Stopwatch(CUDA), Stopwatch(CUDA)
    big = torch.randn(8192, 8192, device=CUDA)
    torch.mm(big, big)
    torch.cuda.synchronize()
    for _ in range(100):
        torch.mm(big, big)
    busy.start()
    time.sleep(0.02)
    busy.stop()
    torch.cuda.synchronize()
    idle.start()
    time.sleep(0.02)
    idle.stop()
    assert busy.take() < 0.01 < 0.018 < idle.take()


def test_a_run(tmp_path: Path) -> None:
    model = tiny_model("llama", attn_implementation="sdpa").to(CUDA)
    trainer = sft(tmp_path, model)
    attach(trainer, peak_flops=1e13)
    for step in logged(trainer):
        assert 0 < step["mfu"] < 1
        assert step["step_seconds"] > 0
        assert step["peak_memory_gib"] < 1
