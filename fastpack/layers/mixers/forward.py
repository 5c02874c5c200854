"""Run a mixer on packed tokens if a kernel knows the sequences' boundaries, else on one row per sequence.

A mixer's own forward knows no boundaries. On rows, its result for a token must not depend on later tokens in the row,
nor on the row's length.

Shape suffixes: T tokens, n rows, L length of the longest, H heads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fastpack.errors import PatchError
from fastpack.families.mixer_spec import MixerSpec
from fastpack.layers.mixers import kernels as mixer_kernels
from fastpack.layers.mixers.fast import run_fast, serves
from fastpack.layers.mixers.rows import Rows, repad, row_groups, unpad
from fastpack.layers.project import fast_forward
from fastpack.layers.runtime import Runtime
from fastpack.layers.window_checks import CHUNKED, SLIDING, masked_size
from fastpack.ops.autograd import as_row
from fastpack.ops.implementation import Implementation
from fastpack.packing.mask import is_mask_placeholder
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.utils.replacement import Forward, Replacement, replaces
from fastpack.utils.sharding import exchange_inside


def mixer_forward(patched: Replacement[MixerSpec, Runtime], /, *args: Any, **kwargs: Any) -> Any:
    """Run the stock forward on ``[1, T, ...]`` with kernels that know boundaries, or on groups of rows ``[n, L, ...]``.

    Without a packed batch, the stock forward runs unchanged.

    Raises:
        PatchError: see :meth:`PackingContext.required` and :func:`fastpack.layers.mixers.rows.unpad`.
    """
    module, spec, context = patched.owner, patched.spec, patched.runtime.context
    assert context is not None, "a mixer reads the packing from the context"
    packed = context.required(module)
    if packed is None:
        return patched.stock(*args, **kwargs)
    if spec.scan is not None:
        from fastpack.layers.mixers.packed import packed_forward, packed_rejects  # the import loads torch's compiler

        if packed_rejects(module, spec, patched.earlier) is None:
            hidden = _hidden(args, kwargs)
            if spec.fast is not None and serves(module, spec.fast):
                return as_row(run_fast(module, spec.fast, patched.runtime, hidden.squeeze(0), packed))
            kernels = patched.runtime.kernels
            return packed_forward(module, spec, packed, _computed_in(hidden), kernels, *args, **kwargs)
    if packed.shards is not None:
        raise PatchError(
            f"{type(module).__name__} can't run on packed tokens any more: other code has put hooks or a forward on it "
            "since the patch. Rows hold whole sequences, and each rank has only a share of the tokens. Remove that, or "
            "patch without a context_mesh."
        )
    kwargs = {name: value for name, value in kwargs.items() if name not in (*spec.left_out, "packed_seq_lens")}
    groups = row_groups(packed, equal=False, among=exchange_inside(module))
    carried = None if spec.carried is None else kwargs.pop(spec.carried, None)
    shared = None if spec.shared is None else kwargs.pop(spec.shared)
    dtype = _hidden(args, kwargs).dtype if spec.mask == "added" else torch.bool
    results = []
    for i, rows in enumerate(groups.groups):
        mask = functools.partial(_mask, module, spec, rows, dtype)
        positional = [_argument(None, value, spec, packed, rows, mask) for value in args]
        named = {name: _argument(name, value, spec, packed, rows, mask) for name, value in kwargs.items()}
        if carried is not None:
            named[str(spec.carried)] = carried.groups[i]
        states = {}
        if shared is not None:  # each group of rows has states of its own, under the name and the group's number
            states = {state: value for (state, group), value in shared.items() if group == i}
            named[str(spec.shared)] = states
        with context.in_rows():
            results.append(patched.stock(*positional, **named))
        if shared is not None:
            shared.update({(state, i): value for state, value in states.items()})
    what = type(module).__name__
    if spec.states:
        return unpad([result[0] for result in results], groups, what), *[None] * spec.states
    if spec.carried is not None:
        rest = unpad([tuple(result[:-1]) for result in results], groups, what)
        return *rest, _Carried(tuple(result[-1] for result in results))
    return unpad(results, groups, what)


def fast_mixer(module: nn.Module) -> Replacement[MixerSpec, Runtime] | None:
    """Return the replacement of a module that runs as :func:`run_fast` on packed tokens, or None."""
    patched = fast_forward(module, mixer_forward)
    if patched is None or patched.spec.fast is None or _why_rows(module, patched.spec) is not None:
        return None
    return patched if serves(module, patched.spec.fast) else None


@dataclass(frozen=True)
class _Carried:
    """The state that one module passes to the next, for each group of rows."""

    groups: tuple[Any, ...]


def mixer_tier(module: nn.Module, spec: MixerSpec) -> Literal["fast", "varlen", "re-padded mixer"]:
    """Return ``fast`` or ``varlen`` for a module that runs on packed tokens."""
    if _why_rows(module, spec) is not None:
        return "re-padded mixer"
    return "fast" if spec.fast is not None and serves(module, spec.fast) else "varlen"


def mixer_notes(module: nn.Module, spec: MixerSpec) -> list[str]:
    """Return notes for the report: the kernels that run packed tokens, or why none runs. Empty if no kernel exists."""
    if spec.scan is None:
        return []
    why = _why_rows(module, spec)
    if why is not None:
        return [f"mixers: on rows: {why}"]
    device, dtype = _placed(module)
    forward = module.__dict__.get("forward")
    kernels: Implementation = forward.runtime.kernels if replaces(forward, mixer_forward) else "auto"
    ops = dict.fromkeys(mixer_kernels.names(op, device, dtype, kernels) for op in ("conv", spec.scan))
    return [f"mixers: {', '.join(ops)} on packed tokens"]


def _why_rows(module: nn.Module, spec: MixerSpec) -> str | None:
    """Return why a module runs on rows, or None if it runs on packed tokens."""
    if spec.scan is None:
        return "no kernel knows boundaries"
    from fastpack.layers.mixers.packed import packed_rejects

    return packed_rejects(module, spec, _replaced(module))


def _replaced(module: nn.Module) -> Forward | None:
    """Return the instance's own forward before the patch, or None; also None if accelerate's hooks wrap it."""
    if hasattr(module, "_hf_hook"):
        return None
    forward: Forward | None = module.__dict__.get("forward")
    return forward.earlier if replaces(forward, mixer_forward) else forward


def _placed(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return the device of a module's weights, and the dtype in which it computes without autocast.

    The dtype is its convolution's, since decays may be stored in float32 and projections in 4 bits.
    """
    weight = next(m for m in module.modules() if isinstance(m, nn.Conv1d)).weight
    return weight.device, weight.dtype


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return a mixer's hidden states: its first floating-point argument that is not a mask placeholder."""
    values = (*args, *kwargs.values())
    return next(x for x in values if isinstance(x, Tensor) and x.is_floating_point() and not is_mask_placeholder(x))


