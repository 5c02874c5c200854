"""How often the fused loss's op ran, for every test that asks."""

from __future__ import annotations

import pytest
from loss_cases import Calls


@pytest.fixture
def op_calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)
