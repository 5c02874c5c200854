"""Models that share prefixes, with attention that has each key once: our own kernels, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import FLOAT32_BOUND, compare, run_alone, run_batch
from prefix_cases import grouped, sharing
from tiny import tiny_model

import fastpack
from fastpack.backends import triton_packed

pytest.importorskip("triton")
from fastpack.ops.kernels import attention

SEQUENCES = grouped([(3, 4), (2, 1)], prompts=(7, 19))


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, where there is no GPU")
@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss"])
def test_each_sequence_alone(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No window, a window and softcap, and sinks; a layer attends on each kept token once."""
    monkeypatch.setattr(triton_packed, "rejects", lambda shape: None)
    launched: list[tuple[int, bool]] = []
    forward = attention.forward

    def recorded(q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        launched.append((len(q), kwargs["paths"][0] is not None))
        return forward(q, *args, **kwargs)

    monkeypatch.setattr(attention, "forward", recorded)
    model = tiny_model(model_type)
    alone = run_alone(model, SEQUENCES)
    fastpack.patch(model, share_prefixes="auto", attention="triton_packed")
    error = compare(run_batch(model, SEQUENCES, "padded left"), alone)
    assert error.worst <= FLOAT32_BOUND, error
    kept = sum(map(len, SEQUENCES)) - 26
    assert sharing(model).stats.saved == 26
    assert launched == [(kept, True)] * 2
