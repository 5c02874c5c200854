"""Compile kernels for GPUs that this machine doesn't have, and print the shared memory that they need.

This is a separate script, since a process in which Triton interprets kernels can't compile them.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from pipelines import overwritten
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastpack.ops.kernels import grouped_matmul as grouped
from fastpack.ops.kernels import launch, lora, lora_glu
from fastpack.ops.kernels import row_limited_mm as matmuls

LIMITS = {75: 65_536, 80: 166_912, 89: 101_376, 90: 232_448}
"""Bytes that a program may have: T4, A100, RTX 4090 and L4, H100 and H200."""
KERNELS = {"expand": lora._expand_kernel, "shrink": lora._shrink_kernel, "reduce": lora._reduce_kernel}
SIZES = {"expand": lora.EXPAND, "shrink": {**lora.SHRINK, "EVEN": True}, "reduce": lora.REDUCE}
GLU = {"KIND": "silu", "HAS_GATE": True, "HAS_UP": True, "HAS_GRAD": True, "RECOMPUTE": True}
ONES = ("rank_step", "weight_rank", "out_rank", "low_rank")
POINTERS = ("base", "low", "out", "x", "weight", "grad", "gate", "up", "dgate", "dup")


LOST: list[str] = []
"""The tiles that kernels overwrite."""


def compiled(source: ASTSource, capability: int, options: dict[str, int], stages: int | None = None) -> int:
    """Return the shared memory of a kernel, and look for overwritten tiles."""
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    LOST.extend(f"{source.fn.__name__}: {tile}" for tile in overwritten(built, stages))
    return int(built.metadata.shared)


def shared_memory(kernel: Any, dtype: str, constants: dict[str, Any], capability: int, warps: int) -> int:
    """Return a kernel's shared memory if every tensor is aligned and ranks are the last dimension."""
    signature: dict[str, str] = {}
    constexprs: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for at, name in enumerate(kernel.arg_names):
        if name in constants or name.rstrip("012").endswith(ONES):
            signature[name], constexprs[(at,)] = "constexpr", constants.get(name, 1)
        elif name.rstrip("012") in POINTERS or name.endswith(("_low", "_weight")):
            is_float32 = kernel is lora._reduce_kernel and name.startswith("out")
            signature[name] = "*fp32" if is_float32 else f"*{dtype}"
        else:
            signature[name] = "fp32" if name.startswith("scale") else "i32"
        if signature[name] != "constexpr" and not name.startswith(("scale", "tokens")):
            attributes[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    return compiled(source, capability, {"num_warps": warps}, constants.get("STAGES"))


def with_descriptors(
    kernel: Any,
    dtype: str,
    tiles: dict[str, tuple[int, int]],
    others: dict[str, str],
    constants: dict[str, Any],
    options: dict[str, int],
    capability: int,
) -> int:
    """Return the shared memory of a kernel that loads tiles through descriptors.

    ``tiles`` has the shape of each descriptor's tile; ``others`` has the types of arguments without their numbers, by
    default int32.
    """
    signature: dict[str, str] = {}
    for name in kernel.arg_names:
        if name in tiles:
            signature[name] = f"tensordesc<{dtype}[{tiles[name][0]},{tiles[name][1]}]>"
        else:
            signature[name] = "constexpr" if name in constants else others.get(name.rstrip("012"), "i32")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return compiled(source, capability, options)


def sums_of_matmuls(count: int, dtype: str, rank: int, outputs: int) -> int:
    """Return the shared memory of ``outputs`` sums of ``count`` matmuls on Hopper.

    One matmul of each sum is a LoRA update. The first two second factors are transposed.
    """
    blocks = [matmuls._block(rank), *[matmuls.BLOCK_K] * 3]
    used = [blocks[i if outputs == 1 and i < 4 else i % 2] for i in range(2 * matmuls.MAX_GROUP)]
    transposed = [i < 2 or outputs > 1 for i in range(2 * matmuls.MAX_GROUP)]
    constants: dict[str, Any] = {"NUMBER": count, "OUTPUTS": outputs, "BASE": outputs == 1, "BIAS": True}
    constants |= {"BLOCK_T": matmuls.BLOCK_T, "BLOCK_N": matmuls.BLOCK_N, "GROUP": matmuls.GROUP}
    constants |= {"BLOCKS": tuple(used[:4]), "TRANSPOSED": tuple(transposed[:4]), "BLOCK_BELOW": matmuls.BLOCK_BELOW}
    constants |= {"EARLY": True, "PROGRAMS": 132}
    height, width = matmuls.BLOCK_T, matmuls.BLOCK_N
    types = dict.fromkeys(("base", "out0", "out1", "out2"), (height, width // 2))
    types |= dict.fromkeys(("lower_base", "lower_out0", "lower_out1", "lower_out2"), (matmuls.BLOCK_BELOW, width // 2))
    for i, block in enumerate(used):
        types |= {f"x{i}": (height, block), f"lower_x{i}": (matmuls.BLOCK_BELOW, block)}
        types[f"m{i}"] = (width, block) if transposed[i] else (block, width)
    pointers = {"count": "*i32", "schedule": "*i32", "flags": "*i32", "parts": "*fp32", "bias": f"*{dtype}"}
    options = {"num_warps": matmuls.WARPS, "num_stages": matmuls.STAGES}
    return with_descriptors(matmuls._matmul_kernel, dtype, types, pointers, constants, options, 90)


def grouped_matmuls(name: str, dtype: str, x: torch.Tensor, rank: int, capability: int) -> dict[str, Any]:
    """Return the stages and the shared memory of a grouped matmul, or of a sum of outer products, of large matrices."""
    tile = grouped.matmul_tile(x, 4096, rank) if name == "grouped" else grouped.outer_tile(x, rank, 4096)
    options = {option: tile.pop(option) for option in ("num_stages", "num_warps")}
    constants: dict[str, Any] = {**tile, "EARLY": capability >= 90}
    if name == "grouped":
        kernel: Any = grouped._matmul_kernel
        rows, width, step = grouped.TILE_ROWS, tile["WIDTH"], tile["STEP"]
        constants |= {"TRANSPOSED": True, "FACTORS_TRANSPOSED": True, "ROWS": rows, "PROGRAMS": 100}
        types = {"x": (rows, step), "matrices": (width, step)}
        if rank:
            types |= {"low": (rows, tile["RANK_STEP"]), "factors": (width, tile["RANK_STEP"])}
        else:
            constants |= {"low": None, "factors": None}
    else:
        kernel, types = grouped._outer_kernel, {"x": (tile["ROWS"], tile["M"]), "y": (tile["ROWS"], tile["N"])}
    pointers = dict.fromkeys(("offsets", "tiles", "tile_count"), "*i32")
    pointers |= {"bias": f"*{dtype}", "out": f"*{dtype}", "scale": "fp32"}
    taken = with_descriptors(kernel, dtype, types, pointers, constants, options, capability)
    return {"stages": options["num_stages"], "taken": taken, "limit": LIMITS[capability]}


def measure(capability: int, dtype: str, rank: int, count: int, name: str) -> dict[str, Any]:
    if name in ("matmul", "outputs"):
        taken = sums_of_matmuls(count, dtype, rank, 1 if name == "matmul" else matmuls.MAX_GROUP)
        return {"stages": matmuls.STAGES, "taken": taken, "limit": LIMITS[capability]}
    of = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    lows = [torch.empty(4, rank, dtype=of)] * count
    launch.shared_memory = lambda _: LIMITS[capability]  # type: ignore[assignment]
    if name in ("grouped", "outer"):
        return grouped_matmuls(name, dtype, lows[0], rank, capability)
    if name == "glu":
        stages = lora_glu.stages(3, *((x, x.t()) for x in lows))
        tile = {"BLOCK_T": lora_glu.BLOCK_T, "BLOCK_I": lora_glu.BLOCK_I}
        kernel, constants, warps = lora_glu._backward_kernel, {**GLU, **tile}, lora_glu.WARPS
    else:
        stages, constants = lora.stages(name, lows), {**SIZES[name], "MEMBERS": count}
        kernel, warps = KERNELS[name], constants.pop("num_warps")
    constants |= {"count": None, "BLOCK_R": lora.block_of_ranks(lows), "STAGES": stages, "EARLY": capability >= 90}
    taken = shared_memory(kernel, dtype, constants, capability, warps) if stages else None
    return {"stages": stages, "taken": taken, "limit": LIMITS[capability]}


if __name__ == "__main__":
    results = [measure(*case) for case in json.loads(sys.argv[1])]
    print(json.dumps([{**result, "overwritten": LOST} for result in results]))
