"""Fixtures of the tests of mixers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from fastpack.layers.mixers import kernels


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide other packages' kernels, and forget what was found, before and after."""
    found: Any = (kernels._absent, kernels._function, kernels._gates_are_wrong)
    for name in ("fla", "mamba_ssm", "causal_conv1d"):
        monkeypatch.setitem(sys.modules, name, None)
    for cache in found:
        cache.cache_clear()
    yield
    for cache in found:
        cache.cache_clear()
