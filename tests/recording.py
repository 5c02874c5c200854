"""Substitutes for CUDA graphs and for an attention kernel that they could record, for tests without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from oracle import FLOAT32_BOUND, Result, compare, make_sequences, run_batch
from tiny import VOCAB
from torch import Tensor, nn

import fastpack
from fastpack.backends.call import AttentionCall, AttentionShape
from fastpack.cuda_graphs.recorder import CapturedPass
from fastpack.cuda_graphs.recordings import GraphSettings
from fastpack.cuda_graphs.runner import GraphRunner
from fastpack.cuda_graphs.stack import Stack
from fastpack.cuda_graphs.step import RecordedStep
from fastpack.model import backbone as causal_lm
from fastpack.model.model_runtime import runtime_of
from fastpack.packing.buckets import TOKEN_STEPS

SMALL, LARGE = (7, 1, 19, 19, 33), (30, 41, 29, 2, 44)
"""Two batches of different buckets."""


class Varlen:
    """What a varlen kernel computes: attention that reads nothing but offsets on the device and the bucket's sizes."""

    SERVES = ("window",)

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def rejects(self, shape: AttentionShape) -> str | None:
        return None

    def run(self, call: AttentionCall) -> Tensor:
        self.tokens.append(call.q.shape[0])
        k, v = call.expanded_kv()
        scores = torch.einsum("qhd,khd->hqk", call.q, k) * call.scale
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        at, sequence = torch.arange(len(call.q)), call.packed.seq_idx[0]
        distance = at[:, None] - at
        hidden = (distance < 0) | (sequence[:, None] != sequence)
        if call.visibility.window is not None:
            hidden |= distance >= call.visibility.window
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v).contiguous()


class FakeRecorder:
    """Runs the passes again in place of graphs, over one memory: each replay overwrites earlier results with NaN."""

    def __init__(self) -> None:
        self.statics: list[Tensor] = []
        self.saved: tuple[Any, list[Tensor]] | None = None
        self.problem: BaseException | None = None
        self.where: str | None = None
        self.passing = ""
        self.cuts: list[str] = []

    def rejects(self, device: torch.device) -> str | None:
        return self.where

    def clear(self) -> None:
        self.statics = []

    def cut(self) -> None:
        if self.passing:
            self.cuts.append(self.passing)

    def record(self, device: torch.device, forward: Any, backward: Any) -> CapturedPass:
        if self.problem is not None:
            raise self.problem
        self.passing, self.cuts = "forward", []
        outputs = forward()
        statics = [output.detach().clone() for output in outputs]
        self.passing = "backward"
        gradients = [None if g is None else g.clone() for g in backward(outputs)]
        self.passing = ""
        self.statics += [*statics, *(g for g in gradients if g is not None)]

        def replay_forward() -> None:
            self._spoil()
            with torch.enable_grad():
                outputs = forward()
            self.saved = (tape, outputs)
            for static, output in zip(statics, outputs, strict=True):
                static.copy_(output.detach())

        def replay_backward() -> None:
            assert self.saved is not None, "a backward without its forward"
            (owner, outputs), self.saved = self.saved, None
            assert owner is tape, "another replay overwrote what this one saved"
            self._spoil()
            try:
                with torch.enable_grad():
                    results = backward(outputs)
            except RuntimeError as error:
                if "modified by an inplace operation" not in str(error):
                    raise
                return  # a graph does not notice: it computes wrong numbers
            for into, gradient in zip(gradients, results, strict=True):
                if into is not None:
                    into.copy_(gradient)

        tape = CapturedPass(statics, gradients, replay_forward, replay_backward)
        return tape

    def _spoil(self) -> None:
        for tensor in self.statics:
            tensor.fill_(float("nan"))


def runner(model: Any) -> GraphRunner:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    runtime = runtime_of(inner.base_model)
    graphs = None if runtime is None else runtime.graphs
    assert graphs is not None
    return graphs


def recorded(model: Any) -> list[RecordedStep]:
    """Return the recorded steps, oldest first."""
    return list(runner(model)._recordings.steps.values())


def graphed(model: Any, *, kernels: Any = "auto", **settings: Any) -> Any:
    """Patch a model with the fake recorder; by default each batch's own sizes are recorded at first sight."""
    fastpack.patch(model, graphs="auto", kernels=kernels)
    graphs = runner(model)
    graphs.recorder = FakeRecorder()
    graphs.settings = GraphSettings(**{"record_after": 0, "first_steps": TOKEN_STEPS, **settings})
    return model


def without_epsilon(model: Any) -> Any:
    """Return the model with norms that divide by zero if their input is zero."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.0
    return model


def step(model: nn.Module, lengths: Sequence[int] = SMALL, kind: str = "padded right", **kwargs: Any) -> Result:
    return run_batch(model, make_sequences(VOCAB, lengths), kind, **kwargs)


def check(ours: Result, want: Result) -> None:
    error = compare(ours, want)
    assert error.worst <= FLOAT32_BOUND, error


def reason(model: Any) -> str:
    """Return the only reason for which forwards of this model ran eagerly."""
    (only,) = runner(model).stats.eager
    return only


def hidden(model: Any, seed: int = 0, lengths: Sequence[int] = SMALL) -> Tensor:
    ids = torch.cat(make_sequences(VOCAB, lengths, seed))[None]
    out: Tensor = model.base_model(input_ids=ids, packed_seq_lens=list(lengths)).last_hidden_state
    return out


def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the order in which modules are compared ("look") and lengths are read ("lengths") from now on."""
    order: list[str] = []
    unchanged, read_packing = Stack.unchanged, causal_lm.read_packing
    monkeypatch.setattr(Stack, "unchanged", lambda self: order.append("look") or unchanged(self))
    monkeypatch.setattr(causal_lm, "read_packing", lambda *a, **k: order.append("lengths") or read_packing(*a, **k))
    return order
