"""Decide what to swap on a model, and why not the rest, without touching it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fastpack.attention_dispatch import explain
from fastpack.errors import PatchError, UnsupportedModelError
from fastpack.families.spec import (
    AnyAttentionSpec,
    AttentionSpec,
    DecoderSpec,
    Family,
    HeadSpec,
    MixerSpec,
    MlpSpec,
    NormSpec,
    Rung,
    Spec,
)
from fastpack.layers.attention import attention_forward
from fastpack.layers.decoder import decoder_forward
from fastpack.layers.liger import spec_of, stands_for
from fastpack.layers.mixers.forward import mixer_forward, packed_alibi
from fastpack.layers.mlp import mlp_forward
from fastpack.layers.norm import norm_forward
from fastpack.layers.read_projection import count_opaque, count_projections
from fastpack.layers.rope_tables import depends_on_length, gives_known_tables, rotary_forward
from fastpack.layers.runtime import Runtime
from fastpack.layers.window_checks import Form, LayerOrder, narrowest_window, refuse_misplaced
from fastpack.model.backbone import backbone_forward
from fastpack.model.checks import learns_prompts, prompts_pre_hook, replica_pre_hook
from fastpack.model.drift import Watch
from fastpack.model.generation import generate
from fastpack.model.head import Head, HeadKind, head_forward, head_pre_hook
from fastpack.model.loss import FusedLoss, fused_loss_rejects
from fastpack.model.prefix_sharing import PrefixSharing, sharing_rejects
from fastpack.model.runtime import ModelRuntime
from fastpack.model.unwrap import Parts, find_parts, refuse_kept_forward, refuse_wrapped, way_in
from fastpack.packing.context import PackingContext
from fastpack.patching.backend_choice import attention_shape, serving_backends
from fastpack.patching.match import Match, settle
from fastpack.patching.options import PatchOptions
from fastpack.patching.recognise import (
    Recognised,
    Skipped,
    forms_by_family,
    own_class,
    recognise,
    with_mask_window,
)
from fastpack.patching.report import PatchReport
from fastpack.patching.token_mixers import Mixing
from fastpack.utils.classes import mentions, shadowed
from fastpack.utils.hooks import own_forward
from fastpack.utils.protocols import HeadLike
from fastpack.utils.replacement import PreHook, Replacement

GENERATE = "generate"
MIXER = "mixer"
PROJECTING = {"attention", "mlp", "layer"}
"""Kinds of replaced modules that read their projections' weights."""


@dataclass(frozen=True, eq=False)
class Planned:
    """A replacement that is not put on yet, and what the report counts it as."""

    kind: str
    replacement: Replacement[Any, Any]

    @property
    def module(self) -> Any:
        """The module of the method to replace."""
        return self.replacement.owner