def _computed_in(hidden: Tensor) -> torch.dtype:
    """Return the dtype in which a batch's projections compute."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _argument(
    name: str | None,
    value: Any,
    spec: MixerSpec,
    packed: PackedSeqLens,
    rows: Rows,
    mask: Callable[[torch.device], Tensor | None],
) -> Any:
    """Convert an argument for the whole batch to one for these rows; ``mask`` makes a mask for the placeholder."""
    if is_mask_placeholder(value):
        return mask(value.device)
    if name in spec.unchanged:
        return value
    if name is not None and name == spec.alibi:  # [H, 1, T] for positions from 0 on: a row takes the first L
        return value[..., : rows.length].repeat(rows.count, 1, 1)
    return repad(value, rows, packed.total_tokens)


def packed_alibi(patched: Replacement[None, Runtime], mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """Run a backbone's own alibi method; ones for T positions replace a mask that is the placeholder."""
    context = patched.runtime.context
    if context is not None and context.packed is not None and is_mask_placeholder(mask):
        mask = torch.ones(1, context.packed.total_tokens, dtype=torch.long, device=mask.device)
    return patched.stock(mask, num_heads, dtype)


def packed_mask(patched: Replacement[None, Runtime], mask: Tensor | None, *args: Any, **kwargs: Any) -> Tensor | None:
    """Return a mask that is the placeholder unchanged; make any other by a backbone's own method."""
    made: Tensor | None = mask if is_mask_placeholder(mask) else patched.stock(mask, *args, **kwargs)
    return made


def _mask(module: nn.Module, spec: MixerSpec, rows: Rows, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Make the mask of a group of rows in the form that a module takes, ``[n, 1, L, L]`` or ``[n, L]``, or None.

    An additive mask has the hidden states' dtype, as in transformers; the weights may be in 4 bits. Padding counts as
    real tokens, whose results are dropped.
    """
    if spec.mask is None:
        return None
    if spec.mask == "real":
        return torch.ones(rows.tokens.shape, dtype=dtype, device=device)
    at = torch.arange(rows.length, device=device)
    distance = at[:, None] - at
    seen = distance >= 0
    window = masked_size(module, spec, spec.window, SLIDING)
    if window is not None:
        seen &= distance < window
    chunk = masked_size(module, spec, spec.chunk, CHUNKED)
    if chunk is not None:
        seen &= at[:, None] // chunk == at // chunk
    mask = ~seen if spec.mask == "hidden" else seen
    if spec.mask == "added":
        mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, torch.finfo(dtype).min)
    return mask.expand(rows.count, 1, -1, -1)
