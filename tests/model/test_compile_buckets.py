"""Training compiles at most once a bucket, forward and backward; on a GPU it is as exact as eager."""

from __future__ import annotations

import copy
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import FLOAT32_BOUND, relative
from test_compile import against, alone, collate, error, step
from tiny import tiny_model
from torch import Tensor
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounterWithBackend

import fastpack
from fastpack.attention_dispatch import BACKENDS
from fastpack.backends import torch_varlen
from fastpack.backends.call import AttentionCall
from fastpack.ops.loss import linear_cross_entropy

pytestmark = pytest.mark.usefixtures("compile_anew")


def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, gqa: bool) -> Tensor:
    """Attend within each sequence alone."""
    out = [
        F.scaled_dot_product_attention(
            *(x[a:b].transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, scale=scale, enable_gqa=gqa
        )[0].transpose(0, 1)
        for a, b in pairwise(cu_seqlens.tolist())
        if b > a
    ]
    return torch.cat(out)


@torch.library.custom_op("fastpack_tests::varlen", mutates_args=())
def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float, window: list[int], gqa: bool
) -> Tensor:
    """A kernel that torch knows as an operator, like torch's own varlen kernel."""
    assert window == [-1, 0]
    assert int(cu_seqlens.diff().max()) <= longest
    return attend(q, k, v, cu_seqlens, scale, gqa)


@torch.library.custom_op("fastpack_tests::varlen_backward", mutates_args=())
def varlen_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    _, back = torch.func.vjp(lambda q, k, v: attend(q, k, v, cu_seqlens, scale, gqa), q, k, v)
    dq, dk, dv = back(grad)
    return dq, dk, dv


@varlen.register_fake
def _(q: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@varlen_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(map(torch.empty_like, (q, k, v)))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, cu_seqlens, _, ctx.scale, _, ctx.gqa = inputs
    ctx.save_for_backward(q, k, v, cu_seqlens)


def _back(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    result = torch.ops.fastpack_tests.varlen_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.gqa)
    return *result, *[None] * 5


varlen.register_autograd(_back, setup_context=_keep)


def fake_varlen_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    return torch.ops.fastpack_tests.varlen(q, k, v, cu_q, max_q, scale, list(window_size), enable_gqa)


def read_lengths(call: AttentionCall) -> Tensor:
    """Negative control: a backend that reads the lengths."""
    assert sum(call.packed.lengths) == call.packed.total_tokens
    return torch_varlen.run(call)


RANDOM_BATCHES = [
    tuple(torch.randint(1, 60, (1 + seed % 7,), generator=torch.Generator().manual_seed(seed)).tolist())
    for seed in range(20)
]
FEW = 6


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("dynamic", "broken", "loss"),
    [
        (None, None, None),
        (False, None, None),
        (None, None, "fused"),
        (False, "lengths are read", None),
        (False, "no buckets", None),
    ],
)
def test_no_more_compilations_than_buckets(
    monkeypatch: pytest.MonkeyPatch, dynamic: bool | None, broken: str | None, loss: Any
) -> None:
    """Both passes compile once a bucket, with the gradients of sequences alone; each of two mistakes costs more."""
    leaks = broken == "lengths are read"
    run = read_lengths if leaks else torch_varlen.run
    backend = SimpleNamespace(run=run, rejects=lambda shape: None, SERVES=torch_varlen.SERVES)
    monkeypatch.setitem(BACKENDS, "torch_varlen", backend)  # type: ignore[arg-type]
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", fake_varlen_attn)
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_TRAINED", 64)  # several to a batch
    torch_varlen._asks_for_groups.cache_clear()  # type: ignore[attr-defined]
    stock = tiny_model("llama", num_hidden_layers=1)
    model = fastpack.patch(copy.deepcopy(stock), loss=loss)
    compiler = AotEagerAndRecordGraphs()
    compiled = torch.compile(model, fullgraph=not leaks, backend=compiler, dynamic=dynamic)
    buckets = set()
    for lengths in RANDOM_BATCHES[: FEW if broken else None]:
        buckets.add(collate(lengths)["packed_seq_lens"].bucket)
        batch = collate(lengths, bucketed=broken != "no buckets")
        result = step(compiled, batch, model)
        assert error(result, step(model, batch, model)) <= FLOAT32_BOUND
        assert against(result, alone(stock, lengths)) <= FLOAT32_BOUND
    torch_varlen._asks_for_groups.cache_clear()  # type: ignore[attr-defined]
    assert 3 <= len(buckets) <= 8
    frames, forwards, backwards = map(len, (compiler.graphs, compiler.fw_graphs, compiler.bw_graphs))
    assert any("fastpack_tests.varlen" in str(node.target) for node in compiler.graphs[0].graph.nodes)
    assert "fastpack_tests.varlen_backward" in str(compiler.bw_graphs[0].graph)
    if broken:
        assert min(forwards, backwards) > len(buckets)
    elif dynamic is None:
        assert max(frames, forwards, backwards) <= len(buckets)
    else:
        assert frames == forwards == backwards == len(buckets)


