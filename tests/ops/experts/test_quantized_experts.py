"""Blocks of experts with quantised stacks: results and gradients are those of the dequantised stacks."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from op_checks import ON_CPU, relative
from torch import Tensor

from fastpack.ops.expert_operands import Gate
from fastpack.ops.experts.experts import experts
from fastpack.ops.experts.layer import ExpertLinear
from fastpack.ops.linear.operands import Lora
from fastpack.ops.stack_formats import FourBitFormat, Mxfp4Format, StackFormat

E, T, K, H, WIDTH, R = 4, 11, 2, 64, 32, 3
FORMATS = ["nf4", "nf4 nested", "mxfp4", "mxfp4 transposed"]


def quantized(kind: str, columns: int, inner: int) -> tuple[Tensor, StackFormat]:
    """Return the packed bytes of a stack, and its format; transposed, it is ``[E, inner, columns]``."""
    generator = torch.Generator().manual_seed(columns)
    if kind.startswith("mxfp4"):
        scales = torch.randint(121, 125, (E, columns, inner // 32), generator=generator, dtype=torch.uint8)
        blocks = torch.randint(256, (*scales.shape, 16), generator=generator, dtype=torch.uint8)
        return blocks, Mxfp4Format.of(scales, transposed="transposed" in kind, dtype=torch.float32)
    functional = pytest.importorskip("bitsandbytes").functional
    dense = torch.randn(E, columns, inner, generator=generator) * 0.1
    packed, state = functional.quantize_4bit(
        dense, quant_type="nf4", blocksize=64, compress_statistics="nested" in kind
    )
    return packed, FourBitFormat(state, torch.float32)


def lora(columns: int, inner: int) -> Lora:
    generator = torch.Generator().manual_seed(inner)
    a, b = (torch.randn(*size, generator=generator) * 0.2 for size in ((E * R, inner), (columns, R * E)))
    return Lora(a.requires_grad_(), b.requires_grad_(), 2.0)


def layers(kind: str, updated: bool) -> list[ExpertLinear]:
    made = []
    for columns, inner in ((2 * WIDTH, H), (H, WIDTH)):
        packed, form = quantized(kind, columns, inner)
        bias = torch.randn(E, columns, generator=torch.Generator().manual_seed(5)) * 0.1
        made.append(ExpertLinear(packed, bias, lora(columns, inner) if updated else None, form))
    return made


def dequantized(layer: ExpertLinear) -> ExpertLinear:
    """Return the same layer with a dense stack, and with tensors of its own."""
    assert layer.format is not None
    copied = moved(layer, "cpu")
    return ExpertLinear(layer.format.dense(layer.weight), copied.bias, copied.lora)


def moved(layer: ExpertLinear, device: str) -> ExpertLinear:
    """Return the same layer on a device, with tensors of its own."""
    update = layer.lora
    if update is not None:
        a, b = (each.detach().to(device, copy=True).requires_grad_() for each in (update.a, update.b))
        update = replace(update, a=a, b=b)
    bias = None if layer.bias is None else layer.bias.to(device)
    stack_format = None if layer.format is None else layer.format.to(torch.device(device), torch.float32)
    return ExpertLinear(layer.weight.to(device), bias, update, stack_format)


def run(pair: list[ExpertLinear], transposed: bool, implementation: Any = "torch") -> list[Tensor]:
    """Return the result, and the gradients of the tokens, their weights and the updates, on the CPU."""
    device = pair[0].weight.device
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(T, H, generator=generator).requires_grad_()
    index = torch.rand(T, E - 1, generator=generator).topk(K).indices  # no token chooses the last expert
    weights = torch.rand(T, K, generator=generator).requires_grad_()
    result = experts(
        x.to(device), index.to(device), weights.to(device), *pair, Gate("silu"), transposed=transposed,
        dtype=torch.float32, implementation=implementation,
    ).finish()  # fmt: skip
    result.backward(torch.randn(result.shape, generator=generator).to(device))
    updates = [tensor for layer in pair if layer.lora is not None for tensor in (layer.lora.a, layer.lora.b)]
    gradients = [tensor.grad for tensor in (x, weights, *updates)]
    assert all(gradient is not None for gradient in gradients)
    return [result.detach().cpu(), *(gradient.cpu() for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize(
    ("device", "implementation"),
    [
        ("cpu", "torch"),
        pytest.param("cpu", "triton", marks=ON_CPU.marks),
        pytest.param("cuda", "triton", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("updated", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_results_are_those_of_the_dequantised_stacks(
    kind: str, updated: bool, device: str, implementation: str
) -> None:
    if implementation == "triton":
        pytest.importorskip("triton")
    pair = layers(kind, updated)
    expected = run([*map(dequantized, pair)], "transposed" in kind)
    pair = [moved(layer, device) for layer in pair]
    actual = run(pair, "transposed" in kind, implementation)
    bound = 1e-5 if implementation == "torch" else 2e-5
    assert max(map(relative, actual, expected)) <= bound
    other = replace(pair[0], weight=pair[0].weight.roll(1))
    assert relative(run([other, pair[1]], "transposed" in kind)[0], expected[0]) > 3 * bound


class Watched(StackFormat):
    """A format that counts how many of its dense stacks exist at once."""

    def __init__(self, inner: StackFormat, alive: list[Any], kept: list[Tensor] | None) -> None:
        self.inner, self.alive, self.kept = inner, alive, kept

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.inner.shape

    def stored(self, packed: Tensor, dtype: torch.dtype, *args: Any) -> Tensor:
        assert not any(reference() is not None for reference in self.alive), "two dense stacks at once"
        dense = self.inner.stored(packed, dtype, *args)
        self.alive.append(weakref.ref(dense))
        if self.kept is not None:
            self.kept.append(dense)
        return dense

    def expert(self, packed: Tensor, index: int) -> Tensor:
        return self.inner.expert(packed, index)

    def to(self, *args: Any) -> Any:
        raise NotImplementedError

    saved = loaded = to


@pytest.mark.parametrize("kind", ["nf4 nested", "mxfp4"])
def test_one_stack_is_dense_at_a_time_and_none_is_kept(kind: str) -> None:
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    def watched(kept: list[Tensor] | None) -> list[Any]:
        alive: list[Any] = []
        pair = layers(kind, True)
        pair = [replace(x, format=Watched(x.format, alive, kept)) for x in pair if x.format is not None]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            run(pair, False)
        return alive

    alive = watched(None)
    assert len(alive) == 4, "both stacks, forward and backward"
    assert not any(reference() is not None for reference in alive)
    assert not [each for each in saved if each.is_floating_point() and each.numel() >= E * H * WIDTH]
    assert [each for each in saved if each.dtype == torch.uint8]
    with pytest.raises(AssertionError, match="at once"):
        watched([])


@pytest.mark.parametrize("kind", FORMATS)
def test_one_expert_alone(kind: str) -> None:
    packed, form = quantized(kind, 2 * WIDTH, H)
    dense = form.dense(packed)
    assert dense.shape == form.shape == ((E, H, 2 * WIDTH) if "transposed" in kind else (E, 2 * WIDTH, H))
    for index in range(E):
        assert relative(form.expert(packed, index), dense[index]) <= 1e-6
    assert relative(form.expert(packed, 1), dense[2]) > 0.1


def test_bytes_in_a_library_s_own_order() -> None:
    """An order of the bytes is undone when a stack is made dense, so that what autograd keeps is the user's."""
    packed, form = quantized("mxfp4", 2 * WIDTH, H)
    assert isinstance(form, Mxfp4Format)

    class Reversed:
        calls = 0

        def unswizzle_data(self, data: Tensor) -> Tensor:
            self.calls += 1
            return data.flip(1)

    layout = Reversed()
    swizzled = packed.flatten(2).transpose(1, 2).flip(1)
    other = replace(form, layout=layout, scales=form.scales.transpose(1, 2).flip(1), scale_layout=layout)
    assert torch.equal(other.dense(swizzled), form.dense(packed))
    assert layout.calls == 2


@ON_CPU.marks[0]
@pytest.mark.usefixtures("unwritten_memory_is_not_finite")
def test_sizes_of_half_a_step() -> None:
    """A kernel's last step reads the next expert's matrix, times zero: it must be finite, with rows or without."""
    generator = torch.Generator().manual_seed(0)

    def layer(columns: int, inner: int) -> ExpertLinear:
        scales = torch.randint(121, 125, (3, columns, inner // 32), generator=generator, dtype=torch.uint8)
        blocks = torch.randint(256, (*scales.shape, 16), generator=generator, dtype=torch.uint8)
        return ExpertLinear(blocks, format=Mxfp4Format.of(scales, dtype=torch.float16))

    x = torch.randn(6, 96, generator=generator).half().requires_grad_()
    index = torch.tensor([[0]] * 3 + [[2]] * 3)
    block = layer(64, 96), layer(96, 32), Gate("silu")
    out = experts(x, index, torch.ones(6, 1), *block, implementation="triton").finish()
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
