"""The fast forward of gated MLPs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastpack.families.spec import MlpSpec
from fastpack.layers.attention import drop
from fastpack.layers.project import project_modules, read_group, read_norm
from fastpack.layers.runtime import Runtime
from fastpack.ops.autograd import reshaped
from fastpack.ops.glu import activation_kind, gated
from fastpack.ops.linear.gated_mlp import ActivationStore, gated_mlp
from fastpack.ops.linear.operands import Norm, Projection
from fastpack.ops.row_count import RowCount
from fastpack.utils.replacement import Replacement


def mlp_forward(patched: Replacement[MlpSpec, Runtime], x: Tensor) -> Tensor:
    """Return ``down(activation(gate(x)) * up(x))`` for x ``[..., hidden]``, packed or not."""
    module, spec = patched.owner, patched.spec
    out = mlp_block(module, spec, patched.runtime, x.reshape(-1, x.shape[-1]))
    return drop(module, spec.out_dropout, reshaped(out, x.shape))


def mlp_block(
    module: nn.Module,
    spec: MlpSpec,
    runtime: Runtime,
    x: Tensor,
    *,
    norm: nn.Module | None = None,
    residual: bool = False,
    need_output: bool = True,
    store: ActivationStore | None = None,
    tile_bytes: int | None = None,
    row_count: RowCount | None = None,
) -> Tensor:
    """Return the MLP of ``norm(x)``, plus x if ``residual``.

    Args:
        module: the MLP.
        spec: the MLP's spec in its family's row.
        runtime: settings of the patched model.
        x: ``[T, hidden]``.
        norm: the norm before the MLP, or None.
        residual: whether to add x to the result.
        need_output: False in a recomputation for the backward, which never reads the result.
        store: stores gate and up between a checkpointed forward and its backward, or None.
        tile_bytes: as for :func:`fastpack.ops.linear.gated_mlp.gated_mlp`.
        row_count: the number of the T tokens that count, or None for all.
    """
    inner, down = [getattr(module, name) for name in spec.gate_up], getattr(module, spec.down)
    activation = F.silu if spec.activation is None else getattr(module, spec.activation)
    kind, kernels = activation_kind(activation), runtime.kernels
    fused_norm = None if norm is None else read_norm(norm)
    group = None if kind is None else read_group([*inner, down], x, fused_norm)
    if group is not None and kind is not None and (norm is None or fused_norm is not None):
        stock = _stock_dtype(group[-1], x, fused_norm)
        adds = residual and x.dtype == group[-1].dtype == stock
        out = gated_mlp(
            x,
            group[:-1],
            group[-1],
            kind,
            norm=fused_norm,
            residual=adds,
            need_output=need_output,
            store=store,
            tile_bytes=tile_bytes if adds == residual else None,
            row_count=row_count,
            implementation=kernels,
        )
        if residual and not adds:
            return x + (out if x.dtype == stock else out.to(stock))
        return out.to(stock)
    outputs, x = project_modules(inner, x, runtime, norm=norm, row_count=row_count)
    gate, up = outputs if len(outputs) == 2 else outputs[0].chunk(2, -1)
    h = gated(gate, up, activation, kernels)
    (out,), _ = project_modules([down], h, runtime, residual=x if residual else None, row_count=row_count)
    return out


def _stock_dtype(down: Projection, x: Tensor, norm: Norm | None) -> torch.dtype:
    """Return the dtype of the stock module's result: bitsandbytes returns its input's dtype."""
    if down.quant_state is None:
        return down.dtype
    return x.dtype if norm is None else norm.result_dtype(x)
