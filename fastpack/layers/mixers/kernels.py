"""Kernels that mix packed tokens and know boundaries: flash-linear-attention, mamba-ssm, causal-conv1d, our own.

Shape suffixes: T tokens, C channels, W taps, H heads, G groups of heads (H if each head is its own group), K size of a
key or of a state, V size of a value.

Each kernel takes one row ``[1, T, ...]`` and the boundaries of its sequences: ``cu_seqlens`` or ``seq_idx``. Those of
other packages need an Ampere or newer GPU, and fp16 or bf16: in float32 their matmuls run in TF32, with errors of 1e-3.
Our own run anywhere: they have a definition in plain torch.

If ranks share the batch, each calls a convolution for its own tokens, and a recurrence for all tokens of its own heads.

Signatures: flash-linear-attention 0.6 (``fla/ops/{gated_delta_rule,kda,simple_gla,gla}/chunk.py``,
``fla/modules/causal_conv1d/ops.py``), mamba-ssm 2.2 (``mamba_ssm/ops/triton/ssd_combined.py``), causal-conv1d 1.5
(``causal_conv1d/causal_conv1d_interface.py``).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpack.backends.limits import HALF_DTYPES
from fastpack.layers.mixers.shares import own_heads, tokens_of_heads, with_tokens_before
from fastpack.ops.delta_rule import delta_chunk
from fastpack.ops.implementation import Implementation
from fastpack.ops.short_conv import short_conv
from fastpack.ops.ssd import CHUNK
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.utils.compile import cached_constant
from fastpack.utils.tensors import send

Op = Literal["conv", "gated_delta", "kda", "ssd"]
Function = Callable[..., Any]
_FLA, _OWN = "flash-linear-attention", "fastpack"


@dataclass(frozen=True)
class Kernel:
    """A function of a package, and how it is called."""

    package: str
    module: str
    name: str
    run: Callable[..., Tensor]
    """Calls the function; its arguments are the function, the packing, and the op's arguments."""
    rejects: Callable[[torch.device], str | None] = lambda device: None
    """Returns why the kernel can't serve on this GPU, or None."""

    def function(self, implementation: Implementation) -> Function:
        """Return the function; one of our own with the implementation."""
        function = _function(self.module, self.name)
        return partial(function, implementation=implementation) if self.package == _OWN else function

    def why_not(self, device: torch.device) -> str | None:
        """Return why the kernel can't serve on this device (it may not be installed), or None."""
        absent = _absent(self.module, self.name)
        return absent if absent is not None or device.type != "cuda" else self.rejects(device)


def names(op: Op, device: torch.device, dtype: torch.dtype, implementation: Implementation = "auto") -> str:
    """Return the name of the package that computes an op, for reports."""
    return _serving(op, device, dtype, implementation).package