@dataclass(frozen=True, eq=False)
class Findings:
    """What one pass over a model found: methods to replace, what is left alone, and what to say of it."""

    planned: tuple[Planned, ...] = ()
    skipped: Skipped = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def of_all(cls, passes: Iterable[Findings]) -> Findings:
        """What several passes found, in their order."""
        found = tuple(passes)
        return cls(
            tuple(planned for each in found for planned in each.planned),
            tuple(skipped for each in found for skipped in each.skipped),
            tuple(note for each in found for note in each.notes),
        )


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything that ``patch`` will do to one model.

    Attributes:
        interface_modules: attention that keeps its own forward, and attends through our interface.
    """

    backbone: nn.Module
    runtime: ModelRuntime
    planned: tuple[Planned, ...]
    interface_modules: tuple[Any, ...]
    pre_hooks: tuple[PreHook[Any, Any], ...]
    mixing: Mixing
    report: PatchReport


def make_plan(model: nn.Module, options: PatchOptions, match: Match) -> Plan:
    """Plan a patch; see :func:`fastpack.patch` for arguments, errors and warnings.

    Args:
        match: judges the classes whose sources were not proved.
    """
    refuse_wrapped(model)
    parts = find_parts(model)
    refuse_kept_forward(model, parts.head)
    found = settle(recognise(parts), match, head=options.loss is not None)
    return plan_recognised(model, parts, found, options)


def plan_recognised(model: nn.Module, parts: Parts, found: Recognised, options: PatchOptions) -> Plan:
    """Plan a patch of a model that is known to be this."""
    _refuse_options(options, found)
    backbone, family, specs = found.backbone, found.family, found.specs
    forms = forms_by_family(backbone, specs, family)
    runtime = _make_runtime(found, options, forms)
    known = Findings(skipped=found.skipped, notes=_notes_on_graphs(backbone, runtime, options))
    around = _plan_model(parts, found, runtime, options)
    attentions = [m for m in backbone.modules() if own_class(m, family) in family.attention]
    _refuse_nothing_to_patch(backbone, family)
    refuse_misplaced(backbone, forms)
    inside = [_plan_module(module, found, runtime.layers) for module in backbone.modules()]
    alibi, rotary = _plan_alibi(found, runtime.layers), _plan_rotary(backbone, runtime.layers)
    findings = Findings.of_all([known, around, *inside, alibi, rotary])
    through_interface = tuple(m for m in attentions if own_class(m, family) not in specs)
    computed = _computed_here(findings.planned, through_interface, family)
    runtime.watch.classes.watch((each.module for each in findings.planned), forwards=computed)
    mixing = Mixing(backbone, tuple(_mixing_modules(found, findings.planned, through_interface)))
    return Plan(
        backbone,
        runtime,
        findings.planned,
        through_interface,
        _plan_hooks(model, parts, runtime, findings.planned),
        mixing,
        _make_report(parts, found, options, findings, through_interface, mixing, attentions),
    )


def _refuse_options(options: PatchOptions, found: Recognised) -> None:
    """Raise where an option can't be kept in this model: ``strict``, or shared prefixes."""
    family, specs = found.family, found.specs
    fast = family.rung == "fast" and all(name in specs for name in family.attention)
    rung = "varlen" if family.rung == "fast" and not fast else family.rung
    if options.strict and (not fast or found.skipped):
        why = "; ".join(f"{what}: {reason}" for what, reason in found.skipped) or (
            f"family {family.model_type} has no fast forwards; it would run on the {rung} rung"
        )
        raise PatchError(f"strict=True, but not every layer is on the fast rung: {why}.")
    not_shared = None if options.share_prefixes is None else sharing_rejects(found.backbone, family)
    if not_shared is not None:
        raise PatchError(
            f"share_prefixes={options.share_prefixes!r} can't be exact for {type(found.backbone).__name__}: "
            f"{not_shared}. Leave the option out. Nothing was changed."
        )


def _refuse_nothing_to_patch(backbone: nn.Module, family: Family) -> None:
    wanted = (*family.attention, *family.mixers)
    if not any(own_class(m, family) in wanted for m in backbone.modules()) and not family.repadded:
        raise PatchError(f"no {' or '.join(wanted)} found in {type(backbone).__name__}: nothing to patch.")


def _make_runtime(found: Recognised, options: PatchOptions, forms: Mapping[int, Form]) -> ModelRuntime:
    """What the replacements share, as the options ask for it."""
    backbone = found.backbone
    # a layer's forward that nobody has read may drop the keyword, and the mask with it
    context = PackingContext() if found.family.needs_scope or found.replaced_layers else None
    graphs = offload = None
    if options.graphs == "auto" and context is None:
        from fastpack.cuda_graphs.runner import GraphRunner  # late, since heavy

        graphs = GraphRunner()
    if options.offload is not None:
        from fastpack.offload.checkpoints import CheckpointOffload  # late, since heavy

        offload = CheckpointOffload(products=options.offload == "activations")
    return ModelRuntime(
        layers=Runtime(options.attention, options.kernels, context),
        watch=Watch(
            order=LayerOrder.of(backbone), attention=found.attends_by, window=narrowest_window(backbone, forms)
        ),
        graphs=graphs,
        offload=offload,
        sharing=PrefixSharing() if options.share_prefixes == "auto" else None,
    )


def _notes_on_graphs(backbone: nn.Module, runtime: ModelRuntime, options: PatchOptions) -> tuple[str, ...]:
    if runtime.graphs is not None:
        return (runtime.graphs.describe(next(backbone.parameters()).device),)
    off = "graphs: off, some of its layers look each batch up on the host, which a recording can't"
    return (off,) if options.graphs == "auto" else ()


def _plan_model(parts: Parts, found: Recognised, runtime: ModelRuntime, options: PatchOptions) -> Findings:
    """The backbone's forward, and the head's."""
    backbone = _plan(parts.backbone, "backbone", backbone_forward, found.family, runtime)
    if parts.head is None:
        return Findings((backbone,))
    kind = _head_kind(parts.head)
    loss, reason = _head_loss(parts.head, kind, options, found)
    planned = [backbone, _plan(parts.head, "head", head_forward, Head(kind, loss), runtime)]
    if hasattr(type(parts.head), GENERATE):
        planned.append(_plan(parts.head, GENERATE, generate, None, runtime, method=GENERATE))
    skipped = () if reason is None else (("loss", f"{reason}: the stock loss runs"),)
    return Findings(tuple(planned), skipped)


