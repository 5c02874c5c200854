"""The last tier: the stock backbone on rows of equal length, one batch for each length.

Nothing is padded, so this is exact even for a model that depends on the length of a row, or on the tokens to the right.
It is no faster than the stock model, and slower if every sequence has a different length. If layers are sharded, all
ranks run as many batches as the rank with the most different lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastpack.families.spec import Family
from fastpack.layers.mixers.rows import repad, row_groups, unpad
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.utils.protocols import ModelLike
from fastpack.utils.replacement import Forward
from fastpack.utils.sharding import exchange_inside

_NOT_PASSED = ("attention_mask", "position_ids", "packed_seq_lens")
"""The arguments that are not passed on: each row is one sequence without padding, and does not need them. Positions of
several axes are passed on."""


def repadded_forward(
    backbone: ModelLike, family: Family, stock: Forward, arguments: Mapping[str, Any], packed: PackedSeqLens
) -> Any:
    """Return the backbone's outputs for a packed batch, ``[1, T, ...]``, computed on rows of equal length.

    Args:
        backbone: the backbone.
        family: its family.
        stock: the forward before the patch.
        arguments: the arguments of a packed forward, with tokens as ``[1, T]`` or ``[1, T, H]``.
        packed: the batch's packing.

    Raises:
        PatchError: see :func:`fastpack.layers.mixers.rows.unpad`.
    """
    groups = row_groups(packed, equal=True, among=exchange_inside(backbone))
    row_arguments = {name: value for name, value in arguments.items() if name not in _NOT_PASSED}
    positions = arguments.get("position_ids")
    if positions is not None and positions.ndim == 3:
        row_arguments["position_ids"] = positions
    row_arguments |= dict.fromkeys(family.disabled_caches, False)
    results = [
        stock(**{name: repad(value, rows, packed.total_tokens) for name, value in row_arguments.items()})
        for rows in groups.groups
    ]
    return unpad(results, groups, type(backbone).__name__)