def packed_conv(
    packed: PackedSeqLens,
    x_1CT: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None = None,
    activation: str | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """Convolve each channel of each sequence by itself, causally: ``[1, C, T]``.

    ``out[t] = activation(bias + sum_j weight[W - 1 - j] x[t - j])`` over the tokens of ``t``'s own sequence.
    """
    if activation not in (None, "silu", "swish"):
        from transformers.activations import ACT2FN

        return ACT2FN[activation](packed_conv(packed, x_1CT, weight_CW, bias_C, implementation=implementation))
    shards = packed.shards
    if shards is not None:
        window, part = with_tokens_before(shards, packed, x_1CT, weight_CW.shape[1] - 1)
        out = packed_conv(part, window, weight_CW, bias_C, activation, implementation)
        return out[..., -x_1CT.shape[2] :]
    kernel = _serving("conv", x_1CT.device, x_1CT.dtype, implementation)
    return kernel.run(kernel.function(implementation), packed, x_1CT, weight_CW, bias_C, activation)


def packed_recurrence(
    op: Op, packed: PackedSeqLens, first: Tensor, *rest: Any, implementation: Implementation = "auto"
) -> Tensor:
    """Run a recurrence in each sequence by itself, chunk by chunk: ``[1, T, H, V]``.

    - ``gated_delta``: the gated delta rule. Arguments: q and k ``[1, T, H, K]``; v ``[1, T, H, V]``; g, the logarithm
      of the decay, and beta, the rate, ``[1, T, H]``; and whether to normalise queries and keys to length 1 first.
    - ``kda``: Kimi's rule, the same with a decay for each channel of a key, g ``[1, T, H, K]``.
    - ``ssd``: Mamba-2's scan, ``h[t] = exp(A dt[t]) h[t - 1] + dt[t] B[t] x[t]``, ``y[t] = C[t] h[t] + D x[t]``.
      Arguments: x ``[1, T, H, V]``; dt ``[1, T, H]`` in float32 (after bias, softplus and limits); A ``[H]``; B and C
      ``[1, T, G, K]``; D ``[H]`` or None; and a chunk size, which some kernels use. The result is in x's dtype
      or float32.

    With ``implementation="torch"``, the definition runs, in plain torch.
    """
    shards = packed.shards
    if shards is not None:
        first, *rest_of = own_heads(shards, [first, *rest])
        out = packed_recurrence(op, packed.whole, first, *rest_of, implementation=implementation)
        return tokens_of_heads(shards, out)
    kernel = _serving(op, first.device, first.dtype, implementation)
    return kernel.run(kernel.function(implementation), packed, first, *rest)


def step_sizes(dt: Tensor, bias: Tensor | None, limits: tuple[float, float]) -> Tensor:
    """Return the steps of Mamba-2's scan in float32: ``softplus(dt + bias)``, within the limits."""
    dt = dt.float() if bias is None else dt.float() + bias.float()
    return F.softplus(dt).clamp(*limits)


# Calls of each kernel.


def _run_delta(
    by_channel: bool,
    function: Function,
    packed: PackedSeqLens,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    normalised: bool,
) -> Tensor:
    """Run the delta rule; ``by_channel`` uses kernels with a decay per key channel: more work, but right on any GPU."""
    k, v = k.to(q.dtype), v.to(q.dtype)
    if by_channel:
        g = g[..., None].expand(*g.shape, k.shape[-1])
    return function(
        q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=normalised, **_offsets(function, packed, q.device)
    )[0]


def _run_own_delta(
    function: Function,
    packed: PackedSeqLens,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    normalised: bool,
) -> Tensor:
    inputs = (x.squeeze(0) for x in (q, k.to(q.dtype), v.to(q.dtype), g, beta))
    chunks = _on(packed, v.device).chunks(delta_chunk(v.device, q.dtype))
    out: Tensor = function(*inputs, chunks, normalised=normalised)
    return out.unsqueeze(0)


def _run_linear_attention(
    by_channel: bool,
    function: Function,
    packed: PackedSeqLens,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    chunk_size: int,
) -> Tensor:
    """Run Mamba-2's scan as linear attention with one decay per head: C are queries, B keys, ``dt x`` values."""
    heads = x.shape[2] // B.shape[2]
    q, k = (y.to(x.dtype).repeat_interleave(heads, 2) for y in (C, B))
    v, g = (x * dt[..., None]).to(x.dtype), A.float() * dt
    if by_channel:
        g = g[..., None].expand(k.shape)
    out: Tensor = function(q, k, v, g=g, scale=1.0, **_offsets(function, packed, x.device))[0]
    return _with_skip(out, x, D)


def _run_mamba2(
    function: Function,
    packed: PackedSeqLens,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    chunk_size: int,
) -> Tensor:
    B, C = B.to(x.dtype), C.to(x.dtype)
    out: Tensor = function(x, dt, A, B, C, chunk_size, seq_idx=_seq_idx(packed, x.device))  # with D, it would round D x
    return _with_skip(out, x, D)


def _with_skip(out: Tensor, x: Tensor, D: Tensor | None) -> Tensor:
    """Add D x in float32, as torch does: the norm that follows makes terms of D's gradient cancel if D x is large."""
    return out if D is None else out + x * D.float()[:, None]


def _run_conv_fla(
    function: Function, packed: PackedSeqLens, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    out: Tensor = function(
        x.transpose(1, 2), weight, bias, activation=activation, **_offsets(function, packed, x.device)
    )[0]
    return out.transpose(1, 2)


def _run_conv_cuda(
    function: Function, packed: PackedSeqLens, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    if weight.shape[1] not in (2, 3, 4) or x.shape[1] % 8:
        return _run_conv(short_conv, packed, x, weight, bias, activation)
    # with seq_idx, the kernel needs the channels of a token to be contiguous
    x = x.transpose(1, 2).contiguous().transpose(1, 2)
    return function(x, weight.contiguous(), bias, seq_idx=_seq_idx(packed, x.device), activation=activation)


def _run_conv(
    function: Function, packed: PackedSeqLens, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    activation = None if activation is None else "silu"
    # squeezed, not indexed: autograd would copy the gradient of x[0] into zeros
    out: Tensor = function(x.squeeze(0).t(), weight, bias, _on(packed, x.device).cu_seqlens, activation=activation)
    return out.t().unsqueeze(0)


def _run_ssd(
    function: Function,
    packed: PackedSeqLens,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    chunk_size: int,
) -> Tensor:
    x_T, dt, B, C = (y.squeeze(0) for y in (x, dt, B.to(x.dtype), C.to(x.dtype)))
    out: Tensor = function(x_T, dt, A, B, C, _on(packed, x.device).chunks(CHUNK))
    return _with_skip(out.unsqueeze(0), x, D)


def _offsets(function: Function, packed: PackedSeqLens, device: torch.device) -> dict[str, Tensor]:
    """Return ``cu_seqlens``, int64 ``[N + 1]``: on the device, and for functions that need it on the host, too.

    All layers get the same tensors for one batch, since flash-linear-attention caches by tensor identity.
    """
    on_host = packed.memo(
        "offsets on the host", lambda: torch.tensor(list(accumulate(packed.lengths, initial=0)), dtype=torch.long)
    )
    offsets = {"cu_seqlens": packed.memo(("int64 offsets", device), lambda: send(on_host, device))}
    if _takes(function, "cu_seqlens_cpu"):
        offsets["cu_seqlens_cpu"] = on_host
    return offsets


def _seq_idx(packed: PackedSeqLens, device: torch.device) -> Tensor:
    return _on(packed, device).seq_idx.contiguous()


def _on(packed: PackedSeqLens, device: torch.device) -> PackedSeqLens:
    """Return the lengths on a device, moved once for a batch: a model may be spread over several devices."""
    if packed.cu_seqlens.device == device:
        return packed
    return packed.memo(("on", device), lambda: packed.to(device))


def _own_is_faster(device: torch.device) -> str | None:
    """Return that fastpack's own kernels are faster than flash-linear-attention's on this GPU, or None.

    Measured on one H100 with flash-linear-attention 0.6 on Triton 3.7.1, at Qwen3.5-9B's, Kimi Linear's, Bamba-9B's and
    Nemotron-H-8B's sizes, bf16, 4,096 to 32,768 tokens, forward and backward: the delta rule 1.25 to 1.34 times as
    fast, with a decay per channel 1.11 to 1.12, Mamba-2's scan 2.0 to 2.7, the convolution 1.16 to 1.28.
    torch.compile doesn't run our kernels, but the definition.
    """
    if torch.compiler.is_compiling() or not _on_hopper(device):
        return None
    return "fastpack's own kernel is faster on Hopper"


@functools.cache
def _gates_are_wrong(device: torch.device) -> str | None:
    """Return why kernels with a decay per head fail on this GPU, or None: flash-linear-attention's issue 640.

    Newer versions of it raise in the backward; older versions return wrong gradients.
    """
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:3] if part.isdigit())
    if not _on_hopper(device) or not (3, 4) <= version < (3, 7, 1):
        return None
    return f"has wrong gradients on Hopper with Triton {triton.__version__} (3.7.1 fixes it)"


def _decay_per_head_rejects(device: torch.device) -> str | None:
    return _own_is_faster(device) or _gates_are_wrong(device)


@functools.cache
def _on_hopper(device: torch.device) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] == 9


def _fla(module: str, name: str, run: Callable[..., Tensor], *, decay_per_head: bool = False) -> Kernel:
    """Return a kernel of flash-linear-attention."""
    return Kernel(_FLA, module, name, run, _decay_per_head_rejects if decay_per_head else _own_is_faster)


KERNELS: dict[Op, tuple[Kernel, ...]] = {
    "conv": (
        Kernel("causal-conv1d", "causal_conv1d", "causal_conv1d_fn", _run_conv_cuda),
        _fla("fla.modules.causal_conv1d", "causal_conv1d", _run_conv_fla),
        _fla("fla.modules.convolution", "causal_conv1d", _run_conv_fla),  # before 0.5
        Kernel(_OWN, "fastpack.ops.short_conv", "short_conv", _run_conv),
    ),
    "gated_delta": (
        _fla("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", partial(_run_delta, False), decay_per_head=True),
        _fla("fla.ops.kda", "chunk_kda", partial(_run_delta, True)),
        Kernel(_OWN, "fastpack.ops.delta_rule", "gated_delta_rule", _run_own_delta),
    ),
    "kda": (
        _fla("fla.ops.kda", "chunk_kda", partial(_run_delta, False)),
        Kernel(_OWN, "fastpack.ops.delta_rule", "gated_delta_rule", _run_own_delta),
    ),
    "ssd": (
        Kernel("mamba-ssm", "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined", _run_mamba2),
        _fla("fla.ops.simple_gla", "chunk_simple_gla", partial(_run_linear_attention, False), decay_per_head=True),
        _fla("fla.ops.gla", "chunk_gla", partial(_run_linear_attention, True)),
        Kernel(_OWN, "fastpack.ops.ssd", "ssd", _run_ssd),
    ),
}
"""The kernels for each op, in order of preference; the last one serves everywhere."""


# The installed kernels, and the ops that they serve.


def _serving(op: Op, device: torch.device, dtype: torch.dtype, implementation: Implementation = "auto") -> Kernel:
    *others, ours = KERNELS[op]
    others = others if implementation != "torch" and _others_serve(device, dtype) else []
    return next((kernel for kernel in others if kernel.why_not(device) is None), ours)


def _others_serve(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether other packages' kernels run on this device and in this dtype."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0) and dtype in HALF_DTYPES


@cached_constant
def _absent(module: str, name: str) -> str | None:
    """Return why a function can't be imported, or None."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return "is not installed"
    try:
        _function(module, name)
    except (ImportError, OSError, AttributeError) as error:
        return f"does not import with torch {torch.__version__}: {error}"
    return None


@functools.cache
def _function(module: str, name: str) -> Function:
    return getattr(importlib.import_module(module), name)


@functools.cache
def _takes(function: Function, name: str) -> bool:
    return name in inspect.signature(function).parameters
