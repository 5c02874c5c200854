"""Every backend computes packed causal attention, forward and gradients, as far as a CPU can show.

``reference`` and ``segments`` run unchanged. Kernels that need a GPU or a package are replaced by stand-ins that check
their arguments (``fake_packages.py``). The kernels themselves are measured in ``test_backends_gpu.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import fake_packages
import pytest
import torch
from attention_cases import (
    FACTORS,
    LENGTHS,
    Case,
    assert_exact,
    errors,
    formula,
    measure,
    pairwise,
    plain,
    product,
    truth_of,
    without,
)

from fastpack.attention_dispatch import BACKENDS, attend
from fastpack.backends import flash_attn, flex, reference, segments, torch_varlen, xformers
from fastpack.backends.call import AttentionCall
from fastpack.packing.seqlens import PackedSeqLens

Pretend = Callable[[int, int], None]

EVERYTHING = pairwise(FACTORS)
PLAIN = pairwise(without("softcap", "sinks"))
CALLED = without("softcap", "sinks", lengths=("mixed", "ones", "alone"), head_dim=(8, 64))
CALLED_SAME_SIZES = {**CALLED, "value_dim": ("same",)}


def in_cpu_dtypes(cases: list[Case]) -> pytest.MarkDecorator:
    """Return every case in float64 and float32, and every third in bfloat16, which is slow on a CPU."""
    every = [(case, dtype) for dtype in (torch.float64, torch.float32) for case in cases]
    return pytest.mark.parametrize(("case", "dtype"), every + [(case, torch.bfloat16) for case in cases[::3]], ids=str)


def test_the_cover_is_one() -> None:
    """Any two values of two factors meet in some case, so that no pair is left untested."""
    names = tuple(FACTORS)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            met = {(getattr(case, first), getattr(case, second)) for case in EVERYTHING}
            assert met == {(a, b) for a in FACTORS[first] for b in FACTORS[second]}


@pytest.mark.parametrize("case", EVERYTHING, ids=str)
def test_plain_torch_and_the_formula_agree(case: Case) -> None:
    """The two yardsticks of these tests are independent, and so are their gradients."""
    result = errors(measure(plain, case.make(torch.float64)), truth_of(case, "cpu"))
    assert max(result.values()) < 1e-12, result


@in_cpu_dtypes(EVERYTHING)
def test_reference(case: Case, dtype: torch.dtype) -> None:
    assert_exact(reference.run, case, dtype)


@in_cpu_dtypes(PLAIN)
def test_segments(case: Case, dtype: torch.dtype) -> None:
    assert segments.rejects(case.make(dtype).shape) is None
    assert_exact(segments.run, case, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_full_product(lengths: str) -> None:
    for case in product({**FACTORS, "lengths": (lengths,)}):
        assert_exact(reference.run, case, torch.float32)
        if case.softcap is None and not case.sinks:
            assert_exact(segments.run, case, torch.float32)


@pytest.mark.parametrize("backend", ["reference", "segments"])
def test_half_precision_of_a_t4(backend: str) -> None:
    assert_exact(BACKENDS[backend].run, Case(head_dim=8, window=7), torch.float16)


@pytest.mark.parametrize("backend", ["reference", "segments"])
def test_naive_concatenation_fails_the_same_check(backend: str) -> None:
    """Negative control: one sequence of all tokens is far outside the bound."""
    case = Case()
    call = case.make(torch.float32)
    naive = replace(call, packed=PackedSeqLens.from_lengths([call.packed.total_tokens]))
    result = errors(measure(BACKENDS[backend].run, naive), truth_of(case, "cpu"))
    assert min(result.values()) > 0.1, result


@pytest.mark.parametrize("backend", ["reference", "segments"])
@pytest.mark.parametrize("window", [None, 7])
def test_a_sequence_is_not_moved_by_its_neighbours(backend: str, window: int | None) -> None:
    """NaN in one sequence reaches no other sequence: masked values are never multiplied by zero."""
    call = Case(window=window).make(torch.float32)
    begin, end = call.packed.cu_seqlens[2:4].tolist()
    spoilt = [t.detach().clone() for t in (call.q, call.k, call.v)]
    for tensor in spoilt:
        tensor[begin:end] = float("nan")
    before, after = BACKENDS[backend].run(call), BACKENDS[backend].run(call.with_qkv(*spoilt))
    assert torch.isnan(after[begin:end]).all()
    assert torch.equal(after[:begin], before[:begin])
    # the poisoned sequence shares a call with the next one, of equal length
    assert torch.equal(after[end:], before[end:])


@pytest.mark.parametrize("backend", ["reference", "segments"])
@pytest.mark.parametrize("lengths", [(90, 90), (520, 1)])
def test_dropout_drops_and_keeps_the_mean(backend: str, lengths: tuple[int, ...]) -> None:
    """A weight survives with probability 0.5 and is doubled. So ones average to one, but single outputs differ."""
    torch.manual_seed(0)
    packed = PackedSeqLens.from_lengths(lengths)
    q, k = (torch.randn(packed.total_tokens, 2, 8) for _ in range(2))
    call = AttentionCall(q, k, torch.ones(packed.total_tokens, 2, 8), packed, 0.3, dropout=0.5)
    outs = torch.stack([BACKENDS[backend].run(call) for _ in range(5)])
    assert outs.std(0).max() > 0.5
    assert abs(outs.mean() - 1) < 0.05
    assert attend(replace(call, dropout=0.0), backend).sub(1).abs().max() < 1e-5


def test_the_gradient_of_sinks_is_rounded_once() -> None:
    """It is not rounded once for each sequence: in bfloat16, sixty roundings would add up to several percent."""
    total = 60 * 11 // 2
    call = replace(
        Case(sinks=True).make(torch.bfloat16),
        packed=PackedSeqLens.from_lengths([5, 6] * 30),
        **{name: torch.randn(total, heads, 64).bfloat16() for name, heads in (("q", 4), ("k", 2), ("v", 2))},
    )
    grads: list[torch.Tensor] = []
    for dtype, run in ((torch.bfloat16, reference.run), (torch.float64, formula)):
        sinks = call.sinks.detach().to(dtype).requires_grad_()
        out = run(replace(call.with_qkv(*(t.to(dtype) for t in (call.q, call.k, call.v))), sinks=sinks))
        out.backward(out.detach())  # every sequence pulls the same way, so that nothing cancels
        grads.append(sinks.grad.double())
    assert ((grads[0] - grads[1]).abs() <= grads[1].abs() * torch.finfo(torch.bfloat16).eps).all()


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", pairwise({**FACTORS, "head_dim": (16, 64)}), ids=str)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_forward(case: Case, eager_flex: None) -> None:
    """This covers its block mask, softcap, grouped heads, and sinks through the log-sum-exp; a CPU has no backward."""
    out = flex.run(case.make(torch.float64, requires_grad=False))
    truth = truth_of(case, "cpu").out
    assert out.dtype == torch.float64
    assert float((out - truth).abs().max() / truth.abs().max()) < 1e-12


FLASH_CASES = {
    2: [*pairwise(CALLED_SAME_SIZES), Case(softcap=1.5), Case(softcap=1.5, window=7)],
    3: [*pairwise(CALLED_SAME_SIZES), Case(softcap=1.5), Case(softcap=1.5, window=7)],
    4: pairwise({**CALLED_SAME_SIZES, "head_dim": (32, 64)}),
}


@pytest.mark.parametrize(("generation", "case"), [(g, c) for g, cases in FLASH_CASES.items() for c in cases], ids=str)
def test_flash_attn_call(generation: int, case: Case, capable_cpu: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_packages.install_flash_attn(monkeypatch, generation)
    capable_cpu(9, 0)
    monkeypatch.setattr(flash_attn, "HALF_DTYPES", (torch.float64,))
    monkeypatch.setattr("fastpack.backends.limits.HALF_DTYPES", (torch.float64,))
    assert flash_attn.rejects(case.make(torch.float64).shape) is None
    assert_exact(flash_attn.run, case, torch.float64)
    (call,) = calls
    assert call["generation"] == generation
    longest = max(LENGTHS[case.lengths])
    none = None if generation == 4 else -1
    limited = case.window is not None and case.window < longest
    assert call["window_size"] == ((case.window - 1, 0) if limited else (none, none))


def test_flash_attn_4_takes_sinks_where_no_gradient_is_wanted(
    capable_cpu: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_packages.install_flash_attn(monkeypatch, 4)
    capable_cpu(9, 0)
    monkeypatch.setattr(flash_attn, "HALF_DTYPES", (torch.float64,))
    case = Case(sinks=True)
    with torch.no_grad():
        out = flash_attn.run(case.make(torch.float64, requires_grad=False))
    assert calls[0]["learnable_sink"].dtype == torch.bfloat16
    truth = truth_of(case, "cpu").out
    assert float((out - truth).abs().max() / truth.abs().max()) < 1e-12


def test_flash_attn_2_drops(capable_cpu: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_packages.install_flash_attn(monkeypatch, 2, 3)
    capable_cpu(9, 0)
    call = replace(Case().make(torch.bfloat16), dropout=0.1)
    flash_attn.run(call)
    assert [(c["generation"], c["dropout_p"]) for c in calls] == [(2, 0.1)], "3 has no dropout"


def test_flash_attn_returns_the_output_of_a_pair(capable_cpu: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Early releases of generation 3 return the log-sum-exp too."""
    call = Case().make(torch.bfloat16)
    fake_packages.module(monkeypatch, "flash_attn_interface", flash_attn_varlen_func=lambda q, *_, **__: (q * 2, None))
    capable_cpu(9, 0)
    assert torch.equal(flash_attn.run(call), call.q * 2)


