"""Helpers for the tests of linear cross-entropy: cases, the written definition, the op, and records of operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_checks import ON_CPU
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastpack.ops.implementation import Implementation
from fastpack.ops.loss.linear_cross_entropy import Reduction, linear_cross_entropy

IMPLEMENTATIONS = [
    "torch",
    pytest.param("triton", marks=ON_CPU.marks),
    pytest.param("triton", marks=pytest.mark.gpu, id="triton natively"),
]
ROUNDING = [IMPLEMENTATIONS[0], IMPLEMENTATIONS[2]]
"""Cases that round to bfloat16 and so run on a GPU only: Triton's interpreter truncates instead."""
REDUCTIONS: tuple[Reduction, ...] = ("sum", "mean", "none")
HALF_DTYPES = (torch.bfloat16, torch.float16)
FLOAT32_BOUND = 1e-5
HALF_BOUND = 1.5
CHUNK = 16
T, H, V, R = 37, 24, 201, 4
"""Odd sizes: no multiples of the chunk, of a vector or of a block."""


@dataclass(frozen=True)
class Case:
    """The options of the op, and its inputs."""

    bias: bool = False
    lora: bool = False
    options: dict[str, float] = field(default_factory=dict)
    shape: tuple[int, int, int] = (T, H, V)
    strided: bool = False
    frozen: tuple[str, ...] = ()


CASES = {
    "plain": Case(),
    "softcap": Case(options={"softcap": 3.0}),
    "scale": Case(options={"logit_scale": 0.3}),
    "bias": Case(bias=True),
    "LoRA": Case(lora=True, frozen=("weight",)),
    "everything": Case(bias=True, lora=True, options={"softcap": 3.0, "logit_scale": 0.3}),
    "strided": Case(bias=True, lora=True, strided=True),
    "one token": Case(shape=(1, H, V)),
    "one chunk": Case(shape=(CHUNK, H, V)),
    "two words": Case(shape=(T, 3, 2)),
    "frozen": Case(bias=True, frozen=("weight", "bias")),
    "frozen hidden": Case(bias=True, lora=True, frozen=("hidden",)),
}
NAMES = ("hidden", "weight", "bias", "a", "b")


def device_of(implementation: Implementation) -> str:
    """Return the GPU for the kernel if there is one; the definition is always tested on the CPU."""
    return "cuda" if implementation == "triton" and torch.cuda.is_available() else "cpu"


def interpreted(implementation: Implementation) -> bool:
    return implementation == "triton" and device_of(implementation) == "cpu"


def cut(implementation: Implementation, dtype: torch.dtype) -> float:
    """Return what is added to every bound, since Triton's interpreter truncates to bfloat16."""
    return torch.finfo(dtype).eps if interpreted(implementation) and dtype == torch.bfloat16 else 0.0


def draw(
    case: Case, dtype: torch.dtype = torch.float32, seed: int = 0, *, device: str = "cpu"
) -> tuple[dict[str, Tensor], Tensor]:
    """Return inputs by name, and labels of which a third is ignored; they are the same on every device."""
    tokens, size, vocab = case.shape
    generator = torch.Generator().manual_seed(seed)
    shapes = {"hidden": (tokens, size), "weight": (vocab, size)}
    if case.bias:
        shapes["bias"] = (vocab,)
    if case.lora:
        shapes |= {"a": (R, size), "b": (vocab, R)}
    inputs = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=generator) * (1.0 if name == "hidden" else 0.5)
        if case.strided and x.ndim == 2:
            x = x.t().contiguous().t()
        inputs[name] = x.to(device, dtype)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[1::3] = -100
    return inputs, labels.to(device)


def defined(
    inputs: dict[str, Tensor],
    labels: Tensor,
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: Reduction = "sum",
    ignore_index: int = -100,
) -> Tensor:
    """Compute the definition, up to the logits in the dtype of the inputs."""
    logits = F.linear(inputs["hidden"], inputs["weight"], inputs.get("bias"))
    if "a" in inputs:
        logits = logits + F.linear(F.linear(inputs["hidden"], inputs["a"]), inputs["b"]) * 0.7
    logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, labels, reduction=reduction, ignore_index=ignore_index)


def computed(inputs: dict[str, Tensor], labels: Tensor, **options: Any) -> Tensor:
    """Compute the op over several chunks."""
    lora = (inputs["a"], inputs["b"], 0.7) if "a" in inputs else None
    options = {"chunk": CHUNK, **options}
    return linear_cross_entropy(
        inputs["hidden"], inputs["weight"], labels, bias=inputs.get("bias"), lora=lora, **options
    )


def run(
    function: Callable[..., Tensor],
    inputs: dict[str, Tensor],
    labels: Tensor,
    *,
    frozen: tuple[str, ...] = (),
    dtype: torch.dtype | None = None,
    factor: float = 0.37,
    **options: Any,
) -> dict[str, Tensor]:
    """Return the result and every gradient, for a cotangent that is not 1 and differs from token to token."""
    leaves = {
        name: x.detach().to(dtype or x.dtype).clone().requires_grad_(name not in frozen) for name, x in inputs.items()
    }
    out = function(leaves, labels, **options)
    weights = torch.linspace(0.5, 1.7, out.numel(), dtype=out.dtype, device=out.device).reshape(out.shape)
    out.backward(weights * factor)
    actual = {"result": out.detach()}
    for name, leaf in leaves.items():
        assert (leaf.grad is None) == (name in frozen)
        if leaf.grad is not None:
            assert leaf.grad.dtype == leaf.dtype
            actual[name] = leaf.grad
    return actual


def luck(key: str, dtype: torch.dtype, reduction: Reduction) -> float:
    """Return what is added for luck: errors of many tokens may cancel in plain torch's sum but not in ours."""
    return torch.finfo(dtype).eps / 4 if key == "result" and reduction != "none" else 0.0


def on_gpu(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.cuda() for name, x in inputs.items()}


class Recorder(TorchDispatchMode):
    """A mode that counts operators and the rows that matmuls read, and records the largest new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.product_shapes: list[tuple[int, ...]] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").split(".")[0]
        self.names.append(name)
        if name in ("mm", "addmm", "addmm_"):
            x, y = [a for a in args if isinstance(a, Tensor)][-2:]
            self.product_shapes.append((x.shape[0], x.shape[1], y.shape[1]))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out

    @property
    def waits(self) -> list[str]:
        """Return the operators that would wait for a GPU."""
        return [n for n in self.names if n in ("_local_scalar_dense", "nonzero", "masked_select", "item", "equal")]


@contextmanager
def recorded() -> Iterator[Recorder]:
    with Recorder() as recorder:
        yield recorder
