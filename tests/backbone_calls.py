"""What reaches a model's backbone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from fastpack.attention_dispatch import BACKENDS
from fastpack.backends.call import AttentionCall


class Calls:
    """Counts the calls of each backend, and how many tokens each saw."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens: dict[str, list[int]] = {name: [] for name in BACKENDS}
        for name, backend in BACKENDS.items():
            monkeypatch.setattr(backend, "run", self._counted(name, backend.run))

    def _counted(self, name: str, run: Callable[[AttentionCall], Tensor]) -> Callable[[AttentionCall], Tensor]:
        def counted(call: AttentionCall) -> Tensor:
            self.tokens[name].append(call.q.shape[0])
            return run(call)

        return counted

    @property
    def all(self) -> list[int]:
        return [count for counts in self.tokens.values() for count in counts]
