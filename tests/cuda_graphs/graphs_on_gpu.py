"""Helpers for GPU tests: an eager model, a graphed one, their steps, and a comparison."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from gpu_cases import LENGTHS as SMALL
from gpu_cases import build
from oracle import GPU_FLOAT32_BOUND, Result, compare, make_sequences, run_batch
from recording import runner
from tiny import VOCAB
from torch import Tensor, nn

import fastpack
from fastpack.cuda_graphs.recordings import GraphSettings
from fastpack.packing.buckets import TOKEN_STEPS

LARGE = (300, 41, 290, 2, 440)


def graphed(model: Any, attention: str = "auto", **settings: Any) -> Any:
    """Patch a model so that each size is recorded at first sight, however much work there is."""
    fastpack.patch(model, graphs="auto", attention=attention)
    runner(model).settings = GraphSettings(
        **{"record_after": 0, "first_steps": TOKEN_STEPS, "max_work": float("inf"), **settings}
    )
    return model


def both(dtype: torch.dtype = torch.float32, wrap: Any = lambda m: m, model_type: str = "llama") -> tuple[Any, Any]:
    """Return the same model eager and graphed."""
    return fastpack.patch(wrap(build(model_type, dtype))), graphed(wrap(build(model_type, dtype)))


def step(model: nn.Module, lengths: Sequence[int] = SMALL, kind: str = "padded right") -> Result:
    return run_batch(model, make_sequences(VOCAB, lengths), kind)


def close(ours: Result, want: Result, bound: float = GPU_FLOAT32_BOUND) -> None:
    error = compare(ours, want)
    assert error.worst <= bound, error


def hidden(model: Any, lengths: Sequence[int] = SMALL, seed: int = 0) -> Tensor:
    ids = torch.cat(make_sequences(VOCAB, lengths, seed))[None].cuda()
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    out: Tensor = inner.base_model(input_ids=ids, packed_seq_lens=list(lengths)).last_hidden_state
    return out


def reserved() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()
