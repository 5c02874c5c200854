"""Calling projections: a group of them as one Function where their parts can be read, as modules where not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.families.spec import NormSpec
from fastpack.layers.liger import is_drop_in
from fastpack.layers.norm import norm_forward
from fastpack.layers.read_projection import read_projection, read_update, refuse_rows, takes
from fastpack.layers.runtime import Runtime
from fastpack.ops.linear.lora import add_updates
from fastpack.ops.linear.parts import Norm, Projection
from fastpack.ops.linear.projections import project
from fastpack.ops.row_count import RowCount
from fastpack.utils.hooks import has_hooks
from fastpack.utils.replacement import FORWARD_COPY, Replacement, replaces
from fastpack.utils.sharding import is_partitioned


def fast_forward(module: nn.Module, function: Callable[..., Any]) -> Replacement[Any, Runtime] | None:
    """Return the replacement of a module's forward that calls ``function``, or None.

    None means that another forward is there which computes something else, or that hooks do more than the forward.
    """
    found = module.__dict__.get("forward")
    if not isinstance(found, Replacement) and not torch.compiler.is_compiling():
        kept: Replacement[Any, Runtime] | None = module.__dict__.get(FORWARD_COPY)
        if kept is not None and is_drop_in(module, found, kept.spec):
            found = kept
    if not replaces(found, function) or not found.enabled or has_hooks(module):
        return None
    return found


def read_norm(module: Any) -> Norm | None:
    """Return the parts of a swapped RMS norm, or None if the module has to be called."""
    fast = fast_forward(module, norm_forward)
    if fast is None:
        return None
    spec: NormSpec = fast.spec
    if spec.kind != "rms" or is_partitioned(module.weight):
        return None
    return Norm(module.weight, getattr(module, spec.eps), spec.rounding, spec.unit_offset)


def read_group(modules: Sequence[nn.Module], x: Tensor, norm: Norm | None = None) -> list[Projection] | None:
    """Return the parts of projections of ``norm(x)`` for one Function, or None if one has to be called as a module."""
    if torch.compiler.is_compiling():
        return None  # the compiler fuses better what it can see
    given = x.dtype if norm is None else norm.result_dtype(x)
    found: list[Projection] = []
    for module in modules:
        parts = read_projection(module)
        if isinstance(parts, str) or (found and parts.dtype != found[0].dtype):
            return None
        if not takes(parts, given):
            return None
        found.append(parts)
    return found


def project_modules(
    modules: Sequence[nn.Module],
    x: Tensor,
    runtime: Runtime,
    *,
    norm: nn.Module | None = None,
    residual: Tensor | None = None,
    row_count: RowCount | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Return the outputs ``[T, O_i]`` of projections of ``norm(x)``.

    Args:
        modules: the projections.
        x: ``[T, H]``.
        runtime: the model's runtime.
        norm: a normalisation module, or None.
        residual: ``[T, O]``, added to the output of a single projection, or None.
        row_count: the number of the T tokens that count, or None for all.

    Returns:
        The outputs, and x to continue with (see :func:`fastpack.ops.linear.projections.project`).
    """
    fused_norm = None if norm is None else read_norm(norm)
    given = x if norm is None or fused_norm is not None else _call(norm, x)
    group = read_group(modules, given, fused_norm)
    if group is None:
        n = given if norm is None or fused_norm is None else _call(norm, x)
        outputs = _one_by_one(modules, n, runtime)
        return ([residual + outputs[0]] if residual is not None else outputs), x
    adds = residual is not None and residual.dtype == group[0].dtype
    made, passed = project(
        given,
        group,
        norm=fused_norm,
        residual=residual if adds else None,
        row_count=row_count,
        implementation=runtime.kernels,
    )
    if residual is not None and not adds:
        made = (residual + made[0],)
    return list(made), passed if given is x else x


def _one_by_one(modules: Sequence[nn.Module], n: Tensor, runtime: Runtime) -> list[Tensor]:
    """Modules called as modules; LoRA around a base that can't be read (8-bit, hooks) is fused all the same."""
    if torch.compiler.is_compiling():
        return [module(n) for module in modules]
    refuse_rows(modules)
    split = [read_update(module) for module in modules]
    if any(isinstance(found, str) for found in split) or not any(found[1] for found in split):
        return [_call(module, n) for module in modules]
    pairs: list[Any] = split
    bases = [_call(base, n) for base, _ in pairs]
    return add_updates(n, bases, [update for _, update in pairs], runtime.kernels)


def _call(module: nn.Module, n: Tensor) -> Tensor:
    """Call a projection with one row ``[1, T, H]``, which is what its hooks see on every tier."""
    result: Tensor = module(n[None])
    return result[0]
