"""``generate`` of a patched head: the stock method, without the packing keyword of a collator."""

from __future__ import annotations

from typing import Any

import torch

from fastpack.errors import PackingError
from fastpack.model.model_runtime import ModelRuntime
from fastpack.packing.inputs import read_packing
from fastpack.utils.replacement import Replacement
from fastpack.utils.signatures import shape_of, source_of


def generate(patched: Replacement[None, ModelRuntime], *args: Any, **kwargs: Any) -> Any:
    """Run the head's own ``generate`` without ``packed_seq_lens``, which stock models don't take.

    A padded batch needs only its ``attention_mask``, which tells generation where rows begin.

    Args:
        patched: the replacement of the head's ``generate``.
        *args: the arguments of ``generate``.
        **kwargs: its keywords. They or ``args`` hold ids ``[B, S]`` or embeddings ``[B, S, H]``.

    Raises:
        PackingError: several sequences share a row, and generation would continue the row as one sequence.
    """
    lengths = kwargs.pop("packed_seq_lens", None)
    if lengths is not None:
        arguments = {**dict(zip(("input_ids",), args, strict=False)), **kwargs}
        arguments["input_ids"] = arguments.pop("inputs", arguments.get("input_ids"))
        if arguments["input_ids"] is not None:
            arguments["inputs_embeds"] = None  # lengths were read from ids if there are both
        shape, device = shape_of(arguments), source_of(arguments).device
        mask = arguments.get("attention_mask")
        packed = read_packing(shape, device, attention_mask=mask, packing={"packed_seq_lens": lengths})
        rows_BS = torch.arange(shape[0], device=device)[:, None].expand(shape)
        if packed.unpad(rows_BS).unique().numel() < packed.num_sequences:
            raise PackingError(
                f"generate got packed_seq_lens of {packed.num_sequences} sequences in {shape[0]} row(s), and would "
                "continue each row as one sequence. Pass a batch that is padded on the left."
            )
    return patched.stock(*args, **kwargs)
