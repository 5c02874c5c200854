"""The benchmark's flags and tables, on results that were made up."""

from __future__ import annotations

import argparse
import io
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from fastpack.bench import runner
from fastpack.bench.ceiling import Ceiling
from fastpack.bench.flops import needed_flops
from fastpack.bench.plot import save_plot
from fastpack.bench.runner import Outcome
from fastpack.bench.same_losses import compare
from fastpack.bench.settings import RunResult, RunSettings
from fastpack.bench.shapes import auto_class, make_config
from fastpack.bench.table import print_outcome
from fastpack.bench.variants import VARIANTS
from fastpack.cli import UsageError, bench
from fastpack.cli.bench import PARSER, choose_variants, make_settings
from fastpack.cli.main import main
from fastpack.errors import FastpackError

CEILING = Ceiling(790e12, 4.3e12, "8192^3 bfloat16", "a GPU")


def made_up(name: str, rate: float, **changes: Any) -> RunResult:
    seconds = [100 / rate] * 5
    row = RunResult(name, "kernel", seconds, [100] * 5, 500, 10.0, 12.5, [2.0] * 6, [1.0] * 6)
    return replace(row, **changes)


def outcome(results: list[RunResult], floor: float = 3000.0) -> Outcome:
    settings = RunSettings("", shape="llama8b", mode="lora")
    verdict = compare(results, half=True)
    return Outcome(settings, results, verdict, CEILING, floor, {"device": "a GPU"}, {"stock + FA2": "needs a GPU"})


def printed(result: Outcome) -> str:
    shown = io.StringIO()
    print_outcome(result, Console(width=140, file=shown))
    return shown.getvalue()


def test_the_table_compares_with_the_best_stock() -> None:
    results = [made_up("stock padded", 500), made_up("stock padding_free", 1000), made_up("fastpack", 1500)]
    text = printed(outcome(results))
    (line,) = (line for line in text.splitlines() if "fastpack " in line and "kernel" in line)
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells == ["fastpack", "kernel", "67", "1,500", "1,500", "1.50", "50%", "10.00", "12.5"]
    assert "left out: stock + FA2 (needs a GPU)" in text


def test_empty_columns_are_left_out() -> None:
    results = [made_up("stock padded", 500, held_memory=None), RunResult("fastpack", error="out of memory")]
    text = printed(outcome(results))
    (head,) = (line for line in text.splitlines() if "real tokens/s" in line and "attention" in line)
    assert "GiB" in head
    assert "held" not in head
    (line,) = (line for line in text.splitlines() if "stock padded " in line and "kernel" in line)
    assert len(line.strip("│").split("│")) == len(head.strip("│").split("│")) == 8


def test_a_narrow_terminal_shows_every_number() -> None:
    """Headings and names fold, numbers stay whole."""
    shown = io.StringIO()
    result = outcome([made_up("stock + FA2 + Liger", 1000), made_up("fastpack collated", 1800)])
    print_outcome(result, Console(width=100, file=shown))
    assert all(len(line) <= 100 for line in shown.getvalue().splitlines())
    assert all(figure in shown.getvalue() for figure in ("1,800", "1.80", "60%", "10.00", "12.5"))
    assert "…" not in shown.getvalue()


def test_the_overall_speed_is_shown_beside_the_median() -> None:
    """Where one step of five was slow, which a median does not show."""
    ours = made_up("fastpack", 2000, seconds=[0.05] * 4 + [0.2])
    text = printed(outcome([made_up("stock padded", 500), ours]))
    (line,) = (line for line in text.splitlines() if "fastpack " in line and "kernel" in line)
    assert [cell.strip() for cell in line.strip("│").split("│")][3:5] == ["2,000", "1,250"]


def test_no_speeds_where_losses_disagree() -> None:
    results = [made_up("stock padded", 500), made_up("fastpack", 1234, losses=[3.0] * 6)]
    text = printed(outcome(results))
    assert "DISAGREE" in text
    assert "'fastpack'" in text
    assert "1,234" not in text
    assert "tokens/s" not in text


