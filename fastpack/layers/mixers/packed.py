"""A mixer's own forward on packed tokens, where kernels that know boundaries serve what it mixes them with.

The forwards of transformers call a convolution and a recurrence by the names of functions in their own file. Their
torch versions drop boundaries without a word (5.17), or refuse them (5.23), and which version a name stands for was
settled when the file was imported. So the forward is run as it is, the same compiled code, over a copy of its file's
names in which those few are ours. Nothing of transformers is changed, and what reaches ours without boundaries can't.

That holds for forwards that were read, and mix tokens nowhere else: :mod:`fastpack.families.lock` has their hashes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastpack.errors import PatchError
from fastpack.families.lock import is_proved, packed_name
from fastpack.families.source import forward_hash
from fastpack.families.spec import MixerSpec
from fastpack.layers.mixers import kernels as mixer_kernels
from fastpack.layers.mixers.kernels import Op, packed_conv, packed_recurrence
from fastpack.packing.mask import is_mask_placeholder
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.utils.classes import stock_class
from fastpack.utils.replacement import Forward


def packed_rejects(
    module: nn.Module, spec: MixerSpec, stock: Forward | None, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Return why this module can't run on packed tokens of this device and dtype, or None."""
    name = type(module).__name__
    if spec.scan is None:
        return f"no kernel knows boundaries for {name}"
    if stock is not None and getattr(stock, "__func__", None) is not type(module).forward:
        return f"the forward of {name} was replaced by someone else"
    if any(hasattr(child, "_hf_hook") for child in module.modules() if isinstance(child, nn.Conv1d)):
        return f"{name} has a convolution with hooks, whose weight must be brought here first"
    if not is_proved(packed_name(stock_class(module).__name__), forward_hash(type(module).forward)):
        return f"the forward of {name} is not one that was read"
    return mixer_kernels.rejects(spec.scan, device, dtype)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_forward(
    module: nn.Module, spec: MixerSpec, packed: PackedSeqLens, dtype: torch.dtype, /, *args: Any, **kwargs: Any
) -> Any:
    """Run the stock forward on ``[1, T, ...]``, each sequence by itself, with the kernels chosen for ``dtype``."""
    given = {name: _argument(value) for name, value in kwargs.items() if name not in (*spec.left_out, *_MADE_HERE)}
    assert spec.scan is not None
    functions = {"causal_conv1d_fn": _conv, **_SCANS[spec.scan]}
    forward = _over(type(module).forward, {name: functools.partial(f, packed, dtype) for name, f in functions.items()})
    return forward(module, *map(_argument, args), **given)


def _argument(value: object) -> Any:
    return None if is_mask_placeholder(value) else value


_MADE_HERE = ("packed_seq_lens", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def _over(forward: Callable[..., Any], names: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return a function with a forward's code, in which these names of its file refer to these functions.

    Decorators of the forward are left out. Transformers' decorator moves the weight of an offloaded convolution, and
    such a module does not run packed.
    """
    inner = inspect.unwrap(forward)
    assert isinstance(inner, FunctionType)
    known = {**inner.__globals__, **names}
    made = FunctionType(inner.__code__, known, inner.__name__, inner.__defaults__, inner.__closure__)
    made.__kwdefaults__ = inner.__kwdefaults__
    return made


# What the names mean: transformers' arguments, of which some are for caches that there are none of here.


def _conv(
    packed: PackedSeqLens,
    dtype: torch.dtype,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    return packed_conv(packed, _narrowed(hidden_states, dtype), weight, bias, activation)


def _delta(
    op: Op,
    packed: PackedSeqLens,
    dtype: torch.dtype,
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
    query, key, value = (_narrowed(x, dtype) for x in (query, key, value))
    return packed_recurrence(op, packed, query, key, value, g, beta, use_qk_l2norm_in_kernel), None


def _ssd(
    packed: PackedSeqLens,
    dtype: torch.dtype,
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
        raise PatchError("a gate inside of Mamba-2's scan is not known here; please report the family.")
    dt = dt.float()
    if dt_bias is not None:
        dt = dt + dt_bias.float()
    if dt_softplus:
        dt = F.softplus(dt)
    dt = dt.clamp(*dt_limit)
    x, B, C = (_narrowed(y, dtype) for y in (hidden_states, B, C))
    return packed_recurrence("ssd", packed, x, dt, A, B, C, D, chunk_size)


def _not_fused(packed: PackedSeqLens, dtype: torch.dtype, /, *_: Any, **__: Any) -> None:
    """Convolution, scan and output in one would leave out LoRA on the output's weight; None asks for one by one."""


def _narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In the dtype for which the kernel was chosen; a float32 buffer may have widened it on the way."""
    return x.to(dtype) if x.dtype == torch.float32 else x


def _stateless(state: object, wanted: bool) -> None:
    if state is not None or wanted:
        raise PatchError(
            "a packed batch came with states of a cache; fastpack.unpatch(model) restores the stock model."
        )


_SCANS: dict[str, dict[str, Callable[..., Any]]] = {
    "conv": {},
    "gated_delta": {"torch_chunk_gated_delta_rule": functools.partial(_delta, "gated_delta")},
    "kda": {"chunk_kimi_delta_attention": functools.partial(_delta, "kda")},
    "ssd": {"mamba2_split_conv1d_scan_combined": _not_fused, "mamba2_chunk_scan": _ssd},
}
"""What else a forward calls, by what it mixes tokens with."""
