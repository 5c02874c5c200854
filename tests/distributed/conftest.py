"""Two ranks for the tests of this folder: on the CPU over gloo, and on two GPUs over NCCL if there are two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ranks import Ranks


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
