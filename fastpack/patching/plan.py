"""Plan which forwards to swap on a model, and say why the rest stays, without changing anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fastpack.errors import PatchError, UnsupportedModelError
from fastpack.families.composites import composite_spec
from fastpack.families.mixer_spec import MixerSpec
from fastpack.families.spec import (
    TIERS,
    AnyAttentionSpec,
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    Family,
    GatedNormSpec,
    MlpSpec,
    NormSpec,
    Spec,
    Tier,
)
from fastpack.layers.attention import attention_forward, two_way_of
from fastpack.layers.decoder import decoder_forward
from fastpack.layers.experts import experts_forward, innermost
from fastpack.layers.liger import spec_of
from fastpack.layers.mixers.forward import mixer_forward, packed_alibi, packed_mask
from fastpack.layers.mlp import mlp_forward
from fastpack.layers.mxfp4_experts import mxfp4_forward
from fastpack.layers.norm import gated_norm_forward, norm_forward
from fastpack.layers.rope_tables import depends_on_length, gives_known_tables, rotary_forward, rotates_by_length
from fastpack.layers.runtime import Runtime
from fastpack.layers.window_checks import LayerOrder, MixingSpec, mask_maker, narrowest_window, refuse_misplaced
from fastpack.model.backbone import backbone_forward
from fastpack.model.checks import refuse_dropped_positions, replica_pre_hook
from fastpack.model.composite import composite_forward
from fastpack.model.context_parallel import ContextParallel
from fastpack.model.generation import generate
from fastpack.model.head import Head, head_forward, head_pre_hook
from fastpack.model.image_sharing import GET_IMAGE_FEATURES, image_features
from fastpack.model.model_runtime import ModelRuntime, UserChanges
from fastpack.model.prefix_sharing import PrefixSharing, sharing_rejects
from fastpack.model.unwrap import Parts, find_parts, refuse_captured_forward, refuse_wrapped, wrapper_chain
from fastpack.packing.context import PackingContext
from fastpack.packing.two_way import TwoWay
from fastpack.patching.backend_choice import attention_shape
from fastpack.patching.changes import Attribute, forward_replacement
from fastpack.patching.context_mesh import plan_context_parallel
from fastpack.patching.experts import plan_experts
from fastpack.patching.head_choice import head_kind, head_loss
from fastpack.patching.match import Match, settle
from fastpack.patching.mxfp4_order import PlainOrder, plain_orders
from fastpack.patching.mxfp4_plan import quantizers, readable_mxfp4
from fastpack.patching.options import PatchOptions
from fastpack.patching.planned_report import planned_report
from fastpack.patching.recognise import (
    Recognised,
    Skipped,
    is_replaced,
    own_class,
    recognise,
    with_mask_window,
)
from fastpack.patching.report import PatchReport
from fastpack.patching.support import refuse_two_ways
from fastpack.patching.token_mixers import Mixing, mixer_tiers, packs_mixers
from fastpack.utils.classes import mentions
from fastpack.utils.replacement import PreHook, Replacement

GENERATE = "generate"
FAST: tuple[tuple[Any, Callable[..., Any]], ...] = (
    (AnyAttentionSpec, attention_forward),
    (DecoderSpec, decoder_forward),
    (NormSpec, norm_forward),
    (GatedNormSpec, gated_norm_forward),
    (MlpSpec, mlp_forward),
)
"""The fast forward of each kind of spec."""


@dataclass(frozen=True, eq=False)
class PatchPlan:
    """Everything that ``patch`` will do to one model.

    Attributes:
        backbone: The model's backbone.
        runtime: The runtime that the replacements share.
        replacements: The new methods of modules, not installed yet.
        interface_modules: Attention modules that keep their own forward and attend through fastpack's interface, each
            with how it uses the blocks of a batch.
        pre_hook: The hook before the head, or before a bare backbone.
        mixing: The modules that mix tokens, each with its tier.
        attributes: Further attributes of modules to set, and orders of packed bytes to change.
        report: What is known before the patch; :func:`fastpack.patching.inspection.inspect_patch` adds what may change.
    """

    backbone: nn.Module
    runtime: ModelRuntime
    replacements: tuple[Replacement[Any, Any], ...]
    interface_modules: Mapping[Any, TwoWay | None]
    pre_hook: PreHook[Any, Any]
    mixing: Mixing
    attributes: tuple[Attribute | PlainOrder, ...]
    report: PatchReport


def make_plan(model: nn.Module, options: PatchOptions, match: Match) -> PatchPlan:
    """Plan a patch; :func:`fastpack.patch` documents the errors and warnings.

    Args:
        model: The model, without fastpack's forwards.
        options: The options of the patch.
        match: Judges the classes whose sources were not proved.
    """
    refuse_wrapped(model)
    parts = find_parts(model)
    refuse_captured_forward(model, parts.head)
    if parts.head is None:
        for wrapper in wrapper_chain(model):
            refuse_dropped_positions(wrapper)
    recognised = recognise(parts)
    recognised.attends_by.spreads = options.spreads
    recognised.attends_by.check(" Nothing was changed.")
    recognised = settle(recognised, match, head=options.loss is not None)
    return plan_recognised(parts, recognised, options)


def plan_recognised(parts: Parts, recognised: Recognised, options: PatchOptions) -> PatchPlan:
    """Plan a patch of a model that is already recognised."""
    not_shared = None if options.share_prefixes is None else sharing_rejects(recognised.backbone, recognised.family)
    _refuse_options(options, recognised, None if hasattr(type(parts.composite), GET_IMAGE_FEATURES) else not_shared)
    backbone, family, specs = recognised.backbone, recognised.family, recognised.specs
    own = {module: own_class(module, family) or "" for module in backbone.modules()}
    mixing_names = (*family.attention, *family.mixers)
    if not (family.repadded or any(name in mixing_names for name in own.values())):
        raise PatchError(f"no {' or '.join(mixing_names)} found in {type(backbone).__name__}: nothing to patch.")
    mixing_specs = {
        id(m): family.mixers.get(name, _mixing_spec(m, recognised)) for m, name in own.items() if name in mixing_names
    }
    attentions = [module for module, name in own.items() if name in family.attention]
    model: Any = backbone
    shapes = [attention_shape(model, module, specs.get(own[module])) for module in attentions]
    ranks = plan_context_parallel(options.context_mesh, backbone, family, shapes, packs=packs_mixers(recognised))
    runtime = _make_runtime(recognised, options, mixing_specs, parts.composite, not_shared, ranks)
    around, skipped = _plan_model(parts, recognised, runtime, options)
    refuse_misplaced(backbone, mixing_specs, mask_maker(parts.composite))
    refuse_two_ways(parts, own, attentions, specs)
    inside = [each for module in backbone.modules() for each in _plan_module(module, recognised, runtime.layers)]
    places, others = plan_experts(recognised, runtime.layers)
    runtime.user_changes.experts.extend(places)
    inside += [place.replacement for place in places]
    in_mxfp4 = readable_mxfp4(backbone, family)
    inside += [forward_replacement(m, mxfp4_forward, spec, runtime.layers) for m, spec in in_mxfp4]
    skipped += others + _replaced_parts(recognised)
    tables = _plan_methods(recognised, runtime.layers) + _plan_rotary(backbone, runtime.layers)
    replacements = (*around, *inside, *tables)
    through_interface = tuple(module for module in attentions if own[module] not in specs)
    computed = _computed_here(replacements, through_interface, family)
    runtime.user_changes.classes.watch((each.module for each in replacements), forwards=computed)
    report = planned_report(parts, recognised, options, runtime, replacements, attentions, shapes)
    return PatchPlan(
        backbone,
        runtime,
        replacements,
        {module: two_way_of(module, family.fast.get(own[module])) or family.two_way for module in through_interface},
        _plan_hook(parts, runtime, around),
        Mixing(backbone, tuple(_mixing_modules(recognised, replacements, through_interface))),
        (*quantizers(parts), *plain_orders(in_mxfp4)),
        replace(report, skipped=tuple(dict.fromkeys(recognised.skipped + skipped))),
    )


def _refuse_options(options: PatchOptions, recognised: Recognised, not_shared: str | None) -> None:
    """Raise if this model can't meet ``strict``, or ``share_prefixes`` for the reason ``not_shared``."""
    if options.strict:
        _refuse_slower_tiers(recognised)
    if not_shared is not None:
        raise PatchError(
            f"share_prefixes={options.share_prefixes!r} can't be exact for {type(recognised.backbone).__name__}: "
            f"{not_shared}. Leave the option out. Nothing was changed."
        )


