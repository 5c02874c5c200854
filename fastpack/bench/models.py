"""The timed models, with real shapes and random weights; trained whole, with LoRA, or with LoRA on 4-bit weights.

4-bit weights are bitsandbytes' NF4, or the MXFP4 that gpt-oss has for its experts.
"""

from __future__ import annotations

from typing import Any

import torch

import fastpack
from fastpack.bench import stock_varlen
from fastpack.bench.settings import RunSettings
from fastpack.bench.shapes import TOWER, auto_class, has_experts, has_images, make_config
from fastpack.errors import FastpackError
from fastpack.ops.mxfp4 import quantize_mxfp4

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
"""The linear layers of attention and of a dense MLP."""
MIXERS = {"qwen3_5_text": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")}
"""The linear layers of modules that mix tokens without attention, by model type."""
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""The stacks of experts."""


class LossNotFusedError(FastpackError):
    """A trainer keeps its own loss, so that there is nothing to time; the message says why."""


def build_model(settings: RunSettings, device: torch.device) -> tuple[Any, str]:
    """Return a variant's model on ``device``, in training mode, and the name of the stock model's attention kernel.

    For all trainers but the ``SFTTrainer``, the model is plain: the trainer adds adapters and other models, and is
    patched as a whole.
    """
    model, backend = build_base(settings, device)
    if settings.mode == "qlora":
        model = quantised(model, experts=has_experts(settings.shape))
    elif settings.mode == "mxfp4":
        model = with_mxfp4_experts(model)
    if settings.trainer != "sft":
        return model.train(), backend
    if settings.mode != "full":
        model = with_lora(model, lora_config(settings))
    if settings.spec.patched:
        patch(model, settings)
    return model.train(), backend


def build_base(settings: RunSettings, device: torch.device) -> tuple[Any, str]:
    """Return the plain model of a variant on ``device``, and the name of its attention kernel."""
    variant = settings.spec
    stock, backend = None, ""  # transformers' default: sdpa, or eager for a class that lacks sdpa
    if variant.varlen and not variant.patched:
        stock, backend = stock_varlen.implementation()
    torch.manual_seed(settings.seed)
    config = make_config(settings.shape)
    with device:
        model: Any = auto_class(settings.shape).from_config(config, dtype=dtype_of(device), attn_implementation=stock)
    if variant.varlen and has_images(settings.shape):
        stock_varlen.use_in_tower(model)
    return model, backend or model.config.get_text_config()._attn_implementation


def patch(target: Any, settings: RunSettings) -> None:
    """Patch a model or trainer with the options of the settings.

    Raises:
        LossNotFusedError: the trainer keeps its own loss, and the variant is one with a fused loss.
    """
    fastpack.patch(
        target,
        max_tokens=settings.max_tokens,
        attention=settings.attention,
        kernels=settings.kernels,
        graphs=settings.graphs,
        loss="fused" if settings.spec.fused else settings.loss,
        offload=settings.offload,
        share_prefixes="auto" if settings.spec.shared else None,
    )
    why = dict(fastpack.report(target).skipped).get("loss")
    if settings.spec.fused and why is not None:
        raise LossNotFusedError(f"the loss is not fused: {why}")


def quantised(model: Any, *, experts: bool = False) -> Any:
    """Return the model with every linear layer except the head in bitsandbytes' NF4, with double quantisation.

    That leaves experts dense, which :func:`fastpack.quantize_experts` then quantises, in every variant.
    """
    from transformers import BitsAndBytesConfig

    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=model.dtype,
    )
    loaded = _loaded(model, model.state_dict(), how)
    return fastpack.quantize_experts(loaded) if experts else loaded


def with_mxfp4_experts(model: Any) -> Any:
    """Return a gpt-oss with its experts in MXFP4, as transformers loads its checkpoints for its kernels."""
    from transformers.utils.quantization_config import Mxfp4Config

    weights: dict[str, torch.Tensor] = {}
    for name, weight in model.state_dict().items():
        if name.endswith(EXPERTS):
            weights[f"{name}_blocks"], weights[f"{name}_scales"] = quantize_mxfp4(weight.mT)
        else:
            weights[name] = weight
    model.config.quantization_config = Mxfp4Config().to_dict()  # a config that has one is that of a checkpoint
    return _loaded(model, weights, None)


def _loaded(model: Any, weights: dict[str, torch.Tensor], how: Any) -> Any:
    """Load a model as a user loads a quantised checkpoint, but from weights in memory instead of a file."""
    return type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=weights,
        quantization_config=how,
        device_map={"": model.device},
        dtype=model.dtype,
        attn_implementation=model.config._attn_implementation,
    )


def linear_layers(settings: RunSettings) -> list[str]:
    """Return the names of a shape's linear layers except the head; its experts are plain parameters."""
    mixers = MIXERS.get(make_config(settings.shape).model_type, ())
    return [*ATTENTION, *mixers, *(() if has_experts(settings.shape) else MLP)]


def lora_config(settings: RunSettings) -> Any:
    """Return the config of LoRA, without dropout.

    It is on every linear layer, except for the head and an image tower, which most recipes for vision-language models
    leave frozen; with ``lora_experts`` it is on the experts too. Layers are named, since PEFT's ``all-linear`` also
    stands for the routers and experts of some families, and doubles the rank of an expert's gate and up projection.
    """
    from peft import LoraConfig

    return LoraConfig(
        r=settings.rank,
        lora_alpha=2 * settings.rank,
        lora_dropout=0.0,
        target_modules=linear_layers(settings),
        target_parameters=[*EXPERTS] if settings.lora_experts else None,
        exclude_modules=rf".*\.{TOWER}\..*" if has_images(settings.shape) else None,
        task_type="CAUSAL_LM",
    )


def with_lora(model: Any, config: Any) -> Any:
    """Add LoRA of a config.

    On 4-bit weights, A and B are bfloat16, as in TRL.
    """
    from peft import get_peft_model

    wrapped = get_peft_model(model, config)
    if getattr(model, "is_loaded_in_4bit", False):
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    return wrapped


def dtype_of(device: torch.device) -> torch.dtype:
    """Return the dtype of the weights on a device."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32
