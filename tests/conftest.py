"""Shared by every test: the oracle and the tiny models on the path, and GPU tests skipped, loudly, without a GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is declared: they run on CPU tensors, one block at a time

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the full product, not the pairwise cover")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="NO GPU HERE: this test needs a CUDA device"))
        if item.get_closest_marker("slow") and not config.getoption("--all"):
            item.add_marker(pytest.mark.skip(reason="part of the full product: bash gists/test.sh --all"))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tensors are small here, and there are many calls: a second thread only waits for the first."""
    torch.set_num_threads(1)
