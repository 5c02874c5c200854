"""Layers that use the keys and values of an earlier layer rotate their queries with the same kernels as others."""

from __future__ import annotations

import pytest
import torch
from oracle import FLOAT32_BOUND, compare, make_sequences, run_alone, run_batch

import fastpack
from fastpack.exactness.tiny import build_tiny
from fastpack.ops.implementation import Implementation

KIND = "TRL's keywords"


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_queries_of_layers_without_keys(kernels: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from fastpack.ops.kernels import norm_rope

    heads: list[tuple[int, int]] = []
    stock = norm_rope.norm_rotate

    def counted(q: torch.Tensor, k: torch.Tensor, *args: object) -> None:
        heads.append((q.shape[1], k.shape[1]))
        stock(q, k, *args)

    monkeypatch.setattr(norm_rope, "norm_rotate", counted)
    model = build_tiny("gemma4_text").train()
    layers = [layer.self_attn for layer in model.model.layers]
    assert {layer.is_kv_shared_layer for layer in layers} == {True, False}
    sequences = make_sequences(model.config.vocab_size)
    alone = run_alone(model, sequences)
    fastpack.patch(model, kernels=kernels)
    assert compare(run_batch(model, sequences, KIND), alone).worst <= FLOAT32_BOUND
    expected = [(layer.config.num_attention_heads, 0) for layer in layers if layer.is_kv_shared_layer]
    assert [result for result in heads if result[1] == 0] == (expected if kernels == "triton" else [])
    assert len(heads) == (len(layers) if kernels == "triton" else 0)


def test_a_norm_with_hooks_is_called_once_and_with_all_heads() -> None:
    model = build_tiny("gemma4_text").train()
    layer = next(one.self_attn for one in model.model.layers if one.self_attn.is_kv_shared_layer)
    seen: list[torch.Size] = []
    layer.q_norm.register_forward_hook(lambda module, args, out: seen.append(out.shape) or out * 1.5)
    sequences = make_sequences(model.config.vocab_size)
    alone = run_alone(model, sequences)
    seen.clear()
    fastpack.patch(model)
    assert compare(run_batch(model, sequences, KIND), alone).worst <= FLOAT32_BOUND
    assert len(seen) == 1
    assert seen[0][-2:] == (layer.config.num_attention_heads, layer.head_dim)
