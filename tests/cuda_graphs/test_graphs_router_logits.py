"""Steps of models with experts are recorded with the routers' logits, if these are requested."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import FLOAT32_BOUND, make_sequences, relative
from recording import LARGE, SMALL, graphed, runner
from tiny import VOCAB, tiny_model

import fastpack

pytestmark = pytest.mark.usefixtures("varlen")


def test_router_logits_that_are_requested_later() -> None:
    """A recording without them is not replayed."""
    model = graphed(tiny_model("mixtral"))
    ids = torch.cat(make_sequences(VOCAB, SMALL))[None]
    for requested in (False, True, False):
        model.config.output_router_logits = requested
        outputs = model.model(input_ids=ids, packed_seq_lens=list(SMALL))
        outputs.last_hidden_state.sum().backward()
        assert (getattr(outputs, "router_logits", None) is not None) == requested
    assert runner(model).stats.replays == 3


@pytest.mark.parametrize("by", ["config", "argument", "config, of the hidden size"])
def test_router_logits_are_recorded(by: str) -> None:
    """The load-balancing loss and its gradient are the same, and nothing runs eagerly."""
    routed: dict[str, Any] = {"output_router_logits": True}
    if by == "config, of the hidden size":  # the gradients of both outputs have one shape
        routed |= {"num_hidden_layers": 1, "num_local_experts": tiny_model("mixtral").config.hidden_size}
    models = [tiny_model("mixtral", **({} if by == "argument" else routed)) for _ in range(2)]
    plain, model = fastpack.patch(models[0]), graphed(models[1])
    keywords = routed if by == "argument" else {}
    for lengths in (SMALL, LARGE, SMALL):
        results: list[Any] = []
        for each in (plain, model):
            each.zero_grad()
            ids = torch.cat(make_sequences(VOCAB, lengths))[None]
            outputs = each(input_ids=ids, labels=ids, packed_seq_lens=list(lengths), **keywords)
            (outputs.loss + outputs.router_logits[-1].square().mean()).backward()
            gradients = {name: p.grad for name, p in each.named_parameters() if p.grad is not None}
            results.append((outputs.loss, outputs.aux_loss, *outputs.router_logits, *gradients.values()))
        assert all(relative(ours, want) <= FLOAT32_BOUND for ours, want in zip(*results, strict=True))
        assert len({tuple(value.shape) for value in outputs.router_logits}) == 1
    assert not runner(model).stats.eager
    assert runner(model).stats.replays == 3
