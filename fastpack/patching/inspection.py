"""Make the report of a patch as it is now, including all changes since the patch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from torch import nn

from fastpack.layers.decoder import tile_tokens
from fastpack.layers.liger import count_unknown
from fastpack.layers.read_projection import count_opaque, count_projections, not_isolated
from fastpack.layers.rope_tables import unserved
from fastpack.model.checks import learns_prompts, passes_a_cache
from fastpack.model.loss import fused_loss_fails
from fastpack.model.unwrap import find_parts, models_of, wrapper_chain
from fastpack.patching.changes import QUANTIZER, Attribute, count_drop_ins, unfused
from fastpack.patching.experts import experts_as_they_are
from fastpack.patching.quantize import notes_on_stacks
from fastpack.patching.report import PatchReport
from fastpack.patching.state import BUDGET, FUSED_LOSS, PatchState, carries, state_of, trainer_record
from fastpack.utils.classes import replaced_forward
from fastpack.utils.protocols import TrainerLike

_PROJECTING = {"attention", "mlp", "layer"}
"""Kinds of modules whose new forwards read the weights of projections."""


def inspect_patch(target: object, *more_notes: str) -> PatchReport:
    """Return the report of a model, or of the model that a trainer trains.

    Args:
        target: The model or trainer.
        more_notes: Further notes for the report.
    """
    model = models_of(target)[0]
    parts = find_parts(model)
    backbone, head = parts.backbone, parts.head
    state = state_of(backbone)
    if state is None:
        whole = head or backbone
        return PatchReport(type(whole).__name__, getattr(whole.config, "model_type", "?"))
    # since the patch, adapters may have changed, graphs may have been recorded, and the model may have moved
    planned, mixing, fused = state.report, state.mixing, trainer_record(target, FUSED_LOSS)
    budget = trainer_record(target, BUDGET)
    notes = planned.notes + mixing.notes() + _notes_on_tiles(backbone) + state.runtime.describe(backbone)
    if budget is not None:
        notes += (budget.describe(),)
    notes += more_notes
    notes += not_isolated(head or backbone) + _notes_on_prompts(model) + _notes_on_liger(backbone, state)
    projections = count_projections(backbone)
    if any(isinstance(change, Attribute) and change.name == QUANTIZER for change in state.changes):
        notes += ("transformers' quantizer says that MXFP4 can't be trained: while patched, this model's says it can",)
    notes += notes_on_stacks(backbone, four_bits=any("4-bit" in kind for kind in projections))
    skipped = planned.skipped + mixing.unknown_modules() + unserved(backbone)
    skipped += unfused(backbone, state.changes) + experts_as_they_are(state)
    replaced = None if head is None else replaced_forward(head)
    if replaced is not None:
        skipped += ((type(head).__name__, f"its class's forward is {replaced}, which runs around a patched backbone"),)
    fused_asked = state.options.loss is not None or fused is not None
    if fused is not None and not fused.reads_head_loss:
        skipped = tuple(entry for entry in skipped if entry[0] != "loss")  # the trainer doesn't compute that loss
    if fused_asked and not any(what == "loss" for what, _ in skipped):
        reason = _why_no_fused_loss(head, state, target)
        note = "loss: fused in training with labels=, where out.logits is None" if fused is None else fused.describe()
        skipped += () if reason is None else (("loss", reason),)
        notes += (note,) if reason is None else ()
    return replace(
        planned,
        **mixing.describe(),
        swapped={**planned.swapped, **mixing.kinds()},
        projections=projections,
        as_modules=count_opaque(backbone) if _PROJECTING & planned.swapped.keys() else {},
        skipped=skipped,
        notes=notes,
    )


def _notes_on_tiles(backbone: nn.Module) -> tuple[str, ...]:
    """Return a note on checkpointed layers whose MLPs run in tiles of tokens."""
    found = Counter(filter(None, map(tile_tokens, backbone.modules())))
    return tuple(
        f"MLPs of {layers} layers run in tiles of some {tokens:,} tokens in batches of more than {2 * tokens:,}"
        for tokens, layers in found.items()
    )


def _notes_on_prompts(model: nn.Module) -> tuple[str, ...]:
    """Return notes on wrappers that learn prompts, whether they were added before or after the patch."""
    return tuple(
        "PEFT's prompts pass a cache: every batch runs the stock forward with padding, even if this report differs"
        if passes_a_cache(wrapper)
        else "PEFT's prompts: only for batches padded on the right"
        for wrapper in filter(learns_prompts, wrapper_chain(model))
    )


def _notes_on_liger(backbone: nn.Module, state: PatchState) -> tuple[str, ...]:
    notes: list[str] = []
    drop_ins, unknown = count_drop_ins(backbone, state.changes), count_unknown(backbone)
    if drop_ins:
        notes.append(f"Liger's forwards of {drop_ins} norms and MLPs: layers that fuse them use fastpack's instead")
    if unknown:
        notes.append(f"{unknown} modules have Liger's own classes: they are called as modules")
    return tuple(notes)


def _why_no_fused_loss(head: nn.Module | None, state: PatchState, target: object) -> str | None:
    """Return why the requested loss is not fused, as far as the target shows now, or None."""
    of_trainer = trainer_record(target, FUSED_LOSS)
    if of_trainer is not None and (rejected := of_trainer.rejects(target)) is not None:
        return str(rejected)
    if of_trainer is not None and not of_trainer.reads_head_loss:
        return None
    if head is None:
        return "a bare backbone has no loss"
    if state.options.loss is None:
        return "the model was patched anew, without loss='fused': TRL's loss runs"
    came_after = f"this {type(head).__name__} was added after the patch"
    reason = fused_loss_fails(head, asked_for=of_trainer is not None) if carries(head, state) else came_after
    return None if reason is None else f"{reason}: the stock loss runs"


def why_no_fused_loss(trainer: TrainerLike) -> str | None:
    """Return why a trainer that asked for the fused loss would now compute another loss, or None."""
    parts = find_parts(trainer.model)
    state = state_of(parts.backbone)
    if state is None:
        return "its model is not patched"
    return dict(state.report.skipped).get("loss") or _why_no_fused_loss(parts.head, state, trainer)
