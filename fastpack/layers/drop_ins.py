"""Liger's kernels as they stand on a model: forwards that compute what they replaced.

Liger (Hsu et al., arXiv:2410.10989) binds forwards of its own to a model's norms and gated MLPs; trainers have it do so
with ``use_liger_kernel=True``, before or after a patch. A fast forward of what these replaced is one of theirs too.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import functional as F

from fastpack.families.spec import MlpSpec, NormSpec
from fastpack.layers.stock import defined_in
from fastpack.ops.glu import ActivationKind, activation_kind

PACKAGE = "liger_kernel."
_NORMS = {("liger_kernel.transformers.rms_norm", "LigerRMSNorm.forward")}
_MLPS: dict[tuple[str, str], ActivationKind] = {
    ("liger_kernel.transformers.swiglu", "LigerSwiGLUMLP.forward"): "silu",
    ("liger_kernel.transformers.swiglu", "LigerQwen3MoeSwiGLUMLP.forward"): "silu",
    ("liger_kernel.transformers.swiglu", "LigerHunyuanV1SwiGLUMLP.forward"): "silu",
    ("liger_kernel.transformers.swiglu", "LigerPhi3SwiGLUMLP.forward"): "silu",
    ("liger_kernel.transformers.geglu", "LigerGEGLUMLP.forward"): "gelu_tanh",
}
"""Each with its activation, whatever the config names."""


def is_drop_in(module: Any, forward: Any, spec: NormSpec | MlpSpec) -> bool:
    """Whether a forward that was bound to a module, whose class computes ``spec``, computes the same."""
    function = getattr(forward, "__func__", None)
    if function is None or hasattr(function, "__wrapped__") or forward.__self__ is not module:
        return False
    place = (defined_in(function), function.__qualname__)
    if isinstance(spec, NormSpec):
        return place in _NORMS and spec.kind == "rms" and getattr(module, "offset", None) == float(spec.unit_offset)
    activation = F.silu if spec.activation is None else getattr(module, spec.activation)
    return place in _MLPS and activation_kind(activation) == _MLPS[place]


def count_of_its_classes(backbone: nn.Module) -> int:
    """How many modules are Liger's own: of a model that was built after it had replaced the family's classes."""
    return sum(type(module).__module__.startswith(PACKAGE) for module in backbone.modules())
