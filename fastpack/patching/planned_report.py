"""Describe what a patch will do, before it is applied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from fastpack.attention_dispatch import AttentionShape, explain
from fastpack.layers.attention import attention_forward, two_way_of
from fastpack.layers.decoder import decoder_forward
from fastpack.layers.experts import experts_forward
from fastpack.layers.mixers.forward import packed_alibi, packed_mask
from fastpack.layers.mlp import mlp_forward
from fastpack.layers.mxfp4_experts import mxfp4_forward
from fastpack.layers.norm import gated_norm_forward, norm_forward
from fastpack.layers.rope_tables import rotary_forward
from fastpack.model.backbone import backbone_forward
from fastpack.model.composite import composite_forward
from fastpack.model.head import head_forward
from fastpack.model.model_runtime import ModelRuntime
from fastpack.model.unwrap import Parts
from fastpack.patching.backend_choice import notes_on_blocks, serving_backends, with_blocks
from fastpack.patching.options import PatchOptions
from fastpack.patching.recognise import Recognised, own_class
from fastpack.patching.report import PatchReport
from fastpack.patching.support import has_blocks, marks_both_ways
from fastpack.utils.replacement import Replacement

KINDS: dict[Callable[..., Any], str] = {
    backbone_forward: "backbone",
    composite_forward: "composite",
    head_forward: "head",
    attention_forward: "attention",
    decoder_forward: "layer",
    norm_forward: "norm",
    gated_norm_forward: "gated norm",
    mlp_forward: "mlp",
    experts_forward: "experts",
    mxfp4_forward: "experts",
    packed_alibi: "alibi",
    packed_mask: "mask",
    rotary_forward: "rotary",
}
"""The report's names for replacements, by their functions. Mixers are counted by the kernels that serve them."""


def planned_report(
    parts: Parts,
    recognised: Recognised,
    options: PatchOptions,
    runtime: ModelRuntime,
    replacements: Sequence[Replacement[Any, Any]],
    attentions: Sequence[nn.Module],
    shapes: Sequence[AttentionShape],
) -> PatchReport:
    """Return what is known before the patch; :func:`fastpack.patching.inspection.inspect_patch` adds what may change.

    Args:
        parts: the model's parts.
        recognised: its family and classes.
        options: the options of the patch.
        runtime: the runtime that the replacements share.
        replacements: the replacements that are planned.
        attentions: the attention modules.
        shapes: the shapes that they will ask a backend for.
    """
    backbone: Any = recognised.backbone
    specs = [recognised.specs.get(own_class(module, recognised.family) or "") for module in attentions]
    of_images = [
        with_blocks(shape, two_way_of(module, spec))
        for shape, module, spec in zip(shapes, attentions, specs, strict=True)
    ]
    if marks_both_ways(parts):
        shapes = of_images
    backends, backend_notes = serving_backends(list(dict.fromkeys(shapes)), options.attention)
    notes: list[str] = []
    if options.graphs == "auto" and runtime.graphs is None:
        notes.append("graphs: off, since some layers look up each batch on the host, which a recording can't do")
    notes += [
        f"rotary type {each.module.rope_type!r}: each sequence gets the frequencies of its own length; the stock "
        "padded model uses those of the longest sequence in the batch"
        for each in replacements
        if each.function is rotary_forward
    ]
    notes += backend_notes
    if has_blocks(parts):
        notes += notes_on_blocks(list(dict.fromkeys(of_images)), options.attention)
    if getattr(backbone.config.get_text_config(decoder=True), "num_kv_shared_layers", 0):
        notes.append(
            "reentrant checkpointing loses gradients of the keys and values that layers share, in the stock model, too"
        )
    swapped = Counter(KINDS[each.function] for each in replacements if each.function in KINDS)
    swapped += Counter({"attention (interface)": specs.count(None)})
    return PatchReport(
        model=type(parts.outermost).__name__,
        family=recognised.family.model_type,
        attention=options.attention,
        backend=", ".join(backends) or None,
        backends=explain(shapes[0]) if shapes else {},
        swapped=dict(swapped),
        matched=recognised.matched,
        notes=tuple(dict.fromkeys(notes)),
    )
