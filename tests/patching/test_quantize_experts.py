"""Models with quantised experts: exact against the dequantised model; adapters before and after; saved and loaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from op_checks import count_calls
from oracle import FLOAT32_BOUND, compare, make_sequences, run_alone, run_batch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny import VOCAB, tiny_model
from torch import nn
from torch.distributed.fsdp import fully_shard

import fastpack
from fastpack.ops.quantized_stack import QuantizedStack
from fastpack.ops.stack_formats import FourBitFormat

pytest.importorskip("bitsandbytes")
STACKS = ["experts.gate_up_proj", "experts.down_proj"]
FAMILIES = ["qwen3_moe", "gpt_oss"]


def stacks_of(model: nn.Module) -> dict[str, QuantizedStack]:
    return {name: each for name, each in model.named_parameters() if isinstance(each, QuantizedStack)}


def dequantized(model: nn.Module) -> Any:
    """Return a copy with dense stacks of the same values."""
    model = copy.deepcopy(model)
    for name, stack in stacks_of(model).items():
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._parameters[last] = nn.Parameter(stack.dense().contiguous(), requires_grad=False)
    return model


def quantized_model(model_type: str, **settings: Any) -> Any:
    return fastpack.quantize_experts(tiny_model(model_type), **settings)


def with_lora(model: Any, seed: int = 0, stacks: list[str] = STACKS) -> Any:
    """Return the model with LoRA of random values, on queries and these stacks."""
    torch.manual_seed(seed)
    config = LoraConfig(r=3, target_modules=["q_proj"], target_parameters=stacks, init_lora_weights=False)
    return get_peft_model(model, config).train()


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("model_type", [*FAMILIES, "mixtral"])
@pytest.mark.sample(4)
def test_exact_against_the_dequantised_model(model_type: str, adapters: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized_model(model_type)
    count = len(stacks_of(model))
    assert count
    if adapters:
        model = with_lora(model)
    sequences = make_sequences(VOCAB)
    alone = run_alone(dequantized(model), sequences)
    kept = [each.packed.clone() for each in stacks_of(model).values()]
    fastpack.patch(model)
    assert fastpack.report(model).swapped["experts"] == count // 2
    made = count_calls(monkeypatch, FourBitFormat, "stored")
    for kind in ("packed_seq_lens", "padded left"):
        made.clear()
        error = compare(run_batch(model, sequences, kind), alone)
        assert error.worst <= FLOAT32_BOUND, f"{kind}: {error}"
        assert len(made) == 2 * count, "each stack once in the forward and once in the backward: the fast forward ran"
    for stack in stacks_of(model).values():
        stack.packed.copy_(stack.packed.roll(1))
    assert compare(run_batch(model, sequences, "padded left"), alone).worst > 3 * FLOAT32_BOUND
    for stack, bytes_before in zip(stacks_of(model).values(), kept, strict=True):
        stack.packed.copy_(bytes_before)
    monkeypatch.undo()
    fastpack.unpatch(model)
    assert compare(run_alone(model, sequences), alone).worst <= FLOAT32_BOUND


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_stock_forward_and_stock_peft_run(model_type: str) -> None:
    """PEFT's wrapper changes the parameter for each forward: the second one finds it as the first."""
    model = with_lora(quantized_model(model_type))
    dense = dequantized(model)
    sequences = make_sequences(VOCAB)
    for _ in range(2):
        error = compare(run_alone(model, sequences), run_alone(dense, sequences))
        assert error.worst <= FLOAT32_BOUND, error
    sizes = {name: each.shape for name, each in model.named_parameters() if "lora_" in name}
    assert sizes == {name: each.shape for name, each in dense.named_parameters() if "lora_" in name}
    with pytest.raises(RuntimeError, match="load the dense model and merge it there"):
        model.merge_adapter()


@pytest.mark.parametrize("order", ["adapters, quantise, patch", "patch, quantise, adapters"])
def test_any_order(order: str) -> None:
    steps = {
        "adapters": with_lora,
        "quantise": fastpack.quantize_experts,
        "patch": fastpack.patch,
    }
    model: Any = tiny_model("qwen3_moe")
    expected = dequantized(with_lora(quantized_model("qwen3_moe")))
    for step in order.split(", "):
        model = steps[step](model)  # type: ignore[operator]
    sequences = make_sequences(VOCAB)
    error = compare(run_batch(model, sequences, "packed_seq_lens"), run_alone(expected, sequences))
    assert error.worst <= FLOAT32_BOUND, error
    assert fastpack.report(model).swapped["experts"] == len(stacks_of(model)) // 2


def test_adapters_load_over_dense_and_quantised_models(tmp_path: Path) -> None:
    model = fastpack.patch(with_lora(quantized_model("qwen3_moe")))
    sequences = make_sequences(VOCAB)
    trained = run_batch(model, sequences, "packed_seq_lens")
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(quantized_model("qwen3_moe"), tmp_path, is_trainable=True).train()
    dense = PeftModel.from_pretrained(dequantized(quantized_model("qwen3_moe")), tmp_path, is_trainable=True).train()
    for loaded in (again, dense):
        assert compare(trained, run_alone(loaded, sequences)).worst <= FLOAT32_BOUND
    other = with_lora(quantized_model("qwen3_moe"), seed=1)
    assert compare(trained, run_alone(other, sequences)).worst > 3 * FLOAT32_BOUND


