"""Models at real widths on a GPU in bf16, and their errors against float32."""

from __future__ import annotations

from typing import Any

import torch
from oracle import Error, Result, compare, make_sequences, run_alone
from tiny import VOCAB, tiny_model
from torch import nn

from fastpack.exactness.rule import FACTOR

LENGTHS = (70, 1, 190, 190, 333)


REAL_HEADS = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "max_position_embeddings": 512,
}


REAL_LATENTS = {"head_dim": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "kv_lora_rank": 128}


FLOOR = 2e-3
"""Below this relative error, bf16's rounding of one value decides, so ratios of errors mean nothing."""


def build(model_type: str, dtype: torch.dtype, **more: Any) -> nn.Module:
    head_dim = None if model_type in ("cohere", "phi3", "qwen2", "smollm3") else 64
    sizes = {**REAL_HEADS, "head_dim": head_dim, **(REAL_LATENTS if model_type == "deepseek_v3" else {}), **more}
    return tiny_model(model_type, **sizes).to("cuda", dtype)


def oracle_and_plain(model_type: str) -> tuple[Result, Error]:
    """Return the result of float32 on each sequence alone, and the error of plain bf16 against it."""
    sequences = make_sequences(VOCAB, LENGTHS)
    wide = run_alone(build(model_type, torch.float32), sequences)
    plain = run_alone(build(model_type, torch.bfloat16), sequences)
    return wide, compare(plain, wide, half=True)


def check(ours: Error, plain: Error) -> None:
    """Compare two errors by norms; in half precision, the largest difference of one draw is luck."""
    for what in ("logits", "loss", "grads"):
        bound = FACTOR * max(getattr(plain, what), FLOOR)
        assert getattr(ours, what) <= bound, f"{what}: {getattr(ours, what):.2e}, plain {getattr(plain, what):.2e}"
