"""Decide what to swap on a model, and why not the rest, without touching it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from fastpack.attention_dispatch import explain
from fastpack.errors import PatchError, UnsupportedModelError
from fastpack.families import (
    FORMS,
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
    source_hash,
)
from fastpack.layers.adapters import count_opaque, count_projections, refuse_rows
from fastpack.layers.attention import attention_forward
from fastpack.layers.decoder import decoder_forward
from fastpack.layers.drift import Watch
from fastpack.layers.liger import spec_of, stands_for
from fastpack.layers.mixers.forward import mixer_forward, packed_alibi
from fastpack.layers.mlp import mlp_forward
from fastpack.layers.norm import norm_forward
from fastpack.layers.prefix_sharing import PrefixSharing, sharing_rejects
from fastpack.layers.rope_tables import depends_on_length, gives_known_tables, rotary_forward
from fastpack.layers.windows import LayerOrder, misplaced, narrowest_window
from fastpack.model.backbone import backbone_forward
from fastpack.model.checks import learns_prompts, prompts_pre_hook, replica_pre_hook
from fastpack.model.generation import generate
from fastpack.model.head import HeadKind, head_forward, head_pre_hook
from fastpack.model.loss import FusedLoss, fused_loss_rejects
from fastpack.model.unwrap import Parts, find_parts, refuse_kept_forward, refuse_wrapped, way_in
from fastpack.packing.context import PackingScope
from fastpack.patching.backend_choice import attention_shape, serving_backend
from fastpack.patching.options import PatchOptions
from fastpack.patching.recognise import (
    layers_replaced,
    own_class,
    refuse_look_alikes,
    refuse_replaced_attention,
    stock_attention,
    trusted_specs,
    with_known_backbone,
)
from fastpack.patching.report import PatchReport
from fastpack.patching.support import covered_family
from fastpack.patching.token_mixers import Mixing
from fastpack.utils.classes import mentions, shadowed, stock_class
from fastpack.utils.hooks import own_forward


@dataclass(frozen=True, eq=False)
class ForwardSwap:
    """One forward, or another method, to replace: which, and how to bind ours over the one that is there."""

    module: nn.Module
    bind: Callable[[Any], Any]
    kind: str
    method: str = "forward"

    @property
    def attribute(self) -> str:
        if self.method != "forward":
            return self.method
        # accelerate keeps the forward that its hooks wrap under this name
        return "_old_forward" if hasattr(self.module, "_hf_hook") else "forward"


@dataclass(eq=False)
class Plan:
    """Everything that ``patch`` will do to one model."""

    backbone: nn.Module
    report: PatchReport
    forwards: list[ForwardSwap] = field(default_factory=list)
    interface_modules: list[Any] = field(default_factory=list)
    pre_hooks: list[tuple[nn.Module, Callable[..., Any]]] = field(default_factory=list)
    scope: PackingScope | None = None
    mixing: Mixing | None = None
    watch: Watch = field(default_factory=Watch)


def make_plan(model: nn.Module, options: PatchOptions) -> Plan:
    """Plan a patch; see :func:`fastpack.patch` for arguments and errors."""
    attention = options.attention
    refuse_wrapped(model)
    parts = find_parts(model)
    refuse_kept_forward(model, parts.head)
    family = covered_family(parts)
    backbone = parts.backbone
    refuse_rows((parts.head or backbone).modules())
    skipped: list[tuple[str, str]] = []
    notes: list[str] = []

    refuse_look_alikes(backbone, family)
    refuse_replaced_attention(backbone, family)
    attends_by = stock_attention(backbone, family)
    attends_by.check(" Nothing was changed.")
    family = with_known_backbone(backbone, family)
    strange_layers = layers_replaced(backbone, family, skipped)
    specs = trusted_specs(backbone, family, skipped)
    family = _keeping_windows(family, specs)
    fast = family.rung == "fast" and all(name in specs for name in family.attention)
    rung = "varlen" if family.rung == "fast" and not fast else family.rung
    if options.strict and (not fast or skipped):
        why = "; ".join(f"{what}: {reason}" for what, reason in skipped) or (
            f"family {family.model_type} has no fast forwards; it would run on the {rung} rung"
        )
        raise PatchError(f"strict=True, but not every layer is on the fast rung: {why}.")

    not_shared = None if options.share_prefixes is None else sharing_rejects(backbone, family)
    if not_shared is not None:
        raise PatchError(
            f"share_prefixes={options.share_prefixes!r} can't be exact for {type(backbone).__name__}: {not_shared}. "
            "Leave the option out. Nothing was changed."
        )

    # a layer's forward that nobody has read may drop the keyword, and the mask with it
    scope = PackingScope() if family.needs_scope or strange_layers else None
    plan = Plan(backbone, PatchReport.stock(backbone), scope=scope)
    plan.watch.attention = attends_by
    _plan_backbone(plan, parts, options, family, skipped, notes)
    for wrapper in filter(learns_prompts, way_in(model)):
        plan.pre_hooks.append((wrapper, prompts_pre_hook))
    attentions = [m for m in backbone.modules() if own_class(m, family) in family.attention]
    wanted = (*family.attention, *family.mixers)
    if not any(own_class(m, family) in wanted for m in backbone.modules()) and not family.repadded:
        raise PatchError(f"no {' or '.join(wanted)} found in {type(backbone).__name__}: nothing to patch.")
    forms = _forms(backbone, specs, family)
    _refuse_misplaced(backbone, forms)
    plan.watch.window = narrowest_window(backbone, forms)
    for module in backbone.modules():
        _plan_module(plan, module, specs, family, options, skipped)
    plan.interface_modules = [m for m in attentions if own_class(m, family) not in specs]
    if family.alibi is not None and plan.scope is not None:
        bind = functools.partial(_bind_alibi, backbone, family.alibi, plan.scope)
        plan.forwards.append(ForwardSwap(backbone, bind, "alibi", method=family.alibi))
    _plan_rotary(plan, backbone, notes)
    plan.watch.classes.watch((swap.module for swap in plan.forwards), forwards=_computed_here(plan, family))

    plan.mixing = Mixing(backbone, tuple(_mixing_modules(plan, family, strange_layers)))
    shapes = list(
        dict.fromkeys(attention_shape(backbone, m, specs.get(own_class(m, family) or "")) for m in attentions)
    )
    backend = ", ".join(dict.fromkeys(serving_backend(shape, attention, notes) for shape in shapes))
    if getattr(backbone.config.get_text_config(decoder=True), "num_kv_shared_layers", 0):
        notes.append("reentrant checkpointing loses gradients of the keys and values that layers share, stock too")
    swapped = Counter(swap.kind for swap in plan.forwards if swap.kind not in (MIXER, GENERATE))
    swapped.update(plan.mixing.kinds())
    if plan.interface_modules:
        swapped["attention (interface)"] = len(plan.interface_modules)
    plan.report = PatchReport(
        model=type(parts.head or backbone).__name__,
        family=family.model_type,
        **plan.mixing.describe(),
        attention=attention,
        backend=backend or None,
        backends=explain(shapes[0]) if shapes else {},
        swapped=dict(swapped),
        projections=count_projections(backbone),
        as_modules=count_opaque(backbone) if PROJECTING & swapped.keys() else {},
        skipped=tuple(dict.fromkeys(skipped)),
        notes=(*dict.fromkeys(notes), *plan.mixing.notes()),
    )
    return plan


MIXER, GENERATE = "mixer", "generate"
PROJECTING = {"attention", "mlp", "layer"}
"""Kinds of swapped modules that read their projections' weights."""


