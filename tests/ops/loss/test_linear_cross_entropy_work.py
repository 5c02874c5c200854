"""The costs of linear cross-entropy (memory, matmuls, waiting), and its use with autograd and the compiler."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cross_entropy_cases import (
    CASES,
    CHUNK,
    FLOAT32_BOUND,
    HALF_BOUND,
    HALF_DTYPES,
    IMPLEMENTATIONS,
    NAMES,
    REDUCTIONS,
    Case,
    T,
    computed,
    defined,
    device_of,
    draw,
    on_gpu,
    recorded,
    run,
)
from op_checks import relative
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastpack.cuda_graphs.recorder import no_synchronisation
from fastpack.ops.implementation import Implementation
from fastpack.ops.loss import linear_cross_entropy as module
from fastpack.ops.loss.chunks import chunk_rows
from fastpack.ops.loss.linear_cross_entropy import Reduction, linear_cross_entropy
from fastpack.ops.loss.segment_sums import segment_sums

# --- work and memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_more_than_a_chunk_of_logits_exists(reduction: Reduction) -> None:
    case = Case(lora=True, shape=(10 * CHUNK, 8, 200))
    inputs, labels = draw(case)
    with recorded() as recorder:
        run(computed, inputs, labels, reduction=reduction)
    assert recorder.largest == CHUNK * 256, "rows of 200 are laid out in whole vectors"
    with recorded() as recorder:
        run(defined, inputs, labels)
    assert recorder.largest == 10 * CHUNK * 200


def test_the_chunk_is_below_a_twentieth() -> None:
    tokens, vocab = 16_384, 128_256
    assert 20 * chunk_rows(tokens, module.CHUNK) * vocab < tokens * vocab
    assert 512 <= chunk_rows(tokens, module.CHUNK) <= 1024
    for tokens in (1, 500, 768, 769, 3000, 16_384):
        rows = chunk_rows(tokens, module.CHUNK)
        chunks = -(-tokens // rows)
        assert rows <= module.CHUNK
        assert tokens - (chunks - 1) * rows > rows - 128 * chunks, "about even"


def test_only_needed_gradients_are_computed() -> None:
    inputs, labels = draw(Case(bias=True, lora=True))
    kept = int((labels != -100).sum())
    chunks = -(-kept // CHUNK)
    with recorded() as recorder, torch.no_grad():
        computed({name: x.clone().requires_grad_() for name, x in inputs.items()}, labels)
    forward = 3 * chunks  # base, A and B
    assert len(recorder.product_shapes) == forward
    for trained, products in (("hidden", 3), ("weight", 1), ("bias", 0), ("a", 2), ("b", 1)):
        with recorded() as recorder:
            run(computed, inputs, labels, frozen=tuple({*NAMES} - {trained}))
        assert len(recorder.product_shapes) == forward + products * chunks, trained


def test_nothing_waits_for_the_device() -> None:
    inputs, labels = draw(Case(bias=True, lora=True))
    offsets = torch.tensor([0, 11, 11, 30, T])
    for reduction in REDUCTIONS:
        with recorded() as recorder:
            run(computed, inputs, labels, reduction=reduction, num_kept=30)
        assert not recorder.waits
    with recorded() as recorder:
        segment_sums(torch.randn(T), offsets)
    assert not recorder.waits
    with recorded() as recorder:
        run(computed, inputs, labels)
    assert recorder.waits, "on a CPU, where it costs nothing, the labels are counted"


def test_a_dequantised_weight_is_made_once_each_way() -> None:
    inputs, labels = draw(Case())
    weights: list[Tensor] = []

    def weight() -> Tensor:
        weights.append(inputs["weight"])
        return inputs["weight"]

    for reduction, times in (("sum", 1), ("mean", 1), ("none", 2)):
        weights.clear()
        hidden = inputs["hidden"].clone().requires_grad_()
        linear_cross_entropy(hidden, weight, labels, reduction=reduction, chunk=CHUNK).sum().backward()
        assert len(weights) == times
        reference = inputs["hidden"].clone().requires_grad_()
        defined({**inputs, "hidden": reference}, labels, reduction=reduction).sum().backward()
        assert hidden.grad is not None
        assert reference.grad is not None
        assert relative(hidden.grad, reference.grad) <= FLOAT32_BOUND


# --- autograd ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_retained_graph(implementation: Implementation, reduction: Reduction) -> None:
    inputs, labels = draw(CASES["everything"], device=device_of(implementation))
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    out = computed(leaves, labels, reduction=reduction, implementation=implementation)
    ones = torch.ones_like(out)
    first = torch.autograd.grad(out, list(leaves.values()), 3 * ones, retain_graph=True)
    second = torch.autograd.grad(out, list(leaves.values()), 3 * ones, retain_graph=True)
    third = torch.autograd.grad(out, list(leaves.values()), 1.5 * ones)
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, 2 * c)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_stay_in_their_place(implementation: Implementation, reduction: Reduction) -> None:
    """They are final after the forward, the mean's divisor included: a loss that is not scaled changes no bit."""
    inputs, labels = draw(Case(bias=True, shape=(50, 40, 130)), device=device_of(implementation))
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    copies: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        copies[x.data_ptr()] = x.clone()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = computed(leaves, labels, reduction=reduction, implementation=implementation)
    elsewhere = torch.autograd.grad(out, list(leaves.values()), retain_graph=True)
    actual = torch.autograd.grad(out, list(leaves.values()))
    for a, b in zip(elsewhere, actual, strict=True):
        assert a.data_ptr() not in copies, "a retained graph needs them again"
        assert torch.equal(a, copies[b.data_ptr()])
        assert torch.equal(b, a)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_hooks_may_hand_back_other_strides(implementation: Implementation) -> None:
    inputs, labels = draw(Case(bias=True, shape=(50, 40, 130)), device=device_of(implementation))
    truth = run(defined, inputs, labels)

    def function(leaves: dict[str, Tensor], labels: Tensor) -> Tensor:
        padded = torch.autograd.graph.saved_tensors_hooks(lambda x: F.pad(x, (0, 8)), lambda x: x[..., :-8])
        with padded:
            return computed(leaves, labels, implementation=implementation)

    actual = run(function, inputs, labels)
    for key, value in truth.items():
        assert relative(actual[key], value) <= FLOAT32_BOUND, key


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_backward_that_failed_is_not_tried_again(
    implementation: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If memory runs out at the last gradient, the first is scaled already; scaling it twice would be wrong."""
    device = device_of(implementation)
    inputs, labels = draw(Case(shape=(50, 40, 130)), torch.float16, device=device)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    loss, half = computed(leaves, labels, implementation=implementation), torch.tensor(0.5, device=device)

    def no_memory(*args: Any, **kwargs: Any) -> Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "empty_like", no_memory)  # which the weight's sum over chunks is rounded into
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward(half)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward(half)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_under_checkpointing(implementation: Implementation, use_reentrant: bool, reduction: Reduction) -> None:
    inputs, labels = draw(CASES["everything"], device=device_of(implementation))
    options: dict[str, Any] = {"reduction": reduction, "implementation": implementation}

    def function(leaves: dict[str, Tensor], labels: Tensor) -> Tensor:
        def inner(*values: Tensor) -> Tensor:
            return computed(dict(zip(inputs, values, strict=True)), labels, **options)

        return checkpoint(inner, *leaves.values(), use_reentrant=use_reentrant)

    truth = run(computed, inputs, labels, **options)
    actual = run(function, inputs, labels)
    assert all(torch.equal(actual[key], value) for key, value in truth.items())


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_under_autocast(implementation: Implementation, dtype: torch.dtype, reduction: Reduction) -> None:
    """Weights are float32, the loss is scaled as for fp16, and the backward runs outside autocast, as in a trainer."""
    case = Case(bias=True, lora=True, shape=(100, 40, 130))
    device = device_of(implementation)
    inputs, labels = draw(case, device=device)

    def within(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run_within(*args: Any, **kwargs: Any) -> Tensor:
            with torch.autocast(device, dtype=dtype):
                return function(*args, **kwargs)

        return run_within

    settings: dict[str, Any] = {"reduction": reduction, "factor": 1024.0}
    truth = run(defined, inputs, labels, dtype=torch.float64, **settings)
    stock = run(within(defined), inputs, labels, **settings)
    actual = run(within(computed), inputs, labels, implementation=implementation, **settings)
    for key in ("hidden", "weight", "a", "b", "bias"):
        error = relative(actual[key], truth[key])
        assert 1e-5 < error < 0.1, key
        assert error <= HALF_BOUND * relative(stock[key], truth[key]), key


def test_tied_embeddings() -> None:
    ids = torch.arange(12) % 9
    labels = ids.roll(-1)
    grads = []
    for function in (defined, computed):
        weight = torch.randn(11, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
        function({"hidden": torch.tanh(F.embedding(ids, weight)), "weight": weight}, labels).backward()
        assert weight.grad is not None
        grads.append(weight.grad)
    assert relative(grads[1], grads[0]) <= FLOAT32_BOUND


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_compiles_whole(reduction: Reduction) -> None:
    torch.compiler.reset()
    inputs, labels = draw(CASES["everything"])

    def function(leaves: dict[str, Tensor], labels: Tensor) -> Tensor:
        return computed(leaves, labels, softcap=3.0, reduction=reduction)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    truth = run(function, inputs, labels)
    actual = run(compiled, inputs, labels)
    for key, value in truth.items():
        assert relative(actual[key], value) <= FLOAT32_BOUND, key


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_memory_on_a_gpu() -> None:
    tokens, size, vocab = 16_384, 4096, 128_256
    hidden = torch.randn(tokens, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, size, device="cuda", dtype=torch.bfloat16) * 0.02
    labels = torch.randint(0, vocab, (tokens,), device="cuda")
    linear_cross_entropy(hidden, weight, labels, reduction="mean").backward()  # cuBLAS makes its workspace
    hidden.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, labels, reduction="mean").backward()
    gradient = hidden.numel() * 2
    extra = torch.cuda.max_memory_allocated() - before - gradient
    assert extra < tokens * vocab * 2 / 20


@pytest.mark.gpu
def test_captured_in_a_graph_without_waiting() -> None:
    inputs, labels = draw(Case(bias=True, lora=True, shape=(300, 64, 1000)))
    gpu, labels = on_gpu(inputs), labels.cuda()
    offsets = torch.tensor([0, 100, 260, 300], device="cuda")

    def step() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in gpu.values()]
        named = dict(zip(gpu, leaves, strict=True))
        loss = computed(named, labels, reduction="mean", chunk=128)
        loss = loss + segment_sums(computed(named, labels, reduction="none", chunk=128), offsets).float().square().sum()
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    expected = step()
    with no_synchronisation():
        step()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
    graph.replay()
    for a, b in zip(captured, expected, strict=True):
        assert relative(a, b) <= FLOAT32_BOUND
    assert math.isfinite(float(captured[0]))
