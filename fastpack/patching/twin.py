"""Match specs against classes whose source was not proved, by a twin: a tiny model of these classes on the CPU.

A spec matches a class if the twin, patched by the spec, passes three checks:

- In float32 it gives the same as its own stock forward on each sequence alone, by the rule of
  :mod:`fastpack.exactness.rule`: the outputs, and the gradients of all parameters and of the inputs.
- With every dropout on, it drops the same elements as the stock layers. Both attend through fastpack's interface.
- In bfloat16 each module is compared with the class's own forward on the same inputs, since float32 hides how a class
  rounds. Norms and gated MLPs, with their projections, give the very same bits. Attention and layers are as near to
  float32 as the rule asks.

Of the user's model only the config is read and copied; the model itself is not run or changed. Everything runs inside
:func:`fastpack.exactness.twins.apart`. The twin's classes are the user's own, so that the unpatched twin gives what
these classes compute.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from fastpack.errors import FastpackError
from fastpack.exactness.inputs import INPUT_KINDS, packed, single
from fastpack.exactness.oracle import Oracle, with_eager_experts
from fastpack.exactness.rule import CONTROL, FULL_BOUND, Result, bound_of, compare, relative
from fastpack.exactness.twins import apart, build_twin, distinct_sequences
from fastpack.exactness.verification import Verification
from fastpack.families.spec import (
    AnyAttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    Family,
    GatedNormSpec,
    HeadSpec,
    MlpSpec,
    NormSpec,
    Spec,
)
from fastpack.layers.experts import read_experts
from fastpack.layers.rope_tables import unknown_tables
from fastpack.layers.window_checks import FULL
from fastpack.model.unwrap import find_parts
from fastpack.patching.apply import apply, restore
from fastpack.patching.options import PatchOptions
from fastpack.patching.plan import PatchPlan, plan_recognised
from fastpack.patching.recognise import own_class, recognise, with_specs
from fastpack.patching.twin_rounding import RoundingComparison
from fastpack.utils.classes import foreign_forward, stock_class

OPTIONS = PatchOptions(attention="reference", kernels="torch")
"""The options of a patched twin: plain implementations, which are the same on every machine."""
KINDS = ("packed_seq_lens", "padded left")
DROPOUT = 0.5
FOREIGN = (
    FastpackError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    RuntimeError,
    StrictDataclassError,  # a config's validation
    TypeError,
    ValueError,
)
"""The errors that unproved code may raise when it is built or run, or when fastpack reads it by a wrong spec."""
_ORDER = (NormSpec, GatedNormSpec, MlpSpec, ExpertsSpec, *AnyAttentionSpec.__args__, DecoderSpec)
"""The order in which kinds of specs are tried: attention may hold norms, and a layer runs all of the others."""
_NO_SETTINGS = ("layer_idx", "training")


def match_by_twin(backbone: nn.Module, family: Family, candidates: Mapping[str, Spec]) -> dict[str, str]:
    """Return, for each candidate, why its class does not compute what its spec says, or an empty string.

    The result depends on classes and config alone, so that it is the same on every rank. No random number and no device
    memory is used, and the model is not changed.

    Args:
        backbone: The user's backbone, with weights, dtype and device of any kind, quantised or with adapters. Its
            config decides what the twin has.
        family: Its family, as :func:`fastpack.patching.support.covered_family` returns it.
        candidates: Specs to try, by the name of a class in the family's file in transformers. A head's spec is tried
            with the fused loss.

    Returns:
        An empty string for each candidate that matches, else a short reason. The matching candidates also match
        together.
    """
    reasons = {name: _not_to_be_tried(backbone, family, name, spec) for name, spec in candidates.items()}
    tried = {name: spec for name, spec in candidates.items() if not reasons[name]}
    layers = {name: spec for name, spec in tried.items() if not isinstance(spec, HeadSpec)}
    heads = {name: spec for name, spec in tried.items() if isinstance(spec, HeadSpec)}
    with apart():
        reasons |= match_layers(backbone, family, layers) if layers else {}
        for name, spec in heads.items():
            fast = {n: s for n, s in layers.items() if not reasons[n]}
            reasons[name] = head_problem(backbone, family, name, spec, fast) or ""
    return reasons


def _not_to_be_tried(backbone: nn.Module, family: Family, name: str, spec: Spec) -> str:
    """Return why a class can't be tried in a twin, or an empty string if it can."""
    if isinstance(spec, HeadSpec):
        cls = getattr(sys.modules[family.module], name, None)
        return f"its file has no {name}" if cls is None else _foreign(cls)
    if isinstance(spec, AnyAttentionSpec) and (strange := unknown_tables(backbone)) is not None:
        return strange
    own_modules = [module for module in backbone.modules() if own_class(module, family) == name]
    if not own_modules:
        return f"the model has no {name}"
    return _foreign(stock_class(own_modules[0]))


