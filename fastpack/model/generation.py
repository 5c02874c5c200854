"""``generate`` of a patched head: stock, whatever a collator says of the packing."""

from __future__ import annotations

from typing import Any

import torch

from fastpack.errors import PackingError
from fastpack.model.runtime import ModelRuntime
from fastpack.packing.inputs import read_packing
from fastpack.utils.replacement import Replacement
from fastpack.utils.signatures import shape_of, source_of


def generate(patched: Replacement[None, ModelRuntime], *args: Any, **kwargs: Any) -> Any:
    """Run the head's own ``generate`` without ``packed_seq_lens``, which a stock model doesn't know.

    A padded batch loses nothing: ``attention_mask`` tells generation where its rows begin.

    Args:
        patched: the replacement of the head's ``generate``.
        *args: the arguments of ``generate``.
        **kwargs: its keywords; ids ``[B, S]`` or embeddings ``[B, S, H]`` are among both.

    Raises:
        PackingError: several sequences share a row, which generation would continue as one.
    """
    lengths = kwargs.pop("packed_seq_lens", None)
    if lengths is not None:
        given = {**dict(zip(("input_ids",), args, strict=False)), **kwargs}
        given["input_ids"] = given.pop("inputs", given.get("input_ids"))
        if given["input_ids"] is not None:
            given["inputs_embeds"] = None  # ids are what was read, where both came
        shape, device = shape_of(given), source_of(given).device
        mask = given.get("attention_mask")
        packed = read_packing(shape, device, attention_mask=mask, packing={"packed_seq_lens": lengths})
        rows_BS = torch.arange(shape[0], device=device)[:, None].expand(shape)
        if packed.unpad(rows_BS).unique().numel() < packed.num_sequences:
            raise PackingError(
                f"packed_seq_lens of {packed.num_sequences} sequences in {shape[0]} row(s) came to generate, which "
                "continues rows, and would take those that share one for one. Pass a padded batch, padded on the left."
            )
    return patched.stock(*args, **kwargs)
