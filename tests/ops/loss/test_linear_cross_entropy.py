"""Linear cross-entropy over chunks against its written definition: values, gradients and labels.

Its work and memory are in ``test_linear_cross_entropy_work.py``, sums over sequences in ``test_segment_sums.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cross_entropy_cases import (
    CASES,
    CHUNK,
    FLOAT32_BOUND,
    HALF_BOUND,
    HALF_DTYPES,
    IMPLEMENTATIONS,
    REDUCTIONS,
    ROUNDING,
    Case,
    H,
    T,
    V,
    computed,
    cut,
    defined,
    device_of,
    draw,
    interpreted,
    luck,
    on_gpu,
    recorded,
    run,
)
from op_checks import relative
from torch import Tensor

from fastpack.ops.implementation import Implementation
from fastpack.ops.loss.linear_cross_entropy import Reduction, linear_cross_entropy

# --- values and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_is_the_definition(implementation: Implementation, name: str, reduction: Reduction) -> None:
    case = CASES[name]
    inputs, labels = draw(case, device=device_of(implementation))
    options = {**case.options, "reduction": reduction}
    truth = run(defined, inputs, labels, frozen=case.frozen, dtype=torch.float64, **options)
    actual = run(computed, inputs, labels, frozen=case.frozen, implementation=implementation, **options)
    assert actual["result"].dtype == torch.float32
    for key, value in truth.items():
        assert relative(actual[key], value) <= FLOAT32_BOUND, key


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_kernel_runs_if_it_is_named(implementation: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastpack.ops.kernels import cross_entropy as kernels

    calls: list[int] = []
    original = kernels.cross_entropy_

    def counted(logits: Tensor, *args: Any, **kwargs: Any) -> None:
        calls.append(len(logits))
        original(logits, *args, **kwargs)

    monkeypatch.setattr(kernels, "cross_entropy_", counted)
    inputs, labels = draw(Case(), device=device_of(implementation))
    kept = int((labels != -100).sum())
    computed(inputs, labels, implementation=implementation, num_kept=kept)
    assert sum(calls) == (kept if implementation == "triton" else 0), "once for each row"


@pytest.mark.parametrize("what", ["softcap", "scale", "bias", "LoRA", "labels"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_negative_control(implementation: Implementation, what: str) -> None:
    """The same comparison fails if one part of the definition is left out."""
    case = CASES["everything"]
    inputs, labels = draw(case, device=device_of(implementation))
    truth = run(defined, inputs, labels, dtype=torch.float64, reduction="none", **case.options)
    options: dict[str, Any] = {name: value for name, value in case.options.items() if not name.endswith(what)}
    options |= {"reduction": "none", "implementation": implementation}
    left_out = {"bias": ("bias",), "LoRA": ("a", "b")}.get(what, ())
    fewer = {name: x for name, x in inputs.items() if name not in left_out}
    actual = run(computed, fewer, labels.roll(1) if what == "labels" else labels, **options)
    for key in ("result", "hidden", "weight"):
        assert relative(actual[key], truth[key]) > 1e-2, key


@pytest.mark.parametrize(("softcap", "scale"), [(30.0, 1.0), (30.0, 10.0), (3.0, 3.0), (3.0, 10.0)])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_softcap_is_as_exact_as_torchs(implementation: Implementation, softcap: float, scale: float) -> None:
    """This holds in float32, near zero and near the cap, where 1 - tanh^2 is small."""
    case = Case(shape=(8, 33, 257), options={"softcap": softcap, "logit_scale": scale})
    errors: dict[str, list[float]] = {"mine": [], "plain": []}
    for seed in range(20):
        inputs, labels = draw(case, seed=seed, device=device_of(implementation))
        truth = run(defined, inputs, labels, dtype=torch.float64, **case.options)
        for name, function, options in (("mine", computed, {"implementation": implementation}), ("plain", defined, {})):
            actual = run(function, inputs, labels, **options, **case.options)
            errors[name].append(max(relative(actual[key], value) for key, value in truth.items()))
    assert sum(errors["mine"]) <= 1.25 * sum(errors["plain"])


@pytest.mark.parametrize("chunk", [CHUNK, 1024])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_half_precision(implementation: Implementation, dtype: torch.dtype, reduction: Reduction, chunk: int) -> None:
    """The error against float64 is at most 1.5 times plain torch's in the same dtype."""
    tokens, seeds = (50, 1) if interpreted(implementation) else (20 * CHUNK - 3, 3)  # the interpreter takes its time
    case = Case(shape=(tokens, 40, 130), options={"softcap": 10.0})
    mine: dict[str, float] = {}
    plain: dict[str, float] = {}
    for seed in range(seeds):
        inputs, labels = draw(case, dtype, seed, device=device_of(implementation))
        options = {**case.options, "reduction": reduction}
        truth = run(defined, inputs, labels, dtype=torch.float64, **options)
        stock = run(defined, inputs, labels, **options)
        actual = run(computed, inputs, labels, implementation=implementation, chunk=chunk, **options)
        for key, value in truth.items():
            mine[key] = max(mine.get(key, 0.0), relative(actual[key], value))
            plain[key] = max(plain.get(key, 0.0), relative(stock[key], value))
    assert mine["hidden"] > 1e-4, "it was computed in half precision"
    for key in mine:
        bound = max(HALF_BOUND * plain[key], luck(key, dtype, reduction))
        assert mine[key] <= bound + cut(implementation, dtype), key