def test_out_of_memory_is_shown() -> None:
    results = [
        RunResult("stock padded", error="out of memory"),
        made_up("stock padding_free", 5),
        made_up("fastpack", 9),
    ]
    result = outcome(results)
    assert "out of memory" in printed(result)
    assert result.row_dict(results[2])["times_best_stock"] == pytest.approx(9 / 5)
    assert result.to_dict()["variants"][0]["error"] == "out of memory"


def test_medians() -> None:
    row = RunResult("fastpack", seconds=[1.0, 1.0, 4.0], tokens=[10, 20, 40], slots=100)
    result = outcome([row], floor=40.0).row_dict(row)
    assert result["tokens_per_second"] == row.tokens_per_second == 10
    assert result["step_median"] == 1
    assert result["padding_share"] == pytest.approx(0.3)
    assert result["tokens_per_second_overall"] == pytest.approx(70 / 6)
    assert (result["floor_share"], result["times_best_stock"]) == (0.25, None)


def parse(*flags: str) -> argparse.Namespace:
    return PARSER.parse_args(flags)


def test_flags() -> None:
    settings = make_settings(
        parse("--graphs", "--loss", "--loop", "plain", "--kernels", "torch", "--mode", "qlora"), on_gpu=True
    )
    assert (settings.graphs, settings.loss, settings.kernels, settings.mode) == ("auto", "fused", "torch", "qlora")
    assert (settings.warmup, settings.shape) == (5, "llama8b")
    settings = make_settings(parse(), on_gpu=False)
    assert (settings.graphs, settings.loss, settings.warmup, settings.shape) == (None, None, 3, "tiny")
    assert make_settings(parse("--graphs", "auto", "--warmup", "9"), on_gpu=True).warmup == 9


def test_the_variants_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    names, left_out = choose_variants(None, on_gpu=False)
    stock = ["stock padded", "stock padding_free"]
    assert names == [*stock, "fastpack", "fastpack packed", "fastpack collated", "fastpack fused loss"]
    assert left_out == dict.fromkeys(["stock + FA2", "stock + FA2 + Liger", "Unsloth"], "needs a GPU")
    with pytest.raises(FastpackError, match="needs a GPU"):
        choose_variants(["stock + FA2"], on_gpu=False)


def test_stock_models_with_attention_sinks_are_padded() -> None:
    names, left_out = choose_variants(None, on_gpu=True, shape="gpt-oss-20b")
    for name in ("stock padding_free", "stock + FA2", "stock + FA2 + Liger"):
        assert left_out[name].startswith("needs FlashAttention-2")
    assert {"stock padded", "fastpack", "fastpack packed"} < {*names}
    assert "stock + FA2" in choose_variants(None, on_gpu=True, shape="qwen3-30b-a3b")[0]