def _foreign(cls: Any) -> str:
    """Return a reason if other code has replaced a class's forward, and so its twin's, too; else an empty string."""
    forward = foreign_forward(cls)
    return "" if forward is None else f"its class's forward is {forward} now, not transformers'"


def match_layers(backbone: nn.Module, family: Family, candidates: Mapping[str, Spec]) -> dict[str, str]:
    """Return, for each candidate, why its class computes something else, or an empty string if it matches."""
    try:
        twin = Twin.of(stock_class(backbone), backbone.config, family, candidates)
    except FOREIGN as error:
        return dict.fromkeys(candidates, f"can't be shrunk: {describe_error(error)}")
    missing = {name: reason for name in candidates if (reason := _lacks(twin.model, backbone, family, name))}
    rest = {name: spec for name, spec in candidates.items() if name not in missing}
    return {**missing, **(twin.match(rest) if rest else {})}


def _lacks(twin: nn.Module, backbone: nn.Module, family: Family, name: str) -> str:
    """Return why a twin does not represent the user's modules of one class, or an empty string if it does."""
    theirs, own = ([m for m in model.modules() if own_class(m, family) == name] for model in (backbone, twin))
    if {*map(stock_class, theirs)} - {*map(stock_class, own)}:
        return f"its twin has no {name} of the same class"
    names = {name for module in own for name, _ in _settings(module)}  # other code sets more, such as hooks
    here = {frozenset(_settings(module) | _contents(module)) for module in own}
    for module in theirs:
        there = frozenset({each for each in _settings(module) if each[0] in names} | _contents(module))
        if there not in here:
            nearest = min((there ^ each for each in here), key=len)
            return f"its twin has no {name} with the same {', '.join(sorted({what for what, _ in nearest}))}"
    return ""


def _settings(module: nn.Module) -> set[tuple[str, bool]]:
    """Return a module's settings (windows, flags), each with whether it is set."""
    plain = {n: value for n, value in vars(module).items() if value is None or isinstance(value, (bool, int, float))}
    return {(n, bool(value)) for n, value in plain.items() if n[0] != "_" and "drop" not in n and n not in _NO_SETTINGS}


def _contents(module: nn.Module) -> set[tuple[str, bool]]:
    """Return the names of a module's submodules and parameters, each with whether it is not None."""
    return {(name, value is not None) for name, value in (*module._modules.items(), *module._parameters.items())}


