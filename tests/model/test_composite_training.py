"""Composite models as they train: LoRA on the text model, on the tower and on both, frozen parts, checkpointing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from composite_cases import off, results
from peft import LoraConfig, get_peft_model

import fastpack
from fastpack.exactness.image_text import batch_of, build_image_text, flat_of, samples
from fastpack.model.unwrap import find_parts

MODELS = ("qwen3_vl", "llava", "internvl")
BOUND = 1e-5
TEXT = r".*language_model.*(q_proj|v_proj|o_proj|gate_proj|down_proj)"
TOWER = r".*(visual|vision_tower).*(qkv|q_proj|v_proj|linear_fc1|fc1)"


def with_lora(targets: str) -> Callable[[Any], Any]:
    def wrap(model: Any) -> Any:
        torch.manual_seed(1)
        wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=targets))
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.3)
        return wrapped

    return wrap


def frozen(part: str) -> Callable[[Any], Any]:
    def freeze(model: Any) -> Any:
        text = find_parts(model).backbone
        inside = {id(parameter) for parameter in text.parameters()}
        for parameter in model.parameters():
            parameter.requires_grad = (id(parameter) in inside) != (part == "text")
        return model

    return freeze


TRAINED: dict[str, tuple[Callable[[Any], Any], tuple[bool, bool]]] = {
    "LoRA on the text model": (with_lora(TEXT), (True, False)),
    "LoRA on the tower": (with_lora(TOWER), (False, True)),
    "LoRA on both": (with_lora(f"{TEXT}|{TOWER}"), (True, True)),
    "tower frozen": (frozen("tower"), (True, False)),
    "text model frozen": (frozen("text"), (False, True)),
}
"""How a model is prepared, and whether its text model and its tower train."""


def prepared(model_type: str, how: str | None = None) -> tuple[Any, list[dict[str, Any]]]:
    model = build_image_text(model_type).train()
    rows = samples(model)
    if how is not None:
        model = TRAINED[how][0](model).train()
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.bias"):  # a key bias changes no attention: its gradient is rounding alone
            parameter.requires_grad = False
    return model, rows


def check_exact(model: Any, rows: list[dict[str, Any]], alone: Any, *, again: bool = False) -> None:
    """Check logits and gradients of all kinds of batches; ``again`` if layers run again in the backward."""
    real = sum(row["input_ids"].numel() for row in rows)
    stock = find_parts(model).outermost
    for batch in (batch_of(stock, rows, "right"), batch_of(stock, rows, "left"), flat_of(stock, rows)):
        runs: list[int] = []
        mlp = find_parts(model).backbone.layers[0].mlp
        with mlp.register_forward_pre_hook(lambda _, args, runs=runs: runs.append(args[0].shape[:-1].numel())):
            ours = results(model, [batch])
        assert max(off(ours, alone)) <= BOUND
        assert runs == [real] * (2 if again else 1)


@pytest.mark.sample(3)
@pytest.mark.parametrize("how", TRAINED)
@pytest.mark.parametrize("model_type", MODELS)
def test_what_trains_gets_the_gradients_of_each_row_alone(model_type: str, how: str) -> None:
    model, rows = prepared(model_type, how)
    alone = results(model, rows)
    trains = tuple(
        any(re.search(part, name) for name in alone[1]) for part in ("language_model", "visual|vision_tower")
    )
    assert trains == TRAINED[how][1]
    check_exact(fastpack.patch(model), rows, alone)


@pytest.mark.sample(3)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("how", [None, "LoRA on both", "tower frozen"])
@pytest.mark.parametrize("model_type", ["qwen3_vl", "llava"])
def test_checkpointing(model_type: str, how: str | None, reentrant: bool) -> None:
    model, rows = prepared(model_type, how)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if how == "LoRA on both":
        model.enable_input_require_grads()
    alone = results(model, rows)
    check_exact(fastpack.patch(model), rows, alone, again=True)


def test_patched_before_peft_and_again_after_unpatch() -> None:
    model = build_image_text("qwen3_vl").train()
    rows = samples(model)
    wrapped = TRAINED["LoRA on both"][0](fastpack.patch(model)).train()
    ours = results(wrapped, [batch_of(model, rows)])
    fastpack.unpatch(wrapped)
    alone = results(wrapped, rows)
    assert max(off(ours, alone)) <= BOUND
    base = results(build_image_text("qwen3_vl").train(), rows)
    assert (base[0] - alone[0]).abs().max() > 1e-2, "the adapters take part"


def test_nf4(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    saved = build_image_text("qwen3_vl")
    saved.save_pretrained(tmp_path)
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path, quantization_config=config, dtype=torch.float32, device_map={"": "cpu"}
    )
    model = TRAINED["LoRA on both"][0](model).train()
    assert {type(module).__name__ for module in model.modules()} >= {"Linear4bit"}
    rows = samples(saved)
    alone = results(model, rows)
    check_exact(fastpack.patch(model), rows, alone)


@pytest.mark.parametrize("auto", ["AutoModelForImageTextToText", "AutoModelForMultimodalLM", "AutoModelForCausalLM"])
def test_a_checkpoint_loaded_by_any_auto_class(auto: str, tmp_path: Path) -> None:
    if not hasattr(transformers, auto):
        pytest.skip("not in this release of transformers")
    model_type = "qwen3_5" if auto == "AutoModelForCausalLM" else "qwen3_vl"
    saved = build_image_text(model_type)
    saved.save_pretrained(tmp_path)
    model = getattr(transformers, auto).from_pretrained(tmp_path).train()
    rows = samples(saved)
    if auto == "AutoModelForCausalLM":  # the text model alone, of the checkpoint's weights
        rows = [{"input_ids": row["input_ids"]} for row in rows if "pixel_values" not in row] * 2
        assert find_parts(model).composite is None
    alone = results(model, rows)
    ours = results(fastpack.patch(model), [batch_of(saved, rows, "left")])
    assert max(off(ours, alone)) <= BOUND