def _refuse_slower_tiers(recognised: Recognised) -> None:
    """Raise unless every layer runs on the fast tier."""
    family, specs = recognised.family, recognised.specs
    of_attention: Tier = "fast" if all(name in specs for name in family.attention) else "varlen"
    of_mixers = mixer_tiers(recognised)
    tier = next(tier for tier in reversed(TIERS) if tier in (family.tier, of_attention, *of_mixers))
    if tier == "fast" and not recognised.skipped:
        return
    reasons = [*(f"{what}: {reason}" for what, reason in recognised.skipped), *of_mixers.get("re-padded mixer", [])]
    why = "; ".join(reasons) or f"family {family.model_type} has no fast forwards; it would run on the {tier} tier"
    raise PatchError(f"strict=True, but not every layer is on the fast tier: {why}.")


def _make_runtime(
    recognised: Recognised,
    options: PatchOptions,
    mixing_specs: Mapping[int, MixingSpec],
    composite: Any,
    not_shared: str | None,
    ranks: ContextParallel | None,
) -> ModelRuntime:
    """Make the runtime that the replacements share, from the options; ``not_shared`` says why prefixes can't be."""
    backbone = recognised.backbone
    # an unknown forward of a layer may drop the packing keyword, and the mask with it; rotary modules never get it
    uses_context = recognised.family.needs_packing_context or recognised.replaced_layers
    context = PackingContext() if uses_context or (ranks is not None and rotates_by_length(backbone)) else None
    graphs = offload = None
    if options.graphs == "auto" and (context is None or packs_mixers(recognised)):
        from fastpack.cuda_graphs.runner import GraphRunner  # late, since heavy

        graphs = GraphRunner()
    if options.offload is not None:
        from fastpack.offload.checkpoints import CheckpointOffload  # late, since heavy

        offload = CheckpointOffload(activations=options.offload == "activations")
    return ModelRuntime(
        layers=Runtime(options.attention, options.kernels, context),
        user_changes=UserChanges(
            order=LayerOrder.of(backbone, mask_maker(composite)),
            attention=recognised.attends_by,
            window=narrowest_window(backbone, mixing_specs),
        ),
        graphs=graphs,
        offload=offload,
        sharing=PrefixSharing(never=not_shared) if options.share_prefixes == "auto" else None,
        context_parallel=ranks,
        composite=composite,
    )


