"""Metrics of two ranks on gloo: both log the same metrics, which cover both ranks."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

STEPS = 3


def process(rank: int, folder: str, port: int) -> None:
    """Run one of two ranks, which train on different batches."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    from test_metrics import logged, record, sft

    from fastpack.trainers.metrics import attach

    trainer = sft(
        Path(folder) / "trainer",
        max_steps=STEPS,
        logging_steps=2,
        save_strategy="steps",
        save_steps=STEPS,
        ddp_backend="gloo",
    )
    batches = record(trainer)
    callback = attach(trainer, peak_flops=1e10)
    steps = logged(trainer)
    result: dict[str, Any] = {
        "lengths": [[length for length, _ in batch] for batch in batches][:STEPS],
        "logged": steps,
        "totals": dict(callback.totals),
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(process, (str(tmp_path), port), nprocs=2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["lengths"] != second["lengths"], "each has batches of its own"
    assert first["totals"] == second["totals"]
    assert first["logged"] == second["logged"]
    real = [sum(map(sum, one["lengths"])) for one in (first, second)]
    assert first["totals"]["real"] == sum(real) != real[0]
    assert first["totals"]["steps"] == STEPS
    two = sum(sum(map(sum, one["lengths"][:2])) for one in (first, second))
    step = first["logged"][0]
    assert step["real_tokens"] == two / 2
    # the third step was not logged, but summed up for the checkpoint
    saved = json.loads((tmp_path / "trainer" / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["fastpack.metrics"]["real"] == sum(real)
    # two ranks take a step at the same time: two steps of both are less than all three of both
    assert step["step_seconds"] * 2 * 2 < first["totals"]["inside"] / 1e9
