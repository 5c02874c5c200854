"""``fastpack bench --trainer dpo``: lengths of pairs, who takes part, and the floor under a step."""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastpack.bench import pair_lengths
from fastpack.bench.flags import add_arguments, choose, make_settings
from fastpack.bench.flops import layer_projections, step_flops
from fastpack.bench.pair_lengths import count_tokens, make_pair_lengths, sequences
from fastpack.bench.preference import dpo_step_flops, make_pairs
from fastpack.bench.settings import Settings
from fastpack.bench.shapes import make_config
from fastpack.commands.demo import data
from fastpack.errors import FastpackError

PAIRS = [(5, 7, 11), (3, 2, 4)]


def test_drawn_lengths_are_those_of_chats() -> None:
    drawn = make_pair_lengths(4000, seed=1)
    assert drawn == make_pair_lengths(4000, seed=1) != make_pair_lengths(4000, seed=2)
    prompt, chosen, rejected = zip(*drawn, strict=True)
    assert statistics.median(prompt) == pytest.approx(pair_lengths.PROMPT, rel=0.1)
    for completions in (chosen, rejected):
        assert statistics.median(completions) == pytest.approx(pair_lengths.COMPLETION, rel=0.1)
    assert 0.3 < statistics.correlation(chosen, rejected) < 0.7


def test_lengths_from_files_and_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(PAIRS))
    (tmp_path / "a.jsonl").write_text("[5, 7, 11]\n[3, 2, 4]\n")
    for name in ("a.json", "a.jsonl"):
        assert make_pair_lengths(3, kind=str(tmp_path / name)) == [*PAIRS, PAIRS[0]]
    assert make_pair_lengths(2, kind="9") == [(4, 5, 5)] * 2
    # rows are cut, and prompts that fill one are left out
    assert make_pair_lengths(3, kind=str(tmp_path / "a.json"), max_length=10) == [(5, 5, 5), (3, 2, 4), (5, 5, 5)]
    assert make_pair_lengths(2, kind=str(tmp_path / "a.json"), max_length=5) == [(3, 2, 2)] * 2
    with pytest.raises(ValueError, match="no prompt"):
        make_pair_lengths(2, kind=str(tmp_path / "a.json"), max_length=3)
    for none in ("0", "1"):
        with pytest.raises(ValueError, match="no room for a prompt and a completion"):
            make_pair_lengths(2, kind=none)
    for wrong in ("[[1, 2]]", "[3, 4]", "[]", "{}", "[[1, 2, 0]]"):
        (tmp_path / "a.json").write_text(wrong)
        with pytest.raises(ValueError, match="tokens of prompt, chosen and rejected"):
            make_pair_lengths(2, kind=str(tmp_path / "a.json"))


def test_rows_of_a_batch() -> None:
    assert sequences(PAIRS) == [12, 5, 16, 7]
    made = make_pairs(PAIRS, 100, seed=0)
    assert [tuple(len(row[name]) for name in ("prompt_ids", "chosen_ids", "rejected_ids")) for row in made] == PAIRS
    assert made[0]["chosen_ids"] != made[0]["rejected_ids"][:7]


TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content + (extra or '') }}{% endfor %}"
)