def test_shapes_with_experts() -> None:
    settings = make_settings(parse("--shape", "qwen3-30b-a3b", "--mode", "lora", "--lora-experts"), on_gpu=True)
    assert settings.lora_experts
    assert "lora-experts True" in replace(outcome([made_up("fastpack", 5)]), settings=settings).title
    assert make_config("qwen3-30b-a3b-16layers").num_hidden_layers == 16
    with torch.device("meta"):
        models = [auto_class(shape).from_config(make_config(shape)) for shape in ("qwen3-30b-a3b", "gpt-oss-20b")]
    sizes = [sum(p.numel() for p in model.parameters()) / 1e9 for model in models]
    assert sizes == pytest.approx([30.53, 20.91], abs=0.01)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--lengths", "nowhere.json"), "--lengths nowhere.json: no such file; pass 'alpaca', a number"),
        (("--lengths", ""), "--lengths : no such file; pass 'alpaca', a number"),
        (("--lengths", "-5"), "--lengths -5: no such file; pass 'alpaca', a number"),
        (("--trainer", "dpo", "--data", "nowhere.json"), "--lengths nowhere.json: no such file; pass 'chat', a number"),
        (("--trainer", "dpo", "--data", "1"), "--lengths 1: pass lists of three .* or a number above 1"),
        (("--lengths", "0"), "--lengths 0: pass lengths of rows .* of at least 2"),
        (("--json", "/nosuch/p.json"), "--json /nosuch/p.json: there is no folder /nosuch"),
        (("--plot", "p.xyz"), "--plot p.xyz: pass a name that ends in one of .png"),
        (("--plot", "/nosuch/p.png"), "--plot /nosuch/p.png: there is no folder /nosuch"),
        (("--attention", "sideways"), "attention='sideways' is not a backend"),
        (("--attention", "flash_attn"), "attention='flash_attn' can't serve float32 on cpu"),
        (("--kernels", "triton"), "there is no GPU here"),
        (("--loss",), "--loss is for --loop plain"),
        (("--loop", "plain", "--trainer-waits"), "--trainer-waits is for --loop trl"),
        (("--offload", "checkpoints"), "--offload is for checkpointed layers"),
        (("--checkpointing", "--offload", "checkpoints"), "--offload needs a GPU"),
        (("--graphs",), "--graphs needs a GPU"),
        (("--lora-experts", "--mode", "lora"), "--lora-experts is for shapes with experts, and tiny has none"),
        (("--mode", "mxfp4", "--shape", "gpt-oss-20b"), "--mode mxfp4 needs a GPU"),
        (("--lora-experts", "--shape", "tiny-moe"), "--lora-experts adds adapters: pass --mode lora too"),
    ],
)
def test_refused_before_anything_runs(flags: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(runner, "_run", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(FastpackError, match=said):
        bench.main(flags)


@pytest.mark.parametrize(
    ("references", "flags", "said"),
    [
        ("[true, 5]", (), "a.json: pass lengths of rows as whole numbers of at least 2"),
        ("[1, 5]", (), "one token alone has nothing to predict"),
        ("{}", (), "a.json: it must hold a JSON list of lengths"),
        ("", (), "a.json: it is not JSON: "),
        ("[5", (), "a.json: it is not JSON: "),
        ("[[5, true, 5]]", ("--trainer", "dpo"), "a.json: pass lists of three positive whole numbers"),
        ("", ("--trainer", "dpo"), "a.json: it is not JSON: "),
    ],
)
def test_lengths_that_can_not_be_trained_on(
    references: str, flags: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_run", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "a.json").write_text(references)
    with pytest.raises(FastpackError, match=said):
        bench.main(["--lengths", str(tmp_path / "a.json"), *flags])


@pytest.mark.parametrize("floor", [3000.0, 500_000.0])
def test_the_picture(tmp_path: Path, floor: float) -> None:
    save_plot(outcome([made_up(name, 100 * i) for i, name in enumerate(VARIANTS, 1)], floor), tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert len(drawn) > 5000


def test_the_title_says_what_is_not_at_its_default() -> None:
    plain = outcome([made_up("fastpack", 5)])
    assert plain.title == "shape llama8b, mode lora, rows 16, lengths alpaca"
    changed = replace(plain.settings, max_length=64, kernels="torch", attention="reference", graphs="auto")
    assert replace(plain, settings=changed).title == (
        f"{plain.title}, max-length 64, attention reference, kernels torch, graphs auto"
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--tokens", "64"), "--tokens sets the sweep of --ops"),
        (("--ops", "--rows", "4", "--trainer-waits"), "leave out --rows, --trainer-waits."),
        (("--ops", "--graphs"), "leave out --graphs."),
        (("--ops", "--plot", "ops.png"), "leave out --plot."),
    ],
)
def test_flags_without_effect_are_refused(
    flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_train", None)
    monkeypatch.setattr(bench, "_time_ops", None)
    assert main(["bench", *flags]) == 2
    assert said in capsys.readouterr().err


def stand_in(monkeypatch: pytest.MonkeyPatch, rows: list[RunResult]) -> list[str]:
    """Replace processes with these results; return the list that collects the names of what is run."""
    by_name, ran = {row.variant: row for row in rows}, []
    machine = {"ceiling": asdict(CEILING), "machine": {}}

    def said(name: str, *_: Any) -> dict[str, Any]:
        ran.append(name)
        return asdict(by_name[name]) if name in by_name else machine

    monkeypatch.setattr(runner, "_run", said)
    return ran


def test_no_variant_runs_after_losses_that_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = made_up("stock padding_free", 1234, losses=[3.0] * 6)
    rows = [made_up("stock padded", 500), wrong, made_up("fastpack", 1500)]
    names = [row.variant for row in rows]
    ran = stand_in(monkeypatch, rows)
    settings = RunSettings("", lengths="8", steps=5)
    result = runner.run_all(settings, names, left_out={"stock + FA2": "needs a GPU"}, on_gpu=False)
    assert ran[1:] == names[:2]
    assert not result.verdict.agree
    assert result.left_out == {
        "stock + FA2": "needs a GPU",
        "fastpack": "was not run: 'stock padded' and 'stock padding_free' disagree",
    }
    record = result.to_dict()
    assert [row["losses"] for row in record["variants"]] == [[2.0] * 6, [3.0] * 6]
    assert {name for row in record["variants"] for name in row} == set(runner.WITHOUT_SPEED)
    assert {"seconds", "step_median", "floor_share"} <= set(outcome(rows[:1]).to_dict()["variants"][0])


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([made_up("stock padded", 500), made_up("fastpack", 900)], 0),
        ([made_up("stock padded", 500), made_up("fastpack", 900, losses=[3.0] * 6)], 1),
        ([made_up("stock padded", 500), RunResult("fastpack", error="out of memory")], 3),
        ([made_up("fastpack", 900)], 0),
    ],
    ids=["agree", "disagree", "one of two", "one alone"],
)
def test_exit_codes(
    rows: list[RunResult], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, rows)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "--lengths", "8", "--steps", "5", "--only", *(row.variant for row in rows)]) == code
    assert ("nothing was compared" in capsys.readouterr().out) == (len([r for r in rows if r.error is None]) < 2)


