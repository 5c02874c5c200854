"""The parts of a patched model that ``torch.compile`` meets: attention operator, cached constants, named kernels."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from oracle import FLOAT32_BOUND, relative
from tiny import WINDOW
from torch import Tensor

import fastpack
from fastpack import PackedSeqLens
from fastpack.attention_dispatch import BACKENDS
from fastpack.backends import custom_op as opaque
from fastpack.backends import limits, segments
from fastpack.backends.call import AttentionCall, AttentionShape, Visibility
from fastpack.backends.registry import why_not
from fastpack.exactness.tiny import build_tiny, plain_tokens
from fastpack.ops.norm import rms_norm
from fastpack.utils.compile import _with_limit, cached_constant, compile_often

pytestmark = pytest.mark.usefixtures("compile_anew")


@pytest.mark.parametrize(("backend", "more"), [("segments", {"window": WINDOW}), ("reference", {"softcap": 2.0})])
def test_the_operator(backend: str, more: dict[str, Any]) -> None:
    """Torch's own checks pass (schema, fake results, gradients under the compiler), and results equal the backend's."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((68, 4, 8), (68, 2, 8), (68, 2, 8))
    q, k, v = (torch.randn(size, generator=generator, requires_grad=True) for size in sizes)
    sinks = torch.randn(4, generator=generator, requires_grad=True) if backend == "reference" else None
    packed = PackedSeqLens.from_lengths([31, 1, 36])
    call = AttentionCall(q, k, v, packed, 0.3, sinks=sinks, **more)
    inputs = [x for x in (q, k, v, sinks) if x is not None]
    expected = BACKENDS[backend].run(call)
    grad = torch.randn(expected.shape, generator=generator)
    with torch.autocast("cpu", torch.bfloat16):  # autocast has no effect inside the operator
        result = opaque.run(backend, call)
        grads = torch.autograd.grad(result, inputs, grad)
    assert relative(result, expected) <= FLOAT32_BOUND
    for ours, theirs in zip(grads, torch.autograd.grad(expected, inputs, grad), strict=True):
        assert relative(ours, theirs) <= FLOAT32_BOUND
    offsets = (packed.cu_seqlens, packed.position_ids)
    arguments = (q, k, v, sinks, *offsets, None, None, 36, 0.3, call.window, call.softcap, None, backend)
    torch.library.opcheck(torch.ops.fastpack.packed_attention.default, arguments)


def test_the_operator_refuses_dropout() -> None:
    q = torch.randn(5, 2, 8)
    call = AttentionCall(q, q, q, PackedSeqLens.from_lengths([5]), 1.0, dropout=0.1)
    assert segments.run(call).shape == q.shape
    with pytest.raises(fastpack.BackendUnavailableError, match=r"attention_dropout=0"):
        opaque.run("segments", call)


@pytest.mark.parametrize("value", [None, True, "why", (9, 0), ("a", "b")])
def test_facts_known_once_are_constants(value: Any) -> None:
    asked = []

    @cached_constant
    def fact(name: str) -> Any:
        asked.append(inspect.currentframe())  # the compiler could not trace this
        return value

    def use(x: Tensor) -> Tensor:
        return x + (1 if fact("a") == value else 2)

    assert float(torch.compile(use, fullgraph=True, backend="eager")(torch.zeros(1))) == 1
    assert fact("a") == value
    assert len(asked) == 1


def test_kernels_by_name_are_not_traced() -> None:
    """They break the graph, and run outside of the compiled code."""
    x, weight = torch.randn(3, 8), torch.ones(8)

    def norm(x: Tensor) -> Tensor:
        return rms_norm(x, weight, 1e-6, implementation="triton")

    with pytest.raises(torch._dynamo.exc.Unsupported, match="pass kernels='auto'"):
        torch.compile(norm, fullgraph=True, backend="eager")(x)


def test_what_a_gpu_is_asked_can_be_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, device.index))
    # the compiler itself asks whether there is a GPU
    monkeypatch.setattr(limits, "cuda_capability", lambda shape: limits._capability(shape.device))

    def choose(x: Tensor) -> Tensor:
        seen, tokens = Visibility(), x.shape[0]
        shape = AttentionShape(torch.device("cuda", 0), torch.bfloat16, 4, 2, 16, 16, seen, total_tokens=tokens)
        return x + (1 if why_not("torch_varlen", shape) is None else 2)

    compiled = torch.compile(choose, fullgraph=True, backend="eager", dynamic=True)
    assert compiled(torch.zeros(3)).tolist() == [1, 1, 1]


@pytest.mark.parametrize("newer", [False, True])
def test_more_variants_than_torch_compiles_by_itself(newer: bool) -> None:
    """One string is one variant: the ninth raises under torch's own limit, and the thirteenth under ours."""
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit

    if newer and "recompile_limit" not in inspect.signature(torch.compile).parameters:
        pytest.skip("this torch has none")

    def function(x: Tensor, kind: str) -> Tensor:
        return x + len(kind) + (kind == "a")

    def variants(compiled: Any, count: int) -> None:
        for i in range(count):
            assert compiled(torch.zeros(2), "a" * (i + 1)).tolist() == [i + 1 + (i == 0)] * 2

    settings: dict[str, Any] = {"backend": "eager", "fullgraph": True}
    with pytest.raises(FailOnRecompileLimitHit):
        variants(torch.compile(function, **settings), 9)
    torch.compiler.reset()
    often = compile_often(function, 12, **settings) if newer else _with_limit(torch.compile(function, **settings), 12)
    variants(often, 12)
    assert config.recompile_limit == 8
    with pytest.raises(FailOnRecompileLimitHit):
        variants(often, 13)
    assert config.recompile_limit == 8


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [pytest.param("bamba", marks=pytest.mark.slow), "emu3", "gemma3"])
def test_batch_after_batch_with_a_packing_context(model_type: str) -> None:
    """The packing context has its fields before the first batch, since a compiler guards on them."""
    model = fastpack.patch(build_tiny(model_type).train())
    compiled = torch.compile(model, backend="eager")
    for lengths in ([5, 7], [5, 7], [4, 8], [6, 9]):
        ids = plain_tokens(1, sum(lengths), seed=lengths[0])
        kwargs = {"input_ids": ids, "packed_seq_lens": PackedSeqLens.from_lengths(lengths)}
        ours = compiled(**kwargs).logits  # before anything else has run
        want = model(**kwargs).logits
        assert relative(ours, want) <= FLOAT32_BOUND
        assert relative(model(input_ids=ids).logits, want) > 1e3 * FLOAT32_BOUND
