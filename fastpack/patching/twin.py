"""Decide what classes compute whose source nobody has proved: by a twin of them, a tiny model on the CPU.

A spec matches a class where the twin, patched by it, passes three checks:

- in float32 it gives what its own stock forward gives for each sequence alone, by the rule of
  :mod:`fastpack.exactness.rule`: the outputs, and the gradients of all parameters and of the inputs;
- with every dropout on, it drops what the stock layers drop, attending through our interface;
- in bfloat16, for the same inputs as the class's own forward, norms and gated MLPs, with their projections, give the
  very bits, and attention and layers are as near to float32 as the rule asks for: float32 hides how a class rounds.

Nothing of the user's model is run, changed or copied but its config. Everything runs inside
:func:`fastpack.exactness.twins.apart`, and a twin's classes are the user's own, so that what it gives unpatched is what
they compute.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from fastpack.errors import FastpackError
from fastpack.exactness.inputs import INPUT_KINDS, packed, single
from fastpack.exactness.oracle import Oracle
from fastpack.exactness.rule import FULL_BOUND, Result, bound_of, compare, is_half, middle, relative
from fastpack.exactness.twins import apart, build_twin, distinct_sequences
from fastpack.families.spec import AnyAttentionSpec, DecoderSpec, Family, HeadSpec, MlpSpec, NormSpec, Spec
from fastpack.layers.rope_tables import unknown_tables
from fastpack.layers.window_checks import FULL
from fastpack.model.unwrap import find_parts
from fastpack.patching.apply import apply, restore
from fastpack.patching.options import PatchOptions
from fastpack.patching.plan import Plan, plan_recognised
from fastpack.patching.recognise import own_class, recognise, with_specs
from fastpack.utils.classes import foreign_forward, stock_class
from fastpack.utils.replacement import Replacement

OPTIONS = PatchOptions(attention="reference", kernels="torch")
"""The definitions: the same on every machine."""
KINDS = ("packed_seq_lens", "padded left")
DROPOUT = 0.5
FLIPS = 0.01
"""The share of a norm's or an MLP's results that may be rounded otherwise: sums in another order flip one at times, and
another place to round flips a fifth."""
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
"""What code that nobody has proved may raise where it is built or run, or where ours reads it by a wrong spec."""
_ORDER = (NormSpec, MlpSpec, *AnyAttentionSpec.__args__, DecoderSpec)
"""Which specs are tried first: attention may hold norms, a layer runs all of them."""
_NO_SETTINGS = ("layer_idx", "training")


def match_by_twin(backbone: nn.Module, family: Family, candidates: Mapping[str, Spec]) -> dict[str, str]:
    """Say which classes of a model compute what their specs say.

    It takes no random number and no memory of a device, changes nothing of the model, and is the same on every rank:
    the twin depends on classes and config alone.

    Args:
        backbone: the user's, of any weights, dtype and device, quantised or with adapters. Its config says what the
            twin is to have.
        family: its family as :func:`fastpack.patching.support.covered_family` gives it.
        candidates: specs to try by class name, each a class of the family's upstream module. A head's is tried with
            the loss fused.

    Returns:
        For each candidate an empty string where it matches, else a short reason. Those that match do so together.
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
    """Why a class is not to be matched by what it computes in a twin; an empty string where it may be."""
    if isinstance(spec, HeadSpec):
        cls = getattr(sys.modules[family.module], name, None)
        return f"its file has no {name}" if cls is None else _foreign(cls)
    if isinstance(spec, AnyAttentionSpec) and (strange := unknown_tables(backbone)) is not None:
        return strange
    mine = [module for module in backbone.modules() if own_class(module, family) == name]
    if not mine:
        return f"the model has no {name}"
    return _foreign(stock_class(mine[0]))


def _foreign(cls: Any) -> str:
    """A forward that somebody has put on a class: a twin of it would prove it by itself."""
    found = foreign_forward(cls)
    return "" if found is None else f"its class's forward is {found} now, not transformers'"


