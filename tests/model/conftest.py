"""Count how often the fused loss's op runs, for tests that request it."""

from __future__ import annotations

import pytest
from loss_cases import Calls


@pytest.fixture
def op_calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)