ON_A_GPU = [
    *((name, None) for name in ("torch_varlen", "auto", "flex", "mem_efficient", "triton_packed")),
    ("auto", "fused"),
    ("flex", "fused"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("attention", "loss"), ON_A_GPU)
def test_on_a_gpu(attention: str, loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own kernel is in the graph, others are operators: with inductor, all are as exact as eager."""
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_TRAINED", 64)  # several to a batch
    model = tiny_model("llama", head_dim=16).to("cuda", torch.bfloat16)
    wide = fastpack.patch(copy.deepcopy(model).float(), attention="reference")
    fastpack.patch(model, attention=attention, loss=loss)
    compiler = CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    off = error if loss is None else against  # the fused loss has no logits
    buckets = set()
    for lengths in RANDOM_BATCHES[:FEW]:
        batch = collate(lengths, device="cuda")
        buckets.add(batch["packed_seq_lens"].bucket)
        true = step(wide, batch, wide)
        result, eager = (step(run, batch, model) for run in (compiled, model))
        assert (result.logits[0].ndim == 0) == (eager.logits[0].ndim == 0) == (loss is not None)
        assert off(result, true) <= 1.5 * off(eager, true)
    assert compiler.frame_count <= len(buckets)
    graph = str(compiler.graphs[0].graph)
    assert ("packed_attention" in graph) == (attention not in ("torch_varlen", "auto"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dynamic", "bucketed", "backend"),
    [(None, True, "inductor"), (False, True, "aot_eager"), (False, False, "aot_eager")],
)
def test_no_more_compilations_than_buckets_on_a_gpu(dynamic: bool | None, bucketed: bool, backend: str) -> None:
    """With torch's own kernel and the loss without logits each frame has one backward; without buckets it has more."""
    model = fastpack.patch(
        tiny_model("llama", head_dim=16, num_hidden_layers=1).to("cuda", torch.bfloat16), loss="fused"
    )
    compiler = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, backend=compiler, dynamic=dynamic)
    buckets = set()
    for lengths in RANDOM_BATCHES[: None if bucketed else FEW]:
        buckets.add(collate(lengths)["packed_seq_lens"].bucket)
        batch = collate(lengths, bucketed=bucketed, device="cuda")
        result, eager = (step(run, batch, model) for run in (compiled, model))
        assert result.grads.keys() == eager.grads.keys()
        assert relative(result.loss, eager.loss) <= 1e-2
    assert "packed_attention" not in str(compiler.graphs[0].graph)
    if not bucketed:
        assert compiler.frame_count > len(buckets)
    elif dynamic is None:
        assert compiler.frame_count <= len(buckets)
    else:
        assert compiler.frame_count == len(buckets)