@dataclass(frozen=True, eq=False)
class Twin:
    """A twin of a backbone, and the results of its stock forward.

    If transformers applies a window only in its mask, ``dropping`` and ``half`` have no window: stock attention on
    packed tokens would not apply it.

    Attributes:
        model: The twin in float32.
        dropping: The same, with every kind of dropout that its classes have.
        half: The same in bfloat16, in evaluation mode, and without biases of projections.
        family: The family of the backbone.
        known: Specs of the other classes, whose source is proved.
        oracle: The results of the stock forward for each sequence alone.
    """

    model: Any
    dropping: Any
    half: Any
    family: Family
    known: Mapping[str, Spec]
    oracle: Oracle

    @classmethod
    def of(cls, backbone: type[nn.Module], config: Any, family: Family, candidates: Mapping[str, Spec]) -> Twin:
        """Build the twin, and run its stock forward.

        Raises one of :data:`FOREIGN` if the class or its config can't be made tiny.
        """
        model = build_twin(backbone, config)
        unmasked = _unmasked(model.config, family)
        try:
            dropping = build_twin(backbone, config, dropout=DROPOUT, **unmasked)
        except FOREIGN:  # some families, such as DiffLlama, have no dropout and raise
            dropping = build_twin(backbone, config, **unmasked)
        half = build_twin(backbone, config, torch.bfloat16, **unmasked).eval()
        for module in half.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.detach().zero_()  # under ZeRO-3, DeepSpeed's matmul rounds before the bias
        proved = recognise(find_parts(model), family).specs
        known = {name: spec for name, spec in proved.items() if name not in candidates}
        oracle = Oracle.of_float32(
            model, distinct_sequences(), lambda: with_eager_experts(copy.deepcopy(model).double())
        )
        return cls(model, dropping, half, family, known, oracle)

    def match(self, candidates: Mapping[str, Spec]) -> dict[str, str]:
        """Try all candidates together. If that fails, try one after another.

        Each is then tried together with the candidates that passed before it.
        """
        if self.problem(candidates) is None:
            return dict.fromkeys(candidates, "")
        reasons: dict[str, str] = {}
        passed: dict[str, Spec] = {}
        for name, spec in sorted(candidates.items(), key=lambda each: _ORDER.index(type(each[1]))):
            reasons[name] = self.problem({**passed, name: spec}) or ""
            if not reasons[name]:
                passed[name] = spec
        return {name: reasons[name] for name in candidates}

    def problem(self, candidates: Mapping[str, Spec]) -> str | None:
        """Return why the classes don't compute what these specs say, or None."""
        specs = {**self.known, **candidates}
        layers = [spec for spec in candidates.values() if isinstance(spec, DecoderSpec)]
        if layers and specs.keys().isdisjoint(self.family.attention):
            return "its attention keeps the stock forward, which a fast layer does not call"
        try:
            wrong = self._unread(candidates) or self._apart(specs)
            return wrong or self._drops_otherwise(specs) or self._rounds_otherwise(candidates)
        except FOREIGN as error:
            return f"fails in its twin: {describe_error(error)}"

    def _unread(self, candidates: Mapping[str, Spec]) -> str | None:
        """Return why experts can't be read by their spec, so that their stock forward would run; or None."""
        for module in self.model.modules():
            spec = candidates.get(own_class(module, self.family) or "")
            reason = read_experts(module, spec) if isinstance(spec, ExpertsSpec) else None
            if isinstance(reason, str):
                return f"fails in its twin: {reason}"
        return None

    def _apart(self, specs: Mapping[str, Spec]) -> str | None:
        """Return how far a patched twin is from each sequence alone, or None for rounding alone.

        The twin passes if it is near enough to the oracle's results in float32 or in float64. Where gradients cancel,
        packing alone may round beyond the bound, whatever the spec. The bound is then measured with the known specs,
        unless their error is so large that it is more than rounding.
        """
        result = self._judge(specs)
        if result.verdict == "not exact":
            known = self._judge(self.known).nearest
            if known.bound < known.error < CONTROL * known.bound:
                result = self._judge(specs, bound=bound_of(known.error, torch.float32))
        if result.passed:
            return None
        if result.verdict == "not exact":
            return f"off by {result.nearest.error:.1e} in float32, where {result.nearest.bound:.1e} is allowed"
        return "a leak would not be seen in its twin"

    def _judge(self, specs: Mapping[str, Spec], *, bound: float = 0.0) -> Verification:
        """Compare the twin, patched by these specs, with the oracle, whose bound is at least ``bound``."""
        oracle = replace(self.oracle, bound=max(bound, self.oracle.bound))
        with patched(self.model, self.family, specs):
            for each in (oracle, replace(oracle, results=oracle.finer)):
                errors = {kind: each.error(self.model, INPUT_KINDS[kind]).of_tensors for kind in KINDS}
                result = each.judge(self.model, errors)
                if result.passed:
                    break
        return result

    def _drops_otherwise(self, specs: Mapping[str, Spec]) -> str | None:
        """Return how far outputs with every dropout are from the stock layers', or None for rounding alone.

        Both use the same attention function. They get the same random numbers if both draw them in the same order.
        """
        family = replace(self.family, mask_window=None)  # or stock attention would run on rows
        outputs = []
        for each in (specs, self.known):
            with patched(self.dropping, family, each), torch.no_grad():
                torch.default_generator.manual_seed(0)
                outputs.append(_packed(self.dropping))
        error = relative(*outputs)
        return None if error <= FULL_BOUND else f"off by {error:.1e} with dropout"

    def _rounds_otherwise(self, candidates: Mapping[str, Spec]) -> str | None:
        """Return how a fast forward rounds differently in bfloat16, or more coarsely, than the class's own, or None."""
        layers = {name: spec for name, spec in candidates.items() if isinstance(spec, DecoderSpec)}
        others = {name: spec for name, spec in candidates.items() if name not in layers}
        return self._compare(others, self.known) or self._compare(layers, {**self.known, **others})

    def _compare(self, candidates: Mapping[str, Spec], beside: Mapping[str, Spec]) -> str | None:
        """Return how a candidate's forward differs in bfloat16 from its modules' own forward, or None.

        The twin is patched by the specs in ``beside``. For each module of a candidate's class, fastpack's forward is
        called with the same arguments as the module.
        """
        if not candidates:
            return None
        family = replace(self.family, mask_window=None)
        comparison = RoundingComparison()
        fast = _plan(self.half, family, {**beside, **candidates})
        with patched(self.half, family, beside) as plan, ExitStack() as hooks, torch.no_grad():
            for each in fast.replacements:
                name = own_class(each.module, family) or ""
                if name in candidates:
                    hook = partial(comparison.compare, name, replace(each, runtime=plan.runtime.layers))
                    hooks.callback(each.module.register_forward_hook(hook, with_kwargs=True).remove)
            _packed(self.half)
        unseen = candidates.keys() - comparison.seen
        return next(iter(comparison.problems), f"{min(unseen)} is not called in its twin" if unseen else None)


