"""Run a mixer's own forward on packed tokens, with kernels that know boundaries for its convolution and recurrence.

In transformers, a forward calls a convolution and a recurrence by global names of its file. The torch versions of these
functions silently ignore boundaries (5.17) or refuse them (5.23). Importing the file settles which version a name
refers to. So fastpack runs the forward's own code with a copy of the file's globals, in which these few names refer to
fastpack's functions. Transformers itself is unchanged, and fastpack's functions always know the boundaries.

This is exact only for forwards that a person has read, and that mix tokens nowhere else. Their hashes are in
:mod:`fastpack.families.lock`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastpack.errors import PatchError
from fastpack.families.lock import is_proved, packed_name
from fastpack.families.mixer_spec import MixerSpec
from fastpack.families.source import forward_hash
from fastpack.layers.mixers.kernels import Op, packed_conv, packed_recurrence, step_sizes
from fastpack.ops.implementation import Implementation
from fastpack.packing.mask import is_mask_placeholder
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.utils.classes import stock_class
from fastpack.utils.replacement import Forward


def packed_rejects(module: nn.Module, spec: MixerSpec, stock: Forward | None) -> str | None:
    """Return why this module can't run on packed tokens, or None; ``stock`` is its own forward before the patch."""
    name = type(module).__name__
    if spec.scan is None:
        return f"no kernel knows boundaries for {name}"
    if stock is not None and getattr(stock, "__func__", None) is not type(module).forward:
        return f"another package replaced the forward of {name}"
    if any(hasattr(child, "_hf_hook") for child in module.modules() if isinstance(child, nn.Conv1d)):
        return f"{name} has a convolution with hooks, which must load its weight first"
    if not is_proved(packed_name(stock_class(module).__name__), forward_hash(type(module).forward)):
        return f"this version of the forward of {name} has not been checked"
    return None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_forward(
    module: nn.Module,
    spec: MixerSpec,
    packed: PackedSeqLens,
    dtype: torch.dtype,
    implementation: Implementation,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the stock forward on ``[1, T, ...]``, each sequence by itself, with kernels chosen for ``dtype``."""
    arguments = {
        name: _argument(value) for name, value in kwargs.items() if name not in (*spec.left_out, *_PACKING_KEYWORDS)
    }
    assert spec.scan is not None
    functions = {"causal_conv1d_fn": _conv, **_SCANS[spec.scan]}
    batch = _Batch(packed, dtype, implementation)
    forward = _over(type(module).forward, {name: functools.partial(f, batch) for name, f in functions.items()})
    return forward(module, *map(_argument, args), **arguments)


def _argument(value: object) -> Any:
    return None if is_mask_placeholder(value) else value


_PACKING_KEYWORDS = ("packed_seq_lens", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def _over(forward: Callable[..., Any], names: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return a function with the same code, in which these global names refer to these functions.

    Decorators are dropped. Transformers' decorator moves the weight of an offloaded convolution; modules with an
    offloaded convolution don't run packed.
    """
    inner = inspect.unwrap(forward)
    assert isinstance(inner, FunctionType)
    namespace = {**inner.__globals__, **names}
    function = FunctionType(inner.__code__, namespace, inner.__name__, inner.__defaults__, inner.__closure__)
    function.__kwdefaults__ = inner.__kwdefaults__
    return function


# Fastpack's functions for these names. They take transformers' arguments; those for caches are unused here.


class _Batch(NamedTuple):
    """The lengths of a batch, the dtype that it is computed in, and the implementation of its kernels."""

    packed: PackedSeqLens
    dtype: torch.dtype
    implementation: Implementation


def _conv(
    batch: _Batch,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    x = _narrowed(hidden_states, batch.dtype)
    return packed_conv(batch.packed, x, weight, bias, activation, batch.implementation)


def _delta(
    op: Op,
    batch: _Batch,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    _stateless(initial_state, output_final_state)
    query, key, value = (_narrowed(x, batch.dtype) for x in (query, key, value))
    arguments = (query, key, value, g, beta, use_qk_l2norm_in_kernel)
    return packed_recurrence(op, batch.packed, *arguments, implementation=batch.implementation), None


def _ssd(
    batch: _Batch,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Tensor:
    _stateless(initial_states, return_final_states)
    if z is not None:
        raise PatchError("Mamba-2's scan got a gate (z), which packed mixers don't support; please report the family.")
    if not dt_softplus:
        raise PatchError(
            "Mamba-2's scan got steps without softplus, which packed mixers don't support; please report it."
        )
    dt = step_sizes(dt, dt_bias, dt_limit)
    x, B, C = (_narrowed(y, batch.dtype) for y in (hidden_states, B, C))
    arguments = (x, dt, A, B, C, D, chunk_size)
    return packed_recurrence("ssd", batch.packed, *arguments, implementation=batch.implementation)


def _not_fused(batch: _Batch, /, *_: Any, **__: Any) -> None:
    """Return None: the forward then runs convolution, scan and output one by one. Fused, they would skip LoRA."""


def _narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in the dtype for which the kernel was chosen; a float32 buffer may have widened x before."""
    return x.to(dtype) if x.dtype == torch.float32 else x


def _stateless(state: object, return_state: bool) -> None:
    if state is not None or return_state:
        raise PatchError(
            "a packed batch came with cached states; pass no cache, or call fastpack.unpatch(model) first."
        )


_SCANS: dict[str, dict[str, Callable[..., Any]]] = {
    "conv": {},
    "gated_delta": {"torch_chunk_gated_delta_rule": functools.partial(_delta, "gated_delta")},
    "kda": {"chunk_kimi_delta_attention": functools.partial(_delta, "kda")},
    "ssd": {"mamba2_split_conv1d_scan_combined": _not_fused, "mamba2_chunk_scan": _ssd},
}
"""The functions that a forward calls besides the convolution, by its recurrence."""
