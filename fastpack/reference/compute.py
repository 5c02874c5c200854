"""Log-probabilities of sequences under a reference, padding-free.

Shape suffixes: N sequences, T tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastpack.api import patched
from fastpack.errors import PatchError
from fastpack.families import FORMS, HeadSpec, source_hash
from fastpack.model.loss import HeadProduct, read_head
from fastpack.model.unwrap import Parts, find_parts
from fastpack.ops.linear_cross_entropy import CHUNK
from fastpack.ops.sequence_log_probs import segment_sums, sequence_log_probs
from fastpack.packing.seqlens import IGNORE_INDEX, PackedSeqLens
from fastpack.patching.state import is_patched
from fastpack.patching.support import covered_family
from fastpack.reference.examples import Scored

Score = Callable[[Sequence[Scored]], Tensor]
"""From N sequences to float64 ``[N]`` on the device, for which nothing waits."""


@contextmanager
def scoring(model: nn.Module, *, adapter: str | None, ld_alpha: float | None) -> Iterator[Score]:
    """What scores sequences; within, the model is the reference, and behind it what it was.

    That is: in evaluation mode, patched, with PEFT's ``adapter`` on, or all of them off for None.

    Args:
        ld_alpha: the factor on tokens behind :attr:`Scored.whole`.

    Raises:
        UnsupportedModelError: the model is not covered.
        PatchError: it has adapters that it was not wrapped with by PEFT.
    """
    parts = find_parts(model)
    with ExitStack() as stack:
        stack.enter_context(_modes_kept(model))
        model.eval()
        stack.enter_context(_adapted(model, parts, adapter))
        if not is_patched(model):
            stack.enter_context(patched(model))
        stack.enter_context(torch.no_grad())
        yield partial(_log_probs, parts, _head_spec(parts), 1.0 if ld_alpha is None else ld_alpha)


@contextmanager
def _modes_kept(model: nn.Module) -> Iterator[None]:
    """Behind it, modules train that did before, and weights (PEFT decides about them as it switches adapters)."""
    training = [(module, module.training) for module in model.modules()]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for module, on in training:
            module.training = on
        for parameter, on in trained:
            parameter.requires_grad_(on)


def is_peft(model: Any) -> bool:
    """True for a PeftModel, whose adapters can be switched; a model that adapters were put into is none."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


@contextmanager
def _adapted(model: Any, parts: Parts, adapter: str | None) -> Iterator[None]:
    """With one adapter on, or none."""
    if not is_peft(model):
        if any("base_layer" in module._modules for module in parts.head.modules()):
            raise PatchError(
                f"this {type(model).__name__} has adapters inside, and is no PeftModel: which ones are on in the "
                "reference can't be chosen. Wrap it by peft.get_peft_model, or pass the model without adapters."
            )
        yield
        return
    if adapter is None:
        with model.disable_adapter():
            yield
        return
    active, inside = model.active_adapter, model.base_model.active_adapter
    model.set_adapter(adapter)
    try:
        yield
    finally:
        model.set_adapter(active)
        model.base_model.set_adapter(inside)


def _head_spec(parts: Parts) -> HeadSpec | None:
    """How the head makes logits, where its source is known."""
    head, family = parts.head, covered_family(parts)
    cls: Any = type(head)
    known = cls.__module__ == family.module and cls.__name__ in family.fast
    spec = FORMS.get(source_hash(cls)) if known else None
    return spec if isinstance(spec, HeadSpec) else None


def _log_probs(parts: Parts, spec: HeadSpec | None, rest: float, sequences: Sequence[Scored]) -> Tensor:
    backbone, head = parts.backbone, parts.head
    device = next(backbone.parameters()).device
    packed = PackedSeqLens.from_lengths([len(s.ids) for s in sequences]).to(device)
    ids_T = torch.cat([s.ids for s in sequences])
    # the first token of a sequence is never scored, so that its last one predicts nothing
    scored_T = torch.cat([s.scored for s in sequences]).roll(-1)
    targets_T = ids_T.roll(-1).masked_fill(~scored_T, IGNORE_INDEX)
    count = int(scored_T.sum())
    offsets = torch.tensor(_cuts(sequences), dtype=torch.int64)
    inputs = {"input_ids": ids_T[None].to(device), "packed_seq_lens": packed, "use_cache": False, "return_dict": True}
    product = read_head(head, spec) if spec is not None else "the head's source is not known"
    if isinstance(product, HeadProduct):
        sums = sequence_log_probs(
            backbone(**inputs).last_hidden_state[0],
            product.weight,
            targets_T,
            offsets,
            bias=product.bias,
            lora=product.lora,
            softcap=product.softcap,
            logit_scale=product.logit_scale,
            num_kept=count,
            dtype=torch.float64,
        )
    else:
        sums = _of_logits(head(**inputs).logits[0], targets_T, offsets)
    whole, behind = sums.view(-1, 2).unbind(1)
    return whole + rest * behind


def _of_logits(logits_TV: Tensor, targets_T: Tensor, offsets: Tensor) -> Tensor:
    """The same sums from logits, for heads that can't be taken apart; in float32 a chunk of rows at a time."""
    targets_T = targets_T.to(logits_TV.device)
    losses = [
        F.cross_entropy(logits.float(), targets, ignore_index=IGNORE_INDEX, reduction="none")
        for logits, targets in zip(logits_TV.split(CHUNK), targets_T.split(CHUNK), strict=True)
    ]
    return -segment_sums(torch.cat(losses), offsets.to(logits_TV.device))


def _cuts(sequences: Sequence[Scored]) -> list[int]:
    """Offsets ``2 N + 1``: each sequence is cut before the token that predicts the first one that counts in part."""
    found, start = [0], 0
    for sequence in sequences:
        end = start + len(sequence.ids)
        cut = end
        if sequence.whole is not None:
            cut = start + int(sequence.scored.nonzero()[sequence.whole]) - 1
        found += [cut, end]
        start = end
    return found
