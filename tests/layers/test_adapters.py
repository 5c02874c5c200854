"""LoRA, 4-bit and 8-bit layers, alone and together, patched before or after PEFT wraps the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import KINDS, check, lora_config, nf4, quantised, with_ia3, with_lora
from oracle import (
    FLOAT32_BOUND,
    GPU_FLOAT32_BOUND,
    compare,
    make_sequences,
    padded,
    positions,
    relative,
    run_alone,
    run_batch,
)
from peft import (
    AdaptionPromptConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from tiny import VOCAB, tiny_model
from torch import nn

import fastpack


@pytest.mark.parametrize("order", ["patched, then wrapped", "wrapped, then patched", "base patched inside"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2"])
def test_lora(model_type: str, order: str) -> None:
    alone = run_alone(with_lora(tiny_model(model_type)), make_sequences(VOCAB))
    model = tiny_model(model_type)
    if order == "patched, then wrapped":
        wrapped = with_lora(fastpack.patch(model))
    else:
        wrapped = with_lora(model)
        fastpack.patch(wrapped if order == "wrapped, then patched" else wrapped.get_base_model())
    check(wrapped, alone)
    assert fastpack.is_patched(wrapped)
    fastpack.unpatch(wrapped)
    assert not fastpack.is_patched(model)
    assert not any("forward" in module.__dict__ for module in wrapped.modules())


def test_some_projections_only() -> None:
    alone = run_alone(with_lora(tiny_model("llama"), target_modules=["q_proj", "down_proj"]), make_sequences(VOCAB))
    wrapped = fastpack.patch(with_lora(tiny_model("llama"), target_modules=["q_proj", "down_proj"]))
    check(wrapped, alone)
    assert fastpack.report(wrapped).projections == {"linear": 10, "linear + lora": 4}


def test_fused_projections() -> None:
    """Phi 3 has one projection for q, k and v, and one for gate and up."""
    targets = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    alone = run_alone(with_lora(tiny_model("phi3"), target_modules=targets), make_sequences(VOCAB))
    check(fastpack.patch(with_lora(tiny_model("phi3"), target_modules=targets)), alone)


def test_adapters_disabled_is_the_base_model() -> None:
    """DPO's reference model is the same patched model with its adapters disabled."""
    base = run_alone(tiny_model("llama"), make_sequences(VOCAB))
    wrapped = fastpack.patch(with_lora(tiny_model("llama")))
    with wrapped.disable_adapter(), torch.no_grad():
        batch = {"input_ids": torch.cat(make_sequences(VOCAB))[None], "packed_seq_lens": [7, 1, 19, 19, 33]}
        off = wrapped(**batch).logits[0]
    assert relative(off, torch.cat(base.logits)) <= FLOAT32_BOUND
    assert relative(wrapped(**batch).logits[0], torch.cat(base.logits)) > 1e-2


def test_several_adapters_and_merging() -> None:
    wrapped = with_lora(tiny_model("llama"))
    wrapped.add_adapter("second", lora_config(r=2))
    wrapped.set_adapter("second")
    alone = run_alone(wrapped, make_sequences(VOCAB))
    fastpack.patch(wrapped)
    check(wrapped, alone)
    wrapped.set_adapter("default")
    logits = run_batch(wrapped, make_sequences(VOCAB), "packed_seq_lens").logits
    merged = wrapped.merge_and_unload()
    assert fastpack.is_patched(merged)
    again = merged(input_ids=torch.cat(make_sequences(VOCAB))[None], packed_seq_lens=[7, 1, 19, 19, 33]).logits[0]
    assert relative(again, torch.cat(logits)) <= FLOAT32_BOUND


@pytest.mark.parametrize("order", ["patch first", "PEFT first"])
def test_mixed_adapters(order: str) -> None:
    """PEFT's ``mixed=True`` gives a wrapper without ``get_base_model``."""
    alone = run_alone(get_peft_model(tiny_model("llama"), lora_config(), mixed=True), make_sequences(VOCAB))
    model = tiny_model("llama")
    if order == "patch first":
        fastpack.patch(model)
    wrapped = get_peft_model(model, lora_config(), mixed=True)
    if order == "PEFT first":
        fastpack.patch(wrapped)
    assert fastpack.is_patched(wrapped)
    check(wrapped, alone)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_nf4_with_lora_and_checkpointing(tmp_path: Path, use_reentrant: bool) -> None:
    from peft import prepare_model_for_kbit_training

    def build() -> Any:
        model = prepare_model_for_kbit_training(
            nf4(tmp_path), gradient_checkpointing_kwargs={"use_reentrant": use_reentrant}
        )
        return with_lora(model)

    alone = run_alone(build(), make_sequences(VOCAB))
    wrapped = fastpack.patch(build(), strict=True)
    assert fastpack.report(wrapped).projections["4-bit + lora"] == 14
    check(wrapped, alone)


def test_nf4_alone(tmp_path: Path) -> None:
    model = nf4(tmp_path)
    alone = run_alone(model, make_sequences(VOCAB))
    check(fastpack.patch(model), alone)
    assert fastpack.report(model).projections["4-bit"] == 14


def test_8_bit_is_reported_as_not_isolated(tmp_path: Path) -> None:
    """LLM.int8 rounds each token by itself, but picks outlier columns over the whole batch, in stock models too."""
    model = fastpack.patch(quantised(tmp_path, load_in_8bit=True))
    report = fastpack.report(model)
    assert report.projections["8-bit"] == 14
    assert any("not isolated" in note for note in report.notes)
    logits = model(input_ids=torch.cat(make_sequences(VOCAB))[None], packed_seq_lens=[7, 1, 19, 19, 33]).logits
    assert bool(logits.isfinite().all())


