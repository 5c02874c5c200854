"""Plan which blocks of experts will be fast, and say why the others keep their stock forward."""

from __future__ import annotations

from fastpack.families.spec import ExpertsSpec
from fastpack.layers.experts import ExpertsPlace, chosen_by_name, experts_forward, innermost, places_of, read_experts
from fastpack.layers.runtime import Runtime
from fastpack.patching.changes import forward_replacement
from fastpack.patching.recognise import Recognised, Skipped, is_replaced, own_class, replaced_on_instance
from fastpack.patching.state import PatchState
from fastpack.utils.classes import place_of, stock_class

NAMED = "Experts"
"""The end of the name of every class of experts in transformers."""


def plan_experts(recognised: Recognised, runtime: Runtime) -> tuple[list[ExpertsPlace], Skipped]:
    """Return the places of the blocks of experts that will be fast, and notes on the others."""
    specs: dict[int, ExpertsSpec] = {}
    skipped: list[tuple[str, str]] = []
    for module in recognised.backbone.modules():
        spec = recognised.specs.get(own_class(module, recognised.family) or "")
        if not isinstance(spec, ExpertsSpec) or is_replaced(module, spec, recognised):
            continue
        chosen = chosen_by_name(getattr(module, "config", None))
        if chosen is None:
            specs[id(module)] = spec
        else:
            skipped.append((type(module).__name__, f"experts_implementation={chosen!r} was chosen by name, and runs"))
    places: list[ExpertsPlace] = []
    for parent, name, outermost, block in places_of(recognised.backbone, specs):
        own = replaced_on_instance(outermost)
        if outermost is not block and own is not None:
            skipped.append((type(block).__name__, f"the forward of PEFT's wrapper is {place_of(own)}: that runs"))
        else:
            ours = forward_replacement(outermost, experts_forward, specs[id(block)], runtime)
            places.append(ExpertsPlace(parent, name, ours))
    return places, tuple(skipped) + _without_spec(recognised)


def _without_spec(recognised: Recognised) -> Skipped:
    """Return a note on each class of experts that has no spec, unless another note says why it runs stock."""
    names = {stock_class(module).__name__ for module in recognised.backbone.modules()}
    of_mxfp4 = {spec.mxfp4 for spec in recognised.family.fast.values() if isinstance(spec, ExpertsSpec)}
    known = {*recognised.specs, *recognised.unknown, *dict(recognised.skipped)} | of_mxfp4
    return tuple(
        (name, "fastpack has no forward for experts of this kind: their own runs")
        for name in sorted(names)
        if name.endswith(NAMED) and name not in known
    )


def experts_as_they_are(state: PatchState) -> Skipped:
    """Return the classes of experts whose weights or adapters can't be read now, and why."""
    reasons: dict[tuple[str, str], None] = {}
    for place in state.runtime.user_changes.experts:
        ours = place.replacement
        operands = read_experts(place.parent._modules.get(place.name) or ours.owner, ours.spec, at_rest=True)
        if isinstance(operands, str):
            reasons[type(innermost(ours.owner)).__name__, f"{operands}: the stock forward runs"] = None
    return tuple(reasons)
