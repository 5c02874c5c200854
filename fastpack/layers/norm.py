"""The fast forward of normalisation modules."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastpack.families.spec import NormSpec
from fastpack.ops.norm import layer_norm, rms_norm
from fastpack.patching.options import PatchOptions


def norm_forward(module: Any, spec: NormSpec, options: PatchOptions, x: Tensor) -> Tensor:
    """Normalise the last dimension of ``x``, any shape, packed or not."""
    eps, kernels = getattr(module, spec.eps), options.kernels
    if spec.kind == "layer":
        return layer_norm(x, module.weight, eps, implementation=kernels)
    return rms_norm(x, module.weight, eps, rounding=spec.rounding, unit_offset=spec.unit_offset, implementation=kernels)
