"""Fixtures of every test: helper modules are on the path, and GPU tests are skipped, loudly, without a GPU."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is declared: they run on CPU tensors, one block at a time

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run every parametrization and the slow tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    everything = config.getoption("--all")
    left_out = set() if everything else _left_out(items)
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="NO GPU HERE: this test needs a CUDA device"))
        elif not everything and (item.get_closest_marker("slow") or item in left_out):
            item.add_marker(pytest.mark.skip(reason="runs with --all: bash gists/test.sh --all"))


def _left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the items that ``@pytest.mark.sample(n)`` leaves for ``--all``.

    A sampled test keeps n of its parametrizations: each time the one with the most parameter values that were not seen
    yet, and of equals the first.
    """
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample"):
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left: set[pytest.Item] = set()
    for group in groups.values():
        (size,) = group[0].get_closest_marker("sample").args  # type: ignore[union-attr]
        seen: set[tuple[str, int]] = set()
        parameters = {item: item.callspec.params for item in group}  # type: ignore[attr-defined]
        values = {item: {(name, id(value)) for name, value in by.items()} for item, by in parameters.items()}
        for _ in range(min(size, len(group))):
            best = max(group, key=lambda item: len(values[item] - seen))
            seen |= values[best]
            group.remove(best)
        left.update(group)
    return left


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Use one thread: tensors are small and calls are many, so a second thread would only wait for the first."""
    torch.set_num_threads(1)


@pytest.fixture
def unwritten_memory_is_not_finite() -> Iterator[None]:
    """Fill new memory with NaN, so that unwritten values are seen and aren't zero by chance."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _compile_anew_on_a_gpu(request: pytest.FixtureRequest) -> None:
    """Reset dynamo on a GPU: dozens of models in one process may exceed its limit of compilations, an error."""
    if request.node.get_closest_marker("gpu") is not None and torch.cuda.is_available():
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _leave_memory_to_others(request: pytest.FixtureRequest) -> Iterator[None]:
    """Free cached GPU memory after a large test, since several processes test on one GPU."""
    yield
    on_gpu = request.node.get_closest_marker("gpu") is not None and torch.cuda.is_initialized()
    if on_gpu and torch.cuda.memory_reserved() > 2**32:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def compile_anew() -> Iterator[None]:
    """Reset the compiler, so that a test doesn't reuse another test's compilations."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def accelerate_afresh() -> Iterator[None]:
    """Reset accelerate, which keeps the precision of the first trainer or accelerator of a process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the calls of each fused Function of the layers."""
    from fastpack.layers import mlp, project

    result: dict[str, int] = {}

    def count(module: Any, name: str) -> None:
        result[name], stock = 0, getattr(module, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            result[name] += 1
            return stock(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)

    count(project, "project")
    count(project, "add_updates")
    count(mlp, "gated_mlp")
    return result


@pytest.fixture
def varlen(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Register an attention kernel that can be recorded without a GPU."""
    from recording import Varlen

    from fastpack.attention_dispatch import BACKENDS

    backend = Varlen()
    monkeypatch.setitem(BACKENDS, "torch_varlen", backend)
    return backend


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Disable the garbage collector, so that memory is freed by reference counts alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