def test_a_sum_in_half_precision_would_be_seen() -> None:
    """The negative control of the test above adds up chunks of the weight's gradient in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(20 * CHUNK, size, generator=generator).bfloat16() for size in (130, 40))
    truth = x.double().t() @ y.double()
    total = torch.zeros_like(truth, dtype=torch.bfloat16)
    for a, b in zip(x.split(CHUNK), y.split(CHUNK), strict=True):
        total.addmm_(a.t(), b)
    assert relative(total, truth) > 2 * relative(x.t() @ y, truth)


@pytest.mark.parametrize("implementation", ROUNDING)
def test_a_mean_rounds_its_gradients_once(implementation: Implementation) -> None:
    """The factor 1 / 25 is no power of two, so a second rounding would show in the norm of all errors.

    It would come from a factor rounded to bfloat16, or applied after a rounding. The largest error may be any.
    """
    keys = ("hidden", "weight")
    errors = {name: dict.fromkeys(keys, 0.0) for name in ("ours", "stock", "rounded factor")}
    rounded = float(torch.tensor(1 / 25).bfloat16()) * 25
    for seed in range(10):
        inputs, labels = draw(Case(), torch.bfloat16, seed, device=device_of(implementation))
        truth = run(defined, inputs, labels, dtype=torch.float64, reduction="mean", factor=1.0)
        stock = run(defined, inputs, labels, reduction="mean", factor=1.0)
        actual = run(computed, inputs, labels, reduction="mean", factor=1.0, implementation=implementation)
        for key in keys:
            of_each = zip(errors, (actual[key], stock[key], actual[key].double() * rounded), strict=True)
            for name, gradient in of_each:
                errors[name][key] += float((gradient.double() - truth[key]).square().sum() / truth[key].square().sum())
    for key in keys:
        ours, stock, control = (total[key] ** 0.5 for total in errors.values())
        assert ours <= 1.1 * stock < control


@pytest.mark.parametrize("of_weight", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_mean_over_many_tokens_in_float16(implementation: Implementation, of_weight: torch.dtype) -> None:
    """A factor of one in a million is zero in float16, before the backward multiplies by the loss scale."""
    inputs, labels = draw(Case(), torch.float16, device=device_of(implementation))
    items, factor = 2**20 + 1, float(2**18)
    truth = run(defined, inputs, labels, dtype=torch.float64, factor=factor / items)
    hidden, weight = inputs["hidden"].clone().requires_grad_(), inputs["weight"].to(of_weight).requires_grad_()
    options: dict[str, Any] = {"reduction": "mean", "num_items": items, "implementation": implementation}
    loss = computed({"hidden": hidden, "weight": weight}, labels, **options)
    (loss * torch.linspace(0.5, 1.7, 1)[0] * factor).backward()
    for leaf, key in ((hidden, "hidden"), (weight, "weight")):
        assert leaf.grad is not None
        assert relative(leaf.grad, truth[key]) <= (5e-3 if of_weight != torch.bfloat16 else 2e-2)


def test_gradcheck() -> None:
    inputs, labels = draw(Case(bias=True, lora=True, shape=(7, 3, 5)), torch.float64)
    for reduction in REDUCTIONS:
        leaves = [x.requires_grad_() for x in inputs.values()]

        def function(*values: Tensor, reduction: Reduction = reduction) -> Tensor:
            options = {"softcap": 2.0, "logit_scale": 0.7, "reduction": reduction, "chunk": 3}
            return computed(dict(zip(inputs, values, strict=True)), labels, **options)

        assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_logits_and_a_large_vocabulary(implementation: Implementation) -> None:
    """There are more columns than a block has, an odd number, and logits whose exponentials overflow."""
    case = Case(shape=(3, 4, 9001))
    inputs, labels = draw(case, device=device_of(implementation))
    inputs["hidden"] = inputs["hidden"] * 1000
    labels[:] = torch.tensor([0, 9000, 4096])
    truth = run(defined, inputs, labels, dtype=torch.float64)
    actual = run(computed, inputs, labels, implementation=implementation)
    for key, value in truth.items():
        assert relative(actual[key], value) <= FLOAT32_BOUND, key


# --- labels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_kept", [None, "a bound", "none known"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ignored_labels(implementation: Implementation, num_kept: str | None) -> None:
    """They are left out if the host knows their number; else they are computed and multiplied by zero."""
    inputs, labels = draw(Case(lora=True), device=device_of(implementation))
    kept = int((labels != -100).sum())
    bound = {None: None, "a bound": kept + 3, "none known": T}[num_kept]
    options = {"implementation": implementation, "num_kept": bound}
    for reduction in REDUCTIONS:
        truth = run(defined, inputs, labels, dtype=torch.float64, reduction=reduction)
        actual = run(computed, inputs, labels, reduction=reduction, **options)
        for key, value in truth.items():
            assert relative(actual[key], value) <= FLOAT32_BOUND, key
        assert not actual["hidden"][labels == -100].any()
        if reduction == "none":
            assert not actual["result"][labels == -100].any()
    with recorded() as recorder:
        computed(inputs, labels, **options)
    counted = T if bound is None and labels.is_cuda else bound or kept  # labels are counted on a CPU alone
    assert sum(rows for rows, size, _ in recorder.product_shapes if size == H) == 2 * counted


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_label_at_all(implementation: Implementation, tokens: int, reduction: Reduction) -> None:
    inputs, labels = draw(Case(bias=True, lora=True, shape=(tokens, H, V)), device=device_of(implementation))
    labels[:] = -100
    for num_kept in (None, tokens):
        actual = run(computed, inputs, labels, reduction=reduction, implementation=implementation, num_kept=num_kept)
        result = actual.pop("result")
        assert result.isnan() if reduction == "mean" else not result.any(), "as torch's own"
        assert all(not grad.any() for grad in actual.values())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_another_index_to_ignore(implementation: Implementation) -> None:
    inputs, labels = draw(Case(), device=device_of(implementation))
    labels[1::3] = 7
    truth = defined(inputs, labels, ignore_index=7)
    assert relative(computed(inputs, labels, ignore_index=7, implementation=implementation), truth) <= FLOAT32_BOUND
    assert relative(computed(inputs, labels, implementation=implementation), truth) > 1e-2


@pytest.mark.parametrize("num_items", [50, torch.tensor(50), torch.tensor([50])])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_divisor_of_a_mean(implementation: Implementation, num_items: int | Tensor) -> None:
    inputs, labels = draw(Case(), device=device_of(implementation))
    truth = run(lambda x, y: defined(x, y) / 50, inputs, labels, dtype=torch.float64)
    actual = run(computed, inputs, labels, reduction="mean", num_items=num_items, implementation=implementation)
    for key, value in truth.items():
        assert relative(actual[key], value) <= FLOAT32_BOUND, key


@pytest.mark.parametrize("wrong", [V, V + 100_000, -1])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_label_outside_the_vocabulary_is_seen(implementation: Implementation, wrong: int) -> None:
    """The definition runs on a CPU, since torch's check would stop a GPU. The kernel reads no logit there."""
    inputs, labels = draw(Case(), device=device_of(implementation))
    labels[3] = wrong
    if implementation == "torch":
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            run(computed, inputs, labels, implementation=implementation)
        return
    actual = run(computed, inputs, labels, implementation=implementation)
    assert actual["result"].isnan()
    of_row = actual["hidden"].isnan()
    assert of_row[3].all()
    assert not of_row[torch.arange(T) != 3].any(), "other rows don't know of it"


