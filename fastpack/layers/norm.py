"""The fast forward of normalisation modules."""

from __future__ import annotations

from torch import Tensor

from fastpack.families.spec import NormSpec
from fastpack.layers.runtime import Runtime
from fastpack.ops.norm import layer_norm, rms_norm
from fastpack.utils.replacement import Replacement


def norm_forward(patched: Replacement[NormSpec, Runtime], x: Tensor) -> Tensor:
    """Normalise the last dimension of ``x``, which may have any shape, packed or not."""
    module, spec, kernels = patched.owner, patched.spec, patched.runtime.kernels
    eps = getattr(module, spec.eps)
    if spec.kind == "layer":
        return layer_norm(x, module.weight, eps, implementation=kernels)
    return rms_norm(x, module.weight, eps, rounding=spec.rounding, unit_offset=spec.unit_offset, implementation=kernels)
