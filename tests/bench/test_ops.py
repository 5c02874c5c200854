"""``fastpack bench --ops``: inputs, work and gate of each op, and the command."""

from __future__ import annotations

import functools
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastpack.bench.ceiling import Ceiling
from fastpack.bench.measure import Timing, time_calls
from fastpack.bench.ops import case as cases
from fastpack.bench.ops import gate, runner
from fastpack.bench.ops.case import LIGER, LLAMA_8B, OURS, PLAIN, SMALL, Case, Maker
from fastpack.bench.ops.gate import check
from fastpack.bench.ops.runner import OpFigures, OpsOutcome, all_cases, run_case
from fastpack.cli import main

CASES = all_cases()
CPU = torch.device("cpu")
CEILING = Ceiling(1e12, 1e11, "", "")


def maker(tokens: int, dtype: torch.dtype = torch.float32, sizes: Any = SMALL) -> Maker:
    return Maker(tokens, sizes, dtype, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tokens", [2, 7])
@pytest.mark.parametrize("name", CASES)
def test_every_implementation_is_exact(name: str, tokens: int) -> None:
    found = check(CASES[name], maker(tokens))
    assert PLAIN in found
    assert len(found) > 1 or name == "attention"  # of which a CPU has the one
    assert all(share <= 1 for share in found.values()), found


ROPES = ["rope", "rope_indexed", "norm_rope"]
NORMS = ["rms_norm", "add_rms_norm", "add_rms_norm_trained", "layer_norm"]


@pytest.mark.parametrize("name", [*ROPES, *NORMS, "swiglu", "geglu"])
def test_in_half_precision_against_torchs_own_error(name: str) -> None:
    tokens = 63 if name == "norm_rope" else 7  # of 7 the 32 gradients of a weight are luck
    found = check(CASES[name], maker(tokens, torch.bfloat16))
    assert found[PLAIN] == pytest.approx(1 / 1.5)
    assert all(share <= 1 for share in found.values()), found


@pytest.mark.parametrize("name", ["lora_qkv", "lora_mlp", "lora_qkv_4bit", "lora_mlp_4bit"])
def test_lora_in_half_precision_against_pefts_under_autocast(name: str) -> None:
    """A and B are float32: without autocast PEFT multiplies them in it, and has next to no error in their gradients."""
    case, make = CASES[name], functools.partial(maker, 63, torch.bfloat16)
    assert max(check(replace(case, plain_in_half=None), make()).values()) > 1
    assert all(share <= 1 for share in check(case, make()).values())
    inputs = case.inputs(make())
    scaled = lambda flat: (t * 1.03 if isinstance(t, torch.Tensor) else t for t in flat)  # noqa: E731
    wrong = {OURS: lambda x, *flat: case.runs(inputs)[OURS](x, *scaled(flat))}
    assert check(replace(case, runs=lambda inputs: case.runs(inputs) | wrong), make())[OURS] > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", ["result", "gradient"])
def test_what_is_wrong_is_noticed(wrong: str, dtype: torch.dtype) -> None:
    case = CASES["swiglu"]

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1.05 if wrong == "result" else x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return grad * 1.05 if wrong == "gradient" else grad

    def runs(inputs: Any) -> Any:
        found = case.runs(inputs)
        return found | {"off": lambda gate, up: found[PLAIN](Off.apply(gate), up)}

    assert check(replace(case, runs=runs), maker(7, dtype))["off"] > 1


@pytest.mark.parametrize(
    ("ours", "draws", "share"),
    [
        ([0.0155, 0.014, 0.013], 3, 0.0155 / 0.0165),  # torch's own largest error came later
        ([0.014, 0.017, 0.013], 3, 0.017 / 0.0165),  # and ours
        ([0.014, math.nan, 0.013], 3, math.inf),
    ],
)
def test_the_largest_errors_of_several_draws_are_compared(
    ours: list[float], draws: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [{PLAIN: [plain], LIGER: [0.02], OURS: [of_us]} for plain, of_us in zip((0.01, 0.011, 0.009), ours)]  # noqa: B905
    for make, count in ((maker(7, torch.bfloat16), draws), (maker(4097, torch.bfloat16), 1), (maker(7), 1)):
        left = iter(made)
        monkeypatch.setattr(gate, "_errors_of_a_draw", lambda *_, left=left: next(left))
        found = check(CASES["swiglu"], make)[OURS]
        assert len(made) - len(list(left)) == count
        assert count == 1 or found == pytest.approx(share)


def test_one_that_has_no_memory_hides_no_other() -> None:
    case = CASES["swiglu"]

    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no")

    found = check(replace(case, runs=lambda inputs: case.runs(inputs) | {LIGER: fails}), maker(7, torch.bfloat16))
    assert found.keys() == {PLAIN, OURS}
    with pytest.raises(torch.OutOfMemoryError):
        check(replace(case, runs=lambda inputs: case.runs(inputs) | {PLAIN: fails}), maker(7, torch.bfloat16))


def test_bytes_and_operations_by_hand() -> None:
    make = maker(1000, torch.bfloat16, LLAMA_8B)
    # q has 4,096 elements a token and k 1,024, read and written; half of the tables, 64 + 64
    assert CASES["rope"].forward(make).bytes == 1000 * 2 * (2 * 5120 + 128)
    assert CASES["rope_indexed"].forward(make).bytes == 1000 * (2 * 2 * 5120 + 8)
    assert CASES["norm_rope"].backward(make).bytes == 1000 * 2 * (3 * 5120 + 128)
    assert CASES["add_rms_norm"].forward(make).bytes == 1000 * 2 * 4 * 4096
    assert CASES["swiglu"].backward(make).bytes == 1000 * 2 * 5 * 14336
    assert CASES["linear_cross_entropy"].forward(make).flops == 2 * 1000 * 128256 * 4096
    assert CASES["linear_cross_entropy_trained"].backward(make).flops == 2 * 2 * 1000 * 128256 * 4096
    # half a byte and two bytes a weight, one byte for each 64 of them
    assert CASES["dequantize"].forward(make).bytes == 1000 * 4096 * 2 + 1000 * 2048 + 1000 * 64
    assert CASES["lora_qkv"].forward(make).flops == 2 * 1000 * (4096 * 6144 + 16 * (3 * 4096 + 6144))


def test_attention_takes_real_lengths() -> None:
    q, _, _, packed = CASES["attention"].inputs(maker(300))
    assert len(q) == packed.total_tokens == 300
    assert packed.num_sequences > 1
    pairs = sum(length * (length + 1) // 2 for length in packed.lengths)
    assert CASES["attention"].forward(maker(300)).flops == 4 * pairs * SMALL.heads * SMALL.head_dim


def test_attention_takes_lengths_that_are_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_seven = replace(maker(20), lengths="7")
    packed = CASES["attention"].inputs(of_seven)[3]
    assert packed.lengths == (7, 7, 6)
    pairs = 2 * 28 + 21
    assert CASES["attention"].forward(of_seven).flops == 4 * pairs * SMALL.heads * SMALL.head_dim
    seen: list[Any] = []

    def run_ops(*given: Any) -> OpsOutcome:
        seen.append(given[-1])
        return OpsOutcome(CEILING, {}, [OpFigures("attention", "torch", 8, deviation=0.5)])

    monkeypatch.setattr(runner, "run_ops", run_ops)
    assert main(["bench", "--ops", "attention", "--lengths", "7"]) == 0
    assert main(["bench", "--ops"]) == 0
    assert seen == ["7", "alpaca"]
    seen.clear()
    assert main(["bench", "--ops", "rope", "--lengths", "7"]) == 2
    of_packed = "none of which is asked for: rope_indexed, sequence_log_probs, attention."
    assert of_packed in capsys.readouterr().err
    assert main(["bench", "--ops", "rope", "rope_indexed", "--lengths", "7"]) == 0
    assert main(["bench", "--ops", "attention", "--lengths", "none.json"]) == 2
    assert "--lengths none.json: no such file" in capsys.readouterr().err


def measured(case: Case, tokens: int = 8) -> list[runner.OpFigures]:
    return run_case(case, tokens, SMALL, torch.float32, CPU, CEILING)


def test_an_op_that_works_in_place_is_timed_on_what_it_may_overwrite() -> None:
    rows = measured(CASES["rope"])
    assert [row.implementation for row in rows] == ["torch", "fastpack", "fastpack, copying"]
    inputs = CASES["rope"].inputs(maker(8))
    runs = CASES["rope"].runs(inputs)
    assert [runner._works_in_place(run, inputs) for run in runs.values()] == [False, True, False]
    for row in rows:
        assert row.forward is not None
        assert row.backward is not None
        assert row.both is not None
        assert row.both.seconds == row.forward.seconds + row.backward.seconds
        assert row.both.share == pytest.approx(row.both.bandwidth / CEILING.bandwidth)


@pytest.mark.parametrize("name", CASES)
def test_one_token(name: str) -> None:
    """At the first position RoPE turns nothing, in place or not."""
    assert all(row.both is not None and row.error is None for row in measured(CASES[name], 1))


@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_cross_entropy_trained"])
def test_a_loss_is_timed_as_training_asks_for_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one, with a gradient of 1, and without a graph that is kept: nothing is scaled or copied then."""
    asked: list[tuple[int, dict[str, Any]]] = []
    grad = torch.autograd.grad

    def watched(outputs: Any, *rest: Any, **kwargs: Any) -> Any:
        asked.append((len(rest), kwargs))
        return grad(outputs, *rest, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", watched)
    rows = measured(CASES[name])
    assert (1, {}) in asked
    assert not any("retain_graph" in kwargs for _, kwargs in asked)
    for row in rows:
        assert row.both is not None
        assert row.forward is None
        assert row.backward is None


def test_an_op_without_gradients_is_timed_forward_only(tmp_path: Path) -> None:
    from fastpack.bench.ops.plot import save_plot
    from fastpack.bench.ops.table import OpTables

    rows = measured(CASES["dequantize"])
    assert [row.implementation for row in rows] == ["torch", "fastpack"]
    for row in rows:
        assert row.forward is not None
        assert row.both is row.forward
        assert row.backward is None
        assert row.error is None
    outcome = OpsOutcome(CEILING, {"device": "this"}, rows)
    tables = OpTables()
    tables.print_op(CASES["dequantize"], rows)
    tables.print_end(outcome)
    save_plot(outcome, tmp_path / "ops.png")
    assert measured(CASES["swiglu"])[0].backward is not None


def test_out_of_memory_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(*_: Any, **__: Any) -> Timing:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(runner, "time_calls", timed)
    rows = measured(CASES["swiglu"])
    assert [row.error for row in rows] == ["out of memory"] * 2
    assert all(row.forward is None for row in rows)


def test_no_memory_to_compare_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What fits is timed all the same."""

    def checked(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(runner, "measure", lambda: CEILING)
    assert main(["bench", "--ops", "swiglu", "--tokens", "4"]) == 0
    assert "not compared" not in capsys.readouterr().out
    monkeypatch.setattr(runner, "check", checked)
    assert main(["bench", "--ops", "swiglu", "--tokens", "4"]) == 3
    printed = capsys.readouterr().out
    assert "not compared, for want of memory: swiglu, torch, T = 3; swiglu, fastpack, T = 3" in printed
    assert "exact enough" not in printed


def test_packed_weights_are_copied_as_dense_ones_are() -> None:
    inputs = CASES["lora_qkv_4bit"].inputs(maker(8))
    copied = cases.leaves(inputs)
    assert torch.equal(copied[1].packed, inputs[1].packed)
    assert copied[1].packed.data_ptr() != inputs[1].packed.data_ptr()
    assert cases.bytes_of(inputs) - cases.bytes_of([x for x in inputs if isinstance(x, torch.Tensor)]) == 3 * 256 * 64


def test_positions_begin_again_with_each_sequence() -> None:
    q, _, cos, _, positions = CASES["rope_indexed"].inputs(replace(maker(20), lengths="7"))
    assert len(q) == 20
    assert positions.tolist() == [*range(7), *range(7), *range(6)]
    assert len(cos) == 4096


def test_calls_take_turns() -> None:
    turns: list[int] = []
    timing = time_calls([lambda i=i: turns.append(i) for i in range(3)], CPU, repeats=6)  # type: ignore[misc]
    assert turns[:3] == [0, 1, 2]
    assert turns[3:] == [0, 1, 2, 0, 1, 2]
    assert timing.seconds >= 0
    assert timing.host_seconds is None


def test_a_table_is_there_before_the_next_op_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from fastpack.bench.ops.table import OpTables

    file = io.StringIO()
    before: list[str] = []

    def run_case(case: Case, tokens: int, *_: Any) -> list[OpFigures]:
        before.append(file.getvalue())
        return [OpFigures(case.name, "torch", tokens)]

    monkeypatch.setattr(runner, "run_case", run_case)
    monkeypatch.setattr(runner, "measure", lambda: CEILING)
    runner.run_ops([CASES["rope"], CASES["swiglu"]], [4, 9], CPU, OpTables(Console(file=file, width=132)))
    assert before[:2] == ["", ""]
    assert "rope: " in before[2]
    assert "swiglu: " not in before[3]
    assert "swiglu: " in file.getvalue()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("written for a CPU")
    monkeypatch.setattr(runner, "measure", lambda: CEILING)
    found, picture = tmp_path / "ops.json", tmp_path / "ops.png"
    flags = ["--tokens", "4", "9", "--json", str(found), "--plot", str(picture)]
    assert main(["bench", "--ops", "rope", "linear_cross_entropy", *flags]) == 0
    printed = capsys.readouterr().out
    assert "rope: rotary embedding of q and k" in printed
    assert "every result of ours that was compared is exact enough" in printed
    record = json.loads(found.read_text())
    assert {(row["op"], row["tokens"]) for row in record["ops"]} == {
        (op, tokens) for op in ("rope", "linear_cross_entropy") for tokens in (4, 9)
    }
    assert all(row["both"]["seconds"] > 0 and row["deviation"] <= 1 for row in record["ops"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_an_inexact_op_of_ours_fails_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "measure", lambda: CEILING)
    monkeypatch.setattr(runner, "check", lambda case, make: {"torch": 0.5, "fastpack": 2.0})
    assert main(["bench", "--ops", "swiglu", "--tokens", "4"]) == 1
    assert "NOT EXACT: swiglu, fastpack" in capsys.readouterr().out


def test_others_may_be_inexact() -> None:
    row = runner.OpFigures("rope", "Liger", 8, deviation=3.0)
    assert OpsOutcome(CEILING, {}, [row]).inexact == []
    row.implementation = "torch_varlen"
    assert OpsOutcome(CEILING, {}, [row]).inexact == [row]


def test_an_unknown_op_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--ops", "ropes"]) == 2
    assert "no such op. Choose from: rope, " in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str) -> None:
    """Small sizes, against Liger where it is installed."""
    torch.compiler.reset()  # what was compiled before may run its backward but once
    device = torch.device("cuda")
    rows = run_case(CASES[name], 128, SMALL, torch.bfloat16, device, CEILING)
    for row in rows:
        assert row.error is None
        assert row.exact or not row.ours, f"{row.implementation}: {row.deviation}"
        launched = row.forward or row.both  # a loss is timed in one
        assert launched is not None
        assert launched.host_seconds is not None
        assert row.peak_memory is not None
