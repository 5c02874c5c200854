"""Measure this machine's highest rates of matmuls and copies, which set a floor under every time.

Run ``python -m fastpack.bench.ceiling`` in a process of its own; its last line of output is JSON.
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fastpack.bench.measure import time_calls
from fastpack.utils.versions import versions_of

MATMULS = 8
PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "bitsandbytes", "flash-attn", "liger-kernel", "unsloth")


@dataclass(frozen=True)
class Ceiling:
    """The measured rates: a large matmul's operations a second, and the bytes a second that a copy reads and writes."""

    flops: float
    bandwidth: float
    product: str
    device: str


def measure() -> Ceiling:
    """Measure medians on this machine, in bfloat16 on a GPU and float32 on a CPU.

    The matrices are random: with zeros, a GPU draws less power and runs faster than in training.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    size, dtype = (8192, torch.bfloat16) if on_gpu else (512, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)

    def multiply() -> None:  # long enough that the chip is as warm as in training
        for _ in range(MATMULS):
            torch.mm(a, b, out=product)

    flops = MATMULS * 2 * size**3 / time_calls([multiply], device, repeats=50 if on_gpu else 5)
    source = torch.randn((1 << 30 if on_gpu else 1 << 26) // 4, device=device)
    target = torch.empty_like(source)
    seconds = time_calls([lambda: target.copy_(source)], device, repeats=50 if on_gpu else 5)
    product_name = f"{size}^3 {str(dtype).removeprefix('torch.')}"
    return Ceiling(flops, 2 * 4 * source.numel() / seconds, product_name, device_name())


def device_name() -> str:
    """Return the name of the GPU, or of the processor."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Return the machine and versions that results were measured with."""
    import fastpack

    threads = {} if torch.cuda.is_available() else {"threads": torch.get_num_threads()}
    return {"device": device_name(), **threads, "fastpack": fastpack.__version__, **versions_of(*PACKAGES)}


if __name__ == "__main__":
    print(json.dumps({"ceiling": asdict(measure()), "machine": machine()}))
