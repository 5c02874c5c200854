"""RoPE, norms, gated units and 4-bit weights: bound by the memory that they read and write.

The plain formulas are those of transformers' own Llama and Gemma. Bytes are counted in the activations' dtype; norm
weights, and one figure a row, are left out. Plain 4-bit weights are bitsandbytes' own where it has a GPU.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpack.bench.ops.case import OURS, PLAIN, Case, Maker, Run, Work, with_liger
from fastpack.ops.dequantize import definition, dequantize
from fastpack.ops.glu import gated
from fastpack.ops.norm import add_rms_norm, rms_norm
from fastpack.ops.rope import apply_rope

EPS = 1e-6


def _rope_inputs(make: Maker) -> list[Any]:
    size, tokens = make.sizes, make.tokens
    frequencies = 10_000.0 ** (-torch.arange(0, size.head_dim, 2, device=make.generator.device) / size.head_dim)
    angles = torch.arange(tokens, device=make.generator.device)[:, None] * frequencies
    cos, sin = (table.repeat(1, 2).to(make.dtype) for table in (angles.cos(), angles.sin()))
    q = make.tensor(tokens, size.heads, size.head_dim)
    return [q, make.tensor(tokens, size.kv_heads, size.head_dim), cos, sin]


def _plain_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos[:, None], sin[:, None]

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return rotate(q), rotate(k)


def _liger_rope() -> Run:
    from liger_kernel.ops.rope import LigerRopeFunction

    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        # heads first, as transformers hands them over; it works on the memory below, in place
        q, k = LigerRopeFunction.apply(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
        return q[0].transpose(0, 1), k[0].transpose(0, 1)

    return run


def _rope_runs(inputs: Sequence[Any]) -> dict[str, Run]:
    runs: dict[str, Run] = {
        PLAIN: _plain_rope,
        OURS: functools.partial(apply_rope, in_place=True),
        f"{OURS}, copying": apply_rope,
    }
    return with_liger(runs, inputs[0].device, _liger_rope)


def _rope_work(make: Maker) -> Work:
    size = make.sizes
    heads = 2 * (size.heads + size.kv_heads) * size.head_dim
    return Work(make.tokens * make.dtype.itemsize * (heads + size.head_dim))  # half of each table holds all of it


def _plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def _plain_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    summed = x + residual
    return _plain_norm(summed, weight), summed


def _liger_norm() -> Run:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", True)


def _liger_add_norm() -> Run:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return lambda x, residual, weight: LigerFusedAddRMSNormFunction.apply(x, residual, weight, EPS, 0.0, "llama", True)


def _norm_runs(inputs: Sequence[Any]) -> dict[str, Run]:
    runs: dict[str, Run] = {PLAIN: _plain_norm, OURS: functools.partial(rms_norm, eps=EPS)}
    return with_liger(runs, inputs[0].device, _liger_norm)


def _add_norm_runs(inputs: Sequence[Any]) -> dict[str, Run]:
    runs: dict[str, Run] = {PLAIN: _plain_add_norm, OURS: functools.partial(add_rms_norm, eps=EPS)}
    return with_liger(runs, inputs[0].device, _liger_add_norm)


def _weight(make: Maker, *, grad: bool) -> Tensor:
    with torch.no_grad():
        weight = 1 + make.tensor(make.sizes.hidden, scale=0.1)
    return weight.requires_grad_(grad)


def _norm_inputs(make: Maker, *, tensors: int, grad: bool) -> list[Any]:
    rows = [make.tensor(make.tokens, make.sizes.hidden) for _ in range(tensors)]
    return [*rows, _weight(make, grad=grad)]


def _gated_runs(
    inputs: Sequence[Any], activation: Callable[[Tensor], Tensor], liger: Callable[[], Run]
) -> dict[str, Run]:
    runs: dict[str, Run] = {
        PLAIN: lambda gate, up: activation(gate) * up,
        OURS: lambda gate, up: gated(gate, up, activation),
    }
    return with_liger(runs, inputs[0].device, liger)


def _liger_swiglu() -> Run:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return lambda gate, up: LigerSiLUMulFunction.apply(gate, up)


def _liger_geglu() -> Run:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return lambda gate, up: LigerGELUMulFunction.apply(gate, up)


def _gated_inputs(make: Maker) -> list[Any]:
    return [make.tensor(make.tokens, make.sizes.inner) for _ in range(2)]


NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Dettmers et al., "QLoRA", arXiv:2305.14314, appendix E."""
BLOCK, OUTER_BLOCK = 64, 256
"""Weights that share a scale, and scales that share one."""


