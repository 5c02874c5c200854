"""The statistics of linear cross-entropy: entropies, and the number of labels that are the likeliest token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cross_entropy_cases import CASES, FLOAT32_BOUND, IMPLEMENTATIONS, REDUCTIONS, Case, computed, device_of, draw
from torch import Tensor

from fastpack.ops.implementation import Implementation
from fastpack.ops.loss.linear_cross_entropy import Reduction


def defined_statistics(inputs: dict[str, Tensor], labels: Tensor, options: dict[str, Any]) -> Tensor:
    """Return float64 ``[2]``, computed as the op's docstring defines it."""
    x = {name: tensor.detach().double() for name, tensor in inputs.items()}
    logits = F.linear(x["hidden"], x["weight"], x.get("bias"))
    if "a" in x:
        logits = logits + F.linear(F.linear(x["hidden"], x["a"]), x["b"]) * 0.7
    logits = logits * options.get("logit_scale", 1.0)
    if "softcap" in options:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    kept = labels != -100
    distribution = torch.distributions.Categorical(logits=logits[kept])
    return torch.stack([distribution.entropy().sum(), (logits[kept].argmax(1) == labels[kept]).sum().double()])


def likely(inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    """Return labels of which half are the likeliest token, since random labels hardly ever are."""
    logits = F.linear(inputs["hidden"].float(), inputs["weight"].float())
    labels_or_top = torch.where(torch.arange(len(labels), device=labels.device) % 2 == 0, logits.argmax(1), labels)
    return labels_or_top.masked_fill(labels == -100, -100)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_are_those_of_the_definition(implementation: Implementation, name: str, reduction: Reduction) -> None:
    case = CASES[name]
    inputs, labels = draw(case, device=device_of(implementation))
    labels = likely(inputs, labels)
    before = torch.tensor([5.0, 7.0], device=labels.device)
    statistics = before.clone()
    leaves = {name: x.clone().requires_grad_(name not in case.frozen) for name, x in inputs.items()}
    options = {**case.options, "reduction": reduction, "implementation": implementation}
    out = computed(leaves, labels, statistics=statistics, **options)
    truth = defined_statistics(inputs, labels, case.options)
    assert truth[1] > 0 or len(labels) < 3
    actual = statistics - before
    assert abs(actual[0] - truth[0]) <= FLOAT32_BOUND * truth[0] + 1e-5
    assert actual[1] == truth[1]
    out.sum().backward()
    assert torch.equal(statistics - before, actual), "the backward adds nothing"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_change_nothing_else(implementation: Implementation, reduction: Reduction) -> None:
    case = CASES["everything"]
    inputs, labels = draw(case, device=device_of(implementation))
    results = []
    for statistics in (None, torch.zeros(2, device=labels.device)):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        options = {**case.options, "reduction": reduction, "implementation": implementation, "statistics": statistics}
        out = computed(leaves, labels, **options)
        out.sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves.values())])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_without_a_gradient_and_without_a_label(implementation: Implementation) -> None:
    inputs, labels = draw(Case(), device=device_of(implementation))
    statistics = torch.zeros(2, device=labels.device)
    with torch.no_grad():
        computed(inputs, labels, statistics=statistics, implementation=implementation)
    assert statistics[0] > 0
    nothing = torch.zeros_like(statistics)
    computed(inputs, torch.full_like(labels, -100), statistics=nothing, implementation=implementation)
    assert not nothing.any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_of_several_likeliest_tokens_the_first_counts(implementation: Implementation) -> None:
    hidden, weight = torch.ones(2, 1), torch.tensor([[1.0], [2.0], [2.0], [0.5]])
    tensors = [x.to(device_of(implementation)) for x in (hidden, weight, torch.tensor([1, 2]), torch.zeros(2))]
    *inputs, labels, statistics = tensors
    named = dict(zip(("hidden", "weight"), inputs, strict=True))
    computed(named, labels, statistics=statistics, implementation=implementation)
    assert statistics[1] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    case = Case(shape=(300, 64, 32003))
    inputs, labels = draw(case, dtype)
    labels = likely(inputs, labels)
    logits = F.linear(inputs["hidden"].cuda(), inputs["weight"].cuda()).float()
    kept = (labels != -100).cuda()
    truth = torch.distributions.Categorical(logits=logits[kept]).entropy().sum()
    statistics = torch.zeros(2, device="cuda")
    leaves = {name: x.cuda().requires_grad_() for name, x in inputs.items()}
    computed(leaves, labels.cuda(), statistics=statistics, chunk=128)
    assert abs(statistics[0] - truth) <= 1e-4 * truth
    right = (logits[kept].argmax(1) == labels.cuda()[kept]).sum()
    assert abs(statistics[1] - right) <= (0 if dtype == torch.float32 else 2)
