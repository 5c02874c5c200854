"""Text models whose layers see a whole image: each uses a batch's blocks as the masks of its stock composite do.

The oracle is the stock text model on each sequence alone, with 4-D masks made token by token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import FLOAT32_BOUND, relative
from tiny import WINDOW
from torch import Tensor

import fastpack
from fastpack import PackedSeqLens
from fastpack.exactness.tiny import build_tiny, plain_tokens
from fastpack.packing.two_way import TwoWayBlocks
from fastpack.patching import plan

NUMBERS = (
    [-1] * 3 + [0] * 12 + [-1] * 2 + [1] * 5,  # an image longer than the window, and one at the end
    [2] * 4 + [3] * 3 + [-1] * 9,
    [-1] * 5,
    [4] * 11,
)
LENGTHS = [len(numbers) for numbers in NUMBERS]
FAMILIES = ("gemma", "gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text")


def seen(model_type: str, numbers: list[int], kind: str) -> Tensor:
    """Return what the stock composite's mask of this kind of layer shows in one sequence, bool ``[L, L]``."""
    token, number = torch.arange(len(numbers)), torch.tensor(numbers)
    block = (number[:, None] == number) & (number >= 0)
    distance = token[:, None] - token
    causal = distance >= 0
    if kind == "full_attention":
        return causal if model_type == "gemma4_text" else causal | block
    in_window = distance < WINDOW
    return (
        (causal & in_window) | block
        if model_type in ("gemma2", "gemma4_unified_text")
        else (causal | block) & in_window
    )


def stock_masks(model_type: str, numbers: list[int]) -> Any:
    masks = {
        kind: torch.zeros(1, 1, len(numbers), len(numbers)).masked_fill(~seen(model_type, numbers, kind), -1e30)
        for kind in ("full_attention", "sliding_attention")
    }
    return masks["full_attention"] if model_type == "gemma" else masks


def gradients(model: Any, out: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    out.backward(cotangent)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("varlen", [False, True], ids=["fast", "varlen"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_exact(model_type: str, varlen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = build_tiny(model_type, attn_implementation="eager").base_model.train()
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    assert kinds == ({"full_attention"} if model_type == "gemma" else {"full_attention", "sliding_attention"})
    ids = [plain_tokens(1, length, seed=length) for length in LENGTHS]
    alone = torch.cat(
        [
            model(input_ids=each, attention_mask=stock_masks(model_type, numbers), use_cache=False).last_hidden_state
            for each, numbers in zip(ids, NUMBERS, strict=True)
        ],
        1,
    )
    cotangent = torch.randn(alone.shape, generator=torch.Generator().manual_seed(0))
    expected = gradients(model, alone, cotangent)
    if varlen:
        _without_fast_attention(monkeypatch)
    fastpack.patch(model)
    report = fastpack.report(model)
    assert ("attention (interface)" in report.swapped) == varlen
    packed = PackedSeqLens.from_lengths(LENGTHS)
    blocks = TwoWayBlocks.of(packed, torch.tensor([[n for numbers in NUMBERS for n in numbers]]))
    batches = (replace(packed, two_way=blocks).flattened(), packed.flattened())
    result, causal = (model(input_ids=torch.cat(ids, 1), packed_seq_lens=each).last_hidden_state for each in batches)
    assert relative(result, alone) <= FLOAT32_BOUND
    assert relative(causal, alone) > 1000 * FLOAT32_BOUND, "the check can fail"
    largest = max(float(g.abs().max()) for g in expected.values())
    found = gradients(model, result, cotangent)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        scale = max(float(grad.abs().max()), 1e-3 * largest)
        assert float((found[name] - grad).abs().max()) / scale <= FLOAT32_BOUND, name


def _without_fast_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan attention and layers as if their sources were not proved and their twins did not match."""
    settle = plan.settle

    def unproved(*args: Any, **kwargs: Any) -> Any:
        recognised = settle(*args, **kwargs)
        specs = {name: spec for name, spec in recognised.specs.items() if not name.endswith(("Attention", "Layer"))}
        return replace(recognised, specs=specs)

    monkeypatch.setattr(plan, "settle", unproved)
