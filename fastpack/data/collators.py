"""A collator that also reads how its batches are packed, for patched models."""

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
    """A collator whose batches carry ``packed_seq_lens``. It is a class, since a data loader's workers pickle it."""

    collator: Collator

    def __call__(self, examples: Any) -> Any:
        """Collate examples, and read the packing of the batch."""
        batch = self.collator(examples)
        if not isinstance(batch, MutableMapping):
            raise PackingError(
                f"the collator made a {type(batch).__name__}; with_packed_seq_lens needs a dict of tensors with "
                "input_ids or inputs_embeds. Don't wrap the collator of GRPO and RLOO: generation makes their batches "
                "after the collator has run."
            )
        if "KL_input_ids" in batch:  # KTO passes unknown keys to the forward of its KL sequences too
            return batch
        source = source_of(batch)
        if not isinstance(source, Tensor):
            raise PackingError(
                f"the collator made a batch of {', '.join(batch)}, without a tensor of input_ids or inputs_embeds. "
                "Add one of them, or don't wrap this collator."
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
        """Return the collator's attributes: a Trainer saves the ``tokenizer`` of its collator."""
        if name == "collator" or name.startswith("__"):  # copy and pickle ask for these before the fields are set
            raise AttributeError(name)
        return getattr(self.collator, name)


def with_packed_seq_lens(collator: Collator) -> Collator:
    """Wrap a collator so that its batches also carry their packing, read and checked on the host.

    A patched model reads the lengths from the batch once a step, and the host waits for the device meanwhile. With the
    wrapped collator it never waits, neither for lengths nor for the prefixes that sequences share
    (``share_prefixes=``). The wrapper takes padded and packed batches of TRL's, transformers' or your own collator, and
    changes nothing else in them.

    The model trusts ``packed_seq_lens``, so code that masks or permutes a batch after the collator has to remove it.
    KTO batches with mismatched completions (for KTO's KL) stay unchanged: they hold two packings, and the model reads
    both itself.

    Args:
        collator: a function from examples to a dict of CPU tensors with ``input_ids`` or ``inputs_embeds``.

    Returns:
        A collator that adds ``packed_seq_lens``, a :class:`fastpack.PackedSeqLens`, and overwrites one that the batch
        has. A stock model does not know the keyword.

    Raises:
        PackingError: when called, if the batch contradicts itself, has neither of the two tensors, or is not a dict
            (the collator of GRPO and RLOO returns the examples).
        TypeError: at once, if ``collator`` can't be called.

    Example:
        >>> trainer.data_collator = fastpack.with_packed_seq_lens(trainer.data_collator)
    """
    if not callable(collator):
        raise TypeError(
            f"with_packed_seq_lens takes a collator, such as trainer.data_collator, not {type(collator).__name__}."
        )
    return _WithPackedSeqLens(collator)


def stock_collator(collator: object) -> Any:
    """Return the collator that makes the batches, without the wrapper of :func:`with_packed_seq_lens`."""
    while isinstance(collator, _WithPackedSeqLens):
        collator = collator.collator
    return collator
