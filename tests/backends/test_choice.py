"""The backend that serves each shape on each machine, and the reasons why the others do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import fake_packages
import pytest
import torch
from attention_cases import Case
from machines import A100, B200, BF16, DOUBLE, FLOAT, H100, HALF, RTX4090, T4, V100, Machine, shape
from torch import Tensor

from fastpack import BackendUnavailableError
from fastpack.attention_dispatch import BACKENDS, AttentionCall, Visibility, attend, check_name, choose, explain
from fastpack.backends import (
    flash_attn,
    flex,
    mem_efficient,
    reference,
    segments,
    torch_varlen,
    triton_packed,
    xformers,
)
from fastpack.backends.call import AttentionShape
from fastpack.packing.seqlens import PackedSeqLens

# Nothing but torch is installed.
CHOICES: list[tuple[str, tuple[int, int] | None, AttentionShape]] = [
    ("segments", None, shape("cpu", FLOAT)),
    ("segments", None, shape("cpu", BF16, window=7, dropout=0.1)),
    ("segments", None, shape("mps", HALF)),
    ("segments", None, shape("cuda", HALF)),  # requested in advance, on a machine without a GPU
    ("reference", None, shape("cpu", FLOAT, softcap=50.0)),
    ("reference", None, shape("cpu", FLOAT, sinks=True)),
    ("mem_efficient", T4, shape(dtype=HALF)),
    ("mem_efficient", T4, shape(dtype=HALF, window=512)),
    ("mem_efficient", T4, shape(dtype=FLOAT)),
    ("segments", T4, shape(dtype=BF16)),
    ("reference", T4, shape(dtype=HALF, softcap=50.0)),
    ("mem_efficient", V100, shape(dtype=HALF)),
    ("torch_varlen", A100, shape(dtype=BF16)),
    ("torch_varlen", A100, shape(dtype=HALF, window=512)),
    ("torch_varlen", RTX4090, shape()),
    ("triton_packed", H100, shape()),
    ("triton_packed", H100, shape(window=1)),
    ("torch_varlen", B200, shape()),
    ("flex", A100, shape(softcap=50.0)),
    ("flex", H100, shape(softcap=50.0)),
    ("flex", H100, shape(sinks=True, window=128)),
    ("flex", H100, shape(dtype=FLOAT, softcap=50.0)),
    ("flex", H100, shape(head_dim=20, value_dim=20)),
    ("mem_efficient", H100, shape(dtype=FLOAT)),
    ("mem_efficient", H100, shape(dropout=0.1)),
    ("mem_efficient", H100, shape(head_dim=192)),
    ("mem_efficient", H100, shape(head_dim=320, value_dim=320)),
    ("mem_efficient", H100, shape(dtype=FLOAT, head_dim=20, value_dim=20)),
    ("segments", H100, shape(dtype=DOUBLE)),
    ("segments", H100, shape(head_dim=12, value_dim=12)),
    ("reference", A100, shape(dtype=HALF, softcap=50.0, head_dim=8, value_dim=8)),
    ("triton_packed", H100, shape(head_dim=128, value_dim=128)),  # it was measured to be faster here
    ("triton_packed", H100, shape(head_dim=96, value_dim=96, window=512)),
    ("triton_packed", H100, shape(head_dim=64, value_dim=64)),
    ("triton_packed", H100, shape(head_dim=64, value_dim=64, num_heads=14, num_kv_heads=2)),
    ("triton_packed", H100, shape(head_dim=64, value_dim=64, num_kv_heads=32)),
    ("torch_varlen", H100, shape(head_dim=48, value_dim=48)),  # and not to be faster here
    ("torch_varlen", A100, shape(head_dim=64, value_dim=64)),
    ("torch_varlen", A100, shape(head_dim=128, value_dim=128)),
    ("torch_varlen", H100, shape(head_dim=256, value_dim=256)),
    ("flex", H100, shape(head_dim=128, value_dim=128, softcap=50.0)),
    ("segments", H100, shape(dtype=BF16, head_dim=12, value_dim=12, dropout=0.1)),
    ("reference", H100, shape(dtype=DOUBLE, sinks=True)),
    ("reference", H100, shape(softcap=50.0, dropout=0.1)),
    ("reference", H100, shape(softcap=50.0, head_dim=8, value_dim=264)),
]


@pytest.mark.parametrize(("expected", "gpu", "requested"), CHOICES)
def test_choice(
    expected: str,
    gpu: tuple[int, int] | None,
    requested: AttentionShape,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if gpu is not None:
        machine(*gpu)
    assert choose(requested) == expected
    # the first backend of the table that can serve is chosen; it can be requested by name too
    able = [name for name, why in explain(requested).items() if why is None]
    assert able[0] == expected
    assert all(choose(requested, name) == name for name in able)


def test_the_table_is_in_order_of_preference() -> None:
    order = ["flash_attn", "torch_varlen", "cudnn", "xformers", "mem_efficient", "flex", "triton_packed"]
    order += ["segments", "reference"]
    assert list(BACKENDS) == order
    assert list(explain(shape("cpu"))) == order
    for backend in BACKENDS.values():
        assert backend.__doc__


def test_packages_are_preferred_where_they_serve(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_packages.install_flash_attn(monkeypatch, 2)
    fake_packages.install_xformers(monkeypatch)
    machine(*A100)
    assert choose(shape()) == "flash_attn"
    machine(*H100)
    assert choose(shape(head_dim=256, value_dim=256)) == "flash_attn"
    assert choose(shape(softcap=50.0)) == "flash_attn"
    assert choose(shape(head_dim=192)) == "xformers"
    assert choose(shape(dtype=FLOAT)) == "mem_efficient"
    assert choose(shape(sinks=True)) == "flex"
    machine(*T4)
    assert choose(shape(dtype=HALF)) == "xformers"


LONG = {"total_tokens": 8192, "num_sequences": 8, "max_seqlen": 1024}
SHORT = {"total_tokens": 8400, "num_sequences": 12, "max_seqlen": 700}
MIXED = {"total_tokens": 10_192, "num_sequences": 21, "max_seqlen": 8192}  # one of 8,192, twenty of 100
SCATTERED = {"total_tokens": 28_192, "num_sequences": 101, "max_seqlen": 8192}  # one of 8,192, a hundred of 200
UNKNOWN = {"total_tokens": 0, "num_sequences": 0, "max_seqlen": 0}


@pytest.mark.parametrize(
    ("generations", "gpu", "lengths", "expected"),
    [
        ((2,), H100, SHORT, "triton_packed"),
        ((2,), H100, LONG, "triton_packed"),
        ((2, 4), H100, SHORT, "triton_packed"),
        ((2, 4), H100, UNKNOWN, "triton_packed"),
        ((2, 4), H100, LONG, "flash_attn"),
        ((2, 4), H100, MIXED, "flash_attn"),
        ((), H100, MIXED, "cudnn"),
        ((2,), H100, MIXED, "cudnn"),
        ((2,), H100, SCATTERED, "triton_packed"),
        ((), B200, MIXED, "torch_varlen"),  # cuDNN's was not measured here
        ((3,), H100, LONG, "flash_attn"),
        ((3,), H100, SHORT, "triton_packed"),
        ((4,), B200, SHORT, "flash_attn"),  # our kernel was not measured here
        ((2,), A100, SHORT, "flash_attn"),
    ],
)
def test_flash_attn_or_our_own_kernel(
    generations: tuple[int, ...],
    gpu: tuple[int, int],
    lengths: dict[str, int],
    expected: str,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if generations:
        fake_packages.install_flash_attn(monkeypatch, *generations)
    machine(*gpu)
    assert choose(shape(**lengths)) == expected
    assert choose(shape(**lengths), "flash_attn" if generations else "torch_varlen")


# --- what each says ---------------------------------------------------------------------------------------------------

REASONS: list[tuple[str, AttentionShape, str]] = [
    ("torch_varlen", shape("cpu"), "needs a CUDA device, not cpu"),
    ("torch_varlen", shape(dtype=FLOAT), "float16 and bfloat16, not float32"),
    ("torch_varlen", shape(head_dim=12, value_dim=12), "multiple of 8 up to 256, not 12"),
    ("torch_varlen", shape(head_dim=264, value_dim=264), "multiple of 8 up to 256, not 264"),
    ("torch_varlen", shape(head_dim=192), "keys and values must have one head size, not 192 and 128"),
    ("torch_varlen", shape(softcap=1.0), "no softcap"),
    ("torch_varlen", shape(sinks=True), "no attention sinks"),
    ("torch_varlen", shape(dropout=0.1), "no dropout"),
    ("xformers", shape(softcap=1.0), "no softcap"),
    ("xformers", shape(sinks=True), "no attention sinks"),
    ("xformers", shape("cpu"), "needs a CUDA device, not cpu"),
    ("xformers", shape(dtype=FLOAT), "float16 and bfloat16, not float32"),
    ("xformers", shape(value_dim=12), "multiples of 8, not 128 and 12"),
    ("mem_efficient", shape("cpu"), "needs a CUDA device, not cpu"),
    ("mem_efficient", shape(softcap=1.0), "no softcap"),
    ("mem_efficient", shape(sinks=True), "no attention sinks"),
    ("mem_efficient", shape(dtype=DOUBLE), "float16, bfloat16 and float32, not float64"),
    ("mem_efficient", shape(head_dim=12), "multiples of 8, not 12 and 128"),
    ("mem_efficient", shape(dtype=FLOAT, value_dim=6), "multiples of 4, not 128 and 6"),
    ("flex", shape("cpu"), "needs a CUDA device, not cpu"),
    ("flex", shape(dropout=0.1), "no dropout"),
    ("flex", shape(dtype=DOUBLE), "not float64"),
    ("flex", shape(head_dim=8), "at least 16, not 8 and 128"),
    ("triton_packed", shape("cpu"), "needs a CUDA device, not cpu"),
    ("triton_packed", shape(dropout=0.1), "no dropout"),
    ("triton_packed", shape(dtype=DOUBLE), "float16, bfloat16 and float32, not float64"),
    ("triton_packed", shape(head_dim=264), "at most 256, not 264 and 128"),
    ("segments", shape("cpu", softcap=1.0), "no softcap"),
    ("segments", shape("cpu", sinks=True), "no attention sinks"),
]


@pytest.mark.parametrize(("name", "requested", "message"), REASONS)
def test_reason(
    name: str, requested: AttentionShape, message: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_packages.install_xformers(monkeypatch)
    machine(*H100)
    reason = BACKENDS[name].rejects(requested)
    assert reason is not None
    assert message in reason
    # nothing else is wrong with it: Llama's own shape is served
    assert BACKENDS[name].rejects(shape(requested.device.type if name == "segments" else "cuda")) is None


@pytest.mark.parametrize(
    ("backend", "dtype", "gpu", "target"),
    [
        (torch_varlen, HALF, T4, "8.0"),
        (mem_efficient, BF16, T4, "8.0"),
        (xformers, BF16, T4, "8.0"),
        (xformers, HALF, (6, 1), "7.0"),
        (flex, HALF, T4, "8.0"),
        (triton_packed, HALF, T4, "8.0"),
        (mem_efficient, HALF, (3, 7), "5.0"),
    ],
)
def test_old_gpus(
    backend: Any, dtype: torch.dtype, gpu: tuple[int, int], target: str, machine: Machine, monkeypatch: Any
) -> None:
    fake_packages.install_xformers(monkeypatch)
    machine(*gpu)
    message = f"needs compute capability {target}, this GPU has {gpu[0]}.{gpu[1]}"
    assert message in str(backend.rejects(shape(dtype=dtype)))
    machine(*(int(n) for n in target.split(".")))
    assert backend.rejects(shape(dtype=dtype)) is None


def test_earlier_segments() -> None:
    """Only our own kernel serves them, which needs a GPU; for all other backends ``attend`` makes sequences whole."""
    requested = shape("cpu", visibility=Visibility(segments=True))
    reasons = explain(requested)
    assert reasons.pop("triton_packed") == "needs a CUDA device, not cpu"
    assert set(reasons.values()) == {"does not support segments"}
    with pytest.raises(BackendUnavailableError, match="earlier segments: flash_attn: does not support segments; "):
        choose(requested)
    assert None in explain(shape("cpu")).values(), "nothing else is wrong with it"
    blocks = Visibility(segments=True, two_way="in_window")
    assert blocks.rejects(("segments", "two_way")) == "does not support image blocks in sequences that share segments"


def test_unknown_visibility_is_refused() -> None:
    """This also holds when a compiled region makes the check."""

    @dataclass(frozen=True)
    class Ahead(Visibility):
        ahead: int = 0

    def served(x: Tensor, window: int | None, ahead: int) -> Tensor:
        return x + (Ahead(window, ahead=ahead).rejects(("window",)) is None)

    assert Ahead(7, ahead=2).rejects(("window",)) == "does not support ahead"
    assert Ahead(7).rejects(("window",)) is None
    assert Ahead(7, ahead=2).rejects(("window", "ahead")) is None
    compiled = torch.compile(served, backend="eager", fullgraph=True)
    assert [int(compiled(torch.zeros(()), 7, ahead)) for ahead in (0, 2)] == [1, 0]


def test_a_backend_without_windows_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend gets no call with a field that it doesn't name in SERVES. Requested by name, it raises an error."""
    assert choose(shape("cpu", window=7)) == "segments"
    monkeypatch.setattr(segments, "SERVES", ())
    assert choose(shape("cpu", window=7)) == "reference"
    with pytest.raises(BackendUnavailableError, match=r"'segments' can't serve .* window 7: does not support window"):
        choose(shape("cpu", window=7), "segments")
    assert choose(shape("cpu"), "segments") == "segments"
    call = AttentionCall(*torch.randn(3, 9, 2, 8), PackedSeqLens.from_lengths([5, 4]), 0.3, window=3)
    ran = []
    monkeypatch.setattr(segments, "run", lambda call: ran.append(call) or call.q)
    attend(call)
    assert not ran
    attend(replace(call, window=5))  # no sequence is longer
    assert len(ran) == 1