def _unmasked(config: Any, family: Family) -> dict[str, Any]:
    """Return settings that leave out the window if transformers applies it only in the mask."""
    if family.mask_window is None:
        return {}
    kinds = {"layer_types": [FULL] * config.num_hidden_layers} if getattr(config, "layer_types", None) else {}
    return {family.mask_window: None, "num_hidden_layers": config.num_hidden_layers, **kinds}


def _packed(model: Any) -> Tensor:
    """Return the last hidden state of a patched backbone, ``[1, T, H]``, for packed sequences."""
    hidden: Tensor = model(**packed(distinct_sequences())).last_hidden_state
    return hidden


def _plan(model: Any, family: Family, specs: Mapping[str, Spec], options: PatchOptions = OPTIONS) -> PatchPlan:
    """Plan a patch with these specs; all other classes keep their own forward."""
    parts = find_parts(model)
    recognised = recognise(parts, family)
    recognised.attends_by.spreads = True  # whatever accelerate spreads: a twin's batches are whole
    return plan_recognised(parts, with_specs(recognised, specs), options)


@contextmanager
def patched(
    model: Any, family: Family, specs: Mapping[str, Spec], options: PatchOptions = OPTIONS
) -> Iterator[PatchPlan]:
    """Patch a model with these specs inside a ``with`` block; all other classes keep their own forward."""
    plan = _plan(model, family, specs, options)
    apply(plan, options)
    try:
        yield plan
    finally:
        restore(model)


def head_problem(backbone: Any, family: Family, name: str, spec: HeadSpec, fast: Mapping[str, Spec]) -> str | None:
    """Return how a head's fused loss differs from the loss that its class computes, or None.

    The fused loss is compared with the head's own loss, and so are the gradients of matrices. Both run after the same
    layers, on one sequence, because a loss that balances experts is not a sum over sequences.
    """
    try:
        model = build_twin(getattr(sys.modules[family.module], name), backbone.config)
    except FOREIGN as error:
        return f"can't be shrunk: {describe_error(error)}"
    try:
        specs = {**recognise(find_parts(model), family).specs, **fast, name: spec}
        with patched(model, family, specs):
            stock = _loss(model)
        with patched(model, family, specs, replace(OPTIONS, loss="fused")):
            off = compare(_loss(model, fused=True), stock).of_tensors
    except FOREIGN as error:
        return f"fails in its twin: {describe_error(error)}"
    return None if off <= FULL_BOUND else f"off by {off:.1e} in float32, where {FULL_BOUND:.1e} is allowed"


def _loss(model: Any, *, fused: bool = False) -> Result:
    """Return the longest sequence's loss, in place of logits, and the gradients of matrices.

    Gradients of vectors may cancel, and are left out.
    """
    ids = max(distinct_sequences(), key=len)[None]
    model.zero_grad(set_to_none=True)
    routed = {"output_router_logits": True} if hasattr(model.config, "output_router_logits") else {}
    outputs = model(labels=ids.clone(), **single(model, ids[0]), **routed)
    if fused and outputs.logits is not None:
        raise ValueError("its loss was computed from logits")
    outputs.loss.backward()
    loss = outputs.loss.detach()
    matrices = {name: p for name, p in model.named_parameters() if p.ndim > 1 and p.grad is not None}
    return Result([loss[None]], loss, {name: p.grad.clone() for name, p in matrices.items()})


def describe_error(error: Exception) -> str:
    """Return an error's type and the first line of its message."""
    first: Sequence[str] = str(error).splitlines()[:1]
    return f"{type(error).__name__}: {first[0][:120]}" if first else type(error).__name__
