"""A module that mixes tokens and knows no boundaries, run on one row a sequence.

Its result for a token must not depend on what stands to the right of it in the row, nor on how long the row is.

Shape suffixes: T tokens, n rows, L length of the longest, H heads.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.families.spec import MixerSpec
from fastpack.layers.rows import Rows, put_back, row_groups, take
from fastpack.layers.scope import PackingScope
from fastpack.layers.stock import Forward, call_stock, is_stand_in
from fastpack.packing import PackedSeqLens


def mixer_forward(
    module: nn.Module, spec: MixerSpec, scope: PackingScope, stock: Forward | None, /, *args: Any, **kwargs: Any
) -> Any:
    """The stock forward on ``[n, L, ...]``, group by group; as it is where no batch is packed.

    Raises:
        PatchError: see :meth:`PackingScope.required` and :func:`fastpack.layers.rows.put_back`.
    """
    packed = scope.required(module)
    if packed is None:
        return call_stock(module, stock, *args, **kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name not in (*spec.left_out, "packed_seq_lens")}
    groups = row_groups(packed, equal=False)
    results = []
    for rows in groups.groups:
        mask = _Mask(module, spec, rows)
        positional = [_argument(None, value, spec, packed, rows, mask) for value in args]
        named = {name: _argument(name, value, spec, packed, rows, mask) for name, value in kwargs.items()}
        with scope.in_rows():
            results.append(call_stock(module, stock, *positional, **named))
    what = type(module).__name__
    if spec.states:
        return put_back([result[0] for result in results], groups, what), *[None] * spec.states
    return put_back(results, groups, what)


def _argument(name: str | None, value: Any, spec: MixerSpec, packed: PackedSeqLens, rows: Rows, mask: _Mask) -> Any:
    """What the rows get for an argument of the whole batch."""
    if is_stand_in(value):
        return mask.make(value.device)
    if name in spec.kept:
        return value
    if name is not None and name == spec.alibi:  # [H, 1, T], of positions from 0 on, which are those of any row
        return value[..., : rows.length].repeat(rows.count, 1, 1)
    return take(value, rows, packed.total_tokens)


def packed_alibi(
    backbone: nn.Module, name: str, scope: PackingScope, mask: Tensor, num_heads: int, dtype: torch.dtype
) -> Tensor:
    """A backbone's own method of that name; where the stand-in came for its mask, for positions from 0 to T."""
    if scope.packed is not None and is_stand_in(mask):
        mask = torch.ones(1, scope.packed.total_tokens, dtype=torch.long, device=mask.device)
    result: Tensor = getattr(type(backbone), name)(backbone, mask, num_heads, dtype)
    return result


class _Mask:
    """Makes the mask of a group of rows in the form that a module takes."""

    def __init__(self, module: Any, spec: MixerSpec, rows: Rows) -> None:
        self.module, self.spec, self.rows = module, spec, rows

    def make(self, device: torch.device) -> Tensor | None:
        """``[n, 1, L, L]``, or None."""
        if self.spec.mask is None:
            return None
        seen = self._seen(device)
        if self.spec.mask == "added":
            dtype = next(self.module.parameters()).dtype
            if torch.is_autocast_enabled(device.type):
                dtype = torch.get_autocast_dtype(device.type)
            made = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, torch.finfo(dtype).min)
        else:
            made = ~seen if self.spec.mask == "hidden" else seen
        return made.expand(self.rows.count, 1, -1, -1)

    def _seen(self, device: torch.device) -> Tensor:
        """bool ``[L, L]``: which keys (columns) each query sees."""
        at = torch.arange(self.rows.length, device=device)
        distance = at[:, None] - at
        seen = distance >= 0
        window = self._size(self.spec.window, "sliding_attention")
        if window is not None:
            seen &= distance < window
        chunk = self._size(self.spec.chunk, "chunked_attention")
        if chunk is not None:
            seen &= at[:, None] // chunk == at // chunk
        return seen

    def _size(self, name: str | None, kind: str) -> int | None:
        """Of a window or a chunk, in layers that have one."""
        if name is None:
            return None
        config = self.module.config
        kinds = getattr(config, "layer_types", None)
        size: int | None = attrgetter(name)(self.module)
        return size if kinds is None or kinds[self.module.layer_idx] == kind else None
