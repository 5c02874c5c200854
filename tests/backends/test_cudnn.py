"""cuDNN's backend without a GPU: its rows, and how they come from packed tokens and go back. A formula stands in."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import Case, assert_exact, bounds, errors, measure, truth_of
from machines import H100, Machine, shape
from torch import Tensor

from fastpack.attention_dispatch import choose
from fastpack.backends import cudnn
from fastpack.backends.call import AttentionCall
from fastpack.cuda_graphs.step import StaticSeqLens
from fastpack.packing.seqlens import PackedSeqLens

DOUBLE = torch.float64


def formula(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (scale * q @ k.mT).masked_fill(torch.ones(q.shape[2], q.shape[2]).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)


def gradients(grad: Tensor, qkv: Sequence[Tensor], out: Tensor, lse: Tensor, scale: float) -> Sequence[Tensor]:
    """Return the gradients, and check that ``out``, where it has one, and the log-sum-exps are those of the forward."""
    again, sums = formula(*qkv, scale)
    real = grad.abs().sum(-1) > 0
    assert torch.equal(sums, lse)
    assert torch.equal(again[real], out[real])
    return gradients_of_formula(grad, qkv, out, lse, scale)


def gradients_of_formula(
    grad: Tensor, qkv: Sequence[Tensor], out: Tensor, lse: Tensor, scale: float
) -> Sequence[Tensor]:
    leaves = [x.detach().requires_grad_() for x in qkv]
    with torch.enable_grad():
        return torch.autograd.grad(formula(*leaves, scale)[0], leaves, grad)


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Replace the kernel, and return the shapes ``[n, H, P, D]`` of the forwards that run."""
    ran: list[tuple[int, ...]] = []

    def forward(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        ran.append(tuple(q.shape))
        return formula(q, *others)

    monkeypatch.setattr(cudnn, "kernel_forward", forward)
    monkeypatch.setattr(cudnn, "kernel_backward", gradients)
    return ran


@pytest.fixture
def short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sequences of eight tokens be long ones, alone in their rows."""
    for name, value in {"LONG": 8, "SHORTEST": 8, "STEPS": 4}.items():
        monkeypatch.setattr(cudnn, name, value)


def never_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no row of a long sequence have zeros as padding if there are tokens after it."""
    rows = cudnn._Alone.rows
    monkeypatch.setattr(cudnn._Alone, "rows", lambda self, x, **_: rows(self, x))


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("lengths", ["mixed", "long", "alone", "ones"])
@pytest.mark.parametrize("groups", [1, 4])
def test_exact(
    lengths: str, groups: int, alone: bool, shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if alone:
        monkeypatch.setattr(cudnn, "LONG", cudnn.SHORTEST // 2)
    assert_exact(cudnn.run, Case(lengths=lengths, groups=groups), DOUBLE)
    assert any(shape[0] > 1 for shape in shapes) == (not alone and lengths in ("mixed", "ones"))


def test_padding_at_the_beginning_would_be_found(
    shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: real tokens come last in their rows, and see the padding before them."""
    case = Case()
    build = cudnn._group

    def shifted(packed: PackedSeqLens, device: torch.device) -> Sequence[cudnn._Alone | cudnn._Group]:
        groups = build(packed, device)
        for group in groups:
            assert isinstance(group, cudnn._Group)
            group.slots.copy_(group.count * group.length - 1 - group.slots.flip(0))
        return groups

    monkeypatch.setattr(cudnn, "_group", shifted)
    found = errors(measure(cudnn.run, case.make(DOUBLE)), truth_of(case, "cpu"))
    assert found["out"] > 1e6 * bounds(case, DOUBLE, "cpu")["out"]


def test_sequences_are_rows_of_few_lengths(shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each length is rounded up, but for a sequence that fills its row, which is not copied."""
    monkeypatch.setattr(cudnn, "SHORTEST", 8)
    packed = PackedSeqLens.from_lengths([5, 16, 8, 3])
    q, k, v = (torch.randn(32, 2, 8, dtype=DOUBLE, requires_grad=True) for _ in range(3))
    cudnn.run(AttentionCall(q, k, v, packed, 0.3)).sum().backward()
    assert sorted(shapes) == [(1, 2, 16, 8), (3, 2, 8, 8)]
    (alone,) = (group for group in packed.memo(("cudnn", q.device), lambda: ()) if isinstance(group, cudnn._Alone))
    assert alone.rows(q.detach()).untyped_storage().data_ptr() == q.untyped_storage().data_ptr()


@pytest.mark.usefixtures("shapes", "short_rows")
@pytest.mark.parametrize("zeros", [True, False])
def test_padding_may_be_the_sequence_after(zeros: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such rows are slices; only the gradient of the padding's queries must be zero, which the control shows."""
    case = Case(lengths="mixed")
    call = case.make(DOUBLE)
    groups = cudnn._group(call.packed, call.q.device)
    slices = [
        group.rows(call.k).untyped_storage().data_ptr() == call.k.untyped_storage().data_ptr() for group in groups
    ]
    assert any(slices)
    if not zeros:
        never_zeros(monkeypatch)
        monkeypatch.setattr(cudnn, "kernel_backward", gradients_of_formula)
    found = errors(measure(cudnn.run, call), truth_of(case, "cpu"))
    bound = bounds(case, DOUBLE, "cpu")
    assert (found["k"] <= bound["k"]) == zeros


@pytest.mark.usefixtures("shapes", "short_rows")
def test_gradients_that_are_expanded() -> None:
    """Copied rows have the steps of slices, but not of a gradient whose elements are one."""
    wide = torch.randn(25, 3 * 16, dtype=DOUBLE)
    call = AttentionCall(*(x.unflatten(1, (2, 8)) for x in wide.split(16, 1)), PackedSeqLens.from_lengths([16, 9]), 0.3)
    first, last = cudnn._group(call.packed, call.q.device)
    assert first.rows(call.q).stride()[2:] == last.rows(call.q).stride()[2:] == (48, 1)
    gradients = []
    for grad in (torch.ones(25, 2, 8, dtype=DOUBLE), torch.ones((), dtype=DOUBLE).expand(25, 2, 8)):
        leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
        gradients.append(torch.autograd.grad(cudnn.run(call.with_qkv(*leaves)), leaves, grad))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.usefixtures("shapes", "short_rows")
@pytest.mark.parametrize("zeros", [True, False])
def test_nothing_comes_from_the_padding(zeros: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even NaN, as it would if values were slices."""
    packed = PackedSeqLens.from_lengths([9, 16])
    q, k, v = torch.randn(3, 25, 2, 8, dtype=DOUBLE)
    want = cudnn.run(AttentionCall(q, k, v, packed, 0.3))[:9]
    for x in (q, k, v):
        x[9:] = torch.nan
    if not zeros:
        never_zeros(monkeypatch)
    assert torch.equal(cudnn.run(AttentionCall(q, k, v, packed, 0.3))[:9], want) == zeros


@pytest.mark.parametrize("rounded", [True, False])
def test_few_shapes(rounded: bool, shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for each shape would cost more than the step, so batches of any lengths must share them."""
    for name, value in {"LONG": 64, "SHORTEST": 16, "STEPS": 4}.items():
        monkeypatch.setattr(cudnn, name, value)
    if not rounded:
        monkeypatch.setattr(cudnn, "row_count", lambda sequences: sequences)
    source = random.Random(0)
    for _ in range(100):
        lengths = [source.randint(1, 128) for _ in range(source.randint(1, 60))]
        q, k, v = torch.randn(3, sum(lengths), 1, 8, dtype=DOUBLE)
        cudnn.run(AttentionCall(q, k, v, PackedSeqLens.from_lengths(lengths), 0.3))
    assert {shape[0] for shape in shapes if shape[2] >= 64} == {1}, "long ones are alone"
    assert (len(set(shapes)) <= 5 + 2 * 10) == rounded, "five long lengths, and two short ones of up to 32 rows"


def test_numbers_of_rows() -> None:
    counts = [cudnn.row_count(sequences) for sequences in range(1, 33)]
    assert sorted({*counts}) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    assert all(sequences <= count <= 1.5 * sequences for sequences, count in enumerate(counts, 1))


def test_from_long_on_alone() -> None:
    lengths = [cudnn.LONG, cudnn.LONG // 2, cudnn.LONG, 3, 3]
    groups = cudnn._group(PackedSeqLens.from_lengths(lengths), torch.device("cpu"))
    assert [type(group) for group in groups] == [cudnn._Alone, cudnn._Alone, cudnn._Alone, cudnn._Group]


@pytest.mark.parametrize("tokens", [1, 127, 1000, 4096, 4097, 50_000, 131_072, 131_073, 400_001])
def test_few_lengths_and_little_padding(tokens: int) -> None:
    rows = cudnn.row_length(tokens)
    assert tokens <= rows
    if tokens > cudnn.LONG:
        assert rows <= tokens * (1 + 1 / cudnn.STEPS) + 1
    if tokens > cudnn.LONGEST:
        assert rows == tokens
    octave = {cudnn.row_length(n) for n in range(16_385, 32_769)}
    assert len(octave) == cudnn.STEPS


def test_one_row_is_the_result(shapes: list[tuple[int, ...]]) -> None:
    """A sequence that fills its row is neither copied to a row nor back."""
    tokens = 2 * cudnn.SHORTEST
    q, k, v = torch.randn(3, tokens, 2, 8, dtype=DOUBLE)
    call = AttentionCall(q, k, v, PackedSeqLens.from_lengths([tokens]), 0.3)
    (group,) = cudnn._group(call.packed, call.q.device)
    rows = group.rows(call.q)
    assert group.put(rows, None, tokens).data_ptr() == call.q.data_ptr()
    two = PackedSeqLens.from_lengths([tokens, 3])
    first, second = cudnn._group(two, call.q.device)
    x = torch.randn(tokens + 3, 2, 8, dtype=DOUBLE)
    part = first.put(first.rows(x), None, tokens + 3)
    assert second.put(second.rows(x), part, tokens + 3) is part
    assert torch.equal(part, x)


def test_a_stored_result_is_not_computed_again(shapes: list[tuple[int, ...]]) -> None:
    class Store:
        def __init__(self) -> None:
            self.kept: list[Tensor] = []

        def save_attention(self, tensors: Sequence[Tensor], operations: int) -> None:
            assert operations > 0
            self.kept = [x.detach().clone() for x in tensors]

        def load_attention(self) -> list[Tensor] | None:
            return list(self.kept) or None

    call = Case(lengths="mixed").make(DOUBLE)
    store = Store()
    want = measure(cudnn.run, call)
    ran = len(shapes)
    for _ in range(2):
        again = measure(cudnn.run, AttentionCall(call.q, call.k, call.v, call.packed, call.scale, store=store))
        assert max(errors(again, want).values()) < 1e-12
    assert len(shapes) == 2 * ran, "the first of these two runs computes, the second loads"


def test_not_in_a_cuda_graph(machine: Machine) -> None:
    """Whose lengths are on the device alone; there `auto` takes what can be recorded."""
    machine(*H100)
    long = shape(total_tokens=8192, num_sequences=1, max_seqlen=8192)
    assert choose(long) == "cudnn"
    recorded = replace(long, knows_lengths=False)
    assert choose(recorded) == "triton_packed"
    assert "CUDA graph" in str(cudnn.rejects(recorded))
    static = StaticSeqLens(**{**vars(PackedSeqLens.from_lengths([8192])), "_memo": {}})
    q = torch.zeros(8192, 1, 8)
    assert not AttentionCall(q, q, q, static, 1.0).shape.knows_lengths