def match_layers(backbone: nn.Module, family: Family, candidates: Mapping[str, Spec]) -> dict[str, str]:
    """Say of each candidate why it is not what its class computes, an empty string where it is."""
    try:
        twin = Twin.of(stock_class(backbone), backbone.config, family, candidates)
    except FOREIGN as error:
        return dict.fromkeys(candidates, f"can't be shrunk: {said(error)}")
    missing = {name: reason for name in candidates if (reason := _lacks(twin.model, backbone, family, name))}
    rest = {name: spec for name, spec in candidates.items() if name not in missing}
    return {**missing, **(twin.match(rest) if rest else {})}


def _lacks(twin: nn.Module, backbone: nn.Module, family: Family, name: str) -> str:
    """Why a twin does not stand for the modules of one class of the user's model; an empty string where it does."""
    theirs, own = ([m for m in model.modules() if own_class(m, family) == name] for model in (backbone, twin))
    if {*map(stock_class, theirs)} - {*map(stock_class, own)}:
        return f"its twin has no such {name}"
    names = {name for module in own for name, _ in _settings(module)}  # others set more on a model, such as hooks
    here = {frozenset(_settings(module) | _held(module)) for module in own}
    for module in theirs:
        there = frozenset({each for each in _settings(module) if each[0] in names} | _held(module))
        if there not in here:
            nearest = min((there ^ each for each in here), key=len)
            return f"its twin has no {name} with such {', '.join(sorted({what for what, _ in nearest}))}"
    return ""


def _settings(module: nn.Module) -> set[tuple[str, bool]]:
    """Which settings of a module are something, and which nothing: windows, flags."""
    plain = {n: value for n, value in vars(module).items() if value is None or isinstance(value, (bool, int, float))}
    return {(n, bool(value)) for n, value in plain.items() if n[0] != "_" and "drop" not in n and n not in _NO_SETTINGS}


def _held(module: nn.Module) -> set[tuple[str, bool]]:
    """Which modules and parameters it has, and which of them are None."""
    return {(name, held is not None) for name, held in (*module._modules.items(), *module._parameters.items())}


