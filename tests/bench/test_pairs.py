"""``fastpack bench --trainer dpo``: lengths of pairs, and who takes part."""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastpack.bench import lengths
from fastpack.bench.lengths import make_pair_lengths, sequences
from fastpack.bench.loops import make_pairs
from fastpack.cli.bench import PARSER, choose_variants, make_settings
from fastpack.errors import FastpackError

PAIRS = [(5, 7, 11), (3, 2, 4)]


def test_drawn_lengths_are_those_of_chats() -> None:
    drawn = make_pair_lengths(4000, seed=1)
    assert drawn == make_pair_lengths(4000, seed=1) != make_pair_lengths(4000, seed=2)
    prompt, chosen, rejected = zip(*drawn, strict=True)
    assert statistics.median(prompt) == pytest.approx(lengths.PROMPT, rel=0.1)
    for completions in (chosen, rejected):
        assert statistics.median(completions) == pytest.approx(lengths.COMPLETION, rel=0.1)
    assert 0.3 < statistics.correlation(chosen, rejected) < 0.7


def test_lengths_from_files_and_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(PAIRS))
    assert make_pair_lengths(3, kind=str(tmp_path / "a.json")) == [*PAIRS, PAIRS[0]]
    assert make_pair_lengths(2, kind="9") == [(4, 5, 5)] * 2
    # rows are cut, and prompts that fill one are left out
    assert make_pair_lengths(3, kind=str(tmp_path / "a.json"), max_length=10) == [(5, 5, 5), (3, 2, 4), (5, 5, 5)]
    assert make_pair_lengths(2, kind=str(tmp_path / "a.json"), max_length=5) == [(3, 2, 2)] * 2
    with pytest.raises(ValueError, match="no prompt"):
        make_pair_lengths(2, kind=str(tmp_path / "a.json"), max_length=3)
    for none in ("0", "1"):
        with pytest.raises(ValueError, match="or a number above 1"):
            make_pair_lengths(2, kind=none)
    for wrong in ("[[1, 2]]", "[3, 4]", "[[1, 2, 0]]"):
        (tmp_path / "a.json").write_text(wrong)
        with pytest.raises(ValueError, match="of prompt, chosen and rejected tokens"):
            make_pair_lengths(2, kind=str(tmp_path / "a.json"))


def test_rows_of_a_batch() -> None:
    assert sequences(PAIRS) == [12, 16, 5, 7]
    built = make_pairs(PAIRS, 100, seed=0)
    assert [tuple(len(row[name]) for name in ("prompt_ids", "chosen_ids", "rejected_ids")) for row in built] == PAIRS
    assert built[0]["chosen_ids"] != built[0]["rejected_ids"][:7]


def flags(*arguments: str) -> argparse.Namespace:
    return PARSER.parse_args(arguments)


def test_flags() -> None:
    settings = make_settings(flags("--trainer", "dpo"), on_gpu=False)
    assert (settings.trainer, settings.rows, settings.lengths) == ("dpo", 4, "chat")
    settings = make_settings(flags(), on_gpu=False)
    assert (settings.trainer, settings.rows, settings.lengths) == ("sft", 16, "alpaca")
    assert make_settings(flags("--data", "a.json", "--rows", "3"), on_gpu=False) == replace(
        settings, lengths="a.json", rows=3
    )
    with pytest.raises(FastpackError, match="--loop plain is for --trainer sft"):
        make_settings(flags("--trainer", "dpo", "--loop", "plain"), on_gpu=False)


def test_the_variants() -> None:
    assert choose_variants(None, on_gpu=True, trainer="dpo") == (
        ["stock padded", "fastpack", "fastpack, prompts shared"],
        {},
    )
    with pytest.raises(FastpackError, match="it shares prefixes, which --graphs excludes"):
        choose_variants(["fastpack, prompts shared"], on_gpu=True, trainer="dpo", graphs="auto")
    names, left_out = choose_variants(None, on_gpu=True, trainer="dpo", graphs="auto")
    assert names == ["stock padded", "fastpack"]
    assert left_out == {"fastpack, prompts shared": "shares prefixes, which --graphs excludes"}
    with pytest.raises(FastpackError, match="not a variant of --trainer dpo, which has stock padded, fastpack"):
        choose_variants(["fastpack packed"], on_gpu=torch.cuda.is_available(), trainer="dpo")
