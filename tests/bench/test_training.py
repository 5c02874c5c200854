"""``fastpack bench``: variants train the same model, the gate notices where not, and the results are there."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import TrainerState

from fastpack import cli as commands
from fastpack.backends import torch_varlen
from fastpack.bench import loops, models, stock_varlen, variant_run
from fastpack.bench.same_losses import compare
from fastpack.bench.settings import COMPARED_STEPS, LEARNING_RATE, LORA_RANK, RunResult, RunSettings
from fastpack.bench.shapes import SHAPES, takes_flash_attention
from fastpack.cli.main import main
from fastpack.ops.quantized_stack import QuantizedStack

trains_on_cpu = pytest.mark.skipif(
    not torch.cuda.is_available() and not commands.trl_trains_on_cpu(), reason="this TRL's loss needs a GPU"
)
SMALL = RunSettings("", rows=3, steps=2, warmup=2, lengths="lengths.json", loop="plain")


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lengths.json").write_text("[9, 33, 17, 2, 40, 21, 28]")
    monkeypatch.setitem(SHAPES, "tiny", {**SHAPES["tiny"], "num_hidden_layers": 2, "vocab_size": 512})


def train(settings: RunSettings, *names: str) -> list[RunResult]:
    return [variant_run.run(replace(settings, variant=name)) for name in names]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mode", ["full", "lora", "qlora"])
def test_all_variants_train_the_same_model(mode: Any, checkpointing: bool) -> None:
    if mode == "qlora":
        pytest.importorskip("bitsandbytes")
    names = ("stock padded", "stock padding_free", "fastpack", "fastpack packed")
    results = train(replace(SMALL, mode=mode, checkpointing=checkpointing), *names)
    verdict = compare(results, half=mode == "qlora")
    assert verdict.agree, str(verdict)
    assert all(len(row.seconds) == 2 and len(row.losses) == 4 and len(row.gradient_norms) == 2 for row in results)
    assert [row.backend for row in results[:2]] == ["sdpa", "sdpa"]
    assert results[2].backend == results[3].backend != "sdpa"
    assert results[0].slots == results[2].slots > sum(results[0].tokens)
    assert results[1].slots == results[3].slots == sum(results[0].tokens)
    assert results[0].tokens == results[1].tokens == [sum(batch) for batch in SMALL.timed_batches()]


@pytest.mark.sample(1)
@trains_on_cpu
@pytest.mark.parametrize("mode", ["lora", "qlora"])
def test_the_same_under_trl(mode: Any) -> None:
    if mode == "qlora":
        pytest.importorskip("bitsandbytes")
    settings = replace(SMALL, mode=mode, loop="trl", checkpointing=True)
    results = train(settings, "stock padded", "stock padding_free", "fastpack packed")
    assert compare(results, half=True).agree
    assert all(len(row.gradient_norms) == 4 for row in results)


@pytest.fixture
def _few_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_hidden_layers": 2, "vocab_size": 512, "hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 32}
    monkeypatch.setitem(SHAPES, "tiny-moe", {**SHAPES["tiny-moe"], **sizes})
    gpt_oss = sizes | {"intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    del gpt_oss["moe_intermediate_size"]
    gpt_oss |= {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 9}
    monkeypatch.setitem(SHAPES, "gpt-oss-20b", {**SHAPES["gpt-oss-20b"], **gpt_oss})


@pytest.mark.usefixtures("_few_experts")
@pytest.mark.parametrize(
    ("shape", "mode", "lora_experts", "loop"),
    [
        ("tiny-moe", "full", False, "plain"),
        pytest.param("tiny-moe", "lora", True, "trl", marks=trains_on_cpu),
        ("tiny-moe", "qlora", True, "plain"),
        pytest.param("gpt-oss-20b", "lora", False, "trl", marks=trains_on_cpu),
        ("gpt-oss-20b", "lora", True, "plain"),
    ],
)
def test_experts_train_the_same(shape: str, mode: Any, lora_experts: bool, loop: str) -> None:
    if mode == "qlora":
        pytest.importorskip("bitsandbytes")
    settings = replace(SMALL, shape=shape, mode=mode, lora_experts=lora_experts, loop=loop)
    results = train(settings, "stock padded", "fastpack", "fastpack packed")
    verdict = compare(results, half=mode == "qlora")
    assert verdict.agree, str(verdict)
    assert verdict.norm_steps >= 2
    assert all(len(row.expert_norms) == verdict.norm_steps * settings.trains_experts for row in results)
    packed = compare([*results[:1], *train(settings, "stock padding_free")], half=mode == "qlora")
    assert packed.agree == takes_flash_attention(shape), "stock sequences of gpt-oss see each other"
    assert results[0].backend == ("sdpa" if shape == "tiny-moe" else "eager")


@pytest.mark.usefixtures("_few_experts")
@pytest.mark.parametrize("shape", ["tiny-moe", "gpt-oss-20b"])
@pytest.mark.parametrize("lora_experts", [False, True])
def test_where_lora_is(shape: str, lora_experts: bool) -> None:
    """On attention's projections; on the experts if told to, at the same rank; never on the router or the head."""
    settings = replace(SMALL, variant="stock padded", shape=shape, mode="lora", lora_experts=lora_experts)
    model, _ = models.build_model(settings, torch.device("cpu"))
    adapted = {name: p for name, p in model.named_parameters() if ".lora_A." in name}
    assert all(p.requires_grad == (".lora_" in name) for name, p in model.named_parameters())
    of_experts = [name for name in adapted if ".experts." in name]
    assert len(of_experts) == (2 * 2 if lora_experts else 0)
    assert len(adapted) - len(of_experts) == 2 * 4
    assert all(name.split(".lora_A")[0].endswith(models.ATTENTION) for name in adapted if name not in of_experts)
    ranks = {len(p) // (8 if name in of_experts else 1) for name, p in adapted.items()}
    assert ranks == {LORA_RANK}


@pytest.mark.usefixtures("_few_experts")
@pytest.mark.parametrize("shape", ["tiny-moe", "gpt-oss-20b"])
def test_experts_are_quantised_too(shape: str) -> None:
    """Whatever the variant."""
    pytest.importorskip("bitsandbytes")
    for variant in ("stock padded", "fastpack"):
        settings = replace(SMALL, variant=variant, shape=shape, mode="qlora", lora_experts=True)
        model, _ = models.build_model(settings, torch.device("cpu"))
        stacks = [p for name, p in model.named_parameters() if name.endswith(("gate_up_proj", "down_proj"))]
        assert len(stacks) == 2 * 2
        assert all(isinstance(stack, QuantizedStack) for stack in stacks)


@pytest.mark.usefixtures("_few_experts")
def test_experts_left_without_lora_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    settings = replace(SMALL, shape="tiny-moe", mode="lora", lora_experts=True)
    honest = train(settings, "stock padded")
    stock_lora = models.lora_config

    def without_experts(settings: RunSettings) -> Any:
        return stock_lora(replace(settings, lora_experts=False))

    monkeypatch.setattr(models, "lora_config", without_experts)
    verdict = compare(honest + train(settings, "fastpack"), half=True)
    assert not verdict.agree
    assert (verdict.what, verdict.difference) == ("experts' gradients' norm", 1)


DPO = replace(SMALL, trainer="dpo", loop="trl", rows=2, lengths="pairs.json")


@pytest.mark.sample(1)
@trains_on_cpu
@pytest.mark.parametrize("mode", ["full", "lora", "qlora"])
def test_dpo_is_the_same_padded_and_patched(mode: Any) -> None:
    if mode == "qlora":
        pytest.importorskip("bitsandbytes")
    Path("pairs.json").write_text("[[9, 30, 12], [20, 3, 44], [1, 5, 6]]")
    results = train(replace(DPO, mode=mode, checkpointing=mode == "lora"), "stock padded", "fastpack")
    verdict = compare(results, half=mode == "qlora")
    assert verdict.agree, str(verdict)
    assert [len(row.losses) for row in results] == [4, 4]
    assert results[0].losses == pytest.approx([math.log(2)] * 4, abs=1e-6), "it learns while it is compared"
    assert (results[0].backend, results[1].backend) == ("sdpa", "segments")
    # of the two timed steps: pairs 1 and 2, then 0 and 1, a prompt with each of its completions
    assert results[0].tokens == [23 + 6 + 64 + 7, 39 + 23 + 21 + 64] == results[1].tokens
    assert results[0].slots == 4 * 64 + 4 * 64 == results[1].slots


@trains_on_cpu
def test_dpo_on_other_pairs_is_noticed() -> None:
    """Negative control."""
    Path("pairs.json").write_text("[[9, 30, 12], [20, 3, 44], [1, 5, 6]]")
    honest = train(DPO, "stock padded")
    Path("pairs.json").write_text("[[9, 30, 12], [20, 3, 44], [1, 5, 7]]")
    assert not compare([*honest, *train(DPO, "fastpack")], half=False).agree


def test_dpo_learns_once_it_was_compared() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    rates = []
    for step in range(COMPARED_STEPS + 2):
        loops.LearnLater().on_step_begin(None, TrainerState(global_step=step), None, optimizer=optimizer)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.0] * COMPARED_STEPS + [LEARNING_RATE] * 2