@dataclass(frozen=True, eq=False)
class Twin:
    """A twin of a backbone, and what it gives unpatched.

    Attributes:
        model: in float32.
        dropping: the same with every dropout, if it has any. This and the next have no window that upstream has in its
            mask alone, of which stock attention on packed tokens knows nothing.
        half: the same in bfloat16, in evaluation mode, and without biases of projections.
        known: specs of other classes, whose source is known.
        oracle: what the stock forward gives for each sequence alone.
    """

    model: Any
    dropping: Any
    half: Any
    family: Family
    known: Mapping[str, Spec]
    oracle: Oracle

    @classmethod
    def of(cls, backbone: type[nn.Module], config: Any, family: Family, candidates: Mapping[str, Spec]) -> Twin:
        """Build it; raises one of :data:`FOREIGN` where the class or its config won't be tiny."""
        model = build_twin(backbone, config)
        unmasked = _unmasked(model.config, family)
        try:
            dropping = build_twin(backbone, config, dropout=DROPOUT, **unmasked)
        except FOREIGN:  # DiffLlama, for one, has none, and says so
            dropping = build_twin(backbone, config, **unmasked)
        half = build_twin(backbone, config, torch.bfloat16, **unmasked).eval()
        for module in half.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.detach().zero_()  # DeepSpeed's product, once ZeRO-3 has put it into torch, rounds before it
        proved = recognise(find_parts(model), family).specs
        known = {name: spec for name, spec in proved.items() if name not in candidates}
        oracle = Oracle.of_float32(model, distinct_sequences(), lambda: copy.deepcopy(model).double())
        return cls(model, dropping, half, family, known, oracle)

    def match(self, candidates: Mapping[str, Spec]) -> dict[str, str]:
        """Try all together; where that fails, one behind the other, each beside those that have passed."""
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
        """Why these are not what the classes compute, or None."""
        specs = {**self.known, **candidates}
        layers = [spec for spec in candidates.values() if isinstance(spec, DecoderSpec)]
        if layers and specs.keys().isdisjoint(self.family.attention):
            return "its attention keeps the stock forward, which a fast layer does not call"
        try:
            return self._apart(specs) or self._drops_otherwise(specs) or self._rounds_otherwise(candidates)
        except FOREIGN as error:
            return f"fails in its twin: {said(error)}"

    def _apart(self, specs: Mapping[str, Spec]) -> str | None:
        """How far a patched twin is from each sequence alone, in float32 and in float64, if by more than rounding."""
        with patched(self.model, self.family, specs):
            for oracle in (self.oracle, replace(self.oracle, results=self.oracle.finer)):
                errors = {kind: oracle.error(self.model, INPUT_KINDS[kind]).of_tensors for kind in KINDS}
                found = oracle.judge(self.model, errors)
                if found.passed:
                    return None
        if found.verdict == "not exact":
            return f"off by {found.nearest.error:.1e} in float32, where {found.nearest.bound:.1e} is allowed"
        return "a leak would not be seen in its twin"

    def _drops_otherwise(self, specs: Mapping[str, Spec]) -> str | None:
        """How far outputs are with every dropout from those of the stock layers, if by more than rounding.

        Both attend by the same function and take the same random numbers, if both ask for them in the same order.
        """
        family = replace(self.family, mask_window=None)  # or stock attention would run on rows
        found = []
        for each in (specs, self.known):
            with patched(self.dropping, family, each), torch.no_grad():
                torch.default_generator.manual_seed(0)
                found.append(_packed(self.dropping))
        error = relative(*found)
        return None if error <= FULL_BOUND else f"off by {error:.1e} with dropout"

    def _rounds_otherwise(self, candidates: Mapping[str, Spec]) -> str | None:
        """A module whose result in bfloat16 is not what the class's own forward gives, or not as near to float32."""
        layers = {name: spec for name, spec in candidates.items() if isinstance(spec, DecoderSpec)}
        others = {name: spec for name, spec in candidates.items() if name not in layers}
        return self._compare(others, self.known) or self._compare(layers, {**self.known, **others})

    def _compare(self, candidates: Mapping[str, Spec], beside: Mapping[str, Spec]) -> str | None:
        """Run the twin in bfloat16 as packed by some specs; and beside each module of other classes its spec's forward,
        of whose result there is something to say."""
        if not candidates:
            return None
        family = replace(self.family, mask_window=None)
        found = _Comparison()
        fast = _plan(self.half, family, {**beside, **candidates})
        with patched(self.half, family, beside) as plan, ExitStack() as hooks, torch.no_grad():
            for each in fast.replacements:
                name = own_class(each.module, family) or ""
                if name in candidates:
                    hook = partial(found.compare, name, replace(each, runtime=plan.runtime.layers))
                    hooks.callback(each.module.register_forward_hook(hook, with_kwargs=True).remove)
            _packed(self.half)
        unseen = candidates.keys() - found.seen
        return next(iter(found.problems), f"{min(unseen)} is not called in its twin" if unseen else None)


