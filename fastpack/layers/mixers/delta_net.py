"""The fast forward of a gated delta net (Yang et al., arXiv:2412.06464), on packed tokens.

Projections run as the ops of :mod:`fastpack.layers.project`: those that share the input in one Function, with LoRA.

Shape suffixes: T tokens, H heads of values.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastpack.families.spec import DeltaNetSpec
from fastpack.layers.mixers.kernels import packed_conv, packed_recurrence
from fastpack.layers.project import project_modules
from fastpack.layers.runtime import Runtime
from fastpack.packing.seqlens import PackedSeqLens


def serves(module: Any, spec: DeltaNetSpec) -> bool:
    """Return whether a module has the parts that the spec names; other releases' modules may have others."""
    return all(hasattr(module, name) for name in (*spec.inner, spec.out, *([spec.split] if spec.split else [])))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def delta_net(
    module: Any,
    spec: DeltaNetSpec,
    runtime: Runtime,
    x: Tensor,
    packed: PackedSeqLens,
    *,
    norm: nn.Module | None = None,
    residual: bool = False,
) -> Tensor:
    """Return the module's result of ``norm(x)``, each sequence by itself, plus x if ``residual``: ``[T, hidden]``.

    Args:
        module: the gated delta net.
        spec: its spec in the family's row.
        runtime: settings of the patched model.
        x: ``[T, hidden]``.
        packed: the lengths of the sequences.
        norm: the norm before the module, or None.
        residual: whether to add x to the result.
    """
    count = packed.row_count
    inner = [getattr(module, name) for name in spec.inner]
    outputs, x = project_modules(inner, x, runtime, norm=norm, row_count=count)
    if spec.split is None:
        qkv, z, b, a = outputs
    else:
        *parts, z, b, a = (x.squeeze(0) for x in getattr(module, spec.split)(*(x[None] for x in outputs)))
        qkv = torch.cat([x.flatten(1) for x in parts], -1)
    weight, bias = module.conv1d.weight.squeeze(1), module.conv1d.bias
    qkv = packed_conv(packed, qkv.t().unsqueeze(0), weight, bias, module.activation).squeeze(0).t()
    q, k, v = qkv.split([module.key_dim, module.key_dim, module.value_dim], -1)
    keys, values = ((1, len(qkv), -1, size) for size in (module.head_k_dim, module.head_v_dim))
    g = -module.A_log.float().exp() * F.softplus(a.float() + module.dt_bias)
    heads = (q.reshape(keys), k.reshape(keys), v.reshape(values), g[None], b.sigmoid()[None])
    out = packed_recurrence("gated_delta", packed, *heads, True)
    size = module.head_v_dim
    normed = module.norm(out.reshape(-1, size), z.reshape(-1, size)).view(len(qkv), -1)
    added = x if residual else None
    (result,), _ = project_modules([getattr(module, spec.out)], normed, runtime, residual=added, row_count=count)
    return result
