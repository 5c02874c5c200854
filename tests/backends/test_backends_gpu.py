"""Every backend's real kernel on a GPU: exact in both passes, isolated, without waiting, in linear memory.

FlashAttention's packages and xformers are replaced by torch's own varlen kernel behind their signatures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import fake_packages
import pytest
import torch
from attention_cases import FACTORS, LENGTHS, Case, Outcome, assert_exact, measure, pairwise, without

from fastpack.attention_dispatch import BACKENDS, attend, choose
from fastpack.backends import flex
from fastpack.backends.call import AttentionCall
from fastpack.cuda_graphs.recorder import no_synchronisation
from fastpack.packing.seqlens import PackedSeqLens

pytestmark = pytest.mark.gpu

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32

SAME_SIZES = pairwise(without("softcap", "sinks", "value_dim"))
PLAIN = pairwise(without("softcap", "sinks"))
# each variant is compiled: few, and the ones that meet every part of the mask and of the score
COMPILED = pairwise(
    {**FACTORS, "lengths": ("blocks", "mixed"), "head_dim": (64,), "groups": (1, 4), "window": (None, 7)}
)

CASES: dict[str, tuple[tuple[torch.dtype, ...], list[Case]]] = {
    "flash_attn": ((BF16, HALF), SAME_SIZES),
    "torch_varlen": ((BF16, HALF), [*SAME_SIZES, *(Case(head_dim=n, window=7) for n in (40, 96, 192, 256))]),
    "cudnn": ((BF16, HALF), pairwise(without("softcap", "sinks", "value_dim", "window"))),
    "xformers": ((BF16, HALF), SAME_SIZES),
    "mem_efficient": ((BF16, HALF, FLOAT), [*PLAIN, Case(head_dim=320), Case(head_dim=192, value_dim="other")]),
    "flex": ((BF16, FLOAT), COMPILED),
    "triton_packed": ((BF16, HALF), pairwise({**FACTORS, "head_dim": (16, 64), "groups": (1, 2, 4, 7)})),
    "segments": ((BF16, HALF, FLOAT), PLAIN),
    "reference": ((BF16, HALF, FLOAT), pairwise(FACTORS)),
}
EXTRA: list[tuple[str, torch.dtype, Case]] = [
    *(("cudnn", dtype, Case(head_dim=n, lengths="long")) for n in (128, 256) for dtype in (BF16, HALF)),
    ("mem_efficient", FLOAT, Case(head_dim=20)),
    ("flex", HALF, Case(softcap=1.5, sinks=True, window=7)),
    ("flex", BF16, Case(head_dim=128, groups=2, window=128, lengths="blocks")),
    ("flex", BF16, Case(lengths="long", window=129)),
    ("flex", BF16, Case(lengths="alone")),
    ("flex", BF16, Case(lengths="ones", sinks=True)),
    ("flex", BF16, Case(head_dim=96)),
    ("flex", BF16, Case(head_dim=20)),
    *(("triton_packed", FLOAT, case) for case in (Case(), Case(head_dim=128, window=7), Case(softcap=1.5, sinks=True))),
    *(("triton_packed", BF16, Case(head_dim=n, window=7, groups=1)) for n in (20, 40, 80, 96)),
    ("triton_packed", BF16, Case(head_dim=192, value_dim="other", lengths="long")),
    ("triton_packed", BF16, Case(head_dim=256, lengths="long")),
    ("triton_packed", FLOAT, Case(head_dim=256)),
    ("triton_packed", BF16, Case(groups=17, sinks=True)),
    ("triton_packed", BF16, Case(groups=32, lengths="blocks", head_dim=128)),
    ("triton_packed", BF16, Case(groups=7, lengths="long", window=129)),
]
TWO_WAY = pairwise(
    {**FACTORS, "lengths": ("mixed", "long", "blocks"), "head_dim": (64, 128), "two_way": ("in_window", "whole")}
)
EXTRA += [("reference", BF16, case) for case in TWO_WAY]
EXTRA += [("segments", dtype, case) for case in TWO_WAY for dtype in (BF16, FLOAT) if not (case.softcap or case.sinks)]
EXTRA += [("triton_packed", BF16, case) for case in TWO_WAY]
EXTRA += [
    (name, BF16, Case(lengths=lengths, head_dim=size, window=window, two_way=two_way, groups=groups))
    for name in ("triton_packed", "flex")
    for lengths, size, window, two_way, groups in (
        ("mixed", 64, 7, "in_window", 7),
        ("long", 64, None, "whole", 2),
        ("blocks", 128, 129, "whole", 4),
        ("long", 256, 129, "in_window", 2),
        ("mixed", 256, None, "whole", 8),
    )
]
EXTRA += [("triton_packed", FLOAT, case) for case in TWO_WAY[::3]]
EVERY = [(name, dtype, case) for name, (dtypes, cases) in CASES.items() for dtype in dtypes for case in cases] + EXTRA


def with_windows(names: Iterable[str], window: int) -> list[tuple[str, int | None]]:
    """Return each name without a window, and those that serve one with it."""
    return [
        (name, size)
        for name in sorted(names)
        for size in (None, window)
        if size is None or "window" in BACKENDS[name].SERVES
    ]


@pytest.fixture(autouse=True)
def _never_eager() -> Iterator[None]:
    """Fail at FlexAttention's limit of compilations, where it would run uncompiled in T x T memory and pass."""
    import torch._dynamo

    limits = {"recompile_limit": 200, "accumulated_recompile_limit": 1000, "fail_on_recompile_limit_hit": True}
    known = {name: value for name, value in limits.items() if hasattr(torch._dynamo.config, name)}
    with torch._dynamo.config.patch(known):
        yield


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_packages.install_flash_attn(monkeypatch, 2)
    fake_packages.install_xformers(monkeypatch)