def _plan_hooks(
    model: nn.Module, parts: Parts, runtime: ModelRuntime, planned: tuple[Planned, ...]
) -> tuple[PreHook[Any, Any], ...]:
    """What runs before the head, or a bare backbone, and before wrappers that learn prompts."""
    if parts.head is None:
        hooks: list[PreHook[Any, Any]] = [PreHook(parts.backbone, replica_pre_hook, None, None)]
    else:
        spec = next(each.replacement.spec for each in planned if each.kind == "head")
        hooks = [PreHook(parts.head, head_pre_hook, spec, runtime)]
    hooks += [PreHook(wrapper, prompts_pre_hook, None, None) for wrapper in filter(learns_prompts, way_in(model))]
    return tuple(hooks)


def _head_loss(
    head: HeadLike, kind: HeadKind, options: PatchOptions, recognised: Recognised
) -> tuple[FusedLoss | None, str | None]:
    """What computes the head's loss, where it is to be fused and can be; and why it can't."""
    if options.loss is None:
        return None, None
    found = recognised.specs.get(own_class(head, recognised.family) or "")
    spec = found if isinstance(found, HeadSpec) else None
    reason = fused_loss_rejects(head, kind, spec)
    if reason is not None:
        return None, reason
    assert spec is not None
    return FusedLoss(spec, options.kernels), None


def _head_kind(head: nn.Module) -> HeadKind:
    name = type(head).__name__
    if name.endswith("ForSequenceClassification"):
        return "sequence_classification"
    if name.endswith("ForTokenClassification"):
        return "token_classification"
    if name.endswith("ForQuestionAnswering"):
        raise UnsupportedModelError(
            f"{name} finds spans in a row; causal LMs, sequence and token classifiers are covered."
        )
    return "causal_lm"


def _plan_module(module: nn.Module, found: Recognised, runtime: Runtime) -> Findings:
    """The forwards of one module of the backbone."""
    family = found.family
    own = own_class(module, family)
    mixer = family.mixers.get(own or "")
    planned: tuple[Planned, ...] = () if mixer is None else (_plan(module, MIXER, mixer_forward, mixer, runtime),)
    spec = found.specs.get(own) if own else spec_of(module, found.backbone)
    if isinstance(spec, AttentionSpec):
        spec = with_mask_window(module, spec, family)
    hooked = hasattr(module, "_hf_hook")
    theirs = _theirs(module, own, spec, found.backbone)
    name = own or type(module).__name__
    if isinstance(spec, AnyAttentionSpec):
        _refuse_attention(module, name, theirs)
        planned += (_plan(module, "attention", attention_forward, spec, runtime),)
    elif isinstance(spec, DecoderSpec):
        # one whose forward was replaced (offloading hooks do this) calls its own modules, which are fast each
        if theirs is None and not hooked:
            planned += (_plan(module, "layer", decoder_forward, spec, runtime),)
    elif isinstance(spec, (NormSpec, MlpSpec)) and theirs is not None:
        return Findings(planned, ((name, "its forward was already replaced by someone else: left alone"),))
    elif isinstance(spec, NormSpec):
        if getattr(module, "weight", None) is not None:  # some have none
            planned += (_plan(module, "norm", norm_forward, spec, runtime),)
    elif isinstance(spec, MlpSpec):
        planned += (_plan(module, "mlp", mlp_forward, spec, runtime),)
    return Findings(planned)


def _theirs(module: nn.Module, own: str | None, spec: Spec | None, backbone: nn.Module) -> Any:
    """The forward that somebody has put on a module, which computes something else; or methods that it calls."""
    if spec is None:
        return None
    if own and (methods := shadowed(module)):
        return ", ".join(methods)
    forward = own_forward(module)
    if forward is None or hasattr(module, "_hf_hook") or stands_for(module, forward, spec, backbone):
        return None
    return forward


def _refuse_attention(module: nn.Module, name: str, theirs: object) -> None:
    if getattr(module, "is_causal", True) is False:
        raise PatchError(
            f"a {name} was set to attend in both directions (is_causal=False); only causal attention is covered. "
            "Train it unpatched, or set it to True. Nothing was changed."
        )
    if theirs is not None:
        raise PatchError(
            f"the forward of a {name} was already replaced ({theirs!r}); undo that first: its attention would not "
            "be packed."
        )


def _plan_alibi(found: Recognised, runtime: Runtime) -> Findings:
    """The backbone's own method that makes ALiBi's biases."""
    name = found.family.alibi
    if name is None or runtime.context is None:
        return Findings()
    return Findings((_plan(found.backbone, "alibi", packed_alibi, None, runtime, method=name),))


