"""xformers' memory_efficient_attention with a ``BlockDiagonalCausalMask``."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastpack.backends.call import AttentionCall, AttentionShape
from fastpack.backends.limits import HALF_DTYPES, lacks, needs_cuda, wrong_dtype, wrong_sizes
from fastpack.utils.compile import cached_constant
from fastpack.utils.versions import install_command

SERVES = ("window",)

RUNTIME, RUNTIME_PACKAGE = "libcudart.so.12", "nvidia-cuda-runtime-cu12"
"""The library that xformers' wheel is linked with, and the package that brings it: torch for CUDA 13 has another."""


def rejects(shape: AttentionShape) -> str | None:
    """Return why xformers can't compute this, or None."""
    why = needs_cuda(shape, (7, 0)) if shape.device.type != "cuda" else _unusable()
    if why is not None:
        return why
    if torch.compiler.is_compiling():
        return "in a compiled region its mask, made of lengths on the host, would wait for the device in each layer"
    return (
        lacks(shape, "xformers", "softcap", "attention sinks")
        or needs_cuda(shape, (8, 0) if shape.dtype == torch.bfloat16 else (7, 0))
        or wrong_dtype(shape, HALF_DTYPES)
        or wrong_sizes(shape, multiple=8)
    )


def run(call: AttentionCall) -> Tensor:
    """``[T, H, V]``; key/value heads are repeated, since xformers trains without grouped heads only."""
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
        from xformers.ops.fmha import common
    except (ImportError, OSError) as error:
        return f"xformers does not import with torch {torch.__version__}: {error}"
    # Its wheels hold kernels for one torch and CUDA only; elsewhere every call says "wasn't build with CUDA support".
    if getattr(common, "_built_with_cuda", True):
        return None
    if not _lacks_runtime():
        return f"this xformers wheel holds no CUDA kernels for torch {torch.__version__}"
    path = _runtime_path()
    if path is None:
        return f"xformers is there and {RUNTIME} is not ({install_command(RUNTIME_PACKAGE)}, and start Python anew)"
    return (
        f"xformers was imported before fastpack could load {RUNTIME} for it: start Python with "
        f"LD_LIBRARY_PATH={path.parent}"
    )


def _load_runtime() -> None:
    """Load what xformers is linked with, where the linker does not find it: before xformers is imported, and tries."""
    try:
        ctypes.CDLL(RUNTIME)
    except OSError:
        path = _runtime_path()
        if path is not None:
            ctypes.CDLL(str(path))


def _runtime_path() -> Path | None:
    """Return where the package has it; None where that is not installed."""
    from importlib import metadata

    try:
        files = metadata.files(RUNTIME_PACKAGE) or ()
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == RUNTIME), None)


def _lacks_runtime() -> bool:
    """Return whether xformers, when it was imported, failed for that library."""
    from xformers import _cpp_lib

    error: BaseException | None = getattr(_cpp_lib, "_cpp_library_load_exception", None)
    while error is not None and RUNTIME not in str(error):
        error = error.__cause__  # xformers' own error, torch's, and the linker's
    return error is not None
