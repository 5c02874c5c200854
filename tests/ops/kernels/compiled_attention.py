"""Compile the attention kernels, for trees and without, for GPUs that this machine doesn't have.

This is a separate script, since a process in which Triton interprets kernels can't compile them. Each launch compiles
its kernel, as on a GPU, and is then left out. It prints the shared memory that each kernel takes.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
from compiled import LIMITS
from pipelines import overwritten
from triton.backends.compiler import GPUTarget

from fastpack.ops.kernels import attention, attention_keys, attention_queries, launch
from fastpack.packing.seqlens import PackedSeqLens

ROWS = [[*range(40), 100 + which, *range(which)] for which in range(4)]


def as_on(capability: int) -> None:
    """Let kernels compile for a GPU, and launch nothing."""
    target = GPUTarget("cuda", capability, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: capability,  # Triton keeps what it compiled by device
            get_current_stream=lambda device: 0,
            get_current_target=lambda: target,
        )
    )
    launch.capability = lambda device: divmod(capability, 10)  # type: ignore[assignment]


def kernels(capability: int, heads: int, kv_heads: int, size: int, window: int | None, tree: bool) -> dict[str, Any]:
    """Return the shared memory of the three kernels, and overwritten tiles."""
    as_on(capability)
    taken: dict[str, int] = {}
    lost: list[str] = []
    run = triton.JITFunction.run

    def compile_only(kernel: Any, *args: Any, **options: Any) -> Any:
        built = run(kernel, *args, **{**options, "warmup": True})
        taken[kernel.__name__] = int(built.metadata.shared)
        lost.extend(f"{kernel.__name__}: {tile}" for tile in overwritten(built))
        return built

    packed = PackedSeqLens.from_lengths([len(row) for row in ROWS])
    paths: Any = (None, None)
    branches: Any = (None, None)
    cu_seqlens, tokens = packed.cu_seqlens, packed.total_tokens
    if tree:
        shared = packed.share(packed.prefixes_in(torch.tensor([[token for row in ROWS for token in row]]))).shared
        assert shared is not None
        cu_seqlens, tokens = shared.tree.cu_seqlens, shared.total_tokens
        paths, branches = ((edges.table, edges.offsets) for edges in (shared.tree.paths, shared.tree.branches))
    q, k, v = (torch.zeros(tokens, count, size, dtype=torch.bfloat16) for count in (heads, kv_heads, kv_heads))
    scores = attention.Scores(size**-0.5, window, None)
    triton.JITFunction.run = compile_only
    out, lse = attention.forward(q, k, v, None, cu_seqlens, scores, paths=paths)
    arrivals = attention_keys.make_arrivals(q, k, v, cu_seqlens)
    _, delta = attention_queries.queries(out, q, k, v, out, lse, cu_seqlens, scores, arrivals=arrivals, paths=paths)
    attention_keys.keys(out, q, k, v, lse, delta, cu_seqlens, scores, arrivals=arrivals, branches=branches)
    triton.JITFunction.run = run
    return {"taken": taken, "overwritten": lost}


if __name__ == "__main__":
    cases = json.loads(sys.argv[1])
    print(json.dumps([{**kernels(*case), "limit": LIMITS[case[0]]} for case in cases]))
