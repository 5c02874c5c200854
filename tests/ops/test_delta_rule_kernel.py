"""The kernels of the gated delta rule against its definition, through Triton's interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch
from delta_cases import chunks_of, errors, gradients_of, make_inputs
from op_checks import DEVICES, count_calls, relative
from torch import Tensor

from fastpack.ops.delta_rule import delta_chunk, gated_delta_rule

pytest.importorskip("triton")
from fastpack.ops.kernels import delta_rule as kernels
from fastpack.ops.kernels import delta_rule_backward, launch

CASES = [
    # lengths, C, K and V, normalised
    ([1, 16, 20], 16, (16, 32), True),
    ([33], 16, (24, 16), True),
    ([15, 17], 16, (32, 40), False),
    ([2] * 4, 16, (16, 16), True),
    ([64, 70], 64, (16, 16), True),
]
ON_GPU = [([1, 63, 64, 65, 300, *[5] * 40], None, sizes, True) for sizes in ((128, 128), (96, 192), (256, 64))]


@pytest.mark.sample(7)
@pytest.mark.parametrize("by_channel", [False, True], ids=["per head", "per channel"])
@pytest.mark.parametrize(("device", "dtype", "case"), [
    *(pytest.param("cpu", torch.float32, case, marks=DEVICES[0].marks) for case in CASES),
    pytest.param("cpu", torch.float16, CASES[0], marks=DEVICES[0].marks),
    *(
        pytest.param("cuda", dtype, case, marks=pytest.mark.gpu)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for case in (*CASES, *ON_GPU)
    ),
], ids=str)  # fmt: skip
def test_kernels_are_the_definition(
    device: str,
    dtype: torch.dtype,
    case: tuple[list[int], int | None, tuple[int, int], bool],
    by_channel: bool,
    monkeypatch: pytest.MonkeyPatch,
    unwritten_memory_is_not_finite: None,
) -> None:
    lengths, size, sizes, normalised = case
    size = size or delta_chunk(torch.device(device), dtype)
    inputs = make_inputs(sum(lengths), by_channel=by_channel, sizes=sizes, device=device)
    if not normalised:
        inputs[:2] = [x / 6 for x in inputs[:2]]
    inputs = [x.to(dtype) if i < 3 else x for i, x in enumerate(inputs)]
    wide = [x.double() for x in inputs]
    forward, backward = (
        count_calls(monkeypatch, kernels, "forward"),
        count_calls(monkeypatch, delta_rule_backward, "backward"),
    )
    chunks = chunks_of(lengths, size, 2, device)
    want = gradients_of(lambda *xs: gated_delta_rule(*xs, chunks, normalised=normalised), wide)
    got = gradients_of(
        lambda *xs: gated_delta_rule(*xs, chunks, normalised=normalised, implementation="triton"), inputs
    )
    assert [x.dtype for x in got] == [dtype, *(x.dtype for x in inputs)]
    bound = 1e-5 if dtype == torch.float32 else 3 * torch.finfo(dtype).eps
    assert max(errors(got, want)) <= bound, errors(got, want)
    assert (len(forward), len(backward)) == (1, 1)
    if len(lengths) > 1:
        as_one = gated_delta_rule(*wide, chunks_of([sum(lengths)], size, 0, device), normalised=normalised)
        assert relative(got[0], as_one) > 10 * bound, "control: a dropped boundary"


@pytest.mark.gpu
@pytest.mark.parametrize("by_channel", [False, True], ids=["per head", "per channel"])
def test_a_gpu_runs_the_kernels(by_channel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch, kernels, "forward")
    inputs = make_inputs(20, by_channel=by_channel, device="cuda")
    chunks = chunks_of([20], 16, 0, "cuda")
    gated_delta_rule(*inputs, chunks, normalised=True)
    assert len(calls) == 1
    gated_delta_rule(*(x.double() for x in inputs), chunks, normalised=True)
    assert len(calls) == 1, "float64 has no kernels"


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("by_channel", [False, True], ids=["per head", "per channel"])
def test_a_gpu_full_of_programs(by_channel: bool, size: int) -> None:
    """In Qwen3-Next's size no element is off, and each run gives the same bits: no copy comes too early."""
    lengths = [700, 1, 690, 657]
    inputs = make_inputs(sum(lengths), by_channel=by_channel, sizes=(size, size), device="cuda", heads=(16, 32))
    inputs = [x.to(torch.bfloat16) if i < 3 else x for i, x in enumerate(inputs)]
    chunks = chunks_of(lengths, 64, 0, "cuda")
    want = gradients_of(lambda *xs: gated_delta_rule(*xs, chunks, normalised=True), [x.float() for x in inputs])
    runs = [
        gradients_of(lambda *xs: gated_delta_rule(*xs, chunks, normalised=True, implementation="triton"), inputs)
        for _ in range(5)
    ]
    assert max(errors(runs[0], want)) <= 3 * torch.finfo(torch.bfloat16).eps
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("by_channel", [False, True], ids=["per head", "per channel"])
@pytest.mark.parametrize("decay", [-30.0, 0.0])
def test_extreme_decays(decay: float, by_channel: bool, device: str) -> None:
    inputs = make_inputs(40, by_channel=by_channel, sizes=(16, 16), device=device)
    inputs[3] = torch.full_like(inputs[3], decay)
    inputs[3][7:9] = -1e-6
    chunks = chunks_of([37, 3], 32, 0, device)
    want = gradients_of(lambda *xs: gated_delta_rule(*xs, chunks, normalised=True), [x.double() for x in inputs])
    got = gradients_of(lambda *xs: gated_delta_rule(*xs, chunks, normalised=True, implementation="triton"), inputs)
    assert max(errors(got, want)) <= 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_views_are_read_where_they_are(device: str) -> None:
    """Queries, keys and values are slices of one projection; and the same bits come out in every run."""
    tokens, lengths = 20, [17, 3]
    inputs = make_inputs(tokens, sizes=(16, 16), device=device)
    joined = torch.cat([x.flatten(1) for x in inputs[:3]], 1)
    views = [x.unflatten(1, (-1, 16)) for x in joined.split([x[0].numel() for x in inputs[:3]], 1)]
    chunks = chunks_of(lengths, 16, 0, device)

    def run(*xs: Tensor) -> Tensor:
        return gated_delta_rule(*xs, chunks, normalised=False, implementation="triton")

    assert not any(x.is_contiguous() for x in views)
    for a, b in zip(gradients_of(run, [*views, *inputs[3:]]), gradients_of(run, inputs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_what_the_kernels_do_not_support(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, chunks = make_inputs(20, device=device), chunks_of([20], 16, 0, device)
    with pytest.raises(ValueError, match="chunks of 8 tokens"):
        gated_delta_rule(*inputs, chunks_of([20], 8, 0, device), normalised=True, implementation="triton")
    with pytest.raises(ValueError, match="float64"):
        gated_delta_rule(*(x.double() for x in inputs), chunks, normalised=True, implementation="triton")
    monkeypatch.setattr(launch, "shared_memory", lambda _: 2**10)
    with pytest.raises(ValueError, match="too large for this GPU"):
        gated_delta_rule(*inputs, chunks, normalised=True, implementation="triton")
