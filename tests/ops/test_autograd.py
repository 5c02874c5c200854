"""Gradients of gradients raise an error and are not silently left out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import FLOAT32_BOUND, relative
from tiny import VOCAB, tiny_config, tiny_model
from torch import Tensor
from torch.utils.checkpoint import CheckpointError, checkpoint
from transformers import LlamaForSequenceClassification

import fastpack
from fastpack.ops.autograd import clamp_passes_its_limits, differentiable_once

IDS = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x * 2 + y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 2, None


def test_results_of_a_backward() -> None:
    x, y = torch.ones(3, requires_grad=True), torch.ones(3)
    (plain,) = torch.autograd.grad(Twice.apply(x, y).sum(), x)
    assert not plain.requires_grad
    (kept,) = torch.autograd.grad(Twice.apply(x, y).sum(), x, create_graph=True)
    assert torch.equal(kept, plain)
    with pytest.raises(RuntimeError, match=r"fastpack\.unpatch"):
        kept.sum().backward()


def head_of_a_language_model(patched: bool) -> tuple[Any, Any]:
    model = tiny_model("llama")
    if patched:
        fastpack.patch(model, loss="fused")
    return model(input_ids=IDS, labels=IDS).loss, model.lm_head.weight


def last_mlp_of_a_reward_model(patched: bool) -> tuple[Any, Any]:
    config = tiny_config("llama")
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config).train()
    model.score.requires_grad_(False)
    if patched:
        fastpack.patch(model)
    loss = model(input_ids=IDS, attention_mask=torch.ones_like(IDS), use_cache=False).logits.sum()
    return loss, model.model.layers[-1].mlp.down_proj.weight


@pytest.mark.parametrize("case", [head_of_a_language_model, last_mlp_of_a_reward_model])
def test_a_penalty_on_gradients_behind_the_last_attention(case: Any) -> None:
    """torch's ``once_differentiable`` doesn't raise there, since the incoming gradients are constants."""
    (stock, weight), (ours, our_weight) = case(False), case(True)
    (expected,) = torch.autograd.grad(stock, weight, create_graph=True)
    expected.square().sum().backward()  # the check can fail: the stock model has this gradient
    (actual,) = torch.autograd.grad(ours, our_weight, create_graph=True)
    assert relative(actual.detach(), expected.detach()) <= FLOAT32_BOUND
    with pytest.raises(RuntimeError, match="differentiate twice"):
        actual.square().sum().backward()


def test_the_fact_about_clamp_is_found_inside_a_checkpointed_layer_unseen() -> None:
    def gradient(find: Callable[[], Any]) -> Tensor:
        first = functools.cache(find)
        x = torch.ones(2, requires_grad=True)
        checkpoint(lambda x: (first(), x.sin())[1], x, use_reentrant=False).sum().backward()
        return x.grad

    assert torch.equal(gradient(clamp_passes_its_limits.__wrapped__), torch.ones(2).cos())
    with pytest.raises(CheckpointError, match="different number of tensors"):  # the control: seen by the hooks
        gradient(lambda: torch.zeros((), requires_grad=True).clamp(max=0.0))
