"""Compile the kernels of recurrences and of the short convolution for GPUs that this machine doesn't have.

This is a separate script, since a process in which Triton interprets kernels can't compile them. Each launch compiles
its kernel, as on a GPU, and is then left out. It prints the shared memory that each kernel takes.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from compiled import LIMITS
from compiled_attention import as_on
from pipelines import overwritten

from fastpack.ops.kernels import launch, short_conv, ssd, ssd_backward
from fastpack.packing.seqlens import PackedSeqLens

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
LENGTHS = [70, 1, 64]


def run_ssd(dtype: torch.dtype, heads: int, groups: int, state: int, value: int, stages: int = 1) -> None:
    ssd_backward.UNPIPELINED = stages
    packed = PackedSeqLens.from_lengths(LENGTHS)
    tokens = packed.total_tokens
    x = torch.zeros(tokens, heads, value, dtype=dtype)
    B, C = (torch.zeros(tokens, groups, state, dtype=dtype) for _ in range(2))
    inputs = ssd.Inputs.of(x, torch.zeros(tokens, heads), torch.zeros(heads), B, C, packed.chunks(64))
    ssd_backward.backward(inputs, ssd.forward(inputs))


def run_conv(dtype: torch.dtype, channels: int, taps: int) -> None:
    offsets = PackedSeqLens.from_lengths(LENGTHS).cu_seqlens
    x, weight, bias = (torch.zeros(*shape, dtype=dtype) for shape in ((135, channels), (channels, taps), (channels,)))
    for silu, shift in ((True, bias), (False, None)):
        out = short_conv.forward(x, weight, shift, offsets, silu)
        for of_x, of_weight in ((True, True), (True, False), (False, True)):
            short_conv.backward(out, x, weight, shift, offsets, silu, of_x=of_x, of_weight=of_weight)


RUNS: dict[str, Any] = {"ssd": run_ssd, "conv": run_conv}


def kernels(op: str, capability: int, dtype: str, *sizes: int) -> dict[str, Any]:
    """Return the shared memory of each kernel of an op, forward and backward, and overwritten tiles."""
    as_on(capability)
    launch.shared_memory = lambda device: LIMITS[capability]  # type: ignore[assignment]
    taken: dict[str, int] = {}
    lost: list[str] = []
    run = triton.JITFunction.run

    def compile_only(kernel: Any, *args: Any, **options: Any) -> Any:
        built = run(kernel, *args, **{**options, "warmup": True})
        taken[kernel.__name__] = max(taken.get(kernel.__name__, 0), int(built.metadata.shared))
        lost.extend(f"{kernel.__name__}: {tile}" for tile in overwritten(built))
        return built

    triton.JITFunction.run = compile_only
    RUNS[op](DTYPES[dtype], *sizes)
    triton.JITFunction.run = run
    return {"taken": taken, "overwritten": lost}


if __name__ == "__main__":
    cases = json.loads(sys.argv[1])
    print(json.dumps([{**kernels(*case), "limit": LIMITS[case[1]]} for case in cases]))
