"""Find the backend that will serve a model's attention, before there is a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

import torch
from torch import nn

from fastpack.attention_dispatch import AttentionShape, Visibility, choose, explain
from fastpack.backends import cudnn, flash_attn
from fastpack.families.spec import AttentionSpec, Spec
from fastpack.layers.window_checks import window_of
from fastpack.packing.two_way import TwoWay
from fastpack.utils.protocols import ModelLike


def attention_shape(backbone: ModelLike, module: nn.Module, spec: Spec | None) -> AttentionShape:
    """Return the shape that one attention module will ask a backend for, as far as known before there is a batch."""
    config = backbone.config.get_text_config(decoder=True)
    heads = getattr(module, "num_heads", None) or config.num_attention_heads  # layers may differ
    head_dim = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None) or config.hidden_size // heads
    named = spec.softcap if isinstance(spec, AttentionSpec) else None
    softcap = attrgetter(named)(module) if named else getattr(config, "attn_logit_softcapping", None)
    dropout = getattr(module, "attention_dropout", 0.0)
    return AttentionShape(
        device=next(backbone.parameters()).device,
        dtype=backbone.dtype,
        num_heads=heads,
        # latent attention ignores num_key_value_heads; if these are more than heads, the group size is 0
        num_kv_heads=heads // max(1, getattr(module, "num_key_value_groups", 1)) or heads,
        head_dim=head_dim,
        value_dim=getattr(module, "v_head_dim", None) or head_dim,
        visibility=Visibility(window_of(module, spec)),
        softcap=softcap,
        sinks=getattr(module, "sinks", None) is not None,
        dropout=float(dropout) if isinstance(dropout, (int, float)) else 0.0,
    )


def with_blocks(shape: AttentionShape, two_way: TwoWay | None) -> AttentionShape:
    """Return the shape that an attention module asks for in a batch with blocks, which it uses as ``two_way`` says."""
    return replace(shape, visibility=replace(shape.visibility, two_way=two_way))


def notes_on_blocks(shapes: Sequence[AttentionShape], attention: str) -> list[str]:
    """Return notes on batches with blocks (:func:`with_blocks`) if other backends serve them, or if none may.

    Args:
        shapes: The shapes that the attention modules will ask a backend for in batches with blocks.
        attention: ``auto``, or the backend asked for by name.
    """
    notes: list[str] = []
    for shape in shapes:
        if shape.device.type == "meta" or shape.visibility.two_way is None:
            continue
        causal = with_blocks(shape, None)
        if attention != "auto":
            why = explain(shape)[attention]
            notes += (
                [] if why is None else [f"attention={attention!r} is refused for batches with images, since it {why}"]
            )
        elif (other := choose(shape)) != choose(causal):
            notes.append(f"attention: {other} in batches with images")
    return list(dict.fromkeys(notes))


HALVES = (torch.bfloat16, torch.float16)
"""The dtypes to which autocast may cast float32 tensors."""


def serving_backends(shapes: Sequence[AttentionShape], attention: str) -> tuple[list[str], tuple[str, ...]]:
    """Return the names of the backends that will serve these shapes, each once, and notes on them.

    Args:
        shapes: The shapes that the attention modules will ask a backend for.
        attention: ``auto``, or the backend asked for by name.

    Raises:
        BackendUnavailableError: The backend asked for by name can't serve.
    """
    served = [_serving_backend(shape, attention) for shape in shapes]
    return list(dict.fromkeys(name for name, _ in served)), tuple(note for _, notes in served for note in notes)


def _serving_backend(shape: AttentionShape, attention: str) -> tuple[str, list[str]]:
    notes: list[str] = []
    if shape.device.type == "meta":
        return attention, notes  # sharded loading: the backend is chosen at the first batch
    # float32 weights are mostly trained under autocast, which casts q, k and v before the kernel
    halves = [replace(shape, dtype=dtype) for dtype in HALVES if shape.dtype == torch.float32]
    if attention == "auto":
        chosen = choose(shape)
        for half in halves:
            if (other := choose(half)) != chosen:
                notes.append(f"attention: {other} under autocast to {str(half.dtype).removeprefix('torch.')}")
        for each in (shape, *halves):
            shorter = choose(each)
            for length in (flash_attn.LONG, cudnn.LONG):
                longer = choose(replace(each, total_tokens=length, num_sequences=1, max_seqlen=length))
                if longer != shorter:
                    notes.append(f"attention: {longer} where most tokens are in sequences of {length:,} and more")
                shorter = longer
        return chosen, list(dict.fromkeys(notes))
    if explain(shape)[attention] is not None and any(explain(half)[attention] is None for half in halves):
        notes.append(f"{attention} needs autocast (bf16=True or fp16=True) over these float32 weights")
        return attention, notes
    return choose(shape, attention), notes
