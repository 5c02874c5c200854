"""Recognise Liger's kernels on a model: forwards that compute the same as the forwards that they replaced.

Liger (Hsu et al., arXiv:2410.10989) binds its own forwards to a model's norms and gated MLPs. Trainers make it do so
with ``use_liger_kernel=True``, before or after a patch. Fastpack's forward of such a module replaces Liger's, too.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import functional as F

from fastpack.families.spec import MlpSpec, NormSpec, Spec
from fastpack.ops.glu import activation_kind
from fastpack.ops.kinds import ActivationKind, Rounding
from fastpack.utils.classes import defined_in
from fastpack.utils.replacement import FORWARD_COPY

PACKAGE = "liger_kernel."
_NORMS = {("liger_kernel.transformers.rms_norm", "LigerRMSNorm.forward")}
_MLPS: dict[tuple[str, str], ActivationKind] = {
    ("liger_kernel.transformers.swiglu", "LigerSwiGLUMLP.forward"): "silu",
    ("liger_kernel.transformers.swiglu", "LigerQwen3MoeSwiGLUMLP.forward"): "silu",
    ("liger_kernel.transformers.swiglu", "LigerHunyuanV1SwiGLUMLP.forward"): "silu",
    ("liger_kernel.transformers.swiglu", "LigerPhi3SwiGLUMLP.forward"): "silu",
    ("liger_kernel.transformers.geglu", "LigerGEGLUMLP.forward"): "gelu_tanh",
}
"""Liger's MLP forwards, each with the activation that it computes even if the config names another."""

_ROUNDINGS: dict[str, Rounding] = {"llama": "before", "gemma": "after"}
"""How a norm rounds, by Liger's ``casting_mode``."""


def is_drop_in(module: nn.Module, forward: Any, spec: NormSpec | MlpSpec) -> bool:
    """Return whether a forward bound to a module computes the same as the module's class, which ``spec`` describes."""
    function = getattr(forward, "__func__", None)
    if function is None or forward.__self__ is not module:
        return False
    place = _place(function)
    if isinstance(spec, NormSpec):
        return place in _NORMS and spec.kind == "rms" and getattr(module, "offset", None) == float(spec.unit_offset)
    activation = F.silu if spec.activation is None else getattr(module, spec.activation)
    return place in _MLPS and activation_kind(activation) == _MLPS[place]


def stands_for(module: nn.Module, forward: object, spec: Spec, backbone: nn.Module) -> bool:
    """Return whether fastpack's forward may replace a drop-in in this model."""
    recognised = isinstance(spec, (NormSpec, MlpSpec)) and is_drop_in(module, forward, spec)
    return recognised and _keeps_dtype(module, spec, backbone)


def spec_of(module: Any, backbone: nn.Module) -> NormSpec | MlpSpec | None:
    """Return the spec of a module if its class is Liger's own, or None for other modules.

    A model has such modules if it was built after Liger had replaced the family's classes.
    """
    place = _place(type(module).forward)
    if place in _NORMS and module.offset in (0.0, 1.0) and module.casting_mode in _ROUNDINGS:
        norm = NormSpec(rounding=_ROUNDINGS[module.casting_mode], unit_offset=module.offset == 1.0)
        return norm if _keeps_dtype(module, norm, backbone) else None
    if _MLPS.get(place) != "silu":
        return None
    together = hasattr(module, "gate_up_proj")
    return MlpSpec(gate_up=("gate_up_proj",) if together else ("gate_proj", "up_proj"), activation=None)


def _keeps_dtype(module: nn.Module, spec: Spec, backbone: Any) -> bool:
    """Return whether the family's own norm keeps its input's dtype, as Liger's norm always does."""
    return not isinstance(spec, NormSpec) or getattr(module.weight, "dtype", None) == backbone.dtype


def count_unknown(backbone: nn.Module) -> int:
    """Count the modules of Liger's own classes for which fastpack has no forward."""
    own = (module for module in backbone.modules() if type(module).__module__.startswith(PACKAGE))
    return sum(FORWARD_COPY not in module.__dict__ for module in own)


def _place(function: object) -> tuple[str, str]:
    """Return the module and name that define a function, or empty strings for a wrapper."""
    if hasattr(function, "__wrapped__"):
        return "", ""
    return defined_in(function), getattr(function, "__qualname__", "")
