"""The fast forward of gated MLPs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastpack.families.spec import MlpSpec
from fastpack.ops.glu import gated
from fastpack.options import PatchOptions


def mlp_forward(module: Any, spec: MlpSpec, options: PatchOptions, x: Tensor) -> Tensor:
    """``down(activation(gate(x)) * up(x))`` on ``[..., hidden]``, packed or not.

    Projections are called as modules: LoRA, 4-bit and 8-bit layers, and whatever hooks they carry, work as they are.
    """
    if spec.gate_up is not None:
        gate, up = getattr(module, spec.gate_up)(x).chunk(2, dim=-1)
    else:
        gate, up = module.gate_proj(x), module.up_proj(x)
    out: Tensor = module.down_proj(gated(gate, up, getattr(module, spec.activation)))
    return out