def _computed_here(plan: Plan, family: Family) -> list[nn.Module]:
    """The modules of a class's own forward that would be bypassed, or is called with packed tokens, if another were put
    there; what runs on rows, and a head, may have any."""
    kinds = ("attention", "layer", "norm", "mlp", *(() if family.repadded else ("backbone",)))
    return [*(swap.module for swap in plan.forwards if swap.kind in kinds), *plan.interface_modules]


def _mixing_modules(
    plan: Plan, family: Family, strange_layers: list[nn.Module]
) -> list[tuple[nn.Module, Rung | MixerSpec]]:
    """The modules that mix tokens; the whole backbone where nobody knows which they are."""
    if family.repadded:
        return [(plan.backbone, "re-padded model")]
    found: dict[int, Rung | MixerSpec] = {id(swap.module): "fast" for swap in plan.forwards if swap.kind == "attention"}
    found |= {id(s.module): family.mixers[own_class(s.module, family) or ""] for s in plan.forwards if s.kind == MIXER}
    inside = {id(module) for layer in strange_layers for module in layer.modules()}
    found |= {id(module): "varlen" for module in plan.interface_modules}
    found |= {at: "varlen" for at, rung in found.items() if rung == "fast" and at in inside}
    return [(module, found[id(module)]) for module in plan.backbone.modules() if id(module) in found]


