"""Tiny gpt-oss models as transformers loads them in MXFP4, made by hand: its kernels need a package and a GPU."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from tiny import tiny_model
from torch import Tensor, nn
from transformers import Mxfp4Config
from transformers.integrations import mxfp4
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

from fastpack.ops.mxfp4 import definition, quantize_mxfp4

STACKS = ("gate_up_proj", "down_proj")


@dataclass
class Reversed:
    """A layout whose order is the reverse of the specification's."""

    name = "REVERSED"

    def unswizzle_data(self, data: Tensor) -> Tensor:
        return data.flip(1)

    def swizzle_data(self, data: Tensor) -> Tensor:
        return data.flip(1)


def in_layout(plain: Tensor, shape: Any = None) -> Any:
    """Return ``[E, O, .]`` as the kernels' library holds it, with columns last."""
    return SimpleNamespace(storage=SimpleNamespace(data=plain.transpose(1, 2).flip(1), layout=Reversed()), shape=shape)


def dense_model() -> Any:
    """Return gpt-oss with dense stacks, whose values MXFP4 has exactly."""
    model = tiny_model("gpt_oss", intermediate_size=32)
    for name, stack in model.named_parameters():
        if name.endswith(STACKS):
            blocks, scales = quantize_mxfp4(stack.data.mT)
            stack.data = definition(blocks, scales, torch.float32).mT.contiguous()
            stack.requires_grad_(False)
        elif ".experts." in name:
            stack.requires_grad_(False)
    return model


def loaded_in_mxfp4(dense: Any) -> Any:
    """Return a copy of :func:`dense_model`'s result, in the form that transformers gives it for its kernels."""
    model = copy.deepcopy(dense)
    for layer in model.model.layers:
        block = mxfp4.Mxfp4GptOssExperts(model.config)
        for name in STACKS:
            stack = getattr(layer.mlp.experts, name)
            blocks, scales = quantize_mxfp4(stack.data.mT)
            del block._parameters[name]
            setattr(block, name, in_layout(blocks.flatten(2), stack.shape))
            setattr(block, f"{name}_precision_config", SimpleNamespace(weight_scale=in_layout(scales)))
            bias = getattr(layer.mlp.experts, f"{name}_bias").detach().clone()
            block._parameters[f"{name}_bias"] = nn.Parameter(bias, requires_grad=False)
        if hasattr(mxfp4, "Mxfp4GptOssMLP"):
            layer.mlp = mxfp4.Mxfp4GptOssMLP(layer.mlp.router, block)
        else:  # before transformers 5.20
            layer.mlp.experts = block
            layer.mlp.forward = MethodType(mxfp4.mlp_forward, layer.mlp)
    model.hf_quantizer, model.is_quantized = Mxfp4HfQuantizer(Mxfp4Config()), True
    return model.train()