@pytest.mark.parametrize("asks_for_gqa", [False, True], ids=["torch 2.11", "torch 2.13"])
@pytest.mark.parametrize("case", pairwise(CALLED_SAME_SIZES), ids=str)
def test_torch_varlen_call(case: Case, asks_for_gqa: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_packages.install_varlen_attn(monkeypatch, asks_for_gqa=asks_for_gqa)
    assert_exact(torch_varlen.run, case, torch.float64)
    limited = case.window is not None and case.window < max(LENGTHS[case.lengths])
    assert calls == [{"window_size": (case.window - 1 if limited else -1, 0)}]


@pytest.mark.parametrize("case", pairwise(CALLED), ids=str)
def test_xformers_call(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_packages.install_xformers(monkeypatch)
    assert xformers._unusable() is None
    assert_exact(xformers.run, case, torch.float64)
    (call,) = calls
    limited = case.window is not None and case.window < max(LENGTHS[case.lengths])
    assert call["attn_bias"].window == (case.window if limited else None)
    assert call["p"] == 0.0


def test_xformers_builds_its_bias_once_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_packages.install_xformers(monkeypatch)
    call = Case(window=7).make(torch.float32)
    other = replace(call, window=None)
    for one in (call, call, other, other):
        xformers.run(one)
    biases = [c["attn_bias"] for c in calls]
    assert biases[0] is biases[1]
    assert biases[2] is biases[3]
    assert biases[0] is not biases[2]
    xformers.run(replace(call, dropout=0.25))
    assert calls[-1]["p"] == 0.25


def test_a_call_that_cannot_be_is_refused() -> None:
    call = Case().make(torch.float32)
    with pytest.raises(ValueError, match=r"packed_seq_lens has 80"):
        replace(call, k=call.k[:-1])
    with pytest.raises(ValueError, match="at least 1, not 0"):
        replace(call, window=0)


def test_grouped_heads_repeat_each_head_for_its_queries() -> None:
    """Head h of the queries reads head h // groups of the keys, not h % heads."""
    call = Case(groups=2).make(torch.float32)
    k, v = call.expanded_kv()
    assert k.shape[1] == v.shape[1] == 4
    for head in range(4):
        assert torch.equal(k[:, head], call.k[:, head // 2])
        assert torch.equal(v[:, head], call.v[:, head // 2])
