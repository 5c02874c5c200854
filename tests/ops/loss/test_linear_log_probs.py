"""Log-probabilities under a linear head against their written definition: all fields, and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cross_entropy_cases import FLOAT32_BOUND, IMPLEMENTATIONS, device_of
from op_checks import relative
from torch import Tensor

from fastpack.ops.implementation import Implementation
from fastpack.ops.loss import linear_log_probs as module
from fastpack.ops.loss.linear_log_probs import TokenScores, linear_log_probs

T, H, V = 11, 8, 50
FIELDS = TokenScores._fields


def defined(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    **_: Any,
) -> TokenScores:
    logits = logit_scale * torch.nn.functional.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    log_p = logits.log_softmax(-1)
    return TokenScores(
        log_p.gather(1, labels[:, None])[:, 0],
        -(log_p.exp() * log_p).sum(1),
        (2 * log_p).exp().sum(1).log().detach(),
        logits.mean(1).detach(),
        log_p.argmax(1) == labels,
    )


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap and temperature": {"softcap": 1.5, "temperature": 0.7, "logit_scale": 0.6},
    "bias": {"with_bias": True, "logit_scale": 2.0},
}
TRAINED = {"frozen head": False, "trained head": True}


def run(function: Any, case: dict[str, Any], trained: bool, *, of_entropy: bool, dtype: Any, device: str) -> Any:
    """Return the scores, and the gradients of a weighted sum of log-probabilities (and entropies)."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    options = dict(case)
    hidden, weight = draw(T, H).requires_grad_(), draw(V, H).requires_grad_(trained)
    bias = draw(V).requires_grad_(trained) if options.pop("with_bias", False) else None
    factors, further = draw(T), draw(T)
    labels = torch.randint(V, (T,), generator=generator).to(device)
    likeliest = torch.nn.functional.linear(hidden[0], weight, bias).argmax()
    labels[0] = int(likeliest)
    scores = function(hidden, weight, labels, bias=bias, **options)
    loss = (scores.log_probs * factors).sum()
    if of_entropy:
        loss = loss + (scores.entropy * further).sum()
    loss.backward()
    return scores, {"hidden": hidden.grad, "weight": weight.grad, "bias": None if bias is None else bias.grad}


def check(actual: Any, truth: Any, bound: float = FLOAT32_BOUND) -> None:
    for name, mine, theirs in zip(FIELDS, actual[0], truth[0], strict=True):
        if name == "is_top1":
            assert mine.tolist() == theirs.tolist()
            assert 0 < mine.sum() < len(mine)
        else:
            assert relative(mine, theirs) <= bound, name
    for name, theirs in truth[1].items():
        mine = actual[1][name]
        assert (mine is None) == (theirs is None), name
        assert theirs is None or relative(mine, theirs) <= bound, name


@pytest.mark.parametrize("of_entropy", [False, True], ids=["log-probs", "and entropy"])
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_is_the_definition(implementation: Implementation, name: str, trained: str, of_entropy: bool) -> None:
    device = device_of(implementation)
    truth = run(defined, CASES[name], TRAINED[trained], of_entropy=of_entropy, dtype=torch.float64, device=device)
    options = {**CASES[name], "outputs": FIELDS, "implementation": implementation, "chunk": 4}
    for dtype, bound in ((torch.float32, FLOAT32_BOUND), (torch.float64, 1e-12)):
        actual = run(linear_log_probs, options, TRAINED[trained], of_entropy=of_entropy, dtype=dtype, device=device)
        check(actual, truth, bound)


@pytest.mark.parametrize("what", ["temperature", "softcap", "logit_scale", "entropy"])
def test_negative_control(what: str) -> None:
    """The same comparison fails if a part of the definition is left out."""
    case = CASES["softcap and temperature"]
    truth = run(defined, case, False, of_entropy=True, dtype=torch.float64, device="cpu")
    less = {name: value for name, value in case.items() if name != what}
    options = {**less, "outputs": FIELDS}
    actual = run(linear_log_probs, options, False, of_entropy=what != "entropy", dtype=torch.float32, device="cpu")
    with pytest.raises(AssertionError):
        check(actual, truth)


@pytest.mark.parametrize(("trained", "of_entropy", "passes"), [(False, False, 1), (True, False, 2), (False, True, 2)])
def test_logits_are_computed_again_only_where_needed(
    trained: bool, of_entropy: bool, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    loop = module.by_chunks

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return loop(*args, **kwargs)

    monkeypatch.setattr(module, "by_chunks", counted)
    options = {"outputs": ("log_probs", "entropy")}
    run(linear_log_probs, options, trained, of_entropy=of_entropy, dtype=torch.float32, device="cpu")
    assert len(calls) == passes


def test_asked_for_alone() -> None:
    hidden, weight, labels = torch.randn(3, H), torch.randn(V, H), torch.tensor([1, 2, 3])
    for name in FIELDS[1:]:
        scores = linear_log_probs(hidden, weight, labels, outputs=(name,))
        assert {field for field in FIELDS if getattr(scores, field) is not None} == {"log_probs", name}


def test_no_tokens() -> None:
    hidden = torch.randn(0, H, requires_grad=True)
    scores = linear_log_probs(hidden, torch.randn(V, H), torch.zeros(0, dtype=torch.long), outputs=FIELDS)
    scores.log_probs.sum().backward()
    assert hidden.grad is not None
    assert scores.entropy is not None
    assert scores.entropy.shape == (0,)


def test_bad_input() -> None:
    hidden, weight = torch.randn(3, H), torch.randn(V, H)
    with pytest.raises(ValueError, match="flattened"):
        linear_log_probs(hidden, weight, torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="choose from"):
        linear_log_probs(hidden, weight, torch.zeros(3, dtype=torch.long), outputs=("logits",))
