"""``fastpack bench --ops``: inputs, work and check of each op, and the command."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import op_exactness
import pytest
import torch
from op_exactness import check
from torch.utils._pytree import tree_map_only

from fastpack.bench.ceiling import Ceiling
from fastpack.bench.measure import time_calls
from fastpack.bench.ops import runner
from fastpack.bench.ops.case import LIGER, OURS, PLAIN, SMALL, Case, Maker
from fastpack.bench.ops.loss_attention_cases import MORE_PAIRS
from fastpack.bench.ops.runner import CASES, OpResult, run_case
from fastpack.bench.shapes import make_config
from fastpack.cli.main import main

LLAMA_8B = make_config("llama8b")
CPU = torch.device("cpu")
CEILING = Ceiling(1e12, 1e11, "", "")


def maker(tokens: int, dtype: torch.dtype = torch.float32, sizes: Any = SMALL) -> Maker:
    return Maker(tokens, sizes, dtype, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tokens", [2, 7])
@pytest.mark.parametrize("name", CASES)
def test_every_implementation_is_exact(name: str, tokens: int) -> None:
    result = check(CASES[name], maker(tokens))
    assert PLAIN in result
    assert len(result) > 1 or name.startswith("attention")  # of which a CPU has the one
    assert all(share <= 1 for share in result.values()), result


LORA = ["lora_qkv", "lora_mlp", "lora_qkv_4bit", "lora_mlp_4bit"]


EXPERTS = ["experts", "experts_trained", "experts_lora", "experts_gpt_oss", "experts_gpt_oss_lora"]


@pytest.mark.parametrize("name", ["rope", "norm_rope", "rms_norm", "layer_norm", "swiglu", "geglu", *LORA, *EXPERTS])
def test_in_half_precision_against_torchs_own_error(name: str) -> None:
    result = check(CASES[name], maker(63, torch.bfloat16))
    assert 0.3 < result[PLAIN] < 0.67, "of 1.5 times its own error, or one rounding where that is more"
    assert all(share <= 1 for share in result.values()), result


@pytest.mark.parametrize("name", LORA)
def test_lora_that_is_a_little_off_is_noticed(name: str) -> None:
    """Negative control: 3 % in half precision, A's, B's and the weight's."""
    case, make = CASES[name], maker(63, torch.bfloat16)
    ours = case.runs(case.inputs(make))[OURS]

    def wrong(x: torch.Tensor, projections: Any) -> Any:
        return ours(x, tree_map_only(torch.Tensor, lambda t: t * 1.03 if t.is_floating_point() else t, projections))

    assert check(replace(case, runs=lambda inputs: case.runs(inputs) | {OURS: wrong}), make)[OURS] > 1


@pytest.mark.parametrize("name", ["experts_lora", "experts_gpt_oss_lora"])
@pytest.mark.parametrize("factor", ["A", "B"])
def test_adapters_of_other_experts_are_noticed(name: str, factor: str) -> None:
    """Negative control: A, or B, of the first two experts of the last layer change places."""
    case, make = CASES[name], maker(63, torch.bfloat16)
    ours = case.runs(case.inputs(make))[OURS]
    order = torch.tensor([1, 0, 2, 3, 4, 5])

    def swapped(x: Any, index: Any, weights: Any, layers: Any) -> Any:
        weight, bias, a, b = layers[1]
        if factor == "A":  # the experts, one after the other
            a = a.unflatten(0, (6, -1))[order].flatten(0, 1)
        else:  # the experts are the fastest index of the columns
            b = b.unflatten(1, (-1, 6))[..., order].flatten(1)
        return ours(x, index, weights, [layers[0], (weight, bias, a, b)])

    assert check(replace(case, runs=lambda inputs: case.runs(inputs) | {OURS: swapped}), make)[OURS] > 3


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
        result = case.runs(inputs)
        return result | {"off": lambda gate, up: result[PLAIN](Off.apply(gate), up)}

    assert check(replace(case, runs=runs), maker(7, dtype))["off"] > 1


