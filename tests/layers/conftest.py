"""Fixtures of the tests of layers."""

from __future__ import annotations

from typing import Any

import pytest
from op_checks import count_calls

from fastpack.layers import experts


@pytest.fixture
def expert_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Record each call of the op of experts, which proves that their fast forward runs; a patch may try it, too."""
    return count_calls(monkeypatch, experts, "experts")
