"""Fixtures for the backend tests: machines that they may pretend to run on, and tiles of kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from fastpack.backends import cudnn, flash_attn, flex, limits, torch_varlen, xformers

if TYPE_CHECKING:
    from packed_kernels import Cut

    from fastpack.ops.kernels.attention import AttentionTile

PROBES = (
    flash_attn._installed,
    flash_attn._import_error,
    flash_attn._function,
    xformers._unusable,
    torch_varlen._asks_for_groups,
)


@pytest.fixture(autouse=True)
def _nothing_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide every package but torch. Installed packages are looked up once a process; here, once a test."""
    for name in ("flash_attn", "flash_attn.cute", "flash_attn_interface", "xformers"):
        monkeypatch.setitem(sys.modules, name, None)
    for probe in PROBES:
        probe.cache_clear()
    yield
    for probe in PROBES:
        probe.cache_clear()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Return a function: after ``machine(7, 5)`` torch reports a CUDA device of that compute capability.

    The shapes of such a test name the device ``cuda``.
    """

    def report(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn.VERSION)

    return report


@pytest.fixture
def capable_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Return a function: after ``capable_cpu(9, 0)`` backends take CPU tensors for that GPU's, so ``run`` works."""

    def report(major: int, minor: int) -> None:
        for module in (limits, flash_attn):
            monkeypatch.setattr(module, "cuda_capability", lambda shape: (major, minor))

    return report


@pytest.fixture
def eager_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run FlexAttention uncompiled, as a CPU does; it then has a forward only."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Cut:
    """Return a function: after ``cut(tile)`` all of our own attention kernels use this tile."""
    from fastpack.ops.kernels import attention, attention_keys, attention_queries

    def cut(tile: AttentionTile) -> None:
        if tile.sharing:
            monkeypatch.setattr(attention_keys, "LEAST_STEPS", 1)
        for module in (attention, attention_queries, attention_keys):
            monkeypatch.setattr(module, "chosen", lambda *_, **__: tile)

    return cut