def _keeping_windows(family: Family, specs: dict[str, Spec]) -> Family:
    """Where windows are in upstream's masks alone, attention without a fast form runs on rows, which have masks."""
    if family.mask_window is None or all(name in specs for name in family.attention):
        return family
    masked = MixerSpec("added", window=f"config.{family.mask_window}")
    return replace(family, attention=(), mixers=dict.fromkeys(family.attention, masked))


def _plan_backbone(
    plan: Plan,
    parts: Parts,
    options: PatchOptions,
    family: Family,
    skipped: list[tuple[str, str]],
    notes: list[str],
) -> None:
    backbone, head = parts.backbone, parts.head
    graphs = None
    if options.graphs == "auto" and plan.scope is None:
        from fastpack.graphs.runner import GraphRunner  # late, since heavy

        graphs = GraphRunner()
    if options.graphs == "auto" and graphs is None:
        notes.append("graphs: off, some of its layers look each batch up on the host, which a recording can't")
    if graphs is not None:
        notes.append(graphs.describe(next(backbone.parameters()).device))
    offload = None
    if options.offload is not None:
        from fastpack.offload.checkpoints import CheckpointOffload  # late, since heavy

        offload = CheckpointOffload(products=options.offload == "activations")
    sharing = PrefixSharing() if options.share_prefixes == "auto" else None
    plan.watch.order = LayerOrder.of(backbone)
    bind = functools.partial(
        _bind, backbone_forward, backbone, (graphs, offload, sharing, plan.scope, plan.watch, family)
    )
    plan.forwards.append(ForwardSwap(backbone, bind, "backbone"))
    if head is None:
        plan.pre_hooks.append((backbone, replica_pre_hook))
        return
    kind = _head_kind(head)
    loss = _head_loss(head, kind, options, family, skipped)
    bind = functools.partial(_bind, head_forward, head, (kind, loss, plan.scope, sharing is not None))
    plan.forwards.append(ForwardSwap(head, bind, "head"))
    plan.pre_hooks.append((head, functools.partial(head_pre_hook, kind, plan.scope, sharing is not None)))
    if hasattr(type(head), GENERATE):
        plan.forwards.append(ForwardSwap(head, functools.partial(_bind_generate, head), GENERATE, method=GENERATE))


def _head_loss(
    head: Any, kind: HeadKind, options: PatchOptions, family: Family, skipped: list[tuple[str, str]]
) -> FusedLoss | None:
    """What the head computes and what does it, where its loss is to be fused and can be."""
    if options.loss is None:
        return None
    cls: Any = stock_class(head)
    known = cls.__module__ == family.module and cls.__name__ in family.fast
    spec = FORMS.get(source_hash(cls)) if known else None
    found = spec if isinstance(spec, HeadSpec) else None
    reason = fused_loss_rejects(head, kind, found)
    if reason is not None:
        skipped.append(("loss", f"{reason}: the stock loss runs"))
        return None
    assert found is not None
    return FusedLoss(found, options.kernels)


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


def _plan_module(
    plan: Plan,
    module: nn.Module,
    specs: dict[str, Spec],
    family: Family,
    options: PatchOptions,
    skipped: list[tuple[str, str]],
) -> None:
    own = own_class(module, family)
    name = own or type(module).__name__
    mixer = family.mixers.get(own or "")
    if mixer is not None:
        bind = functools.partial(_bind, mixer_forward, module, (mixer, plan.scope))
        plan.forwards.append(ForwardSwap(module, bind, MIXER))
    spec = specs.get(own) if own else spec_of(module, plan.backbone)
    if spec is None:
        return
    if isinstance(spec, AttentionSpec):
        spec = _with_mask_window(module, spec, family)
    found = own_forward(module)
    hooked = hasattr(module, "_hf_hook")
    replaced = found is not None and not hooked and not stands_for(module, found, spec, plan.backbone)
    if own and (methods := shadowed(module)):
        replaced, found = True, ", ".join(methods)
    if isinstance(spec, AnyAttentionSpec):
        if getattr(module, "is_causal", True) is False:
            raise PatchError(
                f"a {name} was set to attend in both directions (is_causal=False); only causal attention is covered. "
                "Train it unpatched, or set it to True. Nothing was changed."
            )
        if replaced:
            raise PatchError(
                f"the forward of a {name} was already replaced ({found!r}); undo that first: its attention would not "
                "be packed."
            )
        bind = functools.partial(_bind, attention_forward, module, (spec, options, plan.scope))
        plan.forwards.append(ForwardSwap(module, bind, "attention"))
    elif isinstance(spec, DecoderSpec):
        # one whose forward was replaced (offloading hooks do this) calls its own modules, which are fast each
        if not replaced and not hooked:
            bind = functools.partial(_bind, decoder_forward, module, (spec, options, plan.scope))
            plan.forwards.append(ForwardSwap(module, bind, "layer"))
    elif replaced:
        skipped.append((name, "its forward was already replaced by someone else: left alone"))
    elif isinstance(spec, NormSpec):
        if getattr(module, "weight", None) is None:
            return  # Gemma 4 has some without
        plan.forwards.append(
            ForwardSwap(module, functools.partial(_bind_plain, norm_forward, module, spec, options), "norm")
        )
    elif isinstance(spec, MlpSpec):
        plan.forwards.append(
            ForwardSwap(module, functools.partial(_bind_plain, mlp_forward, module, spec, options), "mlp")
        )


