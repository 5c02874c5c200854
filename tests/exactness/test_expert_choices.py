"""Recorded choices of one pass are replayed in the next: the same indices and bools, with the new pass's values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fastpack.exactness.expert_choices import choosers_of, recorded, replayed
from fastpack.exactness.family_settings import GEMMA4_EXPERTS, NOT_BUILT
from fastpack.exactness.tiny import build_tiny, model_types, plain_tokens
from fastpack.families.registry import FAMILIES

ROUTED = [n for n in model_types() if n in FAMILIES and FAMILIES[n].routers and n not in NOT_BUILT]


class Router(nn.Module):
    """A router that chooses in every way in which upstream's routers choose."""

    def forward(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, picked = scores.topk(2, dim=-1)
        best, _ = scores.max(dim=-1, keepdim=True)
        return values, picked, torch.where(scores > best - 0.5, scores, 0.0).sum(-1)


def test_a_module_repeats_choices_that_it_would_not_make() -> None:
    router = Router()
    scores = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    other = scores.flip(-1).clone().requires_grad_()
    with recorded([router]) as choices:
        _, picked, _ = router(scores)
    with replayed([router], choices()):
        values, as_before, masked = router(other)
    assert torch.equal(as_before, picked)
    assert torch.equal(values, other.gather(-1, picked))
    assert not torch.equal(router(other)[1], picked), "control: left to itself it chooses otherwise"
    values.sum().backward()
    assert torch.equal(other.grad, torch.zeros_like(other).scatter(-1, picked, 1.0))
    free = router(other)[2]
    assert not torch.equal(masked, free), "comparisons are replayed too"


def test_one_sequence_after_the_other_or_all_at_once() -> None:
    router, scores = Router(), torch.randn(7, 4)
    with recorded([router]) as one_by_one:
        for part in scores.split([1, 4, 2]):
            router(part)
    with recorded([router]) as at_once:
        router(scores)
    for a, b in zip(one_by_one()[0], at_once()[0], strict=True):
        assert torch.equal(a, b)
    with replayed([router], at_once()):
        for _ in range(2):  # checkpointing runs a forward again
            result = [router(-part)[1] for part in scores.split([1, 4, 2])]
            assert torch.equal(torch.cat(result), router(scores)[1])


def test_other_tokens_are_an_error() -> None:
    router = Router()
    with recorded([router]) as choices:
        router(torch.randn(5, 4))
    with replayed([router], choices()), pytest.raises(ValueError, match="can't repeat the recorded choice of"):
        router(torch.randn(6, 4))
    with recorded([router]) as nothing:
        pass
    assert nothing() == ((),)
    with replayed([router], nothing()), pytest.raises(ValueError, match="no choice was recorded"):
        router(torch.randn(6, 4))


def test_nothing_outside_of_the_module_is_replayed() -> None:
    router, scores = Router(), torch.randn(5, 4)
    with recorded([router]) as choices:
        router(-scores)
        torch.topk(scores, 3)
    assert len(choices()[0]) == 3
    with replayed([router], choices()):
        assert torch.equal(torch.topk(scores, 2).indices, scores.topk(2).indices)
    assert not router._forward_hooks
    assert not router._forward_pre_hooks


@pytest.mark.parametrize("model_type", ROUTED)
def test_rows_name_the_modules_that_choose(model_type: str) -> None:
    """Each layer of experts has one router, and it chooses."""
    model = build_tiny(model_type, **(GEMMA4_EXPERTS if model_type == "gemma4_text" else {}))
    routers = choosers_of(model, FAMILIES[model_type].routers)
    assert routers
    with recorded(routers) as choices, torch.no_grad():
        model(input_ids=plain_tokens(1, 9))
    for calls in choices():
        assert calls
        assert {len(call) for call in calls} == {9}


@pytest.mark.parametrize("model_type", [n for n in model_types() if n in FAMILIES and FAMILIES[n].tier == "fast"])
def test_no_row_of_the_fast_tier_is_without(model_type: str) -> None:
    classes = {type(module).__name__ for module in build_tiny(model_type).modules()}
    assert bool(FAMILIES[model_type].routers) >= any("Experts" in name for name in classes)
