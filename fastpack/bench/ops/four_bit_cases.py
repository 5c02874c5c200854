"""4-bit weights made dense: bound by the memory that is read and written. Plain is bitsandbytes' own, on a
GPU where it is installed."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fastpack.bench.ops.case import OURS, PLAIN, Case, Maker, Run, Work
from fastpack.ops.dequantize import definition, dequantize

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Dettmers et al., "QLoRA", arXiv:2305.14314, appendix E."""
BLOCK, OUTER_BLOCK = 64, 256
"""Weights that share a scale, and scales that share one."""


def packed_weight(make: Maker, *sizes: int) -> tuple[Tensor, Any]:
    """Random bytes, and a state as bitsandbytes keeps it, for a weight of these sizes; absmax is quantised too."""
    shape = torch.Size(sizes)
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
    return random_bytes(shape.numel() // 2)[:, None], state


def _packed_inputs(make: Maker) -> list[Any]:
    return [*packed_weight(make, make.tokens, make.sizes.hidden)]


def has_bitsandbytes() -> bool:
    """Whether it is installed."""
    return importlib.util.find_spec("bitsandbytes") is not None


def _dequantize_runs(inputs: Sequence[Any]) -> dict[str, Run]:
    weight, state = inputs
    theirs = has_bitsandbytes()
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


CASES = [
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
