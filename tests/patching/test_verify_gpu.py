"""``verify`` on a GPU: right models pass in half precision with every backend and kernel; wrong ones fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import NF4, loaded_again, with_lora
from gpu_cases import build
from test_verify import wrong
from tiny import FAST, tiny_model

import fastpack
from fastpack.attention_dispatch import BACKENDS
from fastpack.bench.shapes import SHAPES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", FAST)
def test_every_fast_family(model_type: str, dtype: torch.dtype) -> None:
    """This includes experts: their routers choose differently after any rounding, so choices are replayed."""
    # with the config's own 1, granite's scores of 64 dimensions are too large: all differences would be rounding
    scale: dict[str, Any] = {"attention_multiplier": 1 / 8} if model_type.startswith("granite") else {}
    result = fastpack.verify(fastpack.patch(build(model_type, dtype, **scale), strict=True))
    assert result.verdict == "exact"
    assert result.dtype == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("model_type", ["llama", "mistral", "gpt_oss"])
def test_backends(model_type: str, attention: str) -> None:
    try:
        model = fastpack.patch(build(model_type, torch.bfloat16), attention=attention)
    except fastpack.BackendUnavailableError as error:
        pytest.skip(str(error))
    assert fastpack.verify(model).verdict == "exact"


WRONG = [
    ("a window off by one", torch.bfloat16),
    ("one boundary missed", torch.bfloat16),
    ("a scale 2 % off", torch.float16),  # in bfloat16 it moves less than rounding does over four runs
    ("a scale 5 % off", torch.bfloat16),
]


@pytest.mark.parametrize(("how", "dtype"), WRONG)
def test_what_is_wrong_on_purpose_is_found(how: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fastpack.patch(build("mistral", dtype))
    assert fastpack.verify(model).verdict == "exact"
    backend = BACKENDS[fastpack.report(model).backend or ""]
    run = backend.run
    monkeypatch.setattr(backend, "run", lambda call: run(wrong(call, how)))
    with pytest.raises(fastpack.ContaminationError):
        fastpack.verify(model)


@pytest.mark.parametrize("graphs", [None, "auto"])
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_real_shapes(mode: str, graphs: Any) -> None:
    """The model has two layers of an 8B Llama; its gradients are sketched."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {**SHAPES["llama8b"], "num_hidden_layers": 2, "vocab_size": 32_000}
    config = AutoConfig.for_model(**shape)
    with torch.device("cuda"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if mode == "lora":
        model = with_lora(model)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.mul_(0.05)
    fastpack.patch(model, graphs=graphs)
    assert fastpack.verify(model).verdict == "exact"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("prepared", [False, True])
def test_qlora(seed: int, prepared: bool, tmp_path: Path) -> None:
    """The residual stream is float32, as PEFT prepares it, or bf16."""
    from peft import prepare_model_for_kbit_training

    model: Any = loaded_again(
        tmp_path, tiny_model("llama"), torch.bfloat16, "cuda", **NF4, bnb_4bit_compute_dtype=torch.bfloat16
    )
    if prepared:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    assert fastpack.verify(fastpack.patch(with_lora(model)), seed=seed).verdict == "exact"


def test_autocast_over_float32_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fastpack.patch(build("mistral", torch.float32))
    with torch.autocast("cuda", torch.bfloat16):
        result = fastpack.verify(model)
    assert (result.dtype, result.verdict) == ("bfloat16", "exact")
    with torch.autocast("cuda", torch.bfloat16):
        for backend in BACKENDS.values():
            run = backend.run
            monkeypatch.setattr(backend, "run", lambda call, run=run: run(replace(call, scale=1.05 * call.scale)))
        with pytest.raises(fastpack.ContaminationError):
            fastpack.verify(model)
