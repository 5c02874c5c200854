"""Two ranks for the tests of this folder: on the CPU over gloo, and on two GPUs over NCCL if there are two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import Ranks
from tiny import tiny_model


@pytest.fixture(scope="session", params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Two processes that live for the whole session."""
    if request.param == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip(f"NEEDS TWO GPUS, and there is {torch.cuda.device_count()}: two ranks over NCCL")
    started = Ranks(request.param)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    """Four processes on the CPU."""
    started = Ranks("gloo", world=4)
    yield started
    started.stop()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with a tiny Llama, large enough for blocks of 4-bit weights; ranks save none, only the first would."""
    tiny_model("llama", hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(tmp_path)
    return tmp_path
