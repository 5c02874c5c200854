"""Optional packages: the generation of FlashAttention that serves, and why another can't."""

from __future__ import annotations

import ctypes
import importlib
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_packages
import pytest
import torch
from attention_cases import Case
from machines import A100, B200, BF16, FLOAT, H100, HALF, RTX4090, T4, Machine, shape

from fastpack import BackendUnavailableError
from fastpack.attention_dispatch import choose
from fastpack.backends import flash_attn, triton_packed, xformers
from fastpack.backends.call import AttentionShape, Visibility


@pytest.mark.parametrize(
    ("installed", "gpu", "changes", "expected"),
    [
        ((2, 3, 4), H100, {}, 3),
        ((2, 3, 4), H100, {"softcap": 1.5}, 3),
        ((2, 4), H100, {}, 4),
        ((2, 4), H100, {"softcap": 1.5}, 2),  # 4 has no varlen backward with a softcap
        ((2, 3, 4), A100, {}, 2),
        ((2, 3, 4), RTX4090, {}, 2),
        ((2, 3, 4), B200, {}, 4),
        ((2, 3), B200, {}, 2),
        ((2, 3, 4), B200, {"softcap": 1.5}, 2),
        ((2, 3, 4), (12, 0), {}, 2),
        ((2, 3, 4), H100, {"dropout": 0.1}, 2),
    ],
)
def test_generation(
    installed: tuple[int, ...],
    gpu: tuple[int, int],
    changes: dict[str, Any],
    expected: int,
    capable_cpu: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = fake_packages.install_flash_attn(monkeypatch, *installed)
    capable_cpu(*gpu)
    call = replace(Case().make(BF16), **changes)
    assert flash_attn.rejects(call.shape) is None
    flash_attn.run(call)
    assert [c["generation"] for c in calls] == [expected]


@pytest.mark.parametrize(
    ("installed", "gpu", "requested", "message"),
    [
        ((), H100, shape(), "flash-attn is not installed"),
        ((2, 3, 4), H100, shape("cpu"), "needs a CUDA device, not cpu"),
        ((3,), A100, shape(), "FlashAttention 3: does not support compute capability 8.0"),
        ((2,), T4, shape(dtype=HALF), "FlashAttention 2: does not support compute capability 7.5"),
        ((3,), H100, shape(dropout=0.1), "FlashAttention 3: it has no dropout"),
        ((2,), H100, shape(dropout=0.1, softcap=1.0), "FlashAttention 2: it has no dropout with a softcap"),
        (
            (2, 3),
            H100,
            shape(sinks=True),
            "FlashAttention 2: it has no attention sinks; FlashAttention 3: it has no attention sinks",
        ),
        ((4,), H100, shape(sinks=True), "FlashAttention 4: it has no gradient for attention sinks"),
        ((4,), H100, shape(softcap=1.0), "FlashAttention 4: it has no softcap"),
        ((3,), H100, shape(dtype=FLOAT), "FlashAttention 3: takes float16 and bfloat16, not float32"),
        ((4,), H100, shape(head_dim=192), "FlashAttention 4: head sizes must be equal multiples of 8 up to 256"),
        ((4,), H100, shape(head_dim=40, value_dim=40), "FlashAttention 4: its gradients are wrong with heads of 40"),
        ((4,), B200, shape(head_dim=256, value_dim=256), "FlashAttention 4: its gradients are wrong with heads of 256"),
        ((2,), H100, shape(head_dim=192), "FlashAttention 2: keys and values must have one head size, not 192 and 128"),
    ],
)
def test_flash_attn_reason(
    installed: tuple[int, ...],
    gpu: tuple[int, int],
    requested: AttentionShape,
    message: str,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_packages.install_flash_attn(monkeypatch, *installed)
    machine(*gpu)
    assert message in str(flash_attn.rejects(requested))


@pytest.mark.parametrize(("gpu", "head_dim"), [(H100, 40), (B200, 256)])
def test_heads_whose_gradients_4_gets_wrong_are_served_forward(
    gpu: tuple[int, int], head_dim: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_packages.install_flash_attn(monkeypatch, 4)
    machine(*gpu)
    requested = shape(head_dim=head_dim, value_dim=head_dim)
    assert flash_attn.rejects(requested) is not None
    assert flash_attn.rejects(replace(requested, needs_grad=False)) is None


def test_sinks_without_a_gradient_are_served_by_4(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_packages.install_flash_attn(monkeypatch, 4)
    machine(*B200)
    assert flash_attn.rejects(shape(sinks=True, needs_grad=False)) is None


@pytest.mark.parametrize("leaf", ["q", "k", "v", "sinks"])
def test_a_gradient_of_anything_counts(leaf: str) -> None:
    call = Case(sinks=True).make(FLOAT, requires_grad=False)
    assert call.shape.needs_grad is False
    target = replace(call, **{leaf: getattr(call, leaf).requires_grad_()})
    assert target.shape.needs_grad is True
    with torch.no_grad():
        assert replace(target).shape.needs_grad is False


@pytest.mark.parametrize(
    ("init", "cute", "message"),
    [
        ("raise ImportError('undefined symbol: _ZN3c10')", None, "FlashAttention 2: does not import with torch"),
        ("raise OSError('libcudart.so.12')", "", "FlashAttention 2: does not import with torch"),
        ("", None, "FlashAttention 2: does not import with torch"),
        (None, "import not_there_at_all", "FlashAttention 4: does not import with torch"),  # the wheel of 4 alone
        # the wheel of generation 2 ships the source of 4, without what it needs
        ("def flash_attn_varlen_func(): ...", "import not_there_at_all", None),
    ],
)
def test_a_broken_wheel_is_a_reason_not_a_crash(
    init: str | None,
    cute: str | None,
    message: str | None,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(flash_attn, "GENERATIONS", [g for g in flash_attn.GENERATIONS if g.number != 3])
    package = tmp_path / "flash_attn"
    package.mkdir()
    if init is not None:
        (package / "__init__.py").write_text(init)
    if cute is not None:
        (package / "cute").mkdir()
        (package / "cute" / "__init__.py").write_text(cute)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.delitem(sys.modules, name)
    try:
        machine(*H100)
        reason = flash_attn.rejects(shape())
        assert (message in str(reason)) if message else reason is None
        where_ours_is_slower = shape(head_dim=256, value_dim=256)
        assert choose(where_ours_is_slower) == ("flash_attn" if message is None else "torch_varlen")
        if message is None:
            assert "does not import" in str(flash_attn._rejects(flash_attn.GENERATIONS[0], shape()))
    finally:
        for name in ("flash_attn", "flash_attn.cute"):
            sys.modules.pop(name, None)


def test_xformers_without_cuda_kernels(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_packages.install_xformers(monkeypatch, built_with_cuda=False)
    machine(*H100)
    reason = f"this xformers wheel holds no CUDA kernels for torch {torch.__version__}"
    assert xformers.rejects(shape()) == reason
    with pytest.raises(BackendUnavailableError, match="holds no CUDA kernels"):
        choose(shape(), "xformers")
    assert choose(shape(head_dim=192)) == "mem_efficient"


def test_xformers_that_does_not_import(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_packages.module(monkeypatch, "xformers")  # an empty module
    machine(*H100)
    assert "does not import with torch" in str(xformers.rejects(shape()))


class Linker:
    """A stand-in for ``ctypes.CDLL`` that does not find some libraries, and records the requested names."""

    def __init__(self, *missing: str) -> None:
        self.missing = missing
        self.requested: list[str] = []

    def __call__(self, name: str, *args: Any) -> None:
        self.requested.append(name)
        if name in self.missing:
            raise OSError(f"{name}: cannot open shared object file: No such file or directory")


@pytest.fixture
def linker(monkeypatch: pytest.MonkeyPatch) -> Linker:
    """Return a linker that does not find the library that xformers needs."""
    linker = Linker(xformers.RUNTIME)
    monkeypatch.setattr(ctypes, "CDLL", linker)
    return linker


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the library's path, with its package's metadata installed."""
    info = tmp_path / "nvidia_cuda_runtime_cu12-12.9.79.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {xformers.RUNTIME_PACKAGE}\nVersion: 12.9.79\n")
    (info / "RECORD").write_text(f"nvidia/__init__.py,,\nnvidia/cuda_runtime/lib/{xformers.RUNTIME},,\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "nvidia" / "cuda_runtime" / "lib" / xformers.RUNTIME


def of_the_linker(library: str) -> Exception:
    """Return an error as xformers raises it: its own over torch's over the linker's."""
    error, of_torch = RuntimeError("can't load C++/CUDA extensions"), OSError("Could not load this library: _C.so")
    of_torch.__cause__ = OSError(f"{library}: cannot open shared object file: No such file or directory")
    error.__cause__ = of_torch
    return error


def test_what_xformers_is_linked_with_is_loaded_before_it_and_only_when_it_is_asked_for(
    linker: Linker, runtime: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "xformers"
    (package / "ops" / "fmha").mkdir(parents=True)
    (package / "__init__.py").write_text("import ctypes; already = list(ctypes.CDLL.requested)")
    (package / "ops" / "fmha" / "common.py").write_text("_built_with_cuda = True")
    monkeypatch.delitem(sys.modules, "xformers")
    machine(*H100)
    try:
        assert choose(shape()) == "triton_packed"
        assert xformers.rejects(shape("cpu")) == "needs a CUDA device, not cpu"
        assert (linker.requested, "xformers" in sys.modules) == ([], False)
        for _ in range(2):
            assert xformers.rejects(shape()) is None
        assert sys.modules["xformers"].already == linker.requested == [xformers.RUNTIME, str(runtime)]
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "xformers"]:
            del sys.modules[name]


def test_what_the_linker_finds_is_left_to_it(
    linker: Linker, runtime: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    linker.missing = ()
    fake_packages.install_xformers(monkeypatch)
    machine(*H100)
    assert xformers.rejects(shape()) is None
    assert linker.requested == [xformers.RUNTIME]


def test_importing_fastpack_loads_nothing() -> None:
    code = f"""if True:
        import ctypes, sys, torch
        asked, stock = [], ctypes.CDLL
        ctypes.CDLL = lambda name, *args, **kwargs: (asked.append(str(name)), stock(name, *args, **kwargs))[1]
        import fastpack, fastpack.attention_dispatch
        sys.exit(any({xformers.RUNTIME!r} in name for name in asked) or "xformers" in sys.modules)"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_library_that_xformers_lacks_is_named_with_its_package(
    linker: Linker, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_packages.install_xformers(monkeypatch, failed=of_the_linker(xformers.RUNTIME))
    machine(*H100)
    reason = str(xformers.rejects(shape()))
    assert reason.startswith("xformers needs libcudart.so.12, which is missing (pip install nvidia-cuda-runtime-cu12")
    from fastpack.cli import doctor

    assert doctor._backends(torch.device("cuda"))["xformers"]["bfloat16"] == reason


def test_doctor_lists_the_features_that_each_backend_serves(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastpack.backends.registry import BACKENDS, why_not

    fake_packages.install_xformers(monkeypatch)
    machine(*H100)
    features: dict[str, dict[str, Any]] = {
        "softcap": {"softcap": 30.0},
        "sinks": {"sinks": True},
        "dropout": {"dropout": 0.1},
        "image blocks": {"visibility": Visibility(two_way="whole")},
    }
    for name in BACKENDS.keys() - {"flash_attn"}:  # its generations differ
        assert BACKENDS[name].rejects(shape(dtype=HALF)) is None, name
        served = [feature for feature, facts in features.items() if not why_not(name, shape(dtype=HALF, **facts))]
        assert served == list(BACKENDS[name].LIMITS.serves), name


def test_another_library_that_xformers_lacks_is_not_this_one(
    linker: Linker, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_packages.install_xformers(monkeypatch, failed=of_the_linker("libtorch_cuda.so"))
    machine(*H100)
    assert "holds no CUDA kernels" in str(xformers.rejects(shape()))


def test_an_xformers_imported_too_early_names_the_library_path(
    linker: Linker, runtime: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_packages.install_xformers(monkeypatch, failed=of_the_linker(xformers.RUNTIME))
    machine(*H100)
    assert f"restart Python with LD_LIBRARY_PATH={runtime.parent}" in str(xformers.rejects(shape()))


@pytest.mark.parametrize("ours", [True, False])
def test_what_xformers_keeps_is_no_model(
    ours: bool, tmp_path: Path, linker: Linker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its own exception, whose frames would hold what the callers of its import hold, as the control shows."""
    folder = tmp_path / "xformers" / "ops" / "fmha"
    folder.mkdir(parents=True)
    keeps = 'try:\n    raise OSError("no kernels")\nexcept OSError as error:\n    kept = error\n'
    (tmp_path / "xformers" / "__init__.py").write_text(keeps)
    (folder / "common.py").write_text("_built_with_cuda = True\n")
    monkeypatch.delitem(sys.modules, "xformers")
    monkeypatch.syspath_prepend(str(tmp_path))

    def forward() -> weakref.ref[Any]:
        model = torch.nn.Linear(1, 1)
        if ours:
            assert xformers._unusable() is None
        else:
            importlib.import_module("xformers.ops.fmha.common")
        return weakref.ref(model)

    try:
        alive = forward()() is not None
    finally:
        for name in ("xformers", "xformers.ops", "xformers.ops.fmha", "xformers.ops.fmha.common"):
            sys.modules.pop(name, None)
    assert alive != ours


def test_triton_that_is_not_there(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(*H100)
    assert triton_packed.rejects(shape()) is None
    monkeypatch.setattr(triton_packed, "_installed", lambda: False)
    assert "pip install triton" in str(triton_packed.rejects(shape()))
    assert choose(shape(head_dim=12)) == "segments"


def test_packages_that_are_not_there() -> None:
    assert "pip install 'xformers>=0.0.35' nvidia-cuda-runtime-cu12" in str(xformers.rejects(shape()))
    assert "pip install flash-attn" in str(flash_attn.rejects(shape()))
