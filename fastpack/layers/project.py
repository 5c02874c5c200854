"""Run projections: as one autograd Function if the weights of a group can be read, else module by module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.families.spec import NormSpec
from fastpack.layers.liger import is_drop_in
from fastpack.layers.norm import norm_forward
from fastpack.layers.read_projection import read_projection, read_update, refuse_rows, takes_dtype
from fastpack.layers.runtime import Runtime
from fastpack.ops.linear.lora import add_updates
from fastpack.ops.linear.operands import Norm, Projection
from fastpack.ops.linear.projections import project
from fastpack.ops.row_count import RowCount
from fastpack.utils.hooks import has_hooks
from fastpack.utils.replacement import FORWARD_COPY, Replacement, replaces
from fastpack.utils.sharding import is_partitioned


def fast_forward(module: nn.Module, function: Callable[..., Any]) -> Replacement[Any, Runtime] | None:
    """Return the replacement that makes ``function`` the forward of a module, or None.

    None means that the module has hooks, or that a forward that computes something else is bound to it.
    """
    forward = module.__dict__.get("forward")
    if not isinstance(forward, Replacement) and not torch.compiler.is_compiling():
        copied: Replacement[Any, Runtime] | None = module.__dict__.get(FORWARD_COPY)
        if copied is not None and is_drop_in(module, forward, copied.spec):
            forward = copied
    if not replaces(forward, function) or not forward.enabled or has_hooks(module):
        return None
    return forward


def read_norm(module: Any) -> Norm | None:
    """Return the parameters of a replaced root-mean-square norm, or None if it must be called as a module."""
    fast = fast_forward(module, norm_forward)
    if fast is None:
        return None
    spec: NormSpec = fast.spec
    if spec.kind != "rms" or is_partitioned(module.weight):
        return None
    return Norm(module.weight, getattr(module, spec.eps), spec.rounding, spec.unit_offset)


def read_group(modules: Sequence[nn.Module], x: Tensor, norm: Norm | None = None) -> list[Projection] | None:
    """Read projections of ``norm(x)`` that can share a Function; None if one must be called as a module."""
    if torch.compiler.is_compiling():
        return None  # the compiler fuses plain modules better
    dtype = x.dtype if norm is None else norm.result_dtype(x)
    group: list[Projection] = []
    for module in modules:
        projection = read_projection(module)
        if isinstance(projection, str) or (group and projection.dtype != group[0].dtype):
            return None
        if not takes_dtype(projection, dtype):
            return None
        group.append(projection)
    return group


def project_modules(
    modules: Sequence[nn.Module],
    x: Tensor,
    runtime: Runtime,
    *,
    norm: nn.Module | None = None,
    residual: Tensor | None = None,
    row_count: RowCount | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Run projections that share the input ``norm(x)``.

    Args:
        modules: the projections.
        x: ``[T, H]``.
        runtime: settings of the patched model.
        norm: a normalisation module, or None.
        residual: ``[T, O]``, added to the output of a single projection, or None.
        row_count: the number of the T tokens that count, or None for all.

    Returns:
        The outputs ``[T, O_i]``, and x for the residual addition (see :func:`fastpack.ops.linear.projections.project`).
    """
    fused_norm = None if norm is None else read_norm(norm)
    inputs = x if norm is None or fused_norm is not None else call_on_row(norm, x)
    group = read_group(modules, inputs, fused_norm)
    if group is None:
        n = inputs if norm is None or fused_norm is None else call_on_row(norm, x)
        outputs = _one_by_one(modules, n, runtime)
        return ([residual + outputs[0]] if residual is not None else outputs), x
    adds = residual is not None and residual.dtype == group[0].dtype
    results, passed = project(
        inputs,
        group,
        norm=fused_norm,
        residual=residual if adds else None,
        row_count=row_count,
        implementation=runtime.kernels,
    )
    if residual is not None and not adds:
        results = (residual + results[0],)
    return list(results), passed if inputs is x else x


def _one_by_one(modules: Sequence[nn.Module], n: Tensor, runtime: Runtime) -> list[Tensor]:
    """Call projections as modules. LoRA around a base that can't be read (8-bit, hooks) is still fused."""
    if torch.compiler.is_compiling():
        return [module(n) for module in modules]
    refuse_rows(modules)
    split = [read_update(module) for module in modules]
    if any(isinstance(parts, str) for parts in split) or not any(parts[1] for parts in split):
        return [call_on_row(module, n) for module in modules]
    pairs: list[Any] = split
    bases = [call_on_row(base, n) for base, _ in pairs]
    return add_updates(n, bases, [update for _, update in pairs], runtime.kernels)


def call_on_row(module: nn.Module, n: Tensor) -> Tensor:
    """Call a module on one row ``[1, T, H]``, the shape that its hooks see on every tier."""
    result: Tensor = module(n.unsqueeze(0))
    return result.squeeze(0)
