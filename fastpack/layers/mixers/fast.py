"""The fast forwards of mixers on packed tokens: gated delta nets, Kimi's, Mamba-2's, and LFM2's short convolution.

Each runs its projections as the ops of :mod:`fastpack.layers.project`: those that share an input in one Function, with
LoRA, the norm before them and the residual addition after them. Convolutions and recurrences are the kernels of
:mod:`fastpack.layers.mixers.kernels`. Decays and steps are computed in float32, as in the stock forwards.

Sources: gated delta nets, Yang et al., arXiv:2412.06464; Kimi Delta Attention, arXiv:2510.26692; Mamba-2, Dao & Gu,
arXiv:2405.21060.

Shape suffixes: T tokens, C channels, H heads of values, K size of a key or of a state, V size of a value.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastpack.families.mixer_spec import (
    DeltaNetSpec,
    FastMixerSpec,
    KimiDeltaSpec,
    Mamba2Spec,
    attributes_of,
)
from fastpack.layers.mixers.kernels import Op, packed_conv, packed_recurrence, step_sizes
from fastpack.layers.project import call_on_row, project_modules
from fastpack.layers.runtime import Runtime
from fastpack.packing.seqlens import PackedSeqLens


def serves(module: Any, spec: FastMixerSpec) -> bool:
    """Return whether a module has the parts that the spec names; other releases' modules may have others."""
    return all(hasattr(module, name) for name in attributes_of(spec))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def run_fast(
    module: Any,
    spec: FastMixerSpec,
    runtime: Runtime,
    x: Tensor,
    packed: PackedSeqLens,
    *,
    norm: nn.Module | None = None,
    residual: bool = False,
) -> Tensor:
    """Return the mixer's result of ``norm(x)``, each sequence by itself, plus x if ``residual``: ``[T, hidden]``.

    Args:
        module: the mixer.
        spec: its spec in the family's row.
        runtime: settings of the patched model.
        x: ``[T, hidden]``.
        packed: the lengths of the sequences.
        norm: the norm before the mixer, or None.
        residual: whether to add x to the result.
    """
    run = _Run(module, runtime, packed)
    if isinstance(spec, DeltaNetSpec):
        mixed, x = _delta_net(run, spec, x, norm)
    elif isinstance(spec, KimiDeltaSpec):
        mixed, x = _kimi_delta(run, spec, x, norm)
    elif isinstance(spec, Mamba2Spec):
        mixed, x = _mamba2(run, spec, x, norm)
    else:
        mixed, x = _gated_conv(run, x, norm)
    (result,), _ = run.project([spec.out], mixed, residual=x if residual else None)
    return result


class _Run(NamedTuple):
    """A mixer, and what its forward shares with others."""

    module: Any
    runtime: Runtime
    packed: PackedSeqLens

    def project(
        self, names: list[str], x: Tensor, *, norm: nn.Module | None = None, residual: Tensor | None = None
    ) -> tuple[list[Tensor], Tensor]:
        """Run projections that share an input; see :func:`fastpack.layers.project.project_modules`."""
        modules = [getattr(self.module, name) for name in names]
        return project_modules(modules, x, self.runtime, norm=norm, residual=residual, row_count=self.packed.row_count)

    def convolve(self, x: Tensor, conv: nn.Conv1d, activation: str | None) -> Tensor:
        """Convolve each channel of ``[T, C]``."""
        weight = conv.weight.squeeze(1)
        x = x.t().unsqueeze(0)
        return packed_conv(self.packed, x, weight, conv.bias, activation, self.runtime.kernels).squeeze(0).t()

    def recur(self, op: Op, first: Tensor, *rest: Any) -> Tensor:
        """Run a recurrence; see :func:`packed_recurrence` for the arguments."""
        return packed_recurrence(op, self.packed, first, *rest, implementation=self.runtime.kernels)


