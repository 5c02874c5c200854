"""Helpers for the tests of RoPE's kernels: inputs, and records of launches."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from op_checks import relative
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastpack.ops.implementation import Implementation
from fastpack.ops.rope import Layout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU kernels run through Triton's interpreter
LAYOUTS: tuple[Layout, ...] = ("half", "interleaved")
IMPLEMENTATIONS: tuple[Implementation, ...] = ("torch", "triton")

SHAPES = [
    # T, H, K, D, R: odd numbers of tokens, heads that fill no block, sizes that are no power of two, a rotary share
    (7, 3, 1, 8, 8),
    (1, 5, 2, 16, 6),
    (9, 4, 4, 20, 20),
    (5, 6, 2, 12, 10),
    (0, 4, 2, 8, 4),
    (6, 3, 0, 8, 4),  # queries alone
]


def tables(positions: int, rotary: int, layout: Layout, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return cos and sin ``[positions, R]`` on the device."""
    theta = torch.arange(positions)[:, None].double() * 100.0 ** (-torch.arange(0, rotary, 2).double() / rotary)
    theta = torch.cat((theta, theta), -1) if layout == "half" else theta.repeat_interleave(2, -1)
    return theta.cos().to(DEVICE, dtype), theta.sin().to(DEVICE, dtype)


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def error_of(actual: Any, expected: Any) -> float:
    """Return the largest error of all tensors; it is infinite if zeros are expected and the values are not zero."""
    return max(
        relative(x.detach(), y.detach()) if x.any() or y.any() else 0.0 for x, y in zip(actual, expected, strict=True)
    )


def on_gpu(step: Callable[[], Any]) -> list[str]:
    """Return the names of the kernels that ran on the GPU."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


class Launches:
    """A stand-in for a kernel that runs it, and counts its launches and the elements of its q and k."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.count, self.elements, self.running = kernel, 0, 0, False

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.count += 1
            sizes = {x.data_ptr(): x.numel() for x in args[:2]}
            self.elements += sum(sizes.values())
            self.running = True
            self.kernel[grid](*args, **kwargs)
            self.running = False

        return launch


class Work(TorchDispatchMode):
    """A mode that counts torch operations that touch memory, outside the kernels."""

    FREE = ("empty", "new_empty", "detach", "view", "alias", "slice", "select", "unsqueeze", "promote_types")

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self.launches, self.done = launches, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if not self.launches.running and name not in self.FREE:
            self.done.append(name)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def count_launches(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> Iterator[tuple[Launches, list[str]]]:
    """Launches of one kernel, and the names of torch's operations beside them.

    Those of a backward on a GPU are not seen: autograd runs it in a thread of its own.
    """
    kernels = importlib.import_module(f"fastpack.ops.kernels.{module}")
    launches = Launches(getattr(kernels, name))
    with monkeypatch.context() as patch, Work(launches) as work:
        patch.setattr(kernels, name, launches)
        yield launches, work.done
