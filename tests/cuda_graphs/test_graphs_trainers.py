"""Replayed steps inside DDP and inside TRL's unmodified trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import FLOAT32_BOUND, make_sequences, relative
from recording import LARGE, SMALL, graphed, looks, runner
from tiny import VOCAB, tiny_model
from torch.nn.parallel import DistributedDataParallel

import fastpack

pytestmark = pytest.mark.usefixtures("varlen")


def test_ddp_gets_its_gradients(tmp_path: Path) -> None:
    """Its hooks sit on the parameters' autograd nodes, which a recording must neither fire nor forget."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        plain, model = fastpack.patch(tiny_model("llama")), graphed(tiny_model("llama"))
        calls: list[int] = []
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(calls, _count)
        for lengths in (SMALL, LARGE, SMALL):
            ids = torch.cat(make_sequences(VOCAB, lengths))[None]
            for m in (plain, wrapped):
                m.zero_grad()
                m(input_ids=ids, labels=ids, packed_seq_lens=list(lengths)).loss.backward()
            for a, b in zip(model.parameters(), plain.parameters(), strict=True):
                assert relative(a.grad, b.grad) <= FLOAT32_BOUND
        assert runner(model).stats.replays == 3
        assert len(calls) >= 3, "gradients went through the reducer"
    finally:
        torch.distributed.destroy_process_group()


def _count(calls, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations, and takes none for right
    calls.append(1)
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


@pytest.mark.parametrize("settings", [{}, {"padding_free": True, "max_length": None}], ids=["padded", "padding_free"])
def test_trl_trains_the_same(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainers = pytest.importorskip("test_trainers")
    settings = {**settings, "gradient_accumulation_steps": 2}
    want, _ = trainers.train(fastpack.patch(tiny_model("llama")), tmp_path, patch=None, **settings)
    model = graphed(tiny_model("llama"), record_after=0.05)
    order = looks(monkeypatch)
    ours, trainer = trainers.train(model, tmp_path, patch=None, **settings)
    trainers.check_equal(ours, want)
    assert runner(trainer.model).stats.replays >= trainers.STEPS
    read = ["lengths", "lengths"]  # by the head, and by the backbone what the head has read
    assert order == read + ["look", *read] * (runner(trainer.model).stats.replays - 1), "ahead, and once"