def test_the_last_resort_never_rejects() -> None:
    assert reference.rejects(shape("cpu", DOUBLE, softcap=1.0, sinks=True, dropout=0.1, head_dim=3)) is None
    assert segments.rejects(shape("cpu", DOUBLE, dropout=0.1, head_dim=3)) is None


@pytest.mark.parametrize(("head_dim", "heads"), [(128, 32), (80, 32), (8, 64), (256, 7)])
def test_int32_limit_of_flash_attention_2(
    head_dim: int, heads: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(T + 128 N) x heads x head size rounded up to 32 must stay below 2^31 in a backward pass."""
    fake_packages.install_flash_attn(monkeypatch, 2)
    machine(*H100)
    sequences, per_token = 24, heads * ((head_dim + 31) // 32 * 32)
    limit = -(-(2**31) // per_token) - 128 * sequences  # the fewest tokens that reach 2^31
    assert (limit - 1 + 128 * sequences) * per_token < 2**31 <= (limit + 128 * sequences) * per_token
    sizes: dict[str, Any] = {"head_dim": head_dim, "value_dim": head_dim, "num_heads": heads, "num_kv_heads": 1}
    below = shape(total_tokens=limit - 1, num_sequences=sequences, **sizes)
    for backend in (torch_varlen, flash_attn):
        assert backend.rejects(below) is None
        for over in (replace(below, total_tokens=limit), replace(below, num_sequences=sequences + 1)):
            reason = backend.rejects(over)
            assert reason is not None
            assert "2^31" in reason
            assert f"T = {over.total_tokens}, N = {over.num_sequences}" in reason
            assert backend.rejects(replace(over, needs_grad=False)) is None


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [check_name, lambda name: choose(shape("cpu"), name)])
def test_an_unknown_name(ask: Callable[[str], Any]) -> None:
    with pytest.raises(BackendUnavailableError) as caught:
        ask("flash")
    for fragment in ("'flash'", "'auto'", *BACKENDS):
        assert fragment in str(caught.value)


def test_a_named_backend_that_cannot_serve_says_why_and_what_can() -> None:
    call = replace(Case().make(FLOAT), softcap=2.0)
    with pytest.raises(BackendUnavailableError) as caught:
        attend(call, "segments")
    message = str(caught.value)
    assert "'segments' can't serve float32 on cpu, 4/2 heads of 64, softcap 2" in message
    assert "scaled_dot_product_attention has no softcap" in message
    assert message.endswith("Backends that can: reference. Or pass attention='auto'.")
    assert isinstance(caught.value, RuntimeError)


def test_if_no_backend_can_serve_all_reasons_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "rejects", lambda shape: "on holiday")
    requested = shape("cpu", softcap=1.0, sinks=True, window=7, dropout=0.1)
    with pytest.raises(BackendUnavailableError) as caught:
        choose(requested)
    for fragment in ("window 7", "softcap 1", "sinks", "dropout 0.1", "reference: on holiday", "segments: ", "flex: "):
        assert fragment in str(caught.value)
    with pytest.raises(BackendUnavailableError, match="Backends that can: none"):
        choose(requested, "reference")