def _plan_model(
    parts: Parts, recognised: Recognised, runtime: ModelRuntime, options: PatchOptions
) -> tuple[list[Replacement[Any, Any]], Skipped]:
    """Return the replacements of the backbone and the head, and a note if the loss can't be fused."""
    planned = [forward_replacement(parts.backbone, backbone_forward, recognised.family, runtime)]
    if parts.composite is not None and parts.composite is not parts.head:
        planned.append(
            forward_replacement(parts.composite, composite_forward, composite_spec(parts.composite), runtime)
        )
    if runtime.sharing is not None and hasattr(type(parts.composite), GET_IMAGE_FEATURES):
        planned.append(Replacement(parts.composite, GET_IMAGE_FEATURES, image_features, None, runtime))
    if parts.head is None:
        return planned, ()
    kind = head_kind(parts.head)
    loss, reason = head_loss(parts.head, kind, options, recognised)
    planned.append(forward_replacement(parts.head, head_forward, Head(kind, loss), runtime))
    if hasattr(type(parts.head), GENERATE):
        planned.append(Replacement(parts.head, GENERATE, generate, None, runtime))
    return planned, () if reason is None else (("loss", f"{reason}: the stock loss runs"),)


def _plan_hook(parts: Parts, runtime: ModelRuntime, around: Sequence[Replacement[Any, Any]]) -> PreHook[Any, Any]:
    """Return the hook before the head, or before a bare backbone."""
    if parts.head is None:
        return PreHook(parts.outermost, replica_pre_hook, None, None)
    spec = next(each.spec for each in around if each.function is head_forward)
    return PreHook(parts.head, head_pre_hook, spec, runtime)


def _plan_module(module: nn.Module, recognised: Recognised, runtime: Runtime) -> list[Replacement[Any, Any]]:
    """Return the replacements of one module of the backbone."""
    family = recognised.family
    own = own_class(module, family)
    mixer = family.mixers.get(own or "")
    planned = [] if mixer is None else [forward_replacement(module, mixer_forward, mixer, runtime)]
    spec = _mixing_spec(module, recognised)
    forward = next((forward for kind, forward in FAST if isinstance(spec, kind)), None)
    if spec is None or forward is None or is_replaced(module, spec, recognised):
        return planned
    # a layer with accelerate's hooks keeps its forward, and calls its own modules, each of which is fast
    hooked_layer = forward is decoder_forward and hasattr(module, "_hf_hook")
    norm_without_weight = forward is norm_forward and getattr(module, "weight", None) is None
    if not (hooked_layer or norm_without_weight):
        planned.append(forward_replacement(module, forward, spec, runtime))
    return planned


