"""Attention packages that are installed on this machine, not stand-ins: all generations of FlashAttention, xformers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from attention_cases import Case, assert_exact, formula, measure, pairwise, without
from torch import Tensor

from fastpack import BackendUnavailableError
from fastpack.attention_dispatch import attend
from fastpack.backends import flash_attn, xformers
from fastpack.backends.call import AttentionCall
from fastpack.cuda_graphs.recorder import no_synchronisation

pytestmark = pytest.mark.gpu

BF16, HALF = torch.bfloat16, torch.float16
PACKAGES = ("flash_attn 2", "flash_attn 3", "flash_attn 4", "xformers")
CASES = pairwise(without("softcap", "sinks", "value_dim"))

Attend = Callable[[AttentionCall], Tensor]


@pytest.fixture(autouse=True)
def _nothing_installed() -> None:
    """Replace the other tests' fixture of this name, which hides packages: here installed packages are tested."""
    for probe in (flash_attn._installed, flash_attn._import_error, flash_attn._function, xformers._unusable):
        probe.cache_clear()


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return one package's name, or skip with the reason why it can't run here."""
    name, _, number = request.param.partition(" ")
    if name == "flash_attn":
        alone = tuple(g for g in flash_attn.GENERATIONS if g.number == int(number))
        monkeypatch.setattr(flash_attn, "GENERATIONS", alone)
    reason = sys.modules[f"fastpack.backends.{name}"].rejects(Case().make(BF16, "cuda").shape)
    if reason is not None:
        pytest.skip(f"THIS MACHINE, {request.param}: {reason}")
    return str(request.param)


@pytest.fixture
def run(package: str) -> Attend:
    return partial(attend, attention=package.partition(" ")[0])


@pytest.mark.parametrize("dtype", [BF16, HALF], ids=str)
@pytest.mark.parametrize("case", [*CASES, *(Case(head_dim=n, window=7) for n in (40, 96, 192, 256))], ids=str)
def test_exact(run: Attend, package: str, case: Case, dtype: torch.dtype) -> None:
    """In half precision within 1.5 times the error of plain torch operations in that dtype."""
    if package == "flash_attn 4" and case.head_dim % 32:
        with pytest.raises(BackendUnavailableError, match="wrong gradients"):
            run(case.make(dtype, "cuda"))
        return
    assert_exact(run, case, dtype, "cuda")


@pytest.mark.parametrize("case", [Case(softcap=1.5), Case(softcap=1.5, window=7, head_dim=128)], ids=str)
def test_softcap(run: Attend, package: str, case: Case) -> None:
    if package not in ("flash_attn 2", "flash_attn 3"):
        pytest.skip(f"{package} has no softcap that we count on")
    assert_exact(run, case, BF16, "cuda")


def test_sinks_of_a_forward(run: Attend, package: str) -> None:
    if package != "flash_attn 4":
        pytest.skip(f"{package} has no sinks")
    call = Case(sinks=True, head_dim=128).make(BF16, "cuda", requires_grad=False)
    assert call.sinks is not None
    truth = formula(call)
    without_sinks = formula(replace(call, sinks=None))
    error = (run(call) - truth).abs().max()
    assert error < 0.02 * truth.abs().max()
    assert error < 0.1 * (truth - without_sinks).abs().max()


@pytest.mark.parametrize("window", [None, 7])
def test_a_sequence_is_not_moved_by_its_neighbours(run: Attend, window: int | None) -> None:
    call = Case(window=window).make(BF16, "cuda")
    begin, end = 8, 27
    before = run(call)
    changed = [t.detach().clone() for t in (call.q, call.k, call.v)]
    for tensor in changed:
        tensor[begin:end] = 100 * torch.randn_like(tensor[begin:end])
    after = run(call.with_qkv(*changed))
    assert not torch.equal(after[begin:end], before[begin:end])
    assert torch.equal(after[:begin], before[:begin])
    assert torch.equal(after[end:], before[end:])


@pytest.mark.parametrize("window", [None, 7])
def test_no_layer_waits_for_the_gpu(run: Attend, window: int | None) -> None:
    case = Case(window=window)
    for _ in range(2):
        measure(run, case.make(BF16, "cuda"))
    call = case.make(BF16, "cuda", seed=3)
    torch.cuda.synchronize()
    with no_synchronisation():
        for _ in range(2):
            run(call).sum().backward()
    assert call.q.grad is not None
