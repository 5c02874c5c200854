"""The sampler of token budgets: its epochs, and ranks that have other data."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from fastpack.data import sampler as budget_sampler
from fastpack.data.sampler import TokenBudgetSampler, compare_ranks
from fastpack.errors import PackingError

RANKS = st.sampled_from([1, 2, 8])


def like_alpaca(count: int, seed: int = 0) -> list[int]:
    """A mean of 190 tokens and a median of 149, from 25 to 663, as the first thousand rows of Alpaca have."""
    draw = random.Random(seed)
    return [min(max(int(draw.lognormvariate(5.0, 0.78)), 25), 663) for _ in range(count)]


def sampler(rank: int = 0, ranks: int = 2, count: int = 400, **changed: Any) -> TokenBudgetSampler:
    return TokenBudgetSampler(like_alpaca(count), 2048, **{"seed": 3, "rank": rank, "ranks": ranks, **changed})


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_data_loader_sees_every_example_once(ranks: int) -> None:
    lengths = like_alpaca(400)
    for epoch in range(2):
        seen: list[int] = []
        counts = set()
        for rank in range(ranks):
            batches = sampler(rank, ranks)
            batches.set_epoch(epoch)
            loader: Any = torch.utils.data.DataLoader(lengths, batch_sampler=batches, collate_fn=list)
            assert all(sum(batch) <= 2048 for batch in loader)
            drawn = list(batches)
            counts |= {len(drawn), len(batches), len(loader)}
            seen += [i for batch in drawn for i in batch]
        assert sorted(seen) == list(range(400))
        assert len(counts) == 1


def test_a_loop_goes_on_in_the_middle() -> None:
    """In a new sampler, by skipping; then the next epoch as ever, and a wrong epoch changes nothing."""
    first, again = sampler(), sampler()
    for one in (first, again):
        one.set_epoch(2)
    want = list(first)
    assert list(islice(again, 3, None)) == want[3:]
    assert list(again) == want
    with pytest.raises(PackingError, match="epoch=-1"):
        again.set_epoch(-1)
    assert list(again) == want
    again.set_epoch(3)
    assert list(again) != want


def test_one_of_rank_and_ranks() -> None:
    with pytest.raises(PackingError, match="pass both"):
        TokenBudgetSampler([1], 2, rank=0)
    with pytest.raises(PackingError, match="ranks=0"):
        TokenBudgetSampler([1], 2, rank=0, ranks=0)
    with pytest.raises(PackingError, match="rank=2 of ranks=2"):
        TokenBudgetSampler([1, 1], 2, rank=2, ranks=2)


def test_ranks_are_compared() -> None:
    states = [{"rank": rank, **sampler(rank)._settings()} for rank in range(2)]
    compare_ranks(states)
    for name, value in {"lengths": "f", "look_ahead": 1, "max_tokens": 3, "seed": 9}.items():
        with pytest.raises(PackingError, match=f"{name} is not the same on every rank"):
            compare_ranks([states[0], {**states[1], name: value}])
    with pytest.raises(PackingError, match=r"ranks \[0, 0\] of \[2, 2\]"):
        compare_ranks([states[0], states[0]])
    with pytest.raises(PackingError, match="Leave rank and ranks out"):
        compare_ranks(states[:1])


def process(rank: int, folder: str) -> None:
    """One of two: the same data, then other data on the second."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    batches = TokenBudgetSampler(like_alpaca(100), 2048)
    result = {"rank": batches.rank, "ranks": batches.ranks, "batches": list(batches)}
    for name, lengths in {"other": like_alpaca(100, rank), "too_long": [3, 3000 * rank + 1]}.items():
        try:
            TokenBudgetSampler(lengths, 2048)
        except PackingError as error:
            result[name] = str(error)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


def test_two_processes(tmp_path: Path) -> None:
    """Other data on one of them raises on both, and neither waits for the other for ever."""
    torch.multiprocessing.spawn(process, (str(tmp_path),), nprocs=2)
    result = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [(one["rank"], one["ranks"]) for one in result] == [(0, 2), (1, 2)]
    assert sorted(i for one in result for batch in one["batches"] for i in batch) == list(range(100))
    for one in result:
        assert "lengths is not the same on every rank" in one["other"]
        assert "lengths is not the same on every rank" in one["too_long"]


def test_epochs_of_equal_length() -> None:
    lengths = [i * 37 % 700 + 200 for i in range(90)]
    short_sighted: dict[str, Any] = {"look_ahead": 4, "rank": 0, "ranks": 1}
    counts: list[list[int]] = []
    for epochs in (1, 6):
        batches = TokenBudgetSampler(lengths, 1024, **short_sighted)
        batches.even_out(epochs)
        counts.append([])
        for epoch in range(6):
            batches.set_epoch(epoch)
            counts[-1].append(len(batches))
            assert sorted(i for batch in batches for i in batch) == list(range(90))
    assert len(set(counts[0])) > 1, "or there is nothing to test"
    assert counts[1] == [max(counts[0])] * 6


def test_of_many_epochs_only_the_first_are_planned_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later one, which might need more micro-batches, has the order of an earlier one, the same on every rank."""
    monkeypatch.setattr(budget_sampler, "EVEN_EPOCHS", 3)
    lengths = [i * 37 % 700 + 200 for i in range(90)]
    single = TokenBudgetSampler(lengths, 1024, look_ahead=4, seed=1, rank=0, ranks=1)
    counts = [single._planned(epoch).micro_batches for epoch in range(40)]
    assert max(counts) > max(counts[:3]), "or there is nothing to test"
    planned = []
    real = budget_sampler.plan_batches
    monkeypatch.setattr(
        budget_sampler, "plan_batches", lambda *args, **kwargs: planned.append(kwargs["epoch"]) or real(*args, **kwargs)
    )
    single.even_out(10**6)
    assert planned == [0, 1, 2, 0]
    pair = [TokenBudgetSampler(lengths, 1024, look_ahead=4, seed=1, rank=rank, ranks=2) for rank in range(2)]
    for ranks in ([single], pair):
        for batches in ranks:
            batches.even_out(10**6)
        for epoch in range(40):
            for batches in ranks:
                batches.set_epoch(epoch)
            assert {len(batches) for batches in ranks} == {ranks[0]._micro_batches}
            assert ranks[0].plan == ranks[-1].plan
            assert sorted(i for batches in ranks for batch in batches for i in batch) == list(range(90))
