"""Stand-ins for kernels that mix packed tokens: the published signatures, strict about what they are given.

Each computes one segment after the other with transformers' own torch function (or, where there is none, from the
recurrence's definition). A ``leaky`` one takes all tokens for one segment, as those torch functions do with boundaries
that they are given. Signatures: flash-linear-attention 0.6, mamba-ssm 2.2, causal-conv1d 1.5.
"""

from __future__ import annotations

import importlib.machinery
import inspect
import itertools
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.bamba import modeling_bamba
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next

conv_torch = inspect.unwrap(modeling_qwen3_next.causal_conv1d_fn)
delta_torch = inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule)
kda_torch = inspect.unwrap(modeling_kimi_linear.chunk_kimi_delta_attention)
ssd_torch = inspect.unwrap(modeling_bamba.mamba2_chunk_scan)


@dataclass
class Calls:
    """The calls of each stand-in: its name, T, and the offsets of the segments."""

    leaky: bool = False
    made: list[tuple[str, int, list[int]]] = field(default_factory=list)

    def segments(self, name: str, total: int, offsets: list[int]) -> list[tuple[int, int]]:
        assert offsets[0] == 0
        assert offsets[-1] == total
        self.made.append((name, total, offsets))
        return list(itertools.pairwise([0, total] if self.leaky else offsets))


def offsets_of(cu_seqlens: Any, cu_seqlens_cpu: Any, rows: int) -> list[int]:
    """Check what flash-linear-attention requires of its arguments."""
    assert rows == 1, "one packed row"
    assert cu_seqlens.dtype == torch.int64
    assert cu_seqlens_cpu.device.type == "cpu"
    assert torch.equal(cu_seqlens.cpu(), cu_seqlens_cpu)
    result: list[int] = cu_seqlens.tolist()
    return result


def ends_of(seq_idx: Tensor, total: int) -> list[int]:
    """Check what mamba-ssm and causal-conv1d require of their argument."""
    assert seq_idx.dtype == torch.int32
    assert seq_idx.shape == (1, total)
    assert seq_idx.is_contiguous()
    changes = (seq_idx[0].diff() != 0).nonzero()[:, 0] + 1
    return [0, *changes.tolist(), total]


def fla(calls: Calls) -> dict[str, Callable[..., Any]]:
    def chunk_gated_delta_rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        return delta("chunk_gated_delta_rule", delta_torch, q, k, v, g, beta, cu_seqlens, cu_seqlens_cpu)

    def chunk_kda(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        return delta("chunk_kda", kda_torch, q, k, v, g, beta, cu_seqlens, cu_seqlens_cpu)

    def delta(
        name: str, function: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu: Any, cpu: Any
    ) -> tuple[Tensor, None]:
        assert q.dtype == k.dtype == v.dtype
        parts = calls.segments(name, q.shape[1], offsets_of(cu, cpu, len(q)))
        out = [
            function(*(x[:, a:z] for x in (q, k, v)), g=g[:, a:z], beta=beta[:, a:z], use_qk_l2norm_in_kernel=True)[0]
            for a, z in parts
        ]
        return torch.cat(out, 1), None

    def chunk_simple_gla(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None = None,
        g_gamma: Tensor | None = None,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """``h[t] = exp(g[t]) h[t - 1] + k[t] v[t]``, ``o[t] = scale q[t] h[t]``."""
        assert g is not None
        assert scale is not None
        assert q.shape == k.shape
        assert g.shape == q.shape[:3] == v.shape[:3]
        out = []
        for a, z in calls.segments("chunk_simple_gla", q.shape[1], offsets_of(cu_seqlens, cu_seqlens_cpu, len(q))):
            sums = g[0, a:z].cumsum(0).T  # [H, t]
            later = torch.ones(z - a, z - a, dtype=torch.bool).triu(1)
            decay = (sums[:, :, None] - sums[:, None]).masked_fill(later, -torch.inf).exp()
            with torch.autocast("cpu", enabled=False):
                scores = torch.einsum("thk,shk->hts", q[0, a:z].float(), k[0, a:z].float()) * decay * scale
                out.append(torch.einsum("hts,shv->thv", scores, v[0, a:z].float()))
        return torch.cat(out)[None].to(q.dtype), None

    def causal_conv1d(
        x: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool | None = False,
        activation: str | None = None,
        backend: str | None = "triton",
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        assert weight is not None
        assert weight.shape[0] == x.shape[2]
        parts = calls.segments("fla conv", x.shape[1], offsets_of(cu_seqlens, cu_seqlens_cpu, len(x)))
        out = [conv_torch(x[:, a:z].transpose(1, 2), weight, bias, activation=activation) for a, z in parts]
        return torch.cat(out, 2).transpose(1, 2), None

    return {
        "fla.ops.gated_delta_rule": chunk_gated_delta_rule,
        "fla.ops.kda": chunk_kda,
        "fla.ops.simple_gla": chunk_simple_gla,
        "fla.modules.causal_conv1d": causal_conv1d,
    }


def mamba(calls: Calls) -> dict[str, Callable[..., Any]]:
    def mamba_chunk_scan_combined(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
    ) -> Tensor:
        assert seq_idx is not None
        assert B.dtype == C.dtype == x.dtype
        total = x.shape[1]
        out = [
            ssd_torch(*(y[:, a:e] for y in (x, dt)), A, *(y[:, a:e] for y in (B, C)), chunk_size=chunk_size, D=D)
            for a, e in calls.segments("mamba_chunk_scan_combined", total, ends_of(seq_idx, total))
        ]
        return torch.cat(out, 1).to(x.dtype)

    def causal_conv1d_fn(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        seq_idx: Tensor | None = None,
        initial_states: Tensor | None = None,
        return_final_states: bool = False,
        final_states_out: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        assert seq_idx is not None
        assert x.stride(1) == 1, "with seq_idx the channels of a token must be neighbours"
        assert x.shape[1] % 8 == 0
        assert 2 <= weight.shape[1] <= 4
        total = x.shape[2]
        parts = calls.segments("causal_conv1d_fn", total, ends_of(seq_idx, total))
        return torch.cat([conv_torch(x[:, :, a:z], weight, bias, activation=activation) for a, z in parts], 2)

    return {"mamba_ssm.ops.triton.ssd_combined": mamba_chunk_scan_combined, "causal_conv1d": causal_conv1d_fn}


def install(monkeypatch: pytest.MonkeyPatch, functions: dict[str, Callable[..., Any]]) -> None:
    """Install importable modules with these functions for the length of the test."""
    for path, function in functions.items():
        packages = [path.rsplit(".", n)[0] for n in range(path.count("."), 0, -1)]
        for name in (*packages, path):
            if not isinstance(sys.modules.get(name), types.ModuleType):
                made = types.ModuleType(name)
                made.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
                made.__path__ = []
                monkeypatch.setitem(sys.modules, name, made)
        monkeypatch.setattr(sys.modules[path], function.__name__, function, raising=False)
