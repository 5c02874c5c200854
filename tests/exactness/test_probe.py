"""Probes: sketches of large gradients, inputs that differ by a rounding, and the least precise dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import tiny_model
from torch import Tensor, nn

from fastpack.exactness.probe import SKETCH, Nudge, Probe, moved_by
from fastpack.exactness.runs import LIKE_ONE, NEARLY_ALL, attending_by, coarsest_dtype, other_attention_of
from fastpack.exactness.tiny import build_tiny


def probe_of(model: Any) -> Probe:
    return Probe.of(model, model.model, (3, 1, 2), 0)


@pytest.mark.parametrize("rank", [1, 50])
def test_a_sketch_keeps_norms_of_differences(rank: int) -> None:
    """This holds for matrices of any rank, since signs are drawn for each element."""
    probe = probe_of(tiny_model("llama"))
    torch.manual_seed(0)
    weight = nn.Parameter(torch.empty(600, 400))
    one, two = (torch.randn(600, rank) @ torch.randn(rank, 400) for _ in range(2))
    sketches = [probe._sketch(weight, gradient) for gradient in (one, two)]
    assert all(sketch.shape == (SKETCH,) for sketch in sketches)
    for value, true in ((sketches[0], one), (sketches[0] - sketches[1], one - two)):
        assert float(value.norm()) == pytest.approx(float(true.norm()), rel=0.02)
    small = nn.Parameter(torch.empty(7, 3))
    assert torch.equal(probe._sketch(small, one[:7, :3]), one[:7, :3].reshape(-1)), "what is small is kept"
    assert not probe._sketch(small, None).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_rounding_off_is_the_next_number(dtype: torch.dtype) -> None:
    values = torch.randn(40, 30).to(dtype)
    steps = Nudge(1, dtype, share=NEARLY_ALL).steps((40, 30))
    moved = moved_by(values, steps, dtype)
    off = (moved.double() - values.double()).abs() / values.double().abs()
    assert torch.equal(moved[steps == 0], values[steps == 0])
    assert (off[steps != 0] > 0).all()
    assert (off <= torch.finfo(dtype).eps).all()
    wide = moved_by(values.float(), steps, torch.bfloat16)
    assert (wide != values.float()).eq(steps != 0).all(), "coarser roundings of a finer stream"


def test_how_far_a_nudge_goes() -> None:
    """With a share, a nudge goes one step further than without, and varies as much as a rounding does."""
    far = Nudge(3, torch.bfloat16, spread=8)
    base, further = far.steps((300, 400)), replace(far, share=LIKE_ONE).steps((300, 400))
    assert base.unique().tolist() == list(range(-8, 9))
    assert (further - base).unique().tolist() == [-1, 0, 1]
    assert float((further - base).var()) == pytest.approx(1 / 12, rel=0.05)
    assert torch.equal(far.steps((300, 400)), base)
    assert not torch.equal(replace(far, seed=4).steps((300, 400)), base)
    assert not Nudge(3, torch.bfloat16).steps((300, 400)).any()


def test_the_other_attention() -> None:
    model = build_tiny("llama")
    assert model.config._attn_implementation == "sdpa"
    assert other_attention_of(model) == "eager"
    with attending_by(model, "eager"):
        assert model.config._attn_implementation == "eager"
        assert other_attention_of(model) == "sdpa"
    assert model.config._attn_implementation == "sdpa"
    assert other_attention_of(nn.Linear(2, 2)) is None


class FourBits(nn.Module):
    """A linear layer like bitsandbytes': packed weights, and a compute dtype of its own."""

    def __init__(self, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = 4, 4
        self.weight: Tensor = nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
        if compute_dtype is not None:
            self.compute_dtype = compute_dtype


@pytest.mark.parametrize(
    ("model", "stream", "autocast", "expected"),
    [
        (nn.Linear(2, 2), torch.float32, None, torch.float32),
        (nn.Linear(2, 2).double(), torch.float64, None, torch.float64),
        (nn.Linear(2, 2), torch.float32, torch.float16, torch.float16),
        (nn.Linear(2, 2).bfloat16(), torch.float32, None, torch.bfloat16),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half()), torch.float32, None, torch.float16),
        (FourBits(torch.float16), torch.float32, None, torch.bfloat16),
        (FourBits(), torch.float32, None, torch.bfloat16),
    ],
)
def test_the_least_precise_dtype(
    model: nn.Module, stream: torch.dtype, autocast: torch.dtype | None, expected: torch.dtype
) -> None:
    assert coarsest_dtype(model, stream, autocast) == expected
