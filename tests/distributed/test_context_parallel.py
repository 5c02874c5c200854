"""Sequences spread over two ranks: a patched model raises, since it would attend to one rank's part alone."""

from __future__ import annotations

from typing import Any

import pytest
from context_parallel_work import torchs, ulysses
from ranks import Ranks

NAMED = "context or sequence parallelism"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["assigned", "registered"])
def test_an_all_to_all_attention_in_the_table(how: str, when: str, ranks: Ranks) -> None:
    check(ranks.run(ulysses, how, when, "llama", {"attention": "reference"}), when)


@pytest.mark.parametrize("when", ["before", "after"])
def test_on_rows_too(when: str, ranks: Ranks) -> None:
    """The same holds if the stock function runs on one row a sequence, since each rank would have a part of the row."""
    check(ranks.run(ulysses, "assigned", when, "gptj", {}), when)


def check(on_each_rank: list[dict[str, Any]], when: str) -> None:
    for result in on_each_rank:
        assert NAMED in result["said"]
        assert "context_parallel_work.hidden_exchange" in result["said"]
        assert ("Nothing was changed" in result["said"]) == (when == "before")
        assert result["calls"] == 0
        assert result["calls of stock"] == 2, "one a layer"
        assert result["stock"] == pytest.approx(result["whole"], abs=1e-4)
        assert result["afterwards"] == pytest.approx(result["whole"], abs=1e-4)


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize(("balanced", "mask"), [(False, False), (True, False), (True, True)])
def test_torchs_own(balanced: bool, mask: bool, labels: bool, ranks: Ranks) -> None:
    """It raises before it reads positions, which load balancing puts in an order that no sequence has."""
    for result in ranks.run(torchs, balanced, mask, labels):
        for message in (result["said"], result["patching"]):
            assert NAMED in message
            assert "scaled_dot_product_attention is now torch.distributed.tensor.experimental" in message