def serve(name: str, call: AttentionCall) -> None:
    """Skip the test if this GPU can't serve the call. From Ampere on a GPU must serve every call of these tests."""
    reason = BACKENDS[name].rejects(call.shape)
    if reason is not None:
        if torch.cuda.get_device_capability() >= (8, 0):
            pytest.fail(f"{name} rejects {call.shape.describe()}: {reason}")
        pytest.skip(f"THIS GPU: {name} {reason}")
    assert choose(call.shape, name) == name


@pytest.mark.parametrize(("name", "dtype", "case"), EVERY, ids=str)
def test_exact(name: str, dtype: torch.dtype, case: Case) -> None:
    """In half precision the bound is 1.5 times the error of plain torch in that dtype; in float32 it is 1e-5."""
    serve(name, case.make(dtype, "cuda"))
    assert_exact(partial(attend, attention=name), case, dtype, "cuda")


@pytest.mark.parametrize("generation", [3, 4])
def test_later_generations_of_flash_attn(generation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("THIS GPU: generations 3 and 4 are preferred on Hopper")
    calls = fake_packages.install_flash_attn(monkeypatch, generation)
    for case in (Case(), Case(window=7), Case(window=1, groups=4), Case(lengths="long", head_dim=128)):
        assert_exact(partial(attend, attention="flash_attn"), case, BF16, "cuda")
    assert {call["generation"] for call in calls} == {generation}


@pytest.mark.parametrize(("name", "window"), with_windows(BACKENDS, 7))
def test_a_sequence_is_not_moved_by_its_neighbours(name: str, window: int | None) -> None:
    """Whatever one sequence holds, all other sequences' outputs are the same to the bit."""
    call = Case(window=window).make(BF16, "cuda")
    serve(name, call)
    begin, end = [0, 7, 8, 27, 46, 79, 80][2:4]
    before = attend(call, name)
    changed = [t.detach().clone() for t in (call.q, call.k, call.v)]
    for tensor in changed:
        tensor[begin:end] = 100 * torch.randn_like(tensor[begin:end])
    after = attend(call.with_qkv(*changed), name)
    assert not torch.equal(after[begin:end], before[begin:end])
    assert torch.equal(after[:begin], before[:begin])
    assert torch.equal(after[end:], before[end:])


@pytest.mark.parametrize(("name", "window"), with_windows(BACKENDS, 7))
def test_no_layer_waits_for_the_gpu(name: str, window: int | None) -> None:
    """This holds in both passes, for the first layer of a batch (which may build a mask) and for the next."""
    case = Case(window=window)
    warm = case.make(BF16, "cuda")
    serve(name, warm)
    for _ in range(2):
        measure(partial(attend, attention=name), warm)
    call = case.make(BF16, "cuda", seed=3)
    cotangent = torch.ones_like(call.v).repeat_interleave(call.groups, 1)
    torch.cuda.synchronize()
    with no_synchronisation():
        for _ in range(2):
            attend(call, name).backward(cotangent)
    assert call.q.grad is not None


@pytest.mark.parametrize(("name", "window"), with_windows(set(BACKENDS) - {"reference"}, 512))
def test_memory_grows_with_tokens_not_with_their_square(name: str, window: int | None) -> None:
    """One sequence of 32,768 tokens, forward and backward: T x T bytes would be 1 GiB, its tensors are 8 MiB each."""
    total = 32_768
    packed = PackedSeqLens.from_lengths([total], device="cuda")
    q, k, v = (torch.randn(total, 2, 64, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3))
    call = AttentionCall(q, k, v, packed, 0.125, window=window)
    serve(name, call)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(call, name).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < total * total // 4


@pytest.mark.parametrize("name", ["flash_attn", "torch_varlen", "cudnn", "mem_efficient", "flex", "triton_packed"])
def test_autocast(name: str) -> None:
    """Float32 heads reach the kernel in autocast's dtype, and their gradients come back in float32."""
    call = Case().make(FLOAT, "cuda")
    for dtype in (BF16, HALF):
        serve(name, call.with_qkv(*(t.detach().to(dtype) for t in (call.q, call.k, call.v))))
        with torch.autocast("cuda", dtype):
            out = attend(call, name)
        assert out.dtype == dtype
        grads = torch.autograd.grad(out.float().square().sum(), (call.q, call.k, call.v))
        assert all(grad.dtype == FLOAT and grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("dtype", [BF16, FLOAT], ids=str)
@pytest.mark.parametrize("name", ["mem_efficient", "segments"])
def test_dropout_is_the_same_in_backward(name: str, dtype: torch.dtype) -> None:
    """The backward drops the same weights as the forward, since the output is linear in v.

    Then the output's square equals the product of v and its gradient, with the output as cotangent. With other weights
    it would be about half of that.
    """
    call = replace(Case(lengths="long", groups=1).make(dtype, "cuda"), dropout=0.5)
    serve(name, call)
    torch.manual_seed(0)
    kept = attend(replace(call, dropout=0.0), name)
    out = attend(call, name)
    assert (out - kept).abs().max() > 0.1
    out.backward(out.detach())
    square, product = out.double().square().sum(), (call.v.grad.double() * call.v.double()).sum()
    assert abs(square - product) / square < (1e-2 if dtype == BF16 else 1e-5)


def test_flex_does_not_compile_again_for_other_lengths() -> None:
    """Torch silently stops compiling after eight variants, so new lengths must not make a variant each."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    serve("flex", Case().make(BF16, "cuda"))
    torch._dynamo.reset()
    flex._compiled.cache_clear()
    counters.clear()
    compiled: list[int] = []
    # on and off a multiple of a block's 128 tokens may be two variants
    for lengths in ([70, 60], [200, 56], [200, 1, 30], [5, 5, 5, 400], [900], [1] * 140, [333, 222], [64] * 12):
        packed = PackedSeqLens.from_lengths(lengths, device="cuda")
        q, k, v = (torch.randn(sum(lengths), 2, 64, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3))
        for window in (None, 16):
            attend(AttentionCall(q, k, v, packed, 0.125, window=window), "flex").sum().backward()
        compiled.append(counters["stats"]["unique_graphs"])
    assert compiled[-1] == compiled[3], compiled


def test_what_auto_takes_here() -> None:
    """Packages are replaced by stand-ins; the kernel that ran must be the chosen one."""
    call = Case(head_dim=32).make(BF16, "cuda")  # on Hopper `auto` takes our own kernel for heads of 64 to 128
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("THIS GPU: FlashAttention needs compute capability 8.0")
    assert choose(call.shape) == "flash_attn"
    assert choose(replace(call, softcap=1.5).shape, "flex") == "flex"
    outs: dict[str, Any] = {name: attend(call, name) for name in ("auto", "flash_attn", "torch_varlen")}
    assert torch.equal(outs["auto"], outs["flash_attn"])
    assert torch.equal(outs["auto"], outs["torch_varlen"]), "the stand-in runs torch's own kernel"


def test_the_yardstick_is_sound() -> None:
    """Plain torch in bfloat16 is neither exact nor far off, so that 1.5 times its error means something."""
    from attention_cases import errors, plain, truth_of

    result: Outcome = measure(plain, Case().make(BF16, "cuda"))
    own = errors(result, truth_of(Case(), "cuda"))
    assert set(own) == {"out", "q", "k", "v"}
    assert all(1e-4 < error < 0.03 for error in own.values()), own
    assert LENGTHS["mixed"][:3] == (7, 1, 19)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_sequences_on_cudnn(head_dim: int) -> None:
    """Sequences of thousands of tokens, rounded up and not, against torch's varlen kernel."""
    packed = PackedSeqLens.from_lengths([8192, 4097, 1000, 3], device="cuda")
    q, k, v = (
        torch.randn(packed.total_tokens, heads, head_dim, device="cuda", dtype=BF16, requires_grad=True)
        for heads in (8, 2, 2)
    )
    call = AttentionCall(q, k, v, packed, head_dim**-0.5)
    serve("cudnn", call)
    ours, want = (measure(partial(attend, attention=name), call) for name in ("cudnn", "torch_varlen"))
    for name, value in {"out": want.out, **want.grads}.items():
        mine = {"out": ours.out, **ours.grads}[name].double()
        assert (mine - value.double()).norm() <= 1e-2 * value.double().norm(), name