def _packed_inputs(make: Maker) -> list[Any]:
    """Random bytes, and a state as bitsandbytes keeps it, for a weight of T rows; absmax is quantised too."""
    shape = torch.Size((make.tokens, make.sizes.hidden))
    device, blocks = make.generator.device, -(-shape.numel() // BLOCK)

    def random_bytes(size: int) -> Tensor:
        return torch.randint(256, (size,), generator=make.generator, device=device, dtype=torch.uint8)

    def tensor(*values: float) -> Tensor:
        return torch.tensor(values, device=device)

    outer = SimpleNamespace(
        absmax=tensor(0.01).repeat(-(-blocks // OUTER_BLOCK)),
        code=torch.linspace(-1, 1, 256, device=device),
        blocksize=OUTER_BLOCK,
        dtype=torch.float32,
        nested=False,
    )
    state = SimpleNamespace(
        shape=shape,
        dtype=make.dtype,
        quant_type="nf4",
        blocksize=BLOCK,
        code=tensor(*NF4),
        absmax=random_bytes(blocks),
        nested=True,
        state2=outer,
        offset=tensor(0.05)[0],
    )
    return [random_bytes(shape.numel() // 2)[:, None], state]


def _dequantize_runs(inputs: Sequence[Any]) -> dict[str, Run]:
    weight, state = inputs
    theirs = importlib.util.find_spec("bitsandbytes") is not None
    runs: dict[str, Run] = {PLAIN: definition}
    if theirs and weight.is_cuda:
        runs[PLAIN] = functools.partial(dequantize, dtype=state.dtype, implementation="torch")
    if theirs or weight.is_cuda:
        runs[OURS] = functools.partial(dequantize, dtype=state.dtype)
    return runs


def _unrounded(weight: Tensor, state: Any) -> Tensor:
    return definition(weight, SimpleNamespace(**{**vars(state), "dtype": torch.float32}))


def _dequantize_work(make: Maker) -> Work:
    weights = make.tokens * make.sizes.hidden
    return Work(weights // 2 + weights // BLOCK + weights * make.dtype.itemsize)


def _no_work(make: Maker) -> Work:
    return Work()


def _rows(count: int, *, inner: bool = False) -> Callable[[Maker], Work]:
    """Bytes of so many ``[T, H]`` or ``[T, I]`` tensors."""

    def work(make: Maker) -> Work:
        width = make.sizes.inner if inner else make.sizes.hidden
        return Work(count * make.tokens * width * make.dtype.itemsize)

    return work


GELU_TANH = functools.partial(F.gelu, approximate="tanh")

CASES = [
    Case(
        "rope",
        "rotary embedding of q and k",
        _rope_inputs,
        _rope_runs,
        _rope_work,
        _rope_work,
    ),
    Case(
        "rms_norm",
        "root-mean-square norm with a weight that trains",
        functools.partial(_norm_inputs, tensors=1, grad=True),
        _norm_runs,
        _rows(2),
        _rows(3),
    ),
    Case(
        "add_rms_norm",
        "the same of a sum with the residual stream, the weight frozen",
        functools.partial(_norm_inputs, tensors=2, grad=False),
        _add_norm_runs,
        _rows(4),
        _rows(4),
    ),
    Case(
        "add_rms_norm_trained",
        "the same of a sum with the residual stream, the weight trains",
        functools.partial(_norm_inputs, tensors=2, grad=True),
        _add_norm_runs,
        _rows(4),
        _rows(4),
    ),
    Case(
        "swiglu",
        "silu(gate) * up",
        _gated_inputs,
        functools.partial(_gated_runs, activation=F.silu, liger=_liger_swiglu),
        _rows(3, inner=True),
        _rows(5, inner=True),
    ),
    Case(
        "geglu",
        "gelu(gate) * up, the tanh form",
        _gated_inputs,
        functools.partial(_gated_runs, activation=GELU_TANH, liger=_liger_geglu),
        _rows(3, inner=True),
        _rows(5, inner=True),
    ),
    Case(
        "dequantize",
        "an NF4 weight of T rows made dense, its scales quantised too",
        _packed_inputs,
        _dequantize_runs,
        _dequantize_work,
        _no_work,
        _unrounded,
    ),
]
