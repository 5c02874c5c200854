"""A stand-in for Liger in plain torch: the same names in the same places, and a count of calls."""

from __future__ import annotations

import types
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CALLS: Counter[str] = Counter()


class LigerRMSNorm(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        CALLS["norm"] += 1
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        if self.casting_mode == "llama":
            x = x.to(hidden_states.dtype)
        return ((self.weight + self.offset) * x).to(hidden_states.dtype)


class LigerSwiGLUMLP(nn.Module):
    def forward(self, x: Tensor) -> Any:
        CALLS["mlp"] += 1
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LigerGEGLUMLP(nn.Module):
    def forward(self, x: Tensor) -> Any:
        CALLS["mlp"] += 1
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class LigerExperts(nn.Module):
    def forward(self, x: Tensor) -> Any:
        CALLS["mlp"] += 1
        return 2 * self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def liger_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    CALLS["rope"] += 1
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first], -1)

    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def _written_in(place: str, function: Any) -> Any:
    """Return the same function, as if it were from another module."""
    named = {**function.__globals__, "__name__": f"liger_kernel.transformers.{place}"}
    built = types.FunctionType(function.__code__, named, function.__name__, function.__defaults__)
    built.__qualname__ = function.__qualname__
    return built


for cls, place in (
    (LigerRMSNorm, "rms_norm"),
    (LigerSwiGLUMLP, "swiglu"),
    (LigerExperts, "swiglu"),
    (LigerGEGLUMLP, "geglu"),
):
    cls.__module__ = f"liger_kernel.transformers.{place}"
    cls.forward = _written_in(place, cls.forward)  # type: ignore[method-assign]
liger_rotary_pos_emb = _written_in("rope", liger_rotary_pos_emb)


def bind(module: Any, cls: type[nn.Module]) -> None:
    """Bind a class's forward to a module as Liger does, without ``setattr``."""
    module.__dict__["forward"] = cls.forward.__get__(module, type(module))


def apply(model: Any, mlp: type[nn.Module] = LigerSwiGLUMLP) -> None:
    """Apply the stand-in to a Llama, or to a model that is built like one."""
    backbone = model.base_model
    norms = [backbone.norm]
    for layer in backbone.layers:
        bind(layer.mlp, mlp)
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
    for norm in norms:
        norm.offset, norm.casting_mode = 0.0, "llama"
        bind(norm, LigerRMSNorm)


def build_of(model: Any, offset: float, casting_mode: str) -> None:
    """Turn a model's modules into Liger's own classes, with the same weights."""
    for module in list(model.modules()):
        if type(module).__name__.endswith("RMSNorm"):
            module.__class__ = LigerRMSNorm
            module.offset, module.casting_mode = offset, casting_mode
        elif type(module).__name__.endswith("MLP"):
            module.__class__ = LigerSwiGLUMLP
