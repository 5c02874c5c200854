"""The tensors that a whole layer saves for its backward; what is cheap to compute again is not saved."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny import VOCAB
from torch import Tensor

import fastpack
from fastpack.exactness.tiny import build_tiny

T = 40


@contextlib.contextmanager
def kept(model: Any) -> Iterator[dict[int, int]]:
    """Return the number of elements, by memory, that the first layer without a window saves besides parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    result: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        memory = x.untyped_storage()
        if memory.data_ptr() not in own:
            result[memory.data_ptr()] = memory.nbytes() // 4  # all of it float32
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    layer = next(one for one in model.model.layers if getattr(one.self_attn, "sliding_window", None) is None)
    handles = [
        layer.register_forward_pre_hook(lambda *_: hooks.__enter__()),
        layer.register_forward_hook(lambda *_: hooks.__exit__()),
    ]
    yield result
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_neither_normed_nor_rotated_nor_activated_is_kept_twice(model_type: str) -> None:
    """The layer saves each tensor once, and none that is cheap to compute again.

    It saves the inputs of both branches, one value a row of each norm, the tables, q, k, v, attention's result with one
    value a head, gate and up. If heads are normalised, it also saves q and k from before the norm. They can't be
    recovered from q and k after it, which are rounded and multiplied by weights that may be 0.
    """
    pytest.importorskip("triton")
    model = build_tiny(model_type).train()
    tokens = torch.randint(3, VOCAB, (1, T))
    config = model.config
    q, k = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    rows = 2 * (config.hidden_size + 1) + 2 * config.head_dim + 2 * config.intermediate_size
    attention = 2 * q + 2 * k + config.num_attention_heads + (q + k if model_type == "qwen3" else 0)
    with kept(model) as stock:
        model(input_ids=tokens)
    fastpack.patch(model, kernels="triton")
    with kept(model) as ours:
        model(input_ids=tokens, packed_seq_lens=[T // 2, T // 2])
    assert sum(ours.values()) == T * (rows + attention)
    assert sum(stock.values()) > 1.5 * sum(ours.values())
