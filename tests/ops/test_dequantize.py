"""Dequantised 4-bit weights: the kernel against the definition and bitsandbytes, bit for bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from op_checks import DEVICES, KERNEL_DTYPES, count_calls, relative
from torch import Tensor

from fastpack.ops.dequantize import definition, dequantize, kernel_rejects
from fastpack.ops.linear.operands import Projection
from fastpack.ops.linear.projections import project

pytest.importorskip("triton")
from fastpack.ops.kernels import dequantize as kernels

# fewer weights than a block, odd, ends inside a word, a block and a program, whole programs
SHAPES = [(1, 1), (5, 7), (3, 16), (129, 65), (33, 136), (64, 128)]
STATES = [("nf4", False), ("nf4", True), ("fp4", False), ("fp4", True)]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def make_weight(
    shape: tuple[int, ...],
    quant_type: str = "nf4",
    nested: bool = False,
    *,
    blocksize: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Any]:
    """Return random bytes and scales in bitsandbytes' format, with any block size."""
    generator = torch.Generator().manual_seed(blocksize + len(shape))
    shape = torch.Size(shape)
    blocks = -(-shape.numel() // blocksize)

    def random(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator).to(device)

    def bytes_of(size: int) -> Tensor:
        return torch.randint(256, (size,), generator=generator, dtype=torch.uint8).to(device)

    code = torch.cat([random(8), -random(8)])
    if quant_type == "fp4":
        code[0] = 0
        code[8:] = -code[:8]
        code[8] = 0  # what bitsandbytes' table has there, whose kernels give a zero with a sign
    state = SimpleNamespace(
        shape=shape, dtype=dtype, quant_type=quant_type, blocksize=blocksize, code=code, nested=nested,
        absmax=random(blocks) + 0.1, offset=None, state2=None,
    )  # fmt: skip
    if nested:
        state.absmax, state.offset = bytes_of(blocks), random(1)[0] + 1
        state.state2 = SimpleNamespace(
            absmax=random(-(-blocks // 256)), code=random(256) - 0.5, blocksize=256, nested=False, dtype=torch.float32
        )
    return bytes_of(-(-shape.numel() // 2))[:, None], state


def swapped(packed: Tensor) -> Tensor:
    return (packed >> 4) | (packed << 4)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether all bits are equal, including the signs of zeros."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    as_integers = INTEGERS[a.element_size()]
    return torch.equal(a.view(as_integers), b.view(as_integers))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("device", "dtype"), KERNEL_DTYPES)
@pytest.mark.parametrize(("quant_type", "nested"), STATES)
def test_kernel_is_the_definition(
    quant_type: str, nested: bool, device: str, dtype: torch.dtype, shape: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    calls = count_calls(monkeypatch, kernels, "dequantize")
    packed, state = make_weight(shape, quant_type, nested, dtype=dtype, device=device)
    actual = dequantize(packed, state, dtype, "triton")
    assert len(calls) == 1
    assert actual.is_contiguous()
    assert same_bits(actual, definition(packed, state))
    if actual.numel() > 1:
        assert not torch.equal(actual, definition(swapped(packed), state)), "the check can fail"
    if nested:
        state.offset = state.offset * 1.01
        assert not torch.equal(actual, definition(packed, state))


@pytest.mark.parametrize("blocksize", [32, 128, 4096, 8192, 32768])
@pytest.mark.parametrize("shape", [(130, 256), (187, 179)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_any_block_size(device: str, shape: tuple[int, ...], blocksize: int) -> None:
    """A program has many blocks, one, or part of one, and reads words or bytes."""
    for nested in (False, True):
        packed, state = make_weight(shape, nested=nested, blocksize=blocksize, device=device)
        actual = dequantize(packed, state, torch.float32, "triton")
        assert same_bits(actual, definition(packed, state))
        state.blocksize = 2 * blocksize
        assert not torch.equal(actual, definition(packed, state))


@pytest.mark.parametrize("device", DEVICES)
def test_scales_are_not_computed_with_a_fused_multiply_add(device: str) -> None:
    """There are enough blocks for a difference between one rounding and two to show."""
    packed, state = make_weight((512, 64), nested=True, device=device)
    state.code = torch.ones_like(state.code)
    actual = dequantize(packed, state, torch.float32, "triton")
    assert same_bits(actual, definition(packed, state))
    product = state.state2.code[state.absmax.int()].double() * state.state2.absmax.double().repeat_interleave(256)[:512]
    fused = (product + state.offset.double()).float()
    assert not torch.equal(actual.flatten()[::64], fused), "the check can fail"


@pytest.mark.parametrize("device", DEVICES)
def test_the_sign_of_zero_in_fp4(device: str) -> None:
    """A small negative weight is -0 on a GPU; bitsandbytes' table says 0."""
    packed, state = make_weight((4, 16), "fp4", device=device)
    packed.fill_(0x80)
    actual = dequantize(packed, state, torch.float32, "triton").flatten()
    assert not actual.any()
    assert actual.signbit().tolist() == [True, False] * 32


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_rounded_to_the_state_s_dtype_first(device: str) -> None:
    packed, state = make_weight((16, 24), dtype=torch.float16, device=device)
    actual = dequantize(packed, state, torch.float32, "triton")
    assert actual.dtype == torch.float32
    assert same_bits(actual, definition(packed, state).float())
    state.dtype = torch.float32
    wide = definition(packed, state)
    assert not torch.equal(actual, wide), "the check can fail"
    assert same_bits(dequantize(packed, state, torch.float16, "triton"), wide.half())


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("device", DEVICES)
def test_any_storage(device: str, storage: torch.dtype) -> None:
    packed, state = make_weight((16, 24), "nf4", True, device=device)
    stored = packed.flatten().view(storage)[:, None]
    assert same_bits(dequantize(stored, state, torch.float32, "triton"), definition(packed, state))
    assert same_bits(definition(stored, state), definition(packed, state))


@pytest.mark.parametrize("skipped", [1, 2, 4])
@pytest.mark.parametrize("device", DEVICES)
def test_a_weight_that_begins_anywhere(device: str, skipped: int) -> None:
    packed, state = make_weight((33, 136), device=device)
    shifted = torch.cat([packed.new_zeros(skipped, 1), packed])[skipped:]
    assert same_bits(dequantize(shifted, state, torch.float32, "triton"), definition(packed, state))


def quantised(
    quant_type: str, nested: bool, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu", blocksize: int = 64
) -> tuple[Tensor, Any]:
    bnb = pytest.importorskip("bitsandbytes")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    weight.flatten()[3::7] *= -1e-4  # some are quantised to a zero, some of those below it
    packed, state = bnb.functional.quantize_4bit(
        weight, blocksize=blocksize, quant_type=quant_type, compress_statistics=nested
    )
    return packed, state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("quant_type", "nested"), STATES)
def test_weights_that_bitsandbytes_quantised(quant_type: str, nested: bool, dtype: torch.dtype) -> None:
    """On a CPU bitsandbytes' own results are within one rounding."""
    packed, state = quantised(quant_type, nested, (40, 66), dtype)
    theirs = dequantize(packed, state, dtype, "torch")
    rounding = torch.finfo(dtype).eps
    assert relative(definition(packed, state), theirs) <= rounding
    assert relative(definition(swapped(packed), state), theirs) > 0.1
    if not torch.cuda.is_available():
        assert same_bits(dequantize(packed, state, dtype, "triton"), definition(packed, state))


def test_on_a_cpu_bitsandbytes_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, state = quantised("nf4", True, (8, 64), torch.float32)
    calls = count_calls(monkeypatch, kernels, "dequantize")
    theirs = count_calls(monkeypatch, pytest.importorskip("bitsandbytes").functional, "dequantize_4bit")
    for implementation in ("auto", "torch"):
        actual = dequantize(packed, state, torch.float16, implementation)  # type: ignore[arg-type]
        assert actual.dtype == torch.float16
    assert (len(calls), len(theirs)) == (0, 2)


def test_unsupported_weights_raise_if_the_kernel_is_named() -> None:
    packed, state = make_weight((8, 64), nested=True)

    def but(**changed: Any) -> Any:
        return SimpleNamespace(**{**vars(state), **changed})

    def outer(**changed: Any) -> Any:
        return but(state2=SimpleNamespace(**{**vars(state.state2), **changed}))

    dtype = torch.float32
    assert kernel_rejects(packed, state, dtype) is None
    cases: list[tuple[str, Tensor, Any, torch.dtype]] = [
        ("quant_type of 'int4'", packed, but(quant_type="int4"), dtype),
        ("packed for a CPU", packed, but(packing_format_for_cpu=True), dtype),
        ("float64 of torch.float32", packed, state, torch.float64),
        ("float32 of torch.float64", packed, but(dtype=torch.float64), dtype),
        ("blocks of 48", packed, but(blocksize=48), dtype),
        ("blocks of 16", packed, but(blocksize=16), dtype),
        ("255 bytes for 512 weights", packed[1:], state, dtype),
        ("strides", torch.stack([packed, packed], 1)[:, 0], state, dtype),
        ("scales quantised to torch.float16", packed, outer(dtype=torch.float16), dtype),
        ("scales quantised .* in blocks of 100", packed, outer(blocksize=100), dtype),
        ("scales quantised", packed, outer(nested=True), dtype),
        ("table of 128 torch.float32 .* but reads 256", packed, outer(code=state.state2.code[::2]), dtype),
        ("tensors are not contiguous", packed, but(code=torch.rand(32)[::2]), dtype),
        ("table of 8 torch.float32 .* but reads 8 torch.uint8", packed, but(absmax=torch.rand(8)), dtype),
        ("table of 7", packed, but(absmax=state.absmax[:7]), dtype),
        ("quant_state on meta", packed, but(offset=state.offset.to("meta")), dtype),
    ]
    for reason, weight, quant_state, to in cases:
        with pytest.raises(ValueError, match=f"{reason}.*Pass implementation='auto' or 'torch'"):
            dequantize(weight, quant_state, to, "triton")


def test_projections_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel runs once in each pass; the input's gradient equals the dense weight's."""
    packed, state = quantised("nf4", True, (24, 64), torch.float32)
    calls = count_calls(monkeypatch, kernels, "dequantize")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        packed = packed.to(device)
        state.to(device)
    weight = torch.nn.Parameter(packed, requires_grad=False)
    x = torch.randn(5, 64, device=device).requires_grad_()
    (y,), _ = project(x, [Projection(weight, torch.float32, quant_state=state)], implementation="triton")
    assert len(calls) == 1
    grad = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, grad)
    assert len(calls) == 2
    dense = definition(packed, state)
    assert relative(y, x @ dense.t()) <= 1e-5
    assert relative(dx, grad @ dense) <= 1e-5
    project(x, [Projection(weight, torch.float32, quant_state=state)], implementation="torch")
    assert len(calls) == 2


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("blocksize", [64, 4096])
@pytest.mark.parametrize("shape", [(5, 7), (129, 65), (512, 1024), (1000, 344)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("quant_type", "nested"), STATES)
def test_the_same_bits_as_bitsandbytes(
    quant_type: str, nested: bool, dtype: torch.dtype, shape: tuple[int, ...], blocksize: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    packed, state = quantised(quant_type, nested, shape, dtype, "cuda", blocksize)
    calls = count_calls(monkeypatch, kernels, "dequantize")
    for to in (dtype, torch.bfloat16 if dtype == torch.float32 else torch.float32):
        theirs = dequantize(packed, state, to, "torch")
        assert same_bits(dequantize(packed, state, to), theirs)
        assert not torch.equal(dequantize(swapped(packed), state, to), theirs)
    assert len(calls) == 4
    assert same_bits(definition(packed, state), dequantize(packed, state, dtype))


@pytest.mark.gpu
def test_auto_calls_bitsandbytes_for_unsupported_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, state = quantised("nf4", True, (8, 64), torch.float32, "cuda")
    calls = count_calls(monkeypatch, kernels, "dequantize")
    wide = dequantize(packed, state, torch.float64)
    assert not calls
    assert torch.equal(wide, dequantize(packed, state, torch.float32).double())
    assert len(calls) == 1


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    """The host reads nothing: a replayed launch dequantises new bytes and scales."""
    packed, state = quantised("nf4", True, (64, 256), torch.bfloat16, "cuda")
    dequantize(packed, state, torch.bfloat16)  # compile
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = dequantize(packed, state, torch.bfloat16, "triton")
    for _ in range(2):
        graph.replay()
        assert same_bits(actual, dequantize(packed, state, torch.bfloat16, "torch"))
        packed.bitwise_xor_(0x5A)
        state.offset.mul_(1.5)
    assert not torch.equal(actual, dequantize(packed, state, torch.bfloat16, "torch"))


@pytest.mark.gpu
def test_more_elements_than_int32_counts() -> None:
    width, tail = 4096, 4096 + 8
    for odd in (0, 1):  # in words, in bytes
        count = 2**31 + tail + odd
        packed, state = make_weight((1, tail + odd), dtype=torch.bfloat16, device="cuda")
        expected = definition(packed, state)[0]
        whole = torch.zeros(2**30 + len(packed), 1, dtype=torch.uint8, device="cuda")
        whole[-len(packed) :] = packed
        state.absmax = torch.cat([torch.ones(2**31 // 64, device="cuda"), state.absmax])
        state.shape = torch.Size((1, count))
        actual = dequantize(whole, state, torch.bfloat16, "triton")[0]
        assert same_bits(actual[-len(expected) :], expected)
        first = state.code[0].bfloat16()
        assert all(part.eq(first).all() for part in actual[: -len(expected)].split(width * 2**14))
        del actual, whole