@pytest.mark.parametrize(
    ("ours", "share"),
    [
        ([0.0155, 0.014, 0.019], 0.0155 / 0.015),  # what one draw blew up says nothing
        ([0.014, math.inf, math.inf], math.inf),
    ],
)
def test_medians_of_several_draws_are_compared(
    ours: list[float], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = [{PLAIN: [plain], OURS: [of_us]} for plain, of_us in zip((0.01, 0.011, 0.009), ours, strict=True)]
    for make, count in ((maker(7, torch.bfloat16), 3), (maker(7), 1)):
        left = iter(built)
        monkeypatch.setattr(op_exactness, "_errors_of_a_draw", lambda *_, left=left: next(left))
        result = check(CASES["swiglu"], make)[OURS]
        assert len(built) - len(list(left)) == count
        assert count == 1 or result == pytest.approx(share)


def test_one_that_has_no_memory_hides_no_other() -> None:
    case = CASES["swiglu"]

    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no")

    result = check(replace(case, runs=lambda inputs: case.runs(inputs) | {LIGER: fails}), maker(7, torch.bfloat16))
    assert result.keys() == {PLAIN, OURS}
    with pytest.raises(torch.OutOfMemoryError):
        check(replace(case, runs=lambda inputs: case.runs(inputs) | {PLAIN: fails}), maker(7, torch.bfloat16))


def test_bytes_and_operations_by_hand() -> None:
    make = maker(1000, torch.bfloat16, LLAMA_8B)
    work = {name: case.work(make) for name, case in CASES.items()}
    # q has 4,096 elements a token and k 1,024, read and written, forward and backward; half of the tables, 64 + 64
    assert work["rope"] == 1000 * 2 * 2 * (2 * 5120 + 128)
    # x once more, for its norm's gradient
    assert work["norm_rope"] == work["rope"] + 1000 * 2 * 5120
    assert work["rms_norm"] == 1000 * 2 * 5 * 4096
    assert work["swiglu"] == 1000 * 2 * 8 * 14336
    assert work["linear_cross_entropy"] == 2 * 2 * 1000 * 128256 * 4096
    assert work["linear_cross_entropy_trained"] == 3 * 2 * 1000 * 128256 * 4096
    # half a byte and two bytes a weight, one byte for each 64 of them
    assert work["dequantize"] == 1000 * 4096 * 2 + 1000 * 2048 + 1000 * 64
    assert work["lora_qkv"] == 2 * 1000 * (2 * 4096 * 6144 + 3 * 16 * (3 * 4096 + 6144))
    # 8 experts of gate and up, 2,048 x 1,536, and down, 768 x 2,048: forward and backward, and again for weights
    base, low = 2 * 8000 * 3 * 2048 * 768, 2 * 8000 * 16 * (2048 + 1536 + 768 + 2048)
    assert work["experts"] == 2 * base
    assert work["experts_trained"] == 3 * base
    assert work["experts_lora"] == 2 * base + 3 * low
    assert work["experts_gpt_oss"] == 2 * 2 * 4000 * 3 * 2880**2
    assert {name for name, case in CASES.items() if case.bound == "flops"} == {
        "linear_cross_entropy", "linear_cross_entropy_trained", "attention", "attention_tree", *LORA, *EXPERTS
    }  # fmt: skip


def test_the_bytes_of_experts_by_hand() -> None:
    """All experts in both passes, and of each token x, the result and both gradients; one token needs few experts."""
    many, one = (maker(tokens, torch.bfloat16, LLAMA_8B) for tokens in (1000, 1))
    stacks, adapters = 3 * 2048 * 768 * 2, 16 * (2048 + 1536 + 768 + 2048) * 4
    moved = {name: [CASES[name].traffic(make) for make in (many, one)] for name in EXPERTS}  # type: ignore[misc]
    assert moved["experts"] == [128 * 2 * stacks + 1000 * 4 * 2048 * 2, 8 * 2 * stacks + 4 * 2048 * 2]
    assert moved["experts_trained"][0] == moved["experts"][0] + 128 * stacks
    assert moved["experts_lora"][0] == moved["experts"][0] + 3 * 128 * adapters
    case = CASES["experts"]
    # at 1e12 operations and 1e11 bytes a second
    assert case.least_seconds(many, CEILING) == case.work(many) / 1e12
    assert case.least_seconds(one, CEILING) == moved["experts"][1] / 1e11 > case.work(one) / 1e12


def test_attention_takes_real_lengths() -> None:
    q, _, _, packed = CASES["attention"].inputs(maker(300))
    assert len(q) == packed.total_tokens == 300
    assert packed.num_sequences > 1
    pairs = sum(length * (length + 1) // 2 for length in packed.lengths)
    assert CASES["attention"].work(maker(300)) == 14 * pairs * SMALL.num_attention_heads * SMALL.head_dim


def test_attention_of_a_tree() -> None:
    """At any T, copies attend as many times more pairs as the title says."""
    for tokens in (2819, 28192):
        q, _, _, packed = CASES["attention_tree"].inputs(maker(tokens))
        assert len(q) == packed.shared.total_tokens == tokens
        assert packed.shared.tree.pairs_alone / packed.shared.tree.pairs == pytest.approx(MORE_PAIRS, abs=0.05)
    assert packed.lengths[0] == 8192 + 500
    assert packed.lengths[-1] == 8192 + 2000
    assert CASES["attention_tree"].work(maker(2819)) < CASES["attention"].work(replace(maker(2819), lengths="2819"))


def test_attention_takes_lengths_that_are_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_seven = replace(maker(20), lengths="7")
    packed = CASES["attention"].inputs(of_seven)[3]
    assert packed.lengths == (7, 7, 6)
    pairs = 2 * 28 + 21
    assert CASES["attention"].work(of_seven) == 14 * pairs * SMALL.num_attention_heads * SMALL.head_dim
    seen: list[Any] = []

    def run_ops(cases: Any, sweep: Any, lengths: str = "alpaca") -> dict[str, Any]:
        seen.append(lengths)
        return {}

    monkeypatch.setattr(runner, "run_ops", run_ops)
    assert main(["bench", "--ops", "attention", "--lengths", "7"]) == 0
    assert main(["bench", "--ops"]) == 0
    assert seen == ["7", "alpaca"]
    seen.clear()
    assert main(["bench", "--ops", "rope", "--lengths", "7"]) == 2
    of_packed = "add attention to --ops, or leave --lengths out"
    assert of_packed in capsys.readouterr().err
    assert main(["bench", "--ops", "rope", "attention", "--lengths", "7"]) == 0
    assert main(["bench", "--ops", "attention", "--lengths", "none.json"]) == 2
    assert "--lengths none.json: no such file" in capsys.readouterr().err


def measured(case: Case, tokens: int = 8) -> list[OpResult]:
    return run_case(case, maker(tokens), CEILING)


def test_what_is_told_of_an_op() -> None:
    rows = measured(CASES["rope"])
    assert [row.implementation for row in rows] == [PLAIN, OURS]
    for row in rows:
        assert row.forward is not None
        assert row.both is not None
        assert row.share == pytest.approx(CASES["rope"].work(maker(8)) / row.both / CEILING.bandwidth)
        assert row.peak_memory is None


@pytest.mark.parametrize("name", CASES)
def test_one_token(name: str) -> None:
    assert all(row.both is not None and row.error is None for row in measured(CASES[name], 1))


def test_an_op_without_gradients_is_timed_forward_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *kwargs: (asked.append(kwargs), grad(*kwargs))[1])
    rows = measured(CASES["dequantize"])
    assert all(row.both is not None and row.error is None for row in rows)
    assert not asked
    measured(CASES["swiglu"])
    assert asked


def test_out_of_memory_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(*_: Any, **__: Any) -> float:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(runner, "time_calls", timed)
    rows = measured(CASES["swiglu"])
    assert [row.error for row in rows] == ["out of memory"] * 2
    assert all(row.forward is None and row.both is None for row in rows)


def test_calls_take_turns() -> None:
    turns: list[int] = []
    seconds = time_calls([lambda i=i: turns.append(i) for i in range(3)], CPU, repeats=6)  # type: ignore[misc]
    assert turns[:3] == [0, 1, 2]
    assert turns[3:] == [0, 1, 2, 0, 1, 2]
    assert seconds > 0


def test_a_table_is_there_before_the_next_op_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[str] = []

    def run_case(case: Case, make: Maker, _: Ceiling) -> list[OpResult]:
        printed.append(capsys.readouterr().out)
        return [OpResult(case.name, PLAIN, make.tokens)]

    monkeypatch.setattr(runner, "run_case", run_case)
    monkeypatch.setattr(runner, "measure", lambda: CEILING)
    runner.run_ops([CASES["rope"], CASES["swiglu"]], [4, 9])
    assert [("rope: " in text) for text in printed] == [False, False, True, False]
    assert "swiglu: " in capsys.readouterr().out


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("written for a CPU")
    monkeypatch.setattr(runner, "measure", lambda: CEILING)
    result = tmp_path / "ops.json"
    flags = ["--tokens", "4", "9", "--json", str(result)]
    assert main(["bench", "--ops", "rope", "linear_cross_entropy", *flags]) == 0
    printed = capsys.readouterr().out
    assert "rope: rotary embedding of q and k" in printed
    record = json.loads(result.read_text())
    assert {(row["op"], row["tokens"]) for row in record["ops"]} == {
        (op, tokens) for op in ("rope", "linear_cross_entropy") for tokens in (4, 9)
    }
    assert all(row["both"] > 0 for row in record["ops"])


def test_an_unknown_op_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--ops", "ropes"]) == 2
    assert "no such op. Choose from: rope, " in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [SMALL, LLAMA_8B])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, sizes: Any) -> None:
    """An odd number of tokens, which no block size divides; against Liger where it is installed."""
    torch.compiler.reset()  # what was compiled before may run its backward but once
    make = Maker(127 if sizes is SMALL else 2047, sizes, torch.bfloat16, torch.Generator(torch.device("cuda")))
    result = check(CASES[name], make)
    assert all(share <= 1 for implementation, share in result.items() if implementation not in (PLAIN, LIGER)), result
    for row in run_case(CASES[name], make, CEILING):
        assert row.error is None
        assert row.both is not None
        assert row.peak_memory is not None