def test_each_variant_is_reported_as_it_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = RunResult("fastpack", error="out of memory", peak_memory=9.71, held_memory=11.5)
    rows = [made_up("stock padded", 500), full]
    stand_in(monkeypatch, rows)
    names = [row.variant for row in rows]
    settings = RunSettings("", lengths="8", steps=5)
    result = runner.run_all(settings, names, left_out={}, on_gpu=False)
    assert result.floor_rate == pytest.approx(5 * 16 * 8 / (needed_flops(settings) / CEILING.flops))
    assert capsys.readouterr().err.splitlines() == [
        "stock padded: 500 real tokens/s",
        "fastpack: out of memory (9.71 GiB in tensors, 11.50 held)",
    ]


def test_a_process_that_fails(capfd: pytest.CaptureFixture[str]) -> None:
    """All that it said, and its last line in the error."""
    with pytest.raises(FastpackError, match=r"^the third failed \(exit 1\): .*No module named '?nosuch"):
        runner._run("the third", "nosuch")
    assert "nosuch" in capfd.readouterr().err


def test_steps_before_those_that_are_timed_may_be_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("--warmup", "0").warmup == 0
    with pytest.raises(SystemExit):
        parse("--warmup", "-1")
    assert "-1: pass 0 or more" in capsys.readouterr().err


def test_liger_takes_part_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose_variants(None, on_gpu=True)[1]["stock + FA2 + Liger"] == "liger-kernel is not installed"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    everyone = [name for name, variant in VARIANTS.items() if variant.trains("sft", images=False)]
    assert choose_variants(None, on_gpu=True) == (everyone, {})


def test_mxfp4_is_for_patched_models(monkeypatch: pytest.MonkeyPatch) -> None:
    names, left_out = choose_variants(None, on_gpu=True, shape="gpt-oss-20b", mode="mxfp4")
    assert all(VARIANTS[name].patched for name in names)
    assert "no gradients" in left_out["stock padded"]
    for shape, installed in (("tiny-moe", True), ("gpt-oss-20b", False)):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, found=installed: object() if found else None)
        with pytest.raises(UsageError, match="--mode mxfp4"):
            make_settings(parse("--mode", "mxfp4", "--shape", shape), on_gpu=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert make_settings(parse("--mode", "mxfp4", "--shape", "gpt-oss-20b"), on_gpu=True).mode == "mxfp4"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from fastpack import cli as commands

    monkeypatch.setattr(commands.importlib.util, "find_spec", lambda name: None)
    bitsandbytes, matplotlib = ["--loop", "plain", "--mode", "qlora"], ["--plot", "x.png"]
    for flags, name in (([], "trl"), (bitsandbytes, "bitsandbytes"), (matplotlib, "matplotlib")):
        assert main(["bench", *flags]) == 2
        assert f"pip install '{name}>=" in capsys.readouterr().err