@pytest.mark.parametrize("model_type", FAMILIES)
def test_saved_and_loaded(model_type: str, tmp_path: Path) -> None:
    model = quantized_model(model_type)
    sequences = make_sequences(VOCAB)
    alone = run_alone(model, sequences)
    model.save_pretrained(tmp_path, save_original_format=False)
    tensors = load_file(tmp_path / "model.safetensors")
    with init_empty_weights():
        empty = type(model)(model.config)
    fastpack.quantize_experts(empty).load_state_dict(tensors, assign=True)
    assert not [name for name, each in empty.named_parameters() if each.is_meta]
    other: Any = fastpack.quantize_experts(tiny_model(model_type, seed=1))
    assert not torch.equal(*(next(iter(stacks_of(each).values())).packed for each in (other, model)))
    other.load_state_dict(tensors)
    for loaded in (empty.train(), other):
        assert compare(run_alone(loaded, sequences), alone).worst <= FLOAT32_BOUND
    with pytest.raises((RuntimeError, ValueError)):
        type(model).from_pretrained(tmp_path)


def test_settings() -> None:
    with torch.no_grad():
        dense = tiny_model("qwen3_moe")
        nested, plain, wide = (
            quantized_model("qwen3_moe", **settings)
            for settings in ({}, {"double_quant": False}, {"quant_type": "fp4", "compute_dtype": torch.bfloat16})
        )
    first = next(iter(stacks_of(nested)))
    original = dense.get_parameter(first)
    stacks = [stacks_of(model)[first] for model in (nested, plain, wide)]
    assert [stack.stack_format.name for stack in stacks] == ["NF4", "NF4", "FP4"]
    assert [stack.dtype for stack in stacks] == [torch.float32, torch.float32, torch.bfloat16]
    assert [stack.stack_format.state.nested for stack in stacks] == [True, False, True]  # type: ignore[attr-defined]
    for stack in stacks:
        off = (stack.dense().float() - original).norm() / original.norm()
        assert 0.02 < off < 0.2, "four bits"
    again = stacks_of(fastpack.quantize_experts(nested))[first]
    assert again is stacks[0], "what is quantised stays as it is"


def test_a_compiled_model_runs_its_experts_outside() -> None:
    model = with_lora(quantized_model("qwen3_moe"))
    sequences = make_sequences(VOCAB)
    alone = run_alone(dequantized(model), sequences)
    compiled: Any = torch.compile(fastpack.patch(model), backend="eager")
    result = run_batch(compiled, sequences, "packed_seq_lens")
    grads = {name.removeprefix("_orig_mod."): each for name, each in result.grads.items()}
    result = result._replace(grads=grads)
    error = compare(result, alone)
    assert error.worst <= FLOAT32_BOUND, error


def test_a_model_on_another_dtype_and_a_copy_of_a_patched_one() -> None:
    model = fastpack.patch(with_lora(quantized_model("qwen3_moe")))
    sequences = make_sequences(VOCAB)
    alone = run_batch(model, sequences, "packed_seq_lens")
    copied = copy.deepcopy(model)
    assert compare(run_batch(copied, sequences, "packed_seq_lens"), alone).worst <= FLOAT32_BOUND
    copied.to(torch.bfloat16)
    assert {stack.dtype for stack in stacks_of(copied).values()} == {torch.bfloat16}
    assert copied(**{"input_ids": sequences[0][None]}).logits.dtype == torch.bfloat16


def test_fsdp2_leaves_ignored_stacks_alone(tmp_path: Path) -> None:
    model = with_lora(quantized_model("qwen3_moe"))
    sequences = make_sequences(VOCAB)
    alone = run_alone(model, sequences)
    packed = [stack.packed for stack in stacks_of(model).values()]
    fastpack.patch(model)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        fully_shard(model, ignored_params={*stacks_of(model).values()})
        result = run_batch(model, sequences, "packed_seq_lens")
        grads = {name: each.full_tensor() for name, each in result.grads.items()}  # type: ignore[operator]
        assert compare(result._replace(grads=grads), alone).worst <= FLOAT32_BOUND
        after = [stack.packed for stack in stacks_of(model).values()]
        assert [each.data_ptr() for each in after] == [each.data_ptr() for each in packed]
    finally:
        dist.destroy_process_group()


def test_the_report_says_what_is_quantised_and_what_is_not() -> None:
    model = fastpack.patch(quantized_model("qwen3_moe"))
    assert any("2 stacks in NF4" in note for note in fastpack.report(model).notes)
    assert not any("are not quantised" in note for note in fastpack.report(model).notes)
    dense = tiny_model("qwen3_moe")
    assert not any("stacks" in note for note in fastpack.report(fastpack.patch(dense)).notes)
    fastpack.unpatch(dense)
    linear = dense.model.layers[0].self_attn.q_proj
    bitsandbytes = pytest.importorskip("bitsandbytes")
    in_four_bits = bitsandbytes.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
    )
    in_four_bits.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
    dense.model.layers[0].self_attn.q_proj = in_four_bits.to("cpu")
    notes = fastpack.report(fastpack.patch(dense)).notes
    assert any("2 stacks are not quantised" in note and "fastpack.quantize_experts" in note for note in notes)


def test_what_is_refused_changes_nothing() -> None:
    with pytest.raises(ValueError, match="'nf4', 'fp4'"):
        fastpack.quantize_experts(tiny_model("qwen3_moe"), quant_type="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not a float dtype"):
        fastpack.quantize_experts(tiny_model("qwen3_moe"), compute_dtype=torch.int8)
    with pytest.raises(fastpack.UnsupportedModelError, match="load_in_4bit"):
        fastpack.quantize_experts(tiny_model("llama"))
    model: Any = tiny_model("qwen3_moe")
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(torch.zeros(2, 2, 2, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(fastpack.PatchError, match=r"torch\.uint8 weights"):
        fastpack.quantize_experts(model)
    del experts._parameters["down_proj"]
    with pytest.raises(fastpack.PatchError, match="not a plain parameter"):
        fastpack.quantize_experts(model)
    assert not stacks_of(model)