@pytest.mark.parametrize("kind", ["messages", "text", "tools", "tools as text"])
def test_tokens_are_counted_as_trl_does(kind: str, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    rows = data.make_pairs(12)
    tokenizer = data.train_tokenizer(rows)
    without = None
    if kind.startswith("tools"):
        tokenizer.chat_template = TEMPLATE
        without = count_tokens(rows, tokenizer)
        tools = [{"type": "function", "function": {"name": "add", "description": "a sum"}}]
        columns = {"tools": json.dumps(tools) if "text" in kind else tools, "chat_template_kwargs": {"extra": " so"}}
        rows = [{**row, **columns} for row in rows]
    if kind == "text":
        rows = [{name: text[0]["content"] for name, text in row.items()} for row in rows]  # type: ignore[misc]
        rows[0]["chosen"] += tokenizer.eos_token  # which is not added twice
    model = AutoModelForCausalLM.from_config(data.tiny_llama(tokenizer, hidden_size=32, num_hidden_layers=1))
    trainer = trl.DPOTrainer(
        model,
        ref_model=AutoModelForCausalLM.from_config(model.config),
        args=trl.DPOConfig(output_dir=str(tmp_path), report_to="none", bf16=False, use_cpu=True),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    theirs = [tuple(len(row[name]) for name in names) for row in trainer.train_dataset]
    assert count_tokens(rows, tokenizer) == theirs != without


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 3 is no JSON"),
        ("5", "line 3: it is int, no object"),
        ('{"chosen": "a", "rejected": "b"}', "line 3: it has no prompt (a prompt inside chosen and rejected has to be"),
        ('{"prompt": null, "chosen": "a", "rejected": "b"}', "line 3: prompt is null, chosen is string"),
        ('{"prompt": "a", "chosen": [], "rejected": "b"}', "chosen is a list that is not of messages"),
        ('{"prompt": 1, "chosen": 2, "rejected": 3}', "line 3: prompt is int"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c", "tools": "{"}', "line 3: tools is a string that is no JSON"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c", "chat_template_kwargs": 3}', "and should be an object"),
    ],
)
def test_a_record_that_can_not_be_counted(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data.train_tokenizer(data.make_pairs(12)).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n  \n' + line)
    with pytest.raises(SystemExit) as ended:
        pair_lengths.main([str(tmp_path / "a.jsonl"), str(tmp_path / "tokenizer"), str(tmp_path / "found.json")])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert "a line holds prompt, chosen and rejected, all three strings or" in printed
    assert not (tmp_path / "found.json").exists()


def test_the_file_of_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = data.make_pairs(12)
    tokenizer = data.train_tokenizer(rows)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    files = [str(data.write_rows(rows, tmp_path)), str(tmp_path / "tokenizer"), str(tmp_path / "found.json")]
    pair_lengths.main(files)
    assert make_pair_lengths(12, kind=str(tmp_path / "found.json")) == count_tokens(iter(rows), tokenizer)
    (tmp_path / "odd.jsonl").write_text('{"question": "Why?"}\n')
    (tmp_path / "empty.jsonl").touch()
    for place, wrong, said in (
        (0, "nowhere.jsonl", "no such file: nowhere.jsonl"),
        (0, str(tmp_path / "odd.jsonl"), "line 1: it has no prompt and no chosen and no rejected; a line holds"),
        (0, str(tmp_path / "empty.jsonl"), "is empty"),
        (1, str(tmp_path), f"no tokenizer in {tmp_path}"),
        (2, "/nowhere/found.json", "there is no folder /nowhere"),
    ):
        with pytest.raises(SystemExit):
            pair_lengths.main([wrong if at == place else file for at, file in enumerate(files)])
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["full", "lora"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_floor_counts_policy_reference_and_completions(mode: str, checkpointing: bool) -> None:
    config = make_config("tiny")
    settings = Settings("", trainer="dpo", mode=mode, checkpointing=checkpointing)  # type: ignore[arg-type]
    tokens, wanted = 40, 24
    layer = sum(ins * outs for ins, outs in layer_projections(config).values())
    pairs = sum(n * (n + 1) // 2 for n in sequences(PAIRS))
    head = 2 * config.hidden_size * config.vocab_size * wanted
    forward = config.num_hidden_layers * (2 * tokens * layer + 4 * pairs * config.hidden_size) + head
    policy = step_flops(config, sequences(PAIRS), mode=settings.mode, checkpointing=checkpointing)
    expected = policy.total - policy.head + head * (3 if mode == "full" else 2) + forward
    assert dpo_step_flops(config, PAIRS, settings) == expected


def flags(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(given)


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


def test_who_takes_part() -> None:
    assert choose(None, on_gpu=True, trainer="dpo") == (["stock padded", "fastpack", "fastpack, prompts shared"], {})
    with pytest.raises(FastpackError, match="it shares prefixes, which --graphs excludes"):
        choose(["fastpack, prompts shared"], on_gpu=True, trainer="dpo", graphs="auto")
    names, left_out = choose(None, on_gpu=True, trainer="dpo", graphs="auto")
    assert names == ["stock padded", "fastpack"]
    assert left_out == {"fastpack, prompts shared": "shares prefixes, which --graphs excludes"}
    with pytest.raises(FastpackError, match="not a way of --trainer dpo, whose are stock padded, fastpack"):
        choose(["fastpack packed"], on_gpu=torch.cuda.is_available(), trainer="dpo")
