"""Rotary tables whose frequencies depend on a sequence's length (dynamic NTK, LongRoPE), for packed sequences.

The stock modules choose by the longest position of the batch, so that a short sequence changes with its neighbours.
Here each sequence gets the frequencies of its own length, which is what it gets alone.

Sources: Ding et al., "LongRoPE", arXiv:2402.13753 (short and long factors); Peng et al., "YaRN", arXiv:2309.00071,
section 3.1 (dynamic NTK: the base grows with ``factor * length / trained length - (factor - 1)``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastpack.layers.stock import Forward, call_stock

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""The rope types whose frequencies depend on the length."""


def rotary_forward(module: Any, stock: Forward | None, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin ``[1, T, R]``.

    Args:
        x: gives dtype and device.
        position_ids: ``[1, T]``; a value that does not grow begins a new sequence. Batches of several rows are the
            stock path's, and get the stock result.
    """
    if position_ids.shape[0] != 1:
        result: tuple[Tensor, Tensor] = call_stock(module, stock, x, position_ids)
        return result
    positions = position_ids[0].long()
    sequence = torch.zeros_like(positions)
    torch.cumsum(positions.diff() <= 0, 0, out=sequence[1:])
    reached = torch.zeros_like(positions).scatter_reduce(0, sequence, positions + 1, "amax")
    length = reached[sequence][:, None].float()
    freqs = positions[:, None].float() * _inverse_frequencies(module, length, x.device)
    table = torch.cat((freqs, freqs), -1)[None]
    scale = module.attention_scaling
    return (table.cos() * scale).to(x.dtype), (table.sin() * scale).to(x.dtype)


def _inverse_frequencies(module: Any, length: Tensor, device: torch.device) -> Tensor:
    """``[T, R / 2]`` for sequences of ``length`` ``[T, 1]``."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config, rope_type = module.config, module.rope_type
    parameters = config.rope_parameters
    original = module.original_inv_freq.to(device)
    if rope_type == "longrope":
        trained = parameters["original_max_position_embeddings"]
        long, _ = ROPE_INIT_FUNCTIONS[rope_type](config, device, seq_len=trained + 1)
        return torch.where(length > trained, long, original)
    # base * (factor * length / trained - (factor - 1)) ** (R / (R - 2)), as the stock module does for a long input
    trained, factor = config.max_position_embeddings, parameters["factor"]
    rotary = 2 * original.shape[-1]
    growth = (factor * length.clamp(min=trained) / trained - (factor - 1)) ** (rotary / (rotary - 2))
    exponents = torch.arange(0, rotary, 2, device=device, dtype=torch.float) / rotary
    return 1.0 / (parameters["rope_theta"] * growth) ** exponents
