"""Lengths of data sets of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastpack.data.lengths import lengths_of
from fastpack.errors import PackingError

PAIR = {"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5, 6]}


class Rows(torch.utils.data.Dataset[Any]):
    """A map-style data set, which counts what it makes."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows
        self.made = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> Any:
        self.made += 1
        return self.rows[at]


@pytest.mark.parametrize("kind", ["list", "map-style", "columns", "datasets"])
@pytest.mark.parametrize(
    ("rows", "want"),
    [
        ([{"input_ids": [1, 2, 3]}, {"input_ids": [1]}], [3, 1]),
        ([{"length": 9, "input_ids": [1, 2, 3]}, {"length": 8, "input_ids": [1]}], [3, 1]),
        ([{"length": 9, "text": "a"}, {"length": 8, "text": "b"}], [9, 8]),
        ([{**PAIR, "length": 3}], [8]),
        ([PAIR, {**PAIR, "prompt_ids": [1]}], [8, 6]),
        ([{name.replace("_ids", "_input_ids"): ids for name, ids in PAIR.items()}], [8]),
        ([{"chosen_ids": [1, 2], "rejected_ids": [1, 2, 3]}], [5]),
        ([{**PAIR, "input_ids": [1]}], [8]),
        ([{"prompt_ids": [1, 2], "completion_ids": [3]}], [3]),
        ([{"prompt_ids": [1, 2], "completion_ids": [3], "KL_completion_ids": [4, 5]}], [7]),
        ([{"input_ids": [[1, 2, 3]]}, {"input_ids": [[1]]}], [3, 1]),  # a processor's rows
    ],
)
def test_lengths_of(kind: str, rows: list[dict[str, Any]], want: list[int]) -> None:
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    made: dict[str, Any] = {"list": rows, "map-style": Rows(rows), "columns": columns}
    if kind == "datasets":
        datasets = pytest.importorskip("datasets")
        stored = datasets.Dataset.from_dict(columns)
        assert lengths_of(stored.with_format("torch")) == want
        assert lengths_of(stored.select(list(range(len(rows)))[::-1])) == want[::-1]
        made["datasets"] = stored
    assert lengths_of(made[kind]) == want
    if kind == "map-style":
        assert made[kind].made == len(rows) + 1


def test_rows_of_a_processor_are_tensors_of_one_row() -> None:
    assert lengths_of([{"input_ids": torch.ones(1, 5)}, {"input_ids": torch.ones(1)}]) == [5, 1]
    for several in (torch.ones(2, 5), [[1, 2, 3], [4, 5, 6]], torch.ones(1, 2, 3)):
        with pytest.raises(PackingError, match="example 0 has no input_ids that can be counted"):
            lengths_of([{"input_ids": several}])


def test_sequences_are_cut_where_the_collator_cuts() -> None:
    assert lengths_of([PAIR], max_length=4) == [3 + 4]
    assert lengths_of([PAIR], max_length=2) == [2 + 2]
    assert lengths_of([{"input_ids": [1, 2, 3]}], max_length=2) == [2]
    assert lengths_of([{**PAIR, "length": 8}], max_length=3) == [3 + 3]
    assert lengths_of([{"length": 8}], max_length=3) == [8], "which may be both sides of a pair"


def test_tensors_have_lengths() -> None:
    assert lengths_of([{"input_ids": torch.arange(4)}, {"input_ids": torch.arange(2)}]) == [4, 2]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (iter([1]), r"has no len\(\)"),
        ([], "is empty"),
        ([1, 2], "examples of this list are int"),
        ([{"text": "a", "label": 1}], "this list has text, label, none of which counts"),
        ([{"text": "a"}], "prompt_ids . chosen_ids . rejected_ids"),
        ([{"input_ids": [1]}, {"text": "a"}], "example 1 has no input_ids that can be counted: None"),
        ([{"length": 2.5}], r"example 0 has no length that can be counted: 2\.5"),
        ({"chosen_ids": [[1]], "rejected_ids": [[1], [2]]}, "differ in size: chosen_ids has 1, rejected_ids has 2"),
    ],
)
def test_data_sets_without_lengths(data: Any, message: str) -> None:
    with pytest.raises(PackingError, match=message):
        lengths_of(data)


def test_streams_and_gaps_of_datasets() -> None:
    datasets = pytest.importorskip("datasets")
    stored = datasets.Dataset.from_dict({"input_ids": [[1], None]})
    with pytest.raises(PackingError, match="example 1 has no input_ids"):
        lengths_of(stored)
    with pytest.raises(PackingError, match="without streaming=True"):
        lengths_of(stored.to_iterable_dataset())
    with pytest.raises(PackingError, match="has train, none of which counts"):
        lengths_of(datasets.DatasetDict({"train": stored}))