def _forms(backbone: nn.Module, specs: dict[str, Spec], family: Family) -> dict[int, Any]:
    """The form of each module that mixes tokens, by the module's ``id``."""
    forms: dict[int, Any] = {}
    for module in backbone.modules():
        own = own_class(module, family) or ""
        if own in family.mixers or own in family.attention:
            spec = family.mixers.get(own, specs.get(own))
            forms[id(module)] = _with_mask_window(module, spec, family) if isinstance(spec, AttentionSpec) else spec
    return forms


def _refuse_misplaced(backbone: nn.Module, forms: dict[int, Any]) -> None:
    """Raise where layers' windows are not those by which the stock model masks."""
    found = list(misplaced(backbone, forms))
    if found:
        more = f" (and {len(found) - 1} more)" if found[1:] else ""
        raise PatchError(
            f"layers were moved, or their config changed: {found[0].what}{more}. Before the patch, {found[0].mend}. "
            "Nothing was changed."
        )


def _with_mask_window(module: Any, spec: AttentionSpec, family: Family) -> AttentionSpec:
    """The form of an attention whose window upstream has in its mask alone."""
    kinds = getattr(module.config, "layer_types", None)
    if family.mask_window is None or (kinds is not None and kinds[module.layer_idx] != "sliding_attention"):
        return spec
    return replace(spec, window=f"config.{family.mask_window}")


def _plan_rotary(plan: Plan, backbone: nn.Module, notes: list[str]) -> None:
    for module in backbone.modules():
        if depends_on_length(module):
            rope_type = module.rope_type
            if not gives_known_tables(module):
                raise UnsupportedModelError(
                    f"{type(module).__name__} has rotary type {rope_type!r}, whose frequencies depend on the length, "
                    "and a forward or a hook that is not transformers', which is not covered. Take it off, or train "
                    "the model unpatched. Nothing was changed."
                )
            if mentions(module, "polar"):  # Llama 4's cos and sin are one complex table
                raise UnsupportedModelError(
                    f"{type(backbone).__name__} has rotary type {rope_type!r}, whose frequencies depend on the length, "
                    "and complex tables, which is not covered. Other rotary types are (rope_parameters of the config); "
                    "or train it unpatched. Nothing was changed."
                )
            plan.forwards.append(ForwardSwap(module, functools.partial(_bind, rotary_forward, module, ()), "rotary"))
            notes.append(
                f"rotary type {rope_type!r}: each sequence gets the frequencies of its own length; the stock padded "
                "model takes those of the longest in the batch"
            )


def _bind(function: Callable[..., Any], module: nn.Module, settings: tuple[Any, ...], stock: Any) -> Any:
    bound = functools.partial(function, module, *settings, stock)
    bound.__wrapped__ = type(module).forward  # type: ignore[attr-defined]  # for inspect.signature
    return bound


def _bind_plain(function: Callable[..., Any], module: nn.Module, spec: Spec, options: PatchOptions, stock: Any) -> Any:
    return functools.partial(function, module, spec, options)


def _bind_generate(head: Any, stock: Any) -> Any:
    bound = functools.partial(generate, head, stock)
    bound.__wrapped__ = type(head).generate  # type: ignore[attr-defined]  # for inspect.signature
    return bound


def _bind_alibi(backbone: nn.Module, name: str, scope: PackingScope, stock: Any) -> Any:
    return functools.partial(packed_alibi, backbone, name, scope)
