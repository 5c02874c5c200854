"""The fixture of tests that check which tokens reach a model's backbone."""

from __future__ import annotations

import pytest
from backbone_calls import Calls


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)
