"""Compile the kernels of the gated delta rule for GPUs that this machine doesn't have.

This is a separate script, since a process in which Triton interprets kernels can't compile them. Each launch compiles
its kernel, as on a GPU, and is then left out. It prints the shared memory that each kernel takes.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import triton
from compiled import LIMITS
from compiled_attention import as_on
from pipelines import overwritten

from fastpack.ops.chunks import Chunks
from fastpack.ops.delta_rule import EPS, delta_chunk
from fastpack.ops.kernels import delta_rule, delta_rule_backward, delta_rule_channels_backward, launch

LENGTHS = [300, 1, 64]


def measure(
    capability: int, dtype: str, key: int, value: int, group: int, by_channel: bool, pipelined: bool = False
) -> dict[str, Any]:
    """Return the shared memory of each kernel, the fewest stages that were chosen for one, and overwritten tiles.

    If ``pipelined``, a kernel whose loop may not be pipelined is.
    """
    if pipelined:
        for module in (delta_rule_backward, delta_rule_channels_backward):
            module.OUTPUT_GRADIENTS = replace(module.OUTPUT_GRADIENTS, stages=2)
    as_on(capability)
    launch.shared_memory = lambda _: LIMITS[capability]  # type: ignore[assignment]
    delta_rule.processors = lambda _: 132  # type: ignore[attr-defined]
    taken: dict[str, int] = {}
    stages: list[int] = []
    lost: list[str] = []
    run = triton.JITFunction.run

    def compile_only(kernel: Any, *args: Any, **options: Any) -> Any:
        built = run(kernel, *args, **{**options, "warmup": True})
        taken[f"{kernel.module.rpartition('.')[2]}.{kernel.__name__}"] = int(built.metadata.shared)
        stages.append(options.get("num_stages", 1))
        lost.extend(f"{kernel.__name__}: {tile}" for tile in overwritten(built))
        return built

    of = getattr(torch, dtype)
    offsets = torch.tensor(list(accumulate(LENGTHS, initial=0)), dtype=torch.int32)
    chunks = Chunks.of(offsets, delta_chunk(torch.device("cuda"), of), 12)
    tokens, heads = sum(LENGTHS), 4
    q, k = (torch.zeros(tokens, heads // group, key, dtype=of) for _ in range(2))
    v = torch.zeros(tokens, heads, value, dtype=of)
    g, beta = torch.zeros(tokens, heads, *[key] * by_channel), torch.zeros(tokens, heads, dtype=of)
    triton.JITFunction.run = compile_only
    out, saved = delta_rule.forward(q, k, v, g, beta, chunks, EPS)
    delta_rule_backward.backward(out, saved, chunks, g.dtype)
    triton.JITFunction.run = run
    return {"taken": taken, "stages": min(stages), "limit": LIMITS[capability], "overwritten": lost}


if __name__ == "__main__":
    cases = json.loads(sys.argv[1])
    print(json.dumps([measure(*case) for case in cases]))