def _mixing_spec(module: nn.Module, recognised: Recognised) -> Spec | None:
    """Return the spec of a module that may have a fast forward, or None."""
    own = own_class(module, recognised.family)
    spec = recognised.specs.get(own) if own else spec_of(module, recognised.backbone)
    return with_mask_window(module, spec, recognised.family) if isinstance(spec, AttentionSpec) else spec


def _replaced_parts(recognised: Recognised) -> Skipped:
    """Return a note on each norm, MLP and block of experts whose own forward other code has replaced."""
    return tuple(
        (
            own_class(module, recognised.family) or type(module).__name__,
            "other code had already replaced its forward: left alone",
        )
        for module in recognised.backbone.modules()
        if isinstance(spec := _mixing_spec(module, recognised), (NormSpec, GatedNormSpec, MlpSpec, ExpertsSpec))
        and is_replaced(module, spec, recognised)
    )


def _plan_methods(recognised: Recognised, runtime: Runtime) -> list[Replacement[Any, Any]]:
    """Return the replacements of the backbone's methods that make ALiBi's biases, or a mask."""
    family = recognised.family
    methods: dict[str, Callable[..., Any]] = {}
    if family.alibi is not None and runtime.context is not None:
        methods[family.alibi] = packed_alibi
    if family.masks_by is not None:
        methods[family.masks_by] = packed_mask
    return [Replacement(recognised.backbone, name, method, None, runtime) for name, method in methods.items()]


def _plan_rotary(backbone: nn.Module, runtime: Runtime) -> list[Replacement[Any, Any]]:
    """Return the replacements of rotary tables whose frequencies depend on a sequence's length."""
    modules = list(filter(depends_on_length, backbone.modules()))
    for module in modules:
        if not gives_known_tables(module):
            raise UnsupportedModelError(
                f"{type(module).__name__} has rotary type {module.rope_type!r}, whose frequencies depend on the "
                "length. It has a forward or a hook that is not transformers', which is not covered. Remove it, or "
                "train the model unpatched. Nothing was changed."
            )
        if mentions(module, "polar"):  # cos and sin are one complex table
            raise UnsupportedModelError(
                f"{type(backbone).__name__} has rotary type {module.rope_type!r}, whose frequencies depend on the "
                "length, and complex tables, which is not covered. Set another rotary type (rope_parameters of the "
                "config), or train it unpatched. Nothing was changed."
            )
    return [forward_replacement(module, rotary_forward, None, runtime) for module in modules]


def _computed_here(
    planned: Sequence[Replacement[Any, Any]], through_interface: Sequence[nn.Module], family: Family
) -> list[nn.Module]:
    """Return the modules for which fastpack must notice if their class's forward is replaced later.

    Fastpack's forwards would bypass the new forward, or would call it with packed tokens. Modules that run on rows, and
    the head, may have any forward.
    """
    functions = [experts_forward, *(forward for _, forward in FAST)] + ([] if family.repadded else [backbone_forward])
    return [*(innermost(each.module) for each in planned if each.function in functions), *through_interface]


def _mixing_modules(
    recognised: Recognised, planned: Sequence[Replacement[Any, Any]], through_interface: Sequence[nn.Module]
) -> list[tuple[nn.Module, Tier | MixerSpec]]:
    """Return the modules that mix tokens, each with its tier or mixer. In a re-padded model it is the backbone."""
    if recognised.family.repadded:
        return [(recognised.backbone, "re-padded model")]
    inside = {id(module) for layer in recognised.replaced_layers for module in layer.modules()}
    how: dict[int, Tier | MixerSpec] = {id(module): "varlen" for module in through_interface}
    for each in planned:
        if each.function is attention_forward:
            how[id(each.module)] = "varlen" if id(each.module) in inside else "fast"
        elif each.function is mixer_forward:
            how[id(each.module)] = each.spec
    return [(module, how[id(module)]) for module in recognised.backbone.modules() if id(module) in how]