@pytest.mark.parametrize("order", ["patched, then wrapped", "wrapped, then patched"])
@pytest.mark.parametrize("base", ["linear", "4-bit"])
def test_an_adapter_that_is_not_read_is_called_and_reported(
    base: str, order: str, tmp_path: Path, calls: dict[str, int]
) -> None:
    """The adapter is IA3, whose layer around a 4-bit layer has the name of bitsandbytes' class."""

    def build() -> nn.Module:
        return nf4(tmp_path) if base == "4-bit" else tiny_model("llama")

    alone = run_alone(with_ia3(build()), make_sequences(VOCAB))
    if order == "patched, then wrapped":
        wrapped = with_ia3(fastpack.patch(build()))
    else:
        wrapped = fastpack.patch(with_ia3(build()))
    check(wrapped, alone)
    assert calls == {"project": 0, "gated_mlp": 0, "add_updates": 0}
    report = fastpack.report(wrapped)
    assert report.projections == {f"{base} + ia3": 14}
    ((why, count),) = report.as_modules.items()
    name = "Linear4bit" if base == "4-bit" else "Linear"
    assert (count, why.split(",")[0]) == (
        14,
        f"wrapped by peft.tuners.ia3.{'bnb' if base == '4-bit' else 'layer'}.{name}",
    )
    for line in (f"14 {base} + ia3", "called as modules", f"14: {why.split(',')[0]}"):
        assert line in str(report)
    scales = wrapped.get_base_model().model.layers[1].mlp.down_proj.ia3_l["default"]
    with torch.no_grad():
        scales.mul_(2)
    error = compare(run_batch(wrapped, make_sequences(VOCAB), KINDS[0]), alone)
    assert error.worst > 1e-2, "the negative control: IA3 takes part"


def test_an_adapter_that_is_not_read_leaves_the_others_fused(calls: dict[str, int]) -> None:
    """The layers are PEFT's default for a Llama: k_proj, v_proj and down_proj."""
    settings = {"target_modules": None, "feedforward_modules": None}
    alone = run_alone(with_ia3(tiny_model("llama"), **settings), make_sequences(VOCAB))
    wrapped = fastpack.patch(with_ia3(tiny_model("llama"), **settings))
    check(wrapped, alone)
    assert calls == {"project": 2 * 2 * len(KINDS), "gated_mlp": 0, "add_updates": 0}, "o; gate and up; of two layers"
    report = fastpack.report(wrapped)
    assert report.projections == {"linear": 8, "linear + ia3": 6}
    assert list(report.as_modules.values()) == [6]
    merged = fastpack.report(wrapped.merge_and_unload())
    assert (merged.projections, merged.as_modules) == ({"linear": 14}, {})


@pytest.mark.gpu
def test_nf4_with_lora_on_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    tiny_model("llama", hidden_size=256, intermediate_size=512, head_dim=64).save_pretrained(tmp_path)

    def build() -> Any:  # in float32, where the comparison is sharp
        quantisation = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=quantisation, dtype=torch.float32, device_map={"": "cuda"}
        )
        return with_lora(model.train())

    check(fastpack.patch(build(), strict=True), run_alone(build(), make_sequences(VOCAB)), GPU_FLOAT32_BOUND)


PROMPTS = {
    "prompt tuning": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "P-tuning": lambda: PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=16),
    "prefix tuning": lambda: PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_virtual_tokens_before_each_row(kind: str) -> None:
    """Batches padded right are exact. Packed ones are refused, and run once prompts are disabled."""
    sequences = make_sequences(VOCAB, (7, 5, 9))
    model = get_peft_model(tiny_model("llama"), PROMPTS[kind]())
    right, left = (padded(sequences, side) for side in ("right", "left"))
    want = model(**right).loss
    fastpack.patch(model)
    assert relative(model(**right).loss, want) <= FLOAT32_BOUND
    (note,) = (note for note in fastpack.report(model).notes if "PEFT's prompts" in note)
    assert ("stock forward" in note) == (kind == "prefix tuning")
    ids = torch.cat(sequences)[None]
    numbers = torch.cat([torch.full_like(s, i + 1) for i, s in enumerate(sequences)])[None]
    packings = ({"position_ids": positions(sequences)}, {"attention_mask": numbers}, {"packed_seq_lens": [7, 5, 9]})
    for packing in packings:
        with pytest.raises(fastpack.PackingError, match=r"virtual tokens before each row|prefix tuning passes too"):
            model(input_ids=ids, labels=ids, **packing)
    if kind == "prefix tuning":
        model(**left)
    else:
        with pytest.raises(fastpack.PackingError, match="before the padding, pad on the right"):
            model(**left)
    with model.disable_adapter():
        alone = model(**right).loss
        for packing in packings:
            assert relative(model(input_ids=ids, labels=ids, **packing).loss, alone) <= FLOAT32_BOUND
    fastpack.unpatch(model)
    model(input_ids=ids, labels=ids, position_ids=positions(sequences))


def test_a_wrapper_that_keeps_the_stock_forward() -> None:
    """Adaption prompts keep calling the stock forward, so first labels would be trained."""
    config = AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=1)
    with pytest.raises(fastpack.PatchError, match=r"Patch the plain model first, then wrap it"):
        fastpack.patch(get_peft_model(tiny_model("llama"), config))
    sequences = make_sequences(VOCAB, (7, 5, 9))
    stock = get_peft_model(tiny_model("llama"), config)
    model = get_peft_model(fastpack.patch(tiny_model("llama")), config)
    ids = torch.cat(sequences)[None]
    want = stock(**padded(sequences, "right")).loss
    assert relative(model(input_ids=ids, labels=ids, packed_seq_lens=[7, 5, 9]).loss, want) <= FLOAT32_BOUND
