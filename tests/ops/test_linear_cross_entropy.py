"""Linear cross-entropy over chunks against its written definition: values, gradients, memory and work."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from common import relative
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fastpack.ops import linear_cross_entropy as module
from fastpack.ops.implementation import Implementation
from fastpack.ops.linear_cross_entropy import Reduction, linear_cross_entropy
from fastpack.ops.sequence_log_probs import sequence_log_probs
from fastpack.packing import PackedSeqLens

IMPLEMENTATIONS: tuple[Implementation, ...] = ("torch", "triton")
REDUCTIONS: tuple[Reduction, ...] = ("sum", "mean", "none")
HALF_DTYPES = (torch.bfloat16, torch.float16)
FLOAT32_BOUND = 1e-5
HALF_BOUND = 1.5
CHUNK = 16
T, H, V, R = 37, 24, 201, 4
"""Odd: no multiple of the chunk, of a vector or of a block."""


@dataclass(frozen=True)
class Case:
    """Options of the op, and which inputs there are."""

    bias: bool = False
    lora: bool = False
    options: dict[str, float] = field(default_factory=dict)
    shape: tuple[int, int, int] = (T, H, V)
    strided: bool = False
    frozen: tuple[str, ...] = ()


CASES = {
    "plain": Case(),
    "softcap": Case(options={"softcap": 3.0}),
    "scale": Case(options={"logit_scale": 0.3}),
    "bias": Case(bias=True),
    "LoRA": Case(lora=True, frozen=("weight",)),
    "everything": Case(bias=True, lora=True, options={"softcap": 3.0, "logit_scale": 0.3}),
    "strided": Case(bias=True, lora=True, strided=True),
    "one token": Case(shape=(1, H, V)),
    "one chunk": Case(shape=(CHUNK, H, V)),
    "two words": Case(shape=(T, 3, 2)),
    "frozen": Case(bias=True, frozen=("weight", "bias")),
    "frozen hidden": Case(bias=True, lora=True, frozen=("hidden",)),
}
NAMES = ("hidden", "weight", "bias", "a", "b")


def draw(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs by name, and labels of which a third is ignored."""
    tokens, size, vocab = case.shape
    generator = torch.Generator().manual_seed(seed)
    shapes = {"hidden": (tokens, size), "weight": (vocab, size)}
    if case.bias:
        shapes["bias"] = (vocab,)
    if case.lora:
        shapes |= {"a": (R, size), "b": (vocab, R)}
    inputs = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=generator) * (1.0 if name == "hidden" else 0.5)
        if case.strided and x.ndim == 2:
            x = x.t().contiguous().t()
        inputs[name] = x.to(dtype)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[1::3] = -100
    return inputs, labels


def defined(
    inputs: dict[str, Tensor],
    labels: Tensor,
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: Reduction = "sum",
    ignore_index: int = -100,
) -> Tensor:
    """The definition, in the dtype of its inputs up to the logits."""
    logits = F.linear(inputs["hidden"], inputs["weight"], inputs.get("bias"))
    if "a" in inputs:
        logits = logits + F.linear(F.linear(inputs["hidden"], inputs["a"]), inputs["b"]) * 0.7
    logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, labels, reduction=reduction, ignore_index=ignore_index)


def computed(inputs: dict[str, Tensor], labels: Tensor, **options: Any) -> Tensor:
    """The op, over several chunks."""
    lora = (inputs["a"], inputs["b"], 0.7) if "a" in inputs else None
    options = {"chunk": CHUNK, **options}
    return linear_cross_entropy(
        inputs["hidden"], inputs["weight"], labels, bias=inputs.get("bias"), lora=lora, **options
    )


def run(
    function: Callable[..., Tensor],
    inputs: dict[str, Tensor],
    labels: Tensor,
    *,
    frozen: tuple[str, ...] = (),
    dtype: torch.dtype | None = None,
    factor: float = 0.37,
    **options: Any,
) -> dict[str, Tensor]:
    """The result and every gradient, for a gradient that is not 1 and differs from token to token."""
    leaves = {
        name: x.detach().to(dtype or x.dtype).clone().requires_grad_(name not in frozen) for name, x in inputs.items()
    }
    out = function(leaves, labels, **options)
    weights = torch.linspace(0.5, 1.7, out.numel(), dtype=out.dtype, device=out.device).reshape(out.shape)
    out.backward(weights * factor)
    found = {"result": out.detach()}
    for name, leaf in leaves.items():
        assert (leaf.grad is None) == (name in frozen)
        if leaf.grad is not None:
            assert leaf.grad.dtype == leaf.dtype
            found[name] = leaf.grad
    return found


