"""Read the sequences of preference data as a collator makes them, and compute their log-probabilities.

Shape suffixes: L tokens of a sequence, N sequences, T tokens of all of them, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastpack.data.lengths import IMAGES
from fastpack.data.packed_collators import PackedPreferenceCollator
from fastpack.errors import PackingError
from fastpack.families.spec import HeadSpec
from fastpack.model.checks import MEDIA
from fastpack.model.loss import HeadMatmul, read_head
from fastpack.model.unwrap import Parts, find_parts
from fastpack.ops.loss import IGNORE_INDEX
from fastpack.ops.loss.linear_cross_entropy import CHUNK, linear_cross_entropy
from fastpack.ops.loss.segment_sums import segment_sums
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.patching.apply import temporarily_patched
from fastpack.patching.match import head_spec
from fastpack.patching.state import is_patched
from fastpack.patching.twin import match_by_twin
from fastpack.trainers.reference.cache import is_peft
from fastpack.utils.modules import evaluating

Collator = Callable[[list[dict[str, Any]]], Mapping[str, Any]]

PAIR_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")
JUDGED_COLUMNS = ("ref_logps", "ref_KL_logps")


@dataclass(frozen=True, eq=False)
class Scored:
    """A sequence, with a weight for each of its tokens.

    Attributes:
        ids: int64 ``[L]``, the token ids.
        weights: float32 ``[L]``, the factor on each token's log-probability; 0 for the first, which no token predicts.
    """

    ids: Tensor
    weights: Tensor

    @cached_property
    def id(self) -> str:
        """A digest of the ids and the weights, 128 bits in hex, which identifies the sequence on any machine."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(self.ids.numpy().astype("<i8").tobytes())
        digest.update(self.weights.numpy().astype("<f4").tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Examples:
    """A data set of tokenised pairs or judged completions, and the sequences to score for each example.

    The sequences come from the collator's batches rather than from the columns, so they are truncated as the collator
    truncates them.

    Attributes:
        dataset: a ``datasets.Dataset``.
        name: the data set's name in messages.
        collator: the collator that makes batches of the examples; None to use the examples as they are.
        ld_alpha: LD-DPO's factor on tokens of a pair's longer completion beyond the shorter one's length; None for 1.
    """

    dataset: Any
    name: str
    collator: Collator | None = None
    ld_alpha: float | None = None

    def __post_init__(self) -> None:
        """Raise unless the columns can be added to the data set."""
        if not hasattr(self.dataset, "add_column") or not hasattr(self.dataset, "__len__"):
            raise PackingError(
                f"{self.name} is a {type(self.dataset).__name__}. Pass one split, a datasets.Dataset, that was loaded "
                "without streaming=True."
            )
        images = [name for name in (*IMAGES, *MEDIA) if name in self.dataset.column_names]
        if images:
            raise PackingError(
                f"{self.name} has {' and '.join(images)}, and reference log-probabilities are computed for text alone. "
                "Let the trainer compute them as it trains (precompute_ref_log_probs=False)."
            )
        existing = [name for name in (*PAIR_COLUMNS, *JUDGED_COLUMNS) if name in self.dataset.column_names]
        if existing:
            raise PackingError(
                f"{self.name} has {' and '.join(existing)} already. Remove them to compute them again: "
                f"dataset.remove_columns({existing}). (A trainer built with precompute_ref_log_probs=True has computed "
                "them itself, on padded batches: build it without that flag.)"
            )
        _ = self.columns

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The columns to fill, one for each sequence of an example, under TRL's names."""
        names = self.dataset.column_names
        if "chosen_ids" in names or "chosen_input_ids" in names:
            return PAIR_COLUMNS
        if "completion_ids" in names:
            return JUDGED_COLUMNS if "KL_completion_ids" in names else JUDGED_COLUMNS[:1]
        raise PackingError(
            f"{self.name} has the columns {', '.join(names) or 'none'}. Pass tokenised examples, as TRL's trainers "
            "make them (trainer.train_dataset): prompt_ids, chosen_ids and rejected_ids, or prompt_ids and "
            "completion_ids."
        )

    @cached_property
    def _lists(self) -> Any:
        return self.dataset.with_format(None)  # examples of plain lists, as collators need them

    def __getitem__(self, row: int) -> list[Scored]:
        """Return the sequences of one example, one for each column."""
        example = self._lists[row]
        try:
            sequences = _collated(self.collator([example])) if self.collator else _as_they_are(example, self.columns)
        except PackingError as error:
            raise PackingError(f"example {row} of {self.name}: {error}") from error
        if len(sequences) != len(self.columns):
            raise PackingError(
                f"example {row} of {self.name}: the collator made {len(sequences)} sequences [B, S] with input_ids, "
                f"attention_mask and completion_mask, but each of {', '.join(self.columns)} needs one. Pass TRL's "
                "collator for preferences (trainer.data_collator), or none."
            )
        if self.ld_alpha is not None and self.columns == PAIR_COLUMNS:
            shared = min(int(sequence.weights.sum()) for sequence in sequences)
            for sequence in sequences:
                sequence.weights[sequence.weights.cumsum(0) > shared] *= self.ld_alpha
        return sequences


def _as_they_are(example: Mapping[str, Any], columns: tuple[str, ...]) -> list[Scored]:
    """Return a prompt with each of its completions, not truncated.

    A judged completion and its KL completion are handled as a pair.
    """
    if columns != PAIR_COLUMNS:
        chosen, rejected = example["completion_ids"], example.get("KL_completion_ids", example["completion_ids"])
        example = {"prompt_ids": example["prompt_ids"], "chosen_ids": chosen, "rejected_ids": rejected}
    batch = PackedPreferenceCollator()([example])
    lengths = batch["packed_seq_lens"].lengths
    pairs = zip(batch["input_ids"][0].split(lengths), batch["labels"][0].split(lengths), strict=True)
    return [Scored(ids, (labels != IGNORE_INDEX).float()) for ids, labels in pairs][: len(columns)]


def _collated(batch: Mapping[str, Any]) -> list[Scored]:
    """Return the sequences of TRL's padded batch of tensors ``[B, S]``: the completions, then the KL completions."""
    sequences = []
    for prefix in ("", "KL_"):
        names = [f"{prefix}{name}" for name in ("input_ids", "attention_mask", "completion_mask")]
        if not all(name in batch for name in names):
            continue
        for ids, real, scored in zip(*(batch[name] for name in names), strict=True):
            weights = scored[real.bool()].float()
            weights[:1] = 0
            sequences.append(Scored(ids[real.bool()].long(), weights))
    return sequences


Score = Callable[[Sequence[Scored]], Tensor]
"""A function from N sequences to their log-probabilities, float64 ``[N]`` on the device (float32 on MPS). It doesn't
wait for the device."""


@contextmanager
def scoring(model: nn.Module, adapter: str | None) -> Iterator[Score]:
    """Turn a model into the reference, and yield the function that scores sequences; restore the model at the end.

    As the reference, the model is patched, in evaluation mode and without gradients. PEFT's ``adapter`` is on; if it is
    None, all adapters are off.

    Raises:
        UnsupportedModelError: fastpack doesn't cover the model.
    """
    parts = find_parts(model)
    as_patched = nullcontext() if is_patched(model) else temporarily_patched(model, match_by_twin)
    with _as_reference(model, adapter), as_patched, torch.no_grad():
        assert parts.head is not None  # identify() has checked it
        yield partial(_log_probs, parts, head_spec(parts, match_by_twin))


@contextmanager
def _as_reference(model: Any, adapter: str | None) -> Iterator[None]:
    """Switch to the reference's adapters; at the end restore the adapters and each parameter's ``requires_grad``."""
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    active = None if adapter is None else model.base_model.active_adapter
    try:
        if adapter is not None:
            model.base_model.set_adapter(adapter)
        with evaluating(model), model.disable_adapter() if adapter is None and is_peft(model) else nullcontext():
            yield
    finally:
        if adapter is not None:
            model.base_model.set_adapter(active)
        for parameter, on in trained:
            parameter.requires_grad_(on)  # PEFT changes it when it switches adapters


def _log_probs(parts: Parts, spec: HeadSpec | None, sequences: Sequence[Scored]) -> Tensor:
    backbone, head = parts.backbone, parts.head
    device = next(backbone.parameters()).device
    packed = PackedSeqLens.from_lengths([len(s.ids) for s in sequences]).to(device)
    ids_T = torch.cat([s.ids for s in sequences])
    # the first token of a sequence has weight 0, so the token before it, the last of another sequence, has no target
    weights_T = torch.cat([s.weights for s in sequences]).roll(-1)
    targets_T = ids_T.roll(-1).masked_fill(weights_T == 0, IGNORE_INDEX)
    count = int((weights_T != 0).sum())
    inputs = {"input_ids": ids_T[None].to(device), "packed_seq_lens": packed, "use_cache": False, "return_dict": True}
    product = None if spec is None else read_head(head, spec)
    if isinstance(product, HeadMatmul):
        hidden_TH = backbone(**inputs).last_hidden_state[0]
        losses_T = linear_cross_entropy(
            hidden_TH,
            product.weight,
            targets_T.to(hidden_TH.device),
            bias=product.bias,
            lora=product.lora,
            softcap=product.softcap,
            logit_scale=product.logit_scale,
            reduction="none",
            num_kept=count,
        )
    else:
        losses_T = _of_logits(head(**inputs).logits[0], targets_T)
    return -segment_sums(losses_T * weights_T.to(losses_T.device), packed.cu_seqlens.to(losses_T.device, torch.int64))


def _of_logits(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """Return float32 losses ``[T]`` from logits, a chunk of rows at a time, for heads whose weight can't be read."""
    chunks = zip(logits_TV.split(CHUNK), targets_T.to(logits_TV.device).split(CHUNK), strict=True)
    return torch.cat([F.cross_entropy(x.float(), y, ignore_index=IGNORE_INDEX, reduction="none") for x, y in chunks])