def _plan_rotary(backbone: nn.Module, runtime: Runtime) -> Findings:
    """Tables of positions whose frequencies depend on a sequence's length."""
    findings: list[Findings] = []
    for module in filter(depends_on_length, backbone.modules()):
        rope_type = module.rope_type
        if not gives_known_tables(module):
            raise UnsupportedModelError(
                f"{type(module).__name__} has rotary type {rope_type!r}, whose frequencies depend on the length, "
                "and a forward or a hook that is not transformers', which is not covered. Take it off, or train "
                "the model unpatched. Nothing was changed."
            )
        if mentions(module, "polar"):  # cos and sin are one complex table
            raise UnsupportedModelError(
                f"{type(backbone).__name__} has rotary type {rope_type!r}, whose frequencies depend on the length, "
                "and complex tables, which is not covered. Other rotary types are (rope_parameters of the config); "
                "or train it unpatched. Nothing was changed."
            )
        note = (
            f"rotary type {rope_type!r}: each sequence gets the frequencies of its own length; the stock padded "
            "model takes those of the longest in the batch"
        )
        findings.append(Findings((_plan(module, "rotary", rotary_forward, None, runtime),), notes=(note,)))
    return Findings.of_all(findings)


def _plan(
    module: nn.Module,
    kind: str,
    function: Callable[..., Any],
    spec: object,
    runtime: Runtime | ModelRuntime,
    *,
    method: str = "forward",
) -> Planned:
    # accelerate keeps the forward that its hooks wrap under this name
    name = "_old_forward" if method == "forward" and hasattr(module, "_hf_hook") else method
    return Planned(kind, Replacement(module, name, function, spec, runtime))


def _computed_here(
    planned: Sequence[Planned], through_interface: Sequence[nn.Module], family: Family
) -> list[nn.Module]:
    """The modules of a class's own forward that would be bypassed, or is called with packed tokens, if another were put
    there; what runs on rows, and a head, may have any."""
    kinds = ("attention", "layer", "norm", "mlp", *(() if family.repadded else ("backbone",)))
    return [*(each.module for each in planned if each.kind in kinds), *through_interface]


def _mixing_modules(
    found: Recognised, planned: Sequence[Planned], through_interface: Sequence[nn.Module]
) -> list[tuple[nn.Module, Rung | MixerSpec]]:
    """The modules that mix tokens; the whole backbone where nobody knows which they are."""
    if found.family.repadded:
        return [(found.backbone, "re-padded model")]
    inside = {id(module) for layer in found.replaced_layers for module in layer.modules()}
    how: dict[int, Rung | MixerSpec] = {id(module): "varlen" for module in through_interface}
    for each in planned:
        if each.kind == "attention":
            how[id(each.module)] = "varlen" if id(each.module) in inside else "fast"
        elif each.kind == MIXER:
            how[id(each.module)] = each.replacement.spec
    return [(module, how[id(module)]) for module in found.backbone.modules() if id(module) in how]


def _make_report(
    parts: Parts,
    found: Recognised,
    options: PatchOptions,
    findings: Findings,
    through_interface: Sequence[nn.Module],
    mixing: Mixing,
    attentions: Sequence[nn.Module],
) -> PatchReport:
    backbone: Any = found.backbone
    family = found.family
    shapes = list(
        dict.fromkeys(
            attention_shape(backbone, module, found.specs.get(own_class(module, family) or "")) for module in attentions
        )
    )
    backends, notes = serving_backends(shapes, options.attention)
    notes = (*findings.notes, *notes)
    if getattr(backbone.config.get_text_config(decoder=True), "num_kv_shared_layers", 0):
        notes += ("reentrant checkpointing loses gradients of the keys and values that layers share, stock too",)
    swapped = Counter(each.kind for each in findings.planned if each.kind not in (MIXER, GENERATE))
    swapped.update(mixing.kinds())
    if through_interface:
        swapped["attention (interface)"] = len(through_interface)
    return PatchReport(
        model=type(parts.head or backbone).__name__,
        family=family.model_type,
        **mixing.describe(),
        attention=options.attention,
        backend=", ".join(backends) or None,
        backends=explain(shapes[0]) if shapes else {},
        swapped=dict(swapped),
        projections=count_projections(backbone),
        as_modules=count_opaque(backbone) if PROJECTING & swapped.keys() else {},
        matched=found.matched,
        skipped=tuple(dict.fromkeys(findings.skipped)),
        notes=(*dict.fromkeys(notes), *mixing.notes()),
    )