# --- values and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_is_the_definition(implementation: Implementation, name: str, reduction: Reduction) -> None:
    case = CASES[name]
    inputs, labels = draw(case)
    options = {**case.options, "reduction": reduction}
    truth = run(defined, inputs, labels, frozen=case.frozen, dtype=torch.float64, **options)
    found = run(computed, inputs, labels, frozen=case.frozen, implementation=implementation, **options)
    assert found["result"].dtype == torch.float32
    for key, value in truth.items():
        assert relative(found[key], value) <= FLOAT32_BOUND, key


def test_the_kernel_runs_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastpack.ops.kernels import cross_entropy as kernels

    calls: list[int] = []
    original = kernels.cross_entropy_

    def counted(logits: Tensor, *args: Any, **kwargs: Any) -> None:
        calls.append(len(logits))
        original(logits, *args, **kwargs)

    monkeypatch.setattr(kernels, "cross_entropy_", counted)
    inputs, labels = draw(Case())
    kept = int((labels != -100).sum())
    for implementation in ("triton", "torch"):
        computed(inputs, labels, implementation=implementation)
        assert sum(calls) == kept, "once for each row, and not for the definition"


@pytest.mark.parametrize("what", ["softcap", "scale", "bias", "LoRA", "labels"])
def test_negative_control(what: str) -> None:
    """The same comparison fails where one part of the definition is left out."""
    case = CASES["everything"]
    inputs, labels = draw(case)
    truth = run(defined, inputs, labels, dtype=torch.float64, reduction="none", **case.options)
    options = {name: value for name, value in case.options.items() if not name.endswith(what)}
    left_out = {"bias": ("bias",), "LoRA": ("a", "b")}.get(what, ())
    fewer = {name: x for name, x in inputs.items() if name not in left_out}
    found = run(computed, fewer, labels.roll(1) if what == "labels" else labels, reduction="none", **options)
    for key in ("result", "hidden", "weight"):
        assert relative(found[key], truth[key]) > 1e-2, key


def luck(key: str, dtype: torch.dtype, reduction: Reduction) -> float:
    """Errors of many tokens may cancel in plain torch's sum, and not in ours: no measure of either."""
    return torch.finfo(dtype).eps / 4 if key == "result" and reduction != "none" else 0.0


@pytest.mark.parametrize("chunk", [CHUNK, 1024])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_half_precision(implementation: Implementation, dtype: torch.dtype, reduction: Reduction, chunk: int) -> None:
    """Against float64, no farther than 1.5 times plain torch in the same dtype."""
    tokens, seeds = (20 * CHUNK - 3, 3) if implementation == "torch" else (50, 1)  # the interpreter takes its time
    case = Case(shape=(tokens, 40, 130), options={"softcap": 10.0})
    mine: dict[str, float] = {}
    plain: dict[str, float] = {}
    for seed in range(seeds):
        inputs, labels = draw(case, dtype, seed)
        options = {**case.options, "reduction": reduction}
        truth = run(defined, inputs, labels, dtype=torch.float64, **options)
        stock = run(defined, inputs, labels, **options)
        found = run(computed, inputs, labels, implementation=implementation, chunk=chunk, **options)
        for key, value in truth.items():
            mine[key] = max(mine.get(key, 0.0), relative(found[key], value))
            plain[key] = max(plain.get(key, 0.0), relative(stock[key], value))
    assert mine["hidden"] > 1e-4, "it was computed in half precision"
    for key in mine:
        assert mine[key] <= max(HALF_BOUND * plain[key], luck(key, dtype, reduction)), key


