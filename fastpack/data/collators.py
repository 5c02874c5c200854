"""Collators for patched models."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fastpack.errors import PackingError
from fastpack.packing.inputs import PACKING_KEYWORDS, read_packing
from fastpack.utils.signatures import source_of

Collator = Callable[[Any], Any]


@dataclass(frozen=True)
class _WithPackedSeqLens:
    """A class and no closure, so that workers of a data loader can be handed it."""

    collator: Collator

    def __call__(self, examples: Any) -> Any:
        batch = self.collator(examples)
        if not isinstance(batch, MutableMapping):
            raise PackingError(
                f"the collator made a {type(batch).__name__}, and with_packed_seq_lens takes those that make a dict of "
                "tensors with input_ids or inputs_embeds. Leave GRPO's and RLOO's as it is: their batches are made by "
                "generation, after it."
            )
        if "KL_input_ids" in batch:  # KTO hands what it does not know on to a forward of those, too
            return batch
        source = source_of(batch)
        if not isinstance(source, Tensor):
            raise PackingError(
                f"the collator made a batch of {', '.join(batch)}: no tensor of input_ids or inputs_embeds, whose "
                "packing could be read."
            )
        batch["packed_seq_lens"] = read_packing(
            (source.shape[0], source.shape[1]),
            source.device,
            attention_mask=batch.get("attention_mask"),
            position_ids=batch.get("position_ids"),
            packing={name: batch[name] for name in PACKING_KEYWORDS if name in batch},
            ids=batch.get("input_ids"),
        )
        return batch

    def __getattr__(self, name: str) -> Any:
        """The collator's own attributes: a Trainer saves the ``tokenizer`` that it finds there."""
        if name == "collator" or name.startswith("__"):  # what copy and pickle ask of a class, and before it is filled
            raise AttributeError(name)
        return getattr(self.collator, name)


def with_packed_seq_lens(collator: Collator) -> Collator:
    """The collator, whose batches also carry their packing, read and checked on the host.

    A patched model then waits for the device nowhere, where it would wait once a step to read lengths from it, and the
    prefixes that its sequences may share (``share_prefixes=``). Padded and packed batches alike, of TRL's,
    transformers' or your own collator; nothing in them is changed, and padded ones go to ``generate`` as they are.
    They are not read again in the model: who masks or permutes a batch behind the collator takes ``packed_seq_lens``
    out of it. KTO's batches with mismatched completions, for its KL, stay as they are: they hold two packings, and the
    model reads each where it runs.

    Args:
        collator: from examples to a dict of CPU tensors with ``input_ids`` or ``inputs_embeds``.

    Returns:
        One that adds ``packed_seq_lens``, a :class:`fastpack.PackedSeqLens`, which takes the place of any
        ``packed_seq_lens`` that the batch has. Give it to a patched model: a stock one does not know the keyword.

    Raises:
        PackingError: when called: what the batch carries contradicts itself, it holds neither of the two, or it is no
            dict (GRPO's and RLOO's collator hands the examples on).
        TypeError: at once: what came can't be called.
    """
    if not callable(collator):
        raise TypeError(
            f"with_packed_seq_lens takes a collator, such as trainer.data_collator, not {type(collator).__name__}."
        )
    return _WithPackedSeqLens(collator)


def stock_collator(collator: object) -> Any:
    """The collator that makes the batches, inside :func:`with_packed_seq_lens` where it was wrapped in it."""
    while isinstance(collator, _WithPackedSeqLens):
        collator = collator.collator
    return collator