def test_how_fastpack_patches_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import fastpack

    patch_options: list[dict[str, Any]] = []
    stock_patch = fastpack.patch

    def patch(model: Any, **options: Any) -> Any:
        patch_options.append(options)
        return stock_patch(model, attention=options["attention"])

    monkeypatch.setattr(fastpack, "patch", patch)
    chosen = {"attention": "reference", "kernels": "torch", "graphs": "auto", "loss": "fused", "offload": "activations"}
    settings = replace(SMALL, **chosen)  # type: ignore[arg-type]
    stock, ours = train(settings, "stock padded", "fastpack")
    assert patch_options == [{**chosen, "share_prefixes": None, "max_tokens": None}]
    assert (stock.backend, ours.backend) == ("sdpa", "reference")


def test_contamination_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss alone, at half precision's bound, would not."""
    honest = train(SMALL, "stock padded")

    flatten = loops.FLATTEN

    def concatenated(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
        batch = flatten(rows)
        return {name: batch[name] for name in ("input_ids", "labels")}

    monkeypatch.setattr(loops, "FLATTEN", concatenated)
    results = [*honest, *train(SMALL, "stock padding_free")]
    for half in (False, True):
        verdict = compare(results, half=half)
        assert not verdict.agree
        assert verdict.variant == "stock padding_free"
    assert verdict.what == "gradients' norm"


def result_of(name: str, losses: list[float], norms: list[float]) -> RunResult:
    return RunResult(name, seconds=[1.0], tokens=[1], slots=1, losses=losses, gradient_norms=norms)


def test_the_verdict_names_the_worst() -> None:
    first = result_of("stock padded", [2.0, 2.0], [1.0])
    near = result_of("fastpack", [2.0, 2.0001], [1.0])
    far = result_of("fastpack packed", [2.0, 2.0], [1.1])
    assert compare([first, near], half=False).agree
    verdict = compare([first, near, far], half=False)
    assert (verdict.agree, verdict.variant, verdict.what, verdict.step) == (
        False,
        "fastpack packed",
        "gradients' norm",
        1,
    )
    assert "'fastpack packed'" in str(verdict)
    assert "losses of the first 2 steps and gradients of 1 of them DISAGREE" in str(verdict)
    assert not compare([first, result_of("fastpack", [float("nan"), 2.0], [1.0])], half=True).agree
    assert compare([first], half=True).variant is None
    assert compare([first, RunResult("fastpack", error="out of memory")], half=True).variant is None


def test_the_verdict_says_what_was_compared() -> None:
    for norms, message in (
        ([1.0, 1.0], "losses of the first 2 steps and gradients of 2 of them agree"),
        ([1.0], "losses of the first 2 steps and gradients of 1 of them agree"),
        ([], "losses of the first 2 steps and gradients of 0 of them agree"),
    ):
        verdict = compare([result_of(name, [2.0, 2.0], norms) for name in ("a", "b")], half=False)
        assert str(verdict).startswith(message)
    results = train(replace(SMALL, warmup=0), "stock padded", "fastpack")
    assert "gradients of 0 of them" in str(compare(results, half=False))


def test_later_steps_may_drift_apart() -> None:
    steps = COMPARED_STEPS
    first = result_of("stock padded", [2.0] * steps + [1.0], [1.0])
    assert compare([first, result_of("fastpack", [2.0] * (steps + 1), [1.0])], half=False).agree


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_memory_of_the_process(platform: str, unit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the system tells in KiB, or in bytes."""
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("resource.getrusage", lambda _: SimpleNamespace(ru_maxrss=3 * 2**30 // unit))
    (row,) = train(SMALL, "stock padded")
    assert row.peak_memory == 3


def test_quantised_as_a_checkpoint_is(tmp_path: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from fastpack.bench.shapes import make_config

    torch.manual_seed(0)
    ours = AutoModelForCausalLM.from_config(make_config("tiny"))
    ours.save_pretrained(tmp_path)
    ours = models.quantised(ours)
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=how, device_map={"": "cpu"})
    pairs = list(zip(ours.named_modules(), theirs.named_modules(), strict=True))
    quantised = 0
    for (name, mine), (_, other) in pairs:
        assert type(mine) is type(other), name
        if isinstance(mine, bnb.nn.Linear4bit):
            quantised += 1
            assert mine.weight.quant_state.nested
            assert mine.weight.quant_state.quant_type == "nf4"
            assert torch.equal(mine.weight, other.weight)
            dense = (bnb.functional.dequantize_4bit(m.weight, m.weight.quant_state) for m in (mine, other))
            assert torch.equal(*dense), name
            assert mine.compute_dtype == other.compute_dtype
    assert quantised == 2 * 7
    ids = torch.arange(3, 20)[None]
    assert torch.equal(ours(ids).logits, theirs(ids).logits)


@pytest.fixture
def varlen_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """A stand-in for the kernel, which needs a GPU: the longest sequence of each call, and whether it is causal."""
    calls: list[tuple[int, bool]] = []

    def varlen_attn(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, **kwargs: Any) -> Any:
        assert torch.equal(cu_q, cu_k)
        assert max_q == max_k == int(cu_q.diff().max())
        causal = {(-1, 0): True, (-1, -1): False}[kwargs["window_size"]]
        calls.append((max_q, causal))
        sequences = [x.transpose(0, 1)[None].tensor_split(cu_q.tolist()[1:-1], 2) for x in (q, k, v)]
        outs = [
            scaled_dot_product_attention(*each, is_causal=causal, scale=kwargs["scale"], enable_gqa=True)
            for each in zip(*sequences, strict=True)
        ]
        return torch.cat(outs, 2)[0].transpose(0, 1)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    torch_varlen._asks_for_groups.cache_clear()  # type: ignore[attr-defined]
    return calls


def test_the_stock_varlen_attention_refuses_what_its_kernel_lacks() -> None:
    q = torch.randn(1, 2, 5, 8)
    for wrong in ({"s_aux": torch.zeros(2)}, {"dropout": 0.1}):
        with pytest.raises(ValueError, match="no dropout and no attention sinks"):
            stock_varlen.varlen_forward(None, q, q, q, None, **wrong)  # type: ignore[arg-type]


def test_the_stock_varlen_attention_is_the_stock_model(varlen_calls: list[tuple[int, bool]]) -> None:
    """Through transformers' own extension points."""
    results = train(SMALL, "stock padding_free", "stock + FA2")
    assert compare(results, half=False).agree
    assert [causal for _, causal in varlen_calls] == [True] * (4 * 2)  # steps and layers
    assert results[1].backend.startswith(("FA2", "flash"))


@pytest.mark.usefixtures("_few_experts", "varlen_calls")
def test_liger_leaves_experts_with_lora_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its experts would replace PEFT's wrapper of them."""
    applied: list[dict[str, Any]] = []
    stand_in = SimpleNamespace(_apply_liger_kernel_to_instance=lambda model, **options: applied.append(options))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", stand_in)
    settings = replace(SMALL, shape="tiny-moe", mode="lora")
    train(settings, "stock + FA2 + Liger")
    train(replace(settings, lora_experts=True), "stock + FA2 + Liger")
    assert applied == [{}, {"swiglu": False}]


@pytest.mark.sample(1)
@pytest.mark.parametrize("loop", ["plain", pytest.param("trl", marks=trains_on_cpu)])
def test_rows_with_images(loop: str, varlen_calls: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastpack.bench.images.SIDES", (32, 200))
    settings = replace(SMALL, shape="tiny-vl", mode="lora", loop=loop)
    results = train(settings, "stock padded", "stock padded + FA2", "fastpack", "fastpack + FA2")
    verdict = compare(results, half=False)
    assert verdict.agree, str(verdict)
    assert {causal for _, causal in varlen_calls} == {True, False}, "the image tower's attention is not causal"
    texts = settings.text_lengths()[settings.warmup * settings.rows :]
    assert all(sum(row.tokens) > sum(texts) and row.slots > sum(row.tokens) for row in results)


@pytest.mark.sample(1)
@trains_on_cpu
@pytest.mark.parametrize("shape", ["tiny", "tiny-vl"])
def test_updates_of_grpo(shape: str, varlen_calls: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt with eight completions a step; its image goes through the tower once if prompts are shared."""
    monkeypatch.setattr("fastpack.bench.images.SIDES", (32, 200))
    monkeypatch.setattr("fastpack.bench.lengths.COMPLETION", 20)
    settings = replace(SMALL, shape=shape, mode="lora", loop="trl", trainer="grpo", rows=1, lengths="alpaca")
    results = train(settings, "stock padded", "fastpack", "fastpack, prompts shared")
    verdict = compare(results, half=False)
    assert verdict.agree, str(verdict)
    assert verdict.norm_steps == 4
    assert all(norm > 0 for row in results for norm in row.gradient_norms)
    assert len(results[0].tokens) == 2
    assert len(settings.row_lengths()) == 4 * 8


@trains_on_cpu
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trainer", "dpo"], "trains on images, and is for --trainer sft and grpo"),
        (["--only", "fastpack packed"], "not a variant of --trainer sft on images, which has stock padded, stock"),
    ],
)
def test_what_images_exclude(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--shape", "tiny-vl", *flags]) == 2
    assert message in capsys.readouterr().err


def test_boundaries_are_those_of_trl() -> None:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    rows = [{"input_ids": list(range(3, 3 + n)), "labels": list(range(3, 3 + n))} for n in (4, 1, 6)]
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(rows)
    ours = loops.FLATTEN(rows)
    assert ours["cu_seq_lens_q"].tolist() == [0, 4, 5, 11]
    assert (ours["max_length_q"], ours["max_length_k"]) == (6, 6)
    for name, value in ours.items():
        if name in batch:  # boundaries from TRL 1.16 on
            assert torch.equal(torch.as_tensor(batch[name]), torch.as_tensor(value)), name
            assert getattr(batch[name], "dtype", None) == getattr(value, "dtype", None), name


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two variants in processes of their own, and everything that is written."""
    if torch.cuda.is_available():
        pytest.skip("written for a CPU")
    result, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    flags = ["--shape", "tiny", "--rows", "2", "--steps", "2", "--warmup", "1", "--max-length", "24", "--loop", "plain"]
    only = ["--only", "stock padded", "fastpack packed"]
    assert main(["bench", *flags, *only, "--json", str(result), "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    for text in (
        "stock padded",
        "fastpack packed",
        "real tokens/s",
        "losses of the first 3 steps and gradients of 1 of them agree",
        "floor",
    ):
        assert text in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    record = json.loads(result.read_text())
    assert record["verdict"]["agree"] is True
    assert record["floor_tokens_per_second"] > 0
    for row in record["variants"]:
        assert row["floor_share"] == pytest.approx(row["tokens_per_second"] / record["floor_tokens_per_second"])
        assert len(row["seconds"]) == 2


@pytest.mark.gpu
def test_the_stock_kernel_on_a_gpu() -> None:
    """FlashAttention-2 for the stock model: the losses of sdpa, and what the device tells."""
    results = train(replace(SMALL, shape="tiny", rows=8), "stock padding_free", "stock + FA2", "fastpack packed")
    verdict = compare(results, half=True)
    assert verdict.agree, str(verdict)
    for row in results:
        assert row.held_memory is not None
        assert row.held_memory >= row.peak_memory > 0
        assert all(0 < seconds < 10 for seconds in row.seconds)
        assert len(row.losses) == 4