def test_arguments_are_checked() -> None:
    inputs, labels = draw(Case())
    for options, match in (
        ({"reduction": "median"}, "'none'"),
        ({"num_items": 3}, "reduction='sum'"),
        ({"chunk": 0}, "1 or more"),
    ):
        with pytest.raises(ValueError, match=match):
            computed(inputs, labels, **options)
    with pytest.raises(ValueError, match="flattened"):
        linear_cross_entropy(inputs["hidden"][None], inputs["weight"], labels[None])
    with pytest.raises(ValueError, match="integers"):
        computed(inputs, labels.float())


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [128_256, 151_936, 50_257])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_real_vocabularies_on_a_gpu(dtype: torch.dtype, reduction: Reduction, vocab: int) -> None:
    case = Case(lora=True, shape=(600, 256, vocab), options={"softcap": 30.0})
    inputs, labels = draw(case, dtype)
    gpu, labels = on_gpu(inputs), labels.cuda()
    options = {**case.options, "reduction": reduction}
    truth = run(defined, gpu, labels, dtype=torch.float64, **options)
    stock = run(defined, gpu, labels, **options)
    for num_kept in (None, int((labels != -100).sum())):
        actual = run(computed, gpu, labels, chunk=128, num_kept=num_kept, **options)
        for key, value in truth.items():
            bound = max(HALF_BOUND * relative(stock[key], value), luck(key, dtype, reduction))
            assert relative(actual[key], value) <= bound, key
