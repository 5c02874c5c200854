"""gpt-oss in MXFP4: as transformers loads it, and with the family's own blocks, it is its dequantised self."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from mxfp4_models import STACKS, dense_model, loaded_in_mxfp4
from op_checks import count_calls
from oracle import FLOAT32_BOUND, Result, compare, make_sequences, run_alone, run_batch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import VOCAB, tiny_model
from transformers import Trainer, TrainingArguments

import fastpack
from fastpack.exactness import rule
from fastpack.ops.quantized_stack import QuantizedStack
from fastpack.ops.stack_formats import Mxfp4Format
from fastpack.patching.apply import disabled
from fastpack.patching.mxfp4_training import TrainableMxfp4Quantizer
from fastpack.patching.state import state_of

SEQUENCES = make_sequences(VOCAB)


def with_lora(model: Any, *, experts: bool = False) -> Any:
    torch.manual_seed(0)
    stacks = [f"experts.{name}" for name in STACKS] if experts else None
    config = LoraConfig(r=3, target_modules=["q_proj"], target_parameters=stacks, init_lora_weights=False)
    return get_peft_model(model, config).train()


@pytest.fixture(scope="module")
def dense() -> Any:
    return dense_model()


@pytest.fixture(scope="module")
def alone(dense: Any) -> Result:
    """The dequantised model with LoRA on attention, on each sequence alone."""
    return run_alone(with_lora(copy.deepcopy(dense)), SEQUENCES)


def check(model: Any, alone: Result, kinds: tuple[str, ...] = ("packed_seq_lens", "padded left")) -> None:
    for kind in kinds:
        error = compare(run_batch(model, SEQUENCES, kind), alone)
        assert error.worst <= FLOAT32_BOUND, f"{kind}: {error}"


@pytest.mark.parametrize("order", ["LoRA first", "patch first"])
def test_attention_lora_over_the_model_as_it_is_loaded(
    order: str, dense: Any, alone: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded_in_mxfp4(dense)
    forwards = [layer.mlp.__dict__.get("forward") for layer in model.model.layers]
    steps = [with_lora, fastpack.patch] if order == "LoRA first" else [fastpack.patch, with_lora]
    wrapped = model
    for step in steps:
        wrapped = step(wrapped)  # type: ignore[operator]
    made = count_calls(monkeypatch, Mxfp4Format, "stored")
    check(wrapped, alone, ("packed_seq_lens",))
    assert len(made) == 4 * len(forwards), "each stack once in the forward and once in the backward"
    check(wrapped, alone, ("padded left",))
    fastpack.unpatch(wrapped)
    assert [layer.mlp.__dict__.get("forward") for layer in model.model.layers] == forwards


def test_bytes_are_in_plain_order_while_patched(dense: Any) -> None:
    """So no step has to undo the kernels' order; unpatch, and a comparison with the stock model, bring it back."""
    model, untouched = loaded_in_mxfp4(dense), loaded_in_mxfp4(dense)
    theirs, ours = (m.model.layers[0].mlp.experts.down_proj for m in (untouched, model))
    before = theirs.storage.data
    fastpack.patch(model)
    plain = ours.storage.data.mT
    assert plain.is_contiguous()
    assert torch.equal(plain, theirs.storage.layout.unswizzle_data(before).mT)
    assert not torch.equal(ours.storage.data, before)
    patched = state_of(model.model)
    assert patched is not None
    with disabled(patched):
        assert torch.equal(ours.storage.data, before)
    assert torch.equal(ours.storage.data.mT, plain)
    fastpack.unpatch(model)
    assert torch.equal(ours.storage.data, before)
    assert ours.storage.data.stride() == before.stride()
    assert type(ours.storage.layout) is type(theirs.storage.layout)


def test_other_bytes_show(dense: Any, alone: Result) -> None:
    model = loaded_in_mxfp4(dense)
    block = model.model.layers[0].mlp.experts
    block.down_proj.storage.data = block.down_proj.storage.data.roll(1, 0)
    error = compare(run_batch(fastpack.patch(with_lora(model)), SEQUENCES, "packed_seq_lens"), alone)
    assert error.worst > 3 * FLOAT32_BOUND


def test_a_copy_and_a_pickled_copy_run(dense: Any, alone: Result) -> None:
    model = fastpack.patch(with_lora(loaded_in_mxfp4(dense)))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        check(copied, alone, ("packed_seq_lens",))
        assert copied.hf_quantizer.is_trainable


@pytest.mark.slow
def test_a_compiled_model_runs_its_experts_outside(dense: Any, alone: Result) -> None:
    compiled: Any = torch.compile(fastpack.patch(with_lora(loaded_in_mxfp4(dense))), backend="eager")
    result = run_batch(compiled, SEQUENCES, "packed_seq_lens")
    grads = {name.removeprefix("_orig_mod."): each for name, each in result.grads.items()}
    result = result._replace(grads=grads)
    assert compare(result, alone).worst <= FLOAT32_BOUND


def test_the_report_says_what_runs(dense: Any) -> None:
    model = fastpack.patch(loaded_in_mxfp4(dense))
    report = fastpack.report(model)
    count = len(model.model.layers)
    assert report.swapped["experts"] == count
    assert any(f"{2 * count} stacks in MXFP4" in note for note in report.notes)
    assert any("this model's says it can" in note for note in report.notes)


