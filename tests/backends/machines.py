"""GPUs by compute capability, and shapes of the attention that is requested on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastpack.backends.call import AttentionShape, Visibility

Machine = Callable[[int, int], None]

T4, V100, A100, RTX4090, H100, B200 = (7, 5), (7, 0), (8, 0), (8, 9), (9, 0), (10, 0)
HALF, BF16, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


def shape(device: str = "cuda", dtype: torch.dtype = BF16, window: int | None = None, **changes: Any) -> AttentionShape:
    """Return Llama's attention with some ``changes``."""
    facts: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "value_dim": 128}
    facts |= {"total_tokens": 4096, "num_sequences": 8, "max_seqlen": 900, "visibility": Visibility(window)}
    return AttentionShape(torch.device(device), dtype, **{**facts, **changes})