def _delta_net(run: _Run, spec: DeltaNetSpec, x: Tensor, norm: nn.Module | None) -> tuple[Tensor, Tensor]:
    """Return the input of the output projection, and x for the residual addition."""
    module = run.module
    outputs, x = run.project(list(spec.inner), x, norm=norm)
    if spec.split is not None:
        outputs = [y.squeeze(0) for y in getattr(module, spec.split)(*(y.unsqueeze(0) for y in outputs))]
    *parts, z, b, a = outputs
    qkv = _side_by_side([y.flatten(1) for y in parts])
    q, k, v = _heads(run, qkv, [module.key_dim, module.key_dim, module.value_dim])
    g = -module.A_log.float().exp() * F.softplus(a.float() + module.dt_bias)
    beta = b.sigmoid()
    if spec.doubled_if is not None and getattr(module, spec.doubled_if):
        beta = beta * 2.0
    sizes = (module.head_k_dim, module.head_k_dim, module.head_v_dim)
    q, k, v = (y.unflatten(-1, (-1, size)).unsqueeze(0) for y, size in zip((q, k, v), sizes, strict=True))
    out = run.recur("gated_delta", q, k, v, g.unsqueeze(0), beta.unsqueeze(0), True)
    size = module.head_v_dim
    normed = getattr(module, spec.norm)(out.reshape(-1, size), z.reshape(-1, size))
    return normed.view(len(x), -1), x


def _kimi_delta(run: _Run, spec: KimiDeltaSpec, x: Tensor, norm: nn.Module | None) -> tuple[Tensor, Tensor]:
    """Return the input of the output projection, and x for the residual addition."""
    module = run.module
    n = x if norm is None else call_on_row(norm, x)  # the decay's module reads it, too
    (*parts, b, low), n = run.project([*spec.inner, spec.gate[0]], n)
    (gate,), _ = run.project([spec.gate[1]], low)
    g = getattr(module, spec.decay)(n.unsqueeze(0))
    heads = (y.unflatten(-1, (-1, module.head_dim)) for y in _heads(run, _side_by_side(parts), [module.qkv_dim] * 3))
    q, k, v = (y.unsqueeze(0) for y in heads)
    out = run.recur("kda", q, k, v, g, b.sigmoid().unsqueeze(0), True)
    normed = getattr(module, spec.norm)(out, gate.view(out.shape))
    return normed.reshape(len(x), -1), x if norm is not None else n


def _mamba2(run: _Run, spec: Mamba2Spec, x: Tensor, norm: nn.Module | None) -> tuple[Tensor, Tensor]:
    """Return the input of the output projection, and x for the residual addition."""
    module = run.module
    if spec.scale is None:
        (projected,), x = run.project(["in_proj"], x, norm=norm)
    else:
        n = x if norm is None else call_on_row(norm, x)
        (projected,), _ = run.project(["in_proj"], n * getattr(module, spec.scale))
    dtype = projected.dtype
    if spec.scales is not None:
        projected = projected * getattr(module, spec.scales).flatten()  # a float32 buffer may widen it
    gate, joined, dt = projected.split([module.intermediate_size, module.conv_dim, module.num_heads], -1)
    states = module.n_groups * module.ssm_state_size
    sizes = [module.intermediate_size, states, states]
    values, B, C = _heads(run, joined.to(dtype), sizes)
    scan = run.recur(
        "ssd",
        values.unflatten(-1, (module.num_heads, -1)).unsqueeze(0),
        step_sizes(dt.unsqueeze(0), module.dt_bias, module.time_step_limit),
        -module.A_log.float().exp(),
        B.unflatten(-1, (module.n_groups, -1)).unsqueeze(0),
        C.unflatten(-1, (module.n_groups, -1)).unsqueeze(0),
        module.D,
        module.chunk_size,
    )
    scan, gate = scan.flatten(2), gate.unsqueeze(0)
    has_norm = spec.norm_if is None or getattr(module, spec.norm_if)
    normed = module.norm(scan, gate) if has_norm else scan * F.silu(gate)
    return normed.squeeze(0).to(dtype), x


def _gated_conv(run: _Run, x: Tensor, norm: nn.Module | None) -> tuple[Tensor, Tensor]:
    """Return the input of the output projection, and x for the residual addition."""
    (projected,), x = run.project(["in_proj"], x, norm=norm)
    before, after, values = projected.chunk(3, -1)
    return after * run.convolve(before * values, run.module.conv, None), x


def _side_by_side(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _heads(run: _Run, joined: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Convolve ``[T, C]`` with the activation, and split the channels."""
    return run.convolve(joined, run.module.conv1d, run.module.activation).split(sizes, -1)
