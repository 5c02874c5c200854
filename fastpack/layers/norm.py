"""The fast forwards of normalisation modules."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastpack.families.spec import GatedNormSpec, NormSpec
from fastpack.layers.runtime import Runtime
from fastpack.ops.gated_norm import gated_norm
from fastpack.ops.kinds import GatedNormKind
from fastpack.ops.norm import layer_norm, rms_norm
from fastpack.utils.replacement import Replacement


def norm_forward(patched: Replacement[NormSpec, Runtime], x: Tensor) -> Tensor:
    """Normalise the last dimension of ``x``, which may have any shape, packed or not."""
    module, spec, kernels = patched.owner, patched.spec, patched.runtime.kernels
    eps = getattr(module, spec.eps)
    if spec.kind == "layer":
        return layer_norm(x, module.weight, eps, implementation=kernels)
    return rms_norm(x, module.weight, eps, rounding=spec.rounding, unit_offset=spec.unit_offset, implementation=kernels)


def gated_norm_forward(
    patched: Replacement[GatedNormSpec, Runtime], hidden_states: Tensor, gate: Tensor | None = None
) -> Any:
    """Normalise the last dimension of ``hidden_states`` and apply the gate; without one, run the stock forward."""
    module, spec = patched.owner, patched.spec
    if gate is None:
        return patched.stock(hidden_states)
    kind = GatedNormKind(spec.gate_first, spec.activation, spec.rounding == "before")
    group = None if spec.group is None else getattr(module, spec.group)
    return gated_norm(
        hidden_states,
        gate,
        module.weight,
        module.variance_epsilon,
        kind,
        group=group,
        implementation=patched.runtime.kernels,
    )
