"""xformers' memory_efficient_attention with a ``BlockDiagonalCausalMask``."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fastpack.backends.call import AttentionCall, AttentionShape
from fastpack.backends.limits import HALF_DTYPES, Limits, lacks, needs_cuda, wrong_dtype, wrong_sizes
from fastpack.utils.compile import cached_constant
from fastpack.utils.versions import install_command

SERVES = ("window",)
LIMITS = Limits(
    "a GPU from Volta on, fp16; from Ampere on, bf16", ("dropout",), "pip install xformers nvidia-cuda-runtime-cu12"
)

RUNTIME, RUNTIME_PACKAGE = "libcudart.so.12", "nvidia-cuda-runtime-cu12"
"""The library that xformers' wheel links to, and its package: torch for CUDA 13 ships another version of it."""


def rejects(shape: AttentionShape) -> str | None:
    """Return why xformers can't compute this, or None."""
    why = needs_cuda(shape, (7, 0)) if shape.device.type != "cuda" else _unusable()
    if why is not None:
        return why
    if torch.compiler.is_compiling():
        return (
            "it builds its mask from lengths on the host, so a compiled region would wait for the device in each layer"
        )
    return (
        lacks(shape, "xformers", "softcap", "attention sinks")
        or needs_cuda(shape, (8, 0) if shape.dtype == torch.bfloat16 else (7, 0))
        or wrong_dtype(shape, HALF_DTYPES)
        or wrong_sizes(shape, multiple=8)
    )


def run(call: AttentionCall) -> Tensor:
    """Return ``[T, H, V]``; key/value heads are repeated, since xformers can't train with grouped heads."""
    from xformers.ops import memory_efficient_attention

    k, v = call.expanded_kv()
    window = call.visibility.window
    out: Tensor = memory_efficient_attention(
        call.q[None],
        k[None],
        v[None],
        attn_bias=call.packed.memo(("xformers", window, call.q.device), lambda: _bias(call, window)),
        p=call.dropout,
        scale=call.scale,
    )
    return out[0]


def _bias(call: AttentionCall, window: int | None) -> Any:
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask

    bias = BlockDiagonalCausalMask.from_seqlens(list(call.packed.lengths), device=call.q.device)
    return bias if window is None else bias.make_local_attention(window)


@cached_constant
def _unusable() -> str | None:
    if importlib.util.find_spec("xformers") is None:
        return f"xformers is not installed ({install_command('xformers', RUNTIME_PACKAGE)})"
    try:
        _load_runtime()
        common = _imported()
    except (ImportError, OSError) as error:
        return f"xformers does not import with torch {torch.__version__}: {error}"
    # A wheel holds kernels for one torch and CUDA version only. With other versions each call raises
    # "wasn't build with CUDA support".
    if getattr(common, "_built_with_cuda", True):
        return None
    if not _lacks_runtime():
        return f"this xformers wheel holds no CUDA kernels for torch {torch.__version__}"
    path = _runtime_path()
    if path is None:
        return f"xformers needs {RUNTIME}, which is missing ({install_command(RUNTIME_PACKAGE)}, then restart Python)"
    return (
        f"xformers was imported before fastpack could load {RUNTIME} for it: restart Python with "
        f"LD_LIBRARY_PATH={path.parent}"
    )


def _imported() -> ModuleType:
    """Import xformers in a thread of its own, and return the module with what is known of its kernels.

    It keeps the exception if its kernels don't load, and so the frames of the thread that imports it: those of a
    forward would keep the model for as long as the process lives.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(importlib.import_module, "xformers.ops.fmha.common").result()


def _load_runtime() -> None:
    """Load the library that xformers links to if the linker can't find it; call this before importing xformers."""
    try:
        ctypes.CDLL(RUNTIME)
    except OSError:
        path = _runtime_path()
        if path is not None:
            ctypes.CDLL(str(path))


def _runtime_path() -> Path | None:
    """Return the library's path in its package, or None if the package is not installed."""
    from importlib import metadata

    try:
        files = metadata.files(RUNTIME_PACKAGE) or ()
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == RUNTIME), None)


def _lacks_runtime() -> bool:
    """Return whether xformers, at import, could not load its kernels because :data:`RUNTIME` was missing."""
    from xformers import _cpp_lib

    error: BaseException | None = getattr(_cpp_lib, "_cpp_library_load_exception", None)
    while error is not None and RUNTIME not in str(error):
        error = error.__cause__  # xformers' own error, torch's, and the linker's
    return error is not None