def test_a_sum_in_half_precision_would_be_seen() -> None:
    """The negative control of the test above: chunks of the weight's gradient, added up in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(20 * CHUNK, size, generator=generator).bfloat16() for size in (130, 40))
    truth = x.double().t() @ y.double()
    total = torch.zeros_like(truth, dtype=torch.bfloat16)
    for a, b in zip(x.split(CHUNK), y.split(CHUNK), strict=True):
        total.addmm_(a.t(), b)
    assert relative(total, truth) > 2 * relative(x.t() @ y, truth)


def test_a_mean_rounds_its_gradients_once() -> None:
    """1 / 25 is no power of two: a factor that was rounded to bfloat16, or applied behind a rounding, would show."""
    inputs, labels = draw(Case(), torch.bfloat16)
    truth = run(defined, inputs, labels, dtype=torch.float64, reduction="mean", factor=1.0)
    stock = run(defined, inputs, labels, reduction="mean", factor=1.0)
    found = run(computed, inputs, labels, reduction="mean", factor=1.0)
    for key in ("hidden", "weight"):
        assert relative(found[key], truth[key]) <= 1.1 * relative(stock[key], truth[key])


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
    """More columns than a block, in a number that is odd; logits whose exponentials overflow."""
    case = Case(shape=(3, 4, 9001))
    inputs, labels = draw(case)
    inputs["hidden"] = inputs["hidden"] * 1000
    labels[:] = torch.tensor([0, 9000, 4096])
    truth = run(defined, inputs, labels, dtype=torch.float64)
    found = run(computed, inputs, labels, implementation=implementation)
    for key, value in truth.items():
        assert relative(found[key], value) <= FLOAT32_BOUND, key


# --- labels -----------------------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Counts the operators that run, the rows that products read, and the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.product_shapes: list[tuple[int, ...]] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").split(".")[0]
        self.names.append(name)
        if name in ("mm", "addmm", "addmm_"):
            x, y = [a for a in args if isinstance(a, Tensor)][-2:]
            self.product_shapes.append((x.shape[0], x.shape[1], y.shape[1]))
        for made in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(made, Tensor):
                self.largest = max(self.largest, made.numel())
        return out

    @property
    def waits(self) -> list[str]:
        """What would wait for a GPU."""
        return [n for n in self.names if n in ("_local_scalar_dense", "nonzero", "masked_select", "item", "equal")]


@contextmanager
def recorded() -> Iterator[Recorder]:
    with Recorder() as recorder:
        yield recorder


@pytest.mark.parametrize("num_kept", [None, "a bound", "none known"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ignored_labels(implementation: Implementation, num_kept: str | None) -> None:
    """Left out where the host knows how many there are, else computed and multiplied by zero."""
    inputs, labels = draw(Case(lora=True))
    kept = int((labels != -100).sum())
    bound = {None: None, "a bound": kept + 3, "none known": T}[num_kept]
    options = {"implementation": implementation, "num_kept": bound}
    for reduction in REDUCTIONS:
        truth = run(defined, inputs, labels, dtype=torch.float64, reduction=reduction)
        found = run(computed, inputs, labels, reduction=reduction, **options)
        for key, value in truth.items():
            assert relative(found[key], value) <= FLOAT32_BOUND, key
        assert not found["hidden"][labels == -100].any()
        if reduction == "none":
            assert not found["result"][labels == -100].any()
    with recorded() as recorder:
        computed(inputs, labels, **options)
    assert sum(rows for rows, size, _ in recorder.product_shapes if size == H) == 2 * (bound or kept)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_label_at_all(implementation: Implementation, tokens: int, reduction: Reduction) -> None:
    inputs, labels = draw(Case(bias=True, lora=True, shape=(tokens, H, V)))
    labels[:] = -100
    for num_kept in (None, tokens):
        found = run(computed, inputs, labels, reduction=reduction, implementation=implementation, num_kept=num_kept)
        result = found.pop("result")
        assert result.isnan() if reduction == "mean" else not result.any(), "as torch's own"
        assert all(not grad.any() for grad in found.values())


def test_another_index_to_ignore() -> None:
    inputs, labels = draw(Case())
    labels[1::3] = 7
    truth = defined(inputs, labels, ignore_index=7)
    assert relative(computed(inputs, labels, ignore_index=7), truth) <= FLOAT32_BOUND
    assert relative(computed(inputs, labels), truth) > 1e-2


def test_shift() -> None:
    inputs, labels = draw(Case())
    aligned = torch.cat([labels[1:], torch.tensor([-100])])
    assert torch.equal(computed(inputs, labels, shift=True), computed(inputs, aligned))
    assert relative(computed(inputs, labels), computed(inputs, aligned)) > 1e-3


@pytest.mark.parametrize("num_items", [50, torch.tensor(50), torch.tensor([50])])
def test_what_a_mean_divides_by(num_items: int | Tensor) -> None:
    inputs, labels = draw(Case())
    truth = run(lambda x, y: defined(x, y) / 50, inputs, labels, dtype=torch.float64)
    found = run(computed, inputs, labels, reduction="mean", num_items=num_items)
    for key, value in truth.items():
        assert relative(found[key], value) <= FLOAT32_BOUND, key


def test_a_label_outside_the_vocabulary_is_seen() -> None:
    inputs, labels = draw(Case())
    for wrong in (V, -1):
        labels[4] = wrong
        found = run(computed, inputs, labels, implementation="triton")
        assert found["result"].isnan()
        assert found["hidden"][4].isnan().all()
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            run(computed, inputs, labels, implementation="torch")


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


# --- work and memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_more_than_a_chunk_of_logits_exists(reduction: Reduction) -> None:
    case = Case(lora=True, shape=(10 * CHUNK, 8, 200))
    inputs, labels = draw(case)
    with recorded() as recorder:
        run(computed, inputs, labels, reduction=reduction)
    assert recorder.largest == CHUNK * 256, "rows of 200 are laid out in whole vectors"
    with recorded() as recorder:
        run(defined, inputs, labels)
    assert recorder.largest == 10 * CHUNK * 200


def test_the_chunk_is_below_a_twentieth() -> None:
    tokens, vocab = 16_384, 128_256
    assert 20 * module._chunk_rows(tokens, module.CHUNK) * vocab < tokens * vocab
    assert 512 <= module._chunk_rows(tokens, module.CHUNK) <= 1024
    for tokens in (1, 500, 768, 769, 3000, 16_384):
        rows = module._chunk_rows(tokens, module.CHUNK)
        chunks = -(-tokens // rows)
        assert rows <= module.CHUNK
        assert tokens - (chunks - 1) * rows > rows - 128 * chunks, "about even"


def test_only_what_is_needed_is_computed() -> None:
    inputs, labels = draw(Case(bias=True, lora=True))
    kept = int((labels != -100).sum())
    chunks = -(-kept // CHUNK)
    with recorded() as recorder, torch.no_grad():
        computed({name: x.clone().requires_grad_() for name, x in inputs.items()}, labels)
    forward = 3 * chunks  # base, A and B
    assert len(recorder.product_shapes) == forward
    for trained, products in (("hidden", 3), ("weight", 1), ("bias", 0), ("a", 2), ("b", 1)):
        with recorded() as recorder:
            run(computed, inputs, labels, frozen=tuple({*NAMES} - {trained}))
        assert len(recorder.product_shapes) == forward + products * chunks, trained


def test_nothing_waits_for_the_device() -> None:
    inputs, labels = draw(Case(bias=True, lora=True))
    offsets = torch.tensor([0, 11, 11, 30, T], dtype=torch.int32)
    for reduction in REDUCTIONS:
        with recorded() as recorder:
            run(computed, inputs, labels, reduction=reduction, num_kept=30)
        assert not recorder.waits
    with recorded() as recorder:
        run(log_probs, inputs, labels, offsets=offsets, shift=True, num_kept=T)
    assert not recorder.waits
    with recorded() as recorder:
        run(computed, inputs, labels)
    assert recorder.waits, "on a CPU, where it costs nothing, the labels are counted"


def test_a_dequantised_weight_is_made_once_each_way() -> None:
    inputs, labels = draw(Case())
    made: list[Tensor] = []

    def weight() -> Tensor:
        made.append(inputs["weight"])
        return inputs["weight"]

    for reduction, times in (("sum", 1), ("mean", 1), ("none", 2)):
        made.clear()
        hidden = inputs["hidden"].clone().requires_grad_()
        linear_cross_entropy(hidden, weight, labels, reduction=reduction, chunk=CHUNK).sum().backward()
        assert len(made) == times
        reference = inputs["hidden"].clone().requires_grad_()
        defined({**inputs, "hidden": reference}, labels, reduction=reduction).sum().backward()
        assert hidden.grad is not None
        assert reference.grad is not None
        assert relative(hidden.grad, reference.grad) <= FLOAT32_BOUND


# --- autograd ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_retained_graph(reduction: Reduction) -> None:
    inputs, labels = draw(CASES["everything"])
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    out = computed(leaves, labels, reduction=reduction)
    ones = torch.ones_like(out)
    first = torch.autograd.grad(out, list(leaves.values()), 3 * ones, retain_graph=True)
    second = torch.autograd.grad(out, list(leaves.values()), 3 * ones, retain_graph=True)
    third = torch.autograd.grad(out, list(leaves.values()), 1.5 * ones)
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, 2 * c)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_under_checkpointing(use_reentrant: bool, reduction: Reduction) -> None:
    inputs, labels = draw(CASES["everything"])

    def function(leaves: dict[str, Tensor], labels: Tensor) -> Tensor:
        def inner(*values: Tensor) -> Tensor:
            return computed(dict(zip(inputs, values, strict=True)), labels, reduction=reduction)

        return checkpoint(inner, *leaves.values(), use_reentrant=use_reentrant)

    truth = run(computed, inputs, labels, reduction=reduction)
    found = run(function, inputs, labels)
    assert all(torch.equal(found[key], value) for key, value in truth.items())


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_under_autocast(implementation: Implementation, dtype: torch.dtype, reduction: Reduction) -> None:
    """Float32 weights, and the loss scaled as for fp16; the backward runs outside, as a trainer's does."""
    case = Case(bias=True, lora=True, shape=(100, 40, 130))
    inputs, labels = draw(case)

    def within(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run_within(*args: Any, **kwargs: Any) -> Tensor:
            with torch.autocast("cpu", dtype=dtype):
                return function(*args, **kwargs)

        return run_within

    settings: dict[str, Any] = {"reduction": reduction, "factor": 1024.0}
    truth = run(defined, inputs, labels, dtype=torch.float64, **settings)
    stock = run(within(defined), inputs, labels, **settings)
    found = run(within(computed), inputs, labels, implementation=implementation, **settings)
    for key in ("hidden", "weight", "a", "b", "bias"):
        error = relative(found[key], truth[key])
        assert 1e-5 < error < 0.1, key
        assert error <= HALF_BOUND * relative(stock[key], truth[key]), key


def test_tied_embeddings() -> None:
    ids = torch.arange(12) % 9
    labels = ids.roll(-1)
    grads = []
    for function in (defined, computed):
        weight = torch.randn(11, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
        function({"hidden": torch.tanh(F.embedding(ids, weight)), "weight": weight}, labels).backward()
        assert weight.grad is not None
        grads.append(weight.grad)
    assert relative(grads[1], grads[0]) <= FLOAT32_BOUND


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_compiles_whole(reduction: Reduction) -> None:
    torch.compiler.reset()
    inputs, labels = draw(CASES["everything"])

    def function(leaves: dict[str, Tensor], labels: Tensor) -> Tensor:
        return computed(leaves, labels, softcap=3.0, reduction=reduction)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    truth = run(function, inputs, labels)
    found = run(compiled, inputs, labels)
    for key, value in truth.items():
        assert relative(found[key], value) <= FLOAT32_BOUND, key


# --- sequences --------------------------------------------------------------------------------------------------------

LENGTHS = (11, 1, 18, 7)


def log_probs(inputs: dict[str, Tensor], labels: Tensor, *, offsets: Any, **options: Any) -> Tensor:
    lora = (inputs["a"], inputs["b"], 0.7) if "a" in inputs else None
    return sequence_log_probs(
        inputs["hidden"],
        inputs["weight"],
        labels,
        offsets,
        bias=inputs.get("bias"),
        lora=lora,
        **{"chunk": CHUNK, **options},
    )


def defined_log_probs(inputs: dict[str, Tensor], labels: Tensor, *, shift: bool, **options: Any) -> Tensor:
    """Each sequence alone."""
    sums = []
    for hidden, wanted in zip(inputs["hidden"].split(LENGTHS), labels.split(LENGTHS), strict=True):
        pair = (hidden[:-1], wanted[1:]) if shift else (hidden, wanted)
        sums.append(-defined({**inputs, "hidden": pair[0]}, pair[1], **options))
    return torch.stack(sums)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_log_probs_of_each_sequence(implementation: Implementation, shift: bool) -> None:
    case = CASES["everything"]
    inputs, labels = draw(case)
    labels[12] = 5  # the first of a sequence, which nothing predicts
    truth = run(defined_log_probs, inputs, labels, dtype=torch.float64, shift=shift, **case.options)
    packed = PackedSeqLens.from_lengths(LENGTHS)
    for offsets in (packed, packed.cu_seqlens):
        options = {**case.options, "implementation": implementation, "shift": shift}
        found = run(log_probs, inputs, labels, offsets=offsets, **options)
        assert found["result"].dtype == torch.float32
        for key, value in truth.items():
            assert relative(found[key], value) <= FLOAT32_BOUND, key
    wrong = run(log_probs, inputs, labels, offsets=torch.tensor([0, 12, 12, 30, T]), **options)
    assert relative(wrong["result"], truth["result"]) > 1e-2


def test_a_first_label_would_be_seen() -> None:
    """The negative control of shifting: labels shifted over all sequences at once."""
    inputs, labels = draw(Case())
    labels[12] = 5
    offsets = PackedSeqLens.from_lengths(LENGTHS)
    right = log_probs(inputs, labels, offsets=offsets, shift=True)
    wrong = log_probs(inputs, labels.roll(-1), offsets=offsets)
    assert relative(wrong, right) > 1e-2


def test_sequences_without_tokens_and_tokens_without_sequence() -> None:
    inputs, labels = draw(Case())
    labels[:] = labels.clamp(min=0)
    offsets = torch.tensor([0, 11, 11, 30, 30], dtype=torch.int32)
    for shift in (False, True):
        found = run(log_probs, inputs, labels, offsets=offsets, shift=shift)
        assert found["result"].shape == (4,)
        assert not found["result"][[1, 3]].any()
        assert found["result"][[0, 2]].all()
        assert not found["hidden"][30:].any()
        changed = {**inputs, "hidden": torch.cat([inputs["hidden"][:30], torch.ones(7, H)])}
        assert torch.equal(run(log_probs, changed, labels, offsets=offsets, shift=shift)["result"], found["result"])
    none = log_probs({**inputs, "hidden": inputs["hidden"][:0]}, labels[:0], offsets=torch.zeros(3).int(), shift=True)
    assert torch.equal(none, torch.zeros(2))


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def on_gpu(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.cuda() for name, x in inputs.items()}


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
        found = run(computed, gpu, labels, chunk=128, num_kept=num_kept, **options)
        for key, value in truth.items():
            bound = max(HALF_BOUND * relative(stock[key], value), luck(key, dtype, reduction))
            assert relative(found[key], value) <= bound, key


@pytest.mark.gpu
def test_memory_on_a_gpu() -> None:
    tokens, size, vocab = 16_384, 4096, 128_256
    hidden = torch.randn(tokens, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, size, device="cuda", dtype=torch.bfloat16) * 0.02
    labels = torch.randint(0, vocab, (tokens,), device="cuda")
    linear_cross_entropy(hidden, weight, labels, reduction="mean").backward()  # cuBLAS makes its workspace
    hidden.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, labels, reduction="mean").backward()
    gradient = hidden.numel() * 2
    extra = torch.cuda.max_memory_allocated() - before - gradient
    assert extra < tokens * vocab * 2 / 20


@pytest.mark.gpu
def test_captured_in_a_graph_without_waiting() -> None:
    inputs, labels = draw(Case(bias=True, lora=True, shape=(300, 64, 1000)))
    gpu, labels = on_gpu(inputs), labels.cuda()
    offsets = torch.tensor([0, 100, 260, 300], dtype=torch.int32, device="cuda")

    def step() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in gpu.values()]
        named = dict(zip(gpu, leaves, strict=True))
        loss = computed(named, labels, reduction="mean", chunk=128)
        loss = loss + log_probs(named, labels, offsets=offsets, shift=True, chunk=128).sum()
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    mode = torch.cuda.get_sync_debug_mode()
    expected = step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    graph.replay()
    for a, b in zip(captured, expected, strict=True):
        assert relative(a, b) <= FLOAT32_BOUND
    assert math.isfinite(float(captured[0]))