@dataclass(eq=False)
class _Comparison:
    """Of modules in a pass in bfloat16: what ours give otherwise for the same arguments.

    Attributes:
        seen: names of the classes that were compared.
        paused: whether a module runs in float32.
    """

    problems: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    paused: bool = False

    def compare(
        self, name: str, ours: Replacement[Any, Any], module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        """A forward hook, once bound to a class's name and our forward of the module."""
        if self.paused:
            return
        self.seen.add(name)
        copied = tree_map(lambda x: x, (args, kwargs))  # some write into a dict that they are given
        stock, found = _first(output), _first(ours(*copied[0], **copied[1]))
        if found.dtype != stock.dtype:
            self.problems.append(f"gives {found.dtype} in bfloat16, not {stock.dtype}")
        elif not isinstance(ours.spec, (NormSpec, MlpSpec)):
            self.paused = True  # its hooks are called there too
            wide = _in_float32(module, args, kwargs)
            self.paused = False
            own, error = _off(stock, wide), _off(found, wide)
            if not error <= bound_of(own, torch.bfloat16):
                self.problems.append(f"off by {error:.1e} in bfloat16, where its own forward is by {own:.1e}")
        elif (share := float((found != stock).float().mean())) > FLIPS:
            self.problems.append(f"rounds {share:.0%} of its results otherwise in bfloat16")


def _in_float32(module: nn.Module, args: Any, kwargs: Any) -> Tensor:
    """What a module's own forward gives in float32."""
    weights = {name: parameter.float() for name, parameter in module.named_parameters()}
    given = tree_map(lambda x: x.float() if isinstance(x, Tensor) and is_half(x.dtype) else x, (args, kwargs))
    return _first(functional_call(module, weights, *given))


def _off(value: Tensor, reference: Tensor) -> float:
    """How far the results of a token are off, the median: experts that flip for a few say nothing."""
    off = (value.float() - reference).norm(dim=-1) / reference.norm(dim=-1)
    return middle(off.flatten().tolist())


def _first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


def _unmasked(config: Any, family: Family) -> dict[str, Any]:
    """Settings without the window that upstream has in its mask alone."""
    if family.mask_window is None:
        return {}
    kinds = {"layer_types": [FULL] * config.num_hidden_layers} if getattr(config, "layer_types", None) else {}
    return {family.mask_window: None, "num_hidden_layers": config.num_hidden_layers, **kinds}


def _packed(model: Any) -> Tensor:
    """The last hidden state of a patched backbone, ``[1, T, H]``, for packed sequences."""
    found: Tensor = model(**packed(distinct_sequences())).last_hidden_state
    return found


def _plan(model: Any, family: Family, specs: Mapping[str, Spec], options: PatchOptions = OPTIONS) -> Plan:
    """Plan a patch by which these classes compute this, and all others keep their own forward."""
    parts = find_parts(model)
    return plan_recognised(parts, with_specs(recognise(parts, family), specs), options)


@contextmanager
def patched(model: Any, family: Family, specs: Mapping[str, Spec], options: PatchOptions = OPTIONS) -> Iterator[Plan]:
    """A model by whose plan these classes compute this, and all others have their own forward."""
    plan = _plan(model, family, specs, options)
    apply(plan, options)
    try:
        yield plan
    finally:
        restore(model)


def head_problem(backbone: Any, family: Family, name: str, spec: HeadSpec, fast: Mapping[str, Spec]) -> str | None:
    """Why the fused loss of a head's spec is not what its class computes, or None.

    Its own loss is compared, and the gradients of matrices, behind the same layers and on one sequence: a loss that
    balances experts is no sum over sequences.
    """
    try:
        model = build_twin(getattr(sys.modules[family.module], name), backbone.config)
    except FOREIGN as error:
        return f"can't be shrunk: {said(error)}"
    try:
        specs = {**recognise(find_parts(model), family).specs, **fast, name: spec}
        with patched(model, family, specs):
            stock = _loss(model)
        with patched(model, family, specs, replace(OPTIONS, loss="fused")):
            off = compare(_loss(model, fused=True), stock).of_tensors
    except FOREIGN as error:
        return f"fails in its twin: {said(error)}"
    return None if off <= FULL_BOUND else f"off by {off:.1e} in float32, where {FULL_BOUND:.1e} is allowed"


def _loss(model: Any, *, fused: bool = False) -> Result:
    """The longest sequence's loss, in place of logits, and the gradients of matrices: those of vectors may cancel."""
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


def said(error: Exception) -> str:
    """An error's type, and the first line of what it says."""
    first: Sequence[str] = str(error).splitlines()[:1]
    return f"{type(error).__name__}: {first[0][:120]}" if first else type(error).__name__
