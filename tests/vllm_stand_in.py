"""A stand-in for vLLM, which TRL fills with weights at each sync and asks for completions.

It is a stock model of its own. It takes exactly the names and shapes that a checkpoint of the model has, as vLLM does,
and records what it got. Its completions are drawn from these weights.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from trl.generation import vllm_generation

Weights = dict[str, Tensor]


class StandIn:
    """vLLM's engine and client in one.

    Attributes:
        syncs: for each sync, the weights by name, in the order in which they came.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model).eval()
        self.names = dict(self.model.named_parameters())
        self.syncs: list[Weights] = []
        self.arriving: Weights = {}
        self.calls = 0
        runner = SimpleNamespace(model=self)
        worker = SimpleNamespace(model_runner=runner)
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            own = self.names[name]
            assert (own.shape, own.dtype) == (weight.shape, weight.dtype), name
            assert name not in self.arriving, f"{name} came twice"
            self.arriving[name] = weight.detach().clone()
            own.data.copy_(weight)

    def update_named_params(self, metadata: list[Any], weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the weights that TRL streams to a server, as its metadata announces them."""
        for (name, dtype, shape), (came, weight) in zip(metadata, weights, strict=True):
            assert (name, dtype, shape) == (came, str(weight.dtype).removeprefix("torch."), list(weight.shape))
            self.load_weights([(came, weight)])

    def reset_prefix_cache(self) -> None:
        """End a sync: every weight of the checkpoint must have come."""
        assert self.arriving.keys() == self.names.keys()
        self.syncs.append(self.arriving)
        self.arriving = {}

    def init_communicator(self, **_: Any) -> None:
        """Do nothing."""

    def generate(self, prompts: list[dict[str, list[int]]], sampling_params: Any, **_: Any) -> list[Any]:
        assert self.syncs, "no weights came before the first completion"
        self.calls += 1
        generator = torch.Generator().manual_seed(self.calls)
        return [self._complete(row["prompt_token_ids"], sampling_params, generator) for row in prompts]

    def _complete(self, prompt: list[int], settings: Any, generator: torch.Generator) -> Any:
        ids, log_probs = list(prompt), []
        with torch.no_grad():
            for _ in range(settings.max_tokens):
                logits = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float()
                each = torch.log_softmax(logits / settings.temperature, -1)
                token = int(torch.multinomial(each.exp(), 1, generator=generator))
                ids.append(token)
                log_probs.append({token: SimpleNamespace(rank=1, logprob=float(each[token]))})
        output = SimpleNamespace(token_ids=ids[len(prompt) :], logprobs=log_probs)
        return SimpleNamespace(prompt_token_ids=prompt, outputs=[output])


@contextmanager
def standing_in(model: nn.Module) -> Iterator[StandIn]:
    """Give TRL a stand-in, with the weights and names of this stock model, wherever it builds an engine or a client."""
    engine = StandIn(model)
    stand_ins = mock.patch.multiple(
        vllm_generation,
        create=True,
        is_vllm_available=lambda: True,
        LLM=lambda **_: engine,
        VLLMClient=lambda *_, **__: engine,
        SamplingParams=lambda **settings: SimpleNamespace(**settings),
    )
    with stand_ins, mock.patch.dict(os.environ):  # TRL sets RANK and its like for vLLM
        yield engine


def synced(model: Any, plain: nn.Module, mode: str = "colocate", times: int = 1) -> list[Weights]:
    """Send a model's weights by TRL's own code, and return what arrived at each sync."""
    model.name_or_path = "stand-in"
    with standing_in(plain) as engine:
        sender = vllm_generation.VLLMGeneration(model, Accelerator(cpu=True), None, mode=mode)  # type: ignore[arg-type]
        for _ in range(times):
            sender.sync_weights()
    return engine.syncs


def base_weights(model: Any) -> Weights:
    """Return the weights under PEFT's adapters, by the names that the stock model gives them."""
    return {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): parameter.detach()
        for name, parameter in model.named_parameters()
        if model.prefix not in name
    }