def test_an_unmodified_trainer_trains_it(dense: Any, tmp_path: Path) -> None:
    model = with_lora(loaded_in_mxfp4(dense))
    args = TrainingArguments(tmp_path, max_steps=2, per_device_train_batch_size=2, report_to="none", use_cpu=True)
    rows = [{"input_ids": ids.tolist(), "labels": ids.tolist()} for ids in make_sequences(VOCAB, (5, 5, 5, 5))]
    with pytest.raises(ValueError, match="do not support training"):
        Trainer(model, args, train_dataset=rows)
    own = model.hf_quantizer
    fastpack.patch(model)
    assert type(model.hf_quantizer) is TrainableMxfp4Quantizer
    before = {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}
    Trainer(model, args, train_dataset=rows).train()
    assert all(not torch.equal(model.get_parameter(name), each) for name, each in before.items())
    fastpack.unpatch(model)
    assert model.hf_quantizer is own
    assert not own.is_trainable


def test_lora_on_experts_over_the_family_s_own_blocks(dense: Any, tmp_path: Path) -> None:
    expected = run_alone(with_lora(copy.deepcopy(dense), experts=True), SEQUENCES)
    model = fastpack.quantize_experts(loaded_in_mxfp4(dense))
    stacks = [each for each in model.parameters() if isinstance(each, QuantizedStack)]
    assert {stack.stack_format.name for stack in stacks} == {"MXFP4"}
    assert [*dict(model.named_modules())] == [*dict(dense.named_modules())]
    assert [type(each) for each in model.modules()] == [type(each) for each in dense.modules()]
    model = with_lora(model, experts=True)
    assert compare(run_alone(model, SEQUENCES), expected).worst <= FLOAT32_BOUND, "the stock forward, and PEFT's"
    fastpack.patch(model)
    check(model, expected)
    assert model.hf_quantizer.is_trainable
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(copy.deepcopy(dense), tmp_path, is_trainable=True).train()
    assert compare(run_alone(loaded, SEQUENCES), expected).worst <= FLOAT32_BOUND


def test_a_checkpoint_fills_empty_stacks(dense: Any, alone: Result) -> None:
    """Without transformers' kernels: the state dict has the names and shapes of gpt-oss's checkpoint."""
    state = fastpack.quantize_experts(loaded_in_mxfp4(dense)).state_dict()
    first = "model.layers.0.mlp.experts.gate_up_proj"
    count, columns, groups, half = state[f"{first}_blocks"].shape
    assert (count, groups * 32, columns) == dense.get_parameter(first).shape
    assert half == 16
    assert state[f"{first}_scales"].shape == (count, columns, groups)
    with init_empty_weights():
        empty = type(dense)(dense.config)
    fastpack.quantize_experts(empty, quant_type="mxfp4").load_state_dict(state, assign=True)
    for name, each in empty.named_parameters():
        each.requires_grad_(dense.get_parameter(name).requires_grad and not isinstance(each, QuantizedStack))
    assert not [each for each in empty.parameters() if each.is_meta]
    check(fastpack.patch(with_lora(empty.train())), alone)


def test_dense_stacks_become_mxfp4(dense: Any) -> None:
    model = fastpack.quantize_experts(copy.deepcopy(dense), quant_type="mxfp4")
    with torch.no_grad():
        for name, each in model.named_parameters():
            if isinstance(each, QuantizedStack):
                assert torch.equal(each.dense(), dense.get_parameter(name)), "its values fit"
    other = fastpack.quantize_experts(tiny_model("qwen3_moe"), quant_type="mxfp4")
    error = compare(run_batch(fastpack.patch(other), SEQUENCES, "packed_seq_lens"), run_alone(other, SEQUENCES))
    assert error.worst <= rule.FULL_BOUND


def test_verify_needs_the_family_s_own_blocks(dense: Any) -> None:
    model = fastpack.patch(with_lora(loaded_in_mxfp4(dense)))
    with pytest.raises(fastpack.PatchError, match=r"after fastpack\.quantize_experts"):
        fastpack.verify(model)
    own = fastpack.patch(with_lora(fastpack.quantize_experts(loaded_in_mxfp4(dense))))
    assert fastpack.verify(own).verdict == "exact"


def test_what_is_refused_changes_nothing(dense: Any) -> None:
    model = loaded_in_mxfp4(dense)
    block = model.model.layers[-1].mlp.experts
    precision, block.down_proj_precision_config = block.down_proj_precision_config, None
    for call in (fastpack.patch, fastpack.quantize_experts):
        with pytest.raises(fastpack.PatchError, match=r"Mxfp4Config\(dequantize=True\)"):
            call(model)
    block.down_proj_precision_config = precision
    fastpack.patch(model)
    with pytest.raises(fastpack.PatchError, match=r"fastpack\.unpatch\(model\) first"):
        fastpack.quantize_experts(model)
    fastpack.unpatch(model)
    narrow = tiny_model("qwen3_moe", hidden_size=40)
    with pytest.raises(fastpack.PatchError, match="quant_type='nf4'"):
        fastpack.quantize_experts(narrow, quant_type="mxfp4")
