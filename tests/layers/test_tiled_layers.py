"""Checkpointed layers run their MLPs in tiles of tokens where a batch is long."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adapter_cases import with_lora
from oracle import relative
from tiny import VOCAB, tiny_model
from torch import Tensor

import fastpack
from fastpack.layers import decoder
from fastpack.ops.linear import gated_mlp

LENGTHS = [300, 100, 240]
LAYERS = 2


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """List the tokens of each piece of an MLP that runs."""
    ran: list[int] = []
    forward = gated_mlp._GatedMlp.forward

    def counted(ctx: Any, inner: Any, down: Any, norm: Any, kind: Any, options: Any, x: Tensor, *rest: Any) -> Tensor:
        ran.append(len(x))
        return forward(ctx, inner, down, norm, kind, options, x, *rest)

    monkeypatch.setattr(gated_mlp._GatedMlp, "forward", staticmethod(counted))
    return ran


def gradients(model: Any, *, reentrant: bool | None = False) -> dict[str, Tensor]:
    if reentrant is None:
        model.gradient_checkpointing_disable()
    else:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model.zero_grad(set_to_none=True)
    ids = torch.randint(VOCAB, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0)).to(model.device)
    model(input_ids=ids, labels=ids, packed_seq_lens=LENGTHS).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def model_of(lora: bool, **options: Any) -> Any:
    model = tiny_model("llama", num_hidden_layers=LAYERS)
    return fastpack.patch((with_lora(model) if lora else model).train(), **options)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("offload", [None, "checkpoints"])
def test_tiled(lora: bool, offload: Any, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(lora, offload=offload)
    want = gradients(model)
    assert sizes == [sum(LENGTHS)] * 2 * LAYERS
    intermediate = model.config.intermediate_size
    monkeypatch.setattr(decoder, "TILE_BYTES", 4 * 256 * intermediate * 4)
    sizes.clear()
    ours = gradients(model)
    assert sizes == [256, 256, 128] * 2 * LAYERS, "once in the forward, and once for the backward"
    assert ours.keys() == want.keys()
    assert max(relative(ours[name], want[name]) for name in want) <= 1e-5
    note = f"MLPs of {LAYERS} layers run in tiles of some 256 tokens in batches of more than 512"
    assert note in fastpack.report(model).notes
    model.gradient_checkpointing_disable()
    assert not any("tiles" in note for note in fastpack.report(model).notes)


@pytest.mark.parametrize("why", ["no checkpointing", "reentrant", "evaluation", "kept"])
def test_not_tiled(why: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing recomputes the MLP, or something keeps its results, tiles would cost time."""
    monkeypatch.setattr(decoder, "TILE_BYTES", 1)
    if why == "kept":
        monkeypatch.setattr(decoder, "ACTIVATION_SLOT", "_slot_of_a_test")
        model = model_of(False)
        for layer in model.model.layers:
            layer.__dict__["_slot_of_a_test"] = Keeps()
    else:
        model = model_of(False)
    if why == "evaluation":
        model.eval()
    gradients(model, reentrant={"no checkpointing": None, "reentrant": True}.get(why, False))
    assert set(sizes) == {sum(LENGTHS)}


@pytest.mark.gpu
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_on_a_gpu(lora: bool, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, where sums over tiles are rounded once a tile."""
    model = tiny_model("llama", num_hidden_layers=LAYERS, hidden_size=256, intermediate_size=1024, head_dim=64)
    model = fastpack.patch((with_lora(model) if lora else model).train().to("cuda", torch.bfloat16))
    want = gradients(model)
    monkeypatch.setattr(decoder, "TILE_BYTES", 4 * 256 * 1024 * 2)
    sizes.clear()
    ours = gradients(model)
    assert sizes == [256, 256, 128] * 2 * LAYERS
    size_of = torch.linalg.vector_norm
    assert max(relative(ours[name], want[name], size=size_of) for name in want) <= 2**-7


class Keeps:
    """A slot that may save the results of an MLP, and doesn't."""

    of_mlps = True

    def save(self, outputs: Any, x: Tensor) -> None: ...

    def load(self) -> None: ...
