"""``exact_merges`` where two ranks share a model: each rank's part of every base weight is as it was."""

from __future__ import annotations

import pytest
from merge_work import merged_and_unmerged
from ranks import Ranks


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_the_base_is_as_it_was(kind: str, ranks: Ranks) -> None:
    exact = ranks.run(merged_and_unmerged, kind, exact=True)
    stock = ranks.run(merged_and_unmerged, kind, exact=False)
    for ours, theirs in zip(exact, stock, strict=True):
        assert (ours["sharded"] > 0) == (kind == "fsdp2")
        assert ours["merged"] == theirs["merged"] > 0
        assert ours["drifted"] == 0
        assert theirs["drifted"] > 0, "negative control: PEFT's own merges round"
