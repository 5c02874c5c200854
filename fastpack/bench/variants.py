"""The variants of a training run, which differ in their batches, attention kernel and changes to the stock model."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

ROLLOUTS = ("grpo", "distill")
"""The trainers that generate completions, which are drawn here."""


@dataclass(frozen=True)
class Variant:
    """One way to train the same model.

    Attributes:
        what: a line for the help text.
        packed: batches are flattened, as with TRL's ``padding_free=True``; otherwise they are padded, with a mask.
        varlen: stock attention is FlashAttention-2's kernel for packed sequences; otherwise transformers' sdpa.
        liger: Liger's kernels are applied.
        unsloth: Unsloth loads the model, adds LoRA and changes TRL's trainer.
        patched: fastpack patches the model.
        collated: the packing is read in the collator, by :func:`fastpack.with_packed_seq_lens`.
        fused: the trainer's loss is fused with the head: ``patch(trainer, loss="fused")``.
        shared: the prompt that several sequences share runs once.
        trainers: the trainers that the variant works with, on rows of text. All but the SFTTrainer always pad.
        image_trainers: the trainers that it works with on rows with images, which TRL always pads.
    """

    what: str
    packed: bool = False
    varlen: bool = False
    liger: bool = False
    unsloth: bool = False
    patched: bool = False
    collated: bool = False
    fused: bool = False
    shared: bool = False
    trainers: tuple[str, ...] = ("sft",)
    image_trainers: tuple[str, ...] = ()

    def trains(self, trainer: str, *, images: bool) -> bool:
        """Return whether a trainer is one of the variant's, on rows with or without images."""
        return trainer in (self.image_trainers if images else self.trainers)

    @property
    def module(self) -> str:
        """Return the module that trains the variant in a process of its own."""
        return "fastpack.bench.unsloth_run" if self.unsloth else "fastpack.bench.variant_run"

    @property
    def foreign(self) -> bool:
        """Return whether other libraries change the model: if it fails or trains another model, the others go on."""
        return self.liger or self.unsloth

    def unavailable(
        self, on_gpu: bool, graphs: str | None = None, *, flash: bool = True, loop: str = "trl", mode: str = "full"
    ) -> str | None:
        """Return why the variant can't run, or None if it can.

        Args:
            on_gpu: whether this machine has a GPU.
            graphs: whether CUDA graphs are requested.
            flash: whether transformers has FlashAttention-2 for the model.
            loop: the training loop.
            mode: what trains.
        """
        if mode == "mxfp4" and not self.patched:
            return "can't train over MXFP4: transformers' kernels have no gradients"
        if self.shared and graphs is not None:
            return "shares prefixes, which --graphs excludes"
        if self.unsloth and loop != "trl":
            return "changes TRL's trainer, which --loop plain does without"
        if (self.varlen or self.liger or self.unsloth) and not on_gpu:
            return "needs a GPU"
        if self.packed and not self.patched and not flash:
            return "needs FlashAttention-2, without which transformers does not separate this shape's sequences"
        if self.varlen and not flash:
            return "needs FlashAttention-2, which transformers lacks for this shape"
        if self.liger and importlib.util.find_spec("liger_kernel") is None:
            return "liger-kernel is not installed"
        if self.unsloth and importlib.util.find_spec("unsloth") is None:
            return "unsloth is not installed"
        return None


TRAINERS = ("sft", "dpo", "grpo", "distill")
IMAGE_TRAINERS = ("sft", "grpo")
"""The trainers that train on rows with images here."""

VARIANTS = {
    "stock padded": Variant(
        "padded batches, transformers' sdpa attention", trainers=TRAINERS, image_trainers=IMAGE_TRAINERS
    ),
    "stock padded + FA2": Variant(
        "padded batches, FlashAttention-2's varlen kernel, un-padded at each layer's attention",
        varlen=True,
        trainers=ROLLOUTS,
        image_trainers=IMAGE_TRAINERS,
    ),
    "stock padded + FA2 + Liger": Variant(
        "the same with TRL's use_liger_kernel, which since TRL 1.15 is Liger's layers under TRL's own chunked loss",
        varlen=True,
        liger=True,
        trainers=ROLLOUTS,
    ),
    "stock padding_free": Variant("flattened batches, transformers' sdpa attention", packed=True),
    "stock + FA2": Variant("flattened batches, FlashAttention-2's varlen kernel", packed=True, varlen=True),
    "stock + FA2 + Liger": Variant("the same with Liger's kernels", packed=True, varlen=True, liger=True),
    "Unsloth": Variant("loaded and trained as Unsloth documents it, which decides about padding itself", unsloth=True),
    "fastpack": Variant(
        "patched, fed the padded batches", patched=True, trainers=TRAINERS, image_trainers=IMAGE_TRAINERS
    ),
    "fastpack + FA2": Variant(
        "patched, fed the padded batches of images; FlashAttention-2's kernel in the image tower, which stays stock",
        varlen=True,
        patched=True,
        trainers=(),
        image_trainers=IMAGE_TRAINERS,
    ),
    "fastpack, prompts shared": Variant(
        "patched, but a prompt runs once for all of its completions, with its images",
        patched=True,
        shared=True,
        trainers=("dpo", "grpo"),
        image_trainers=("grpo",),
    ),
    "fastpack, fused loss": Variant(
        "patched, fed the padded batches, but the trainer's loss is fused with the head",
        patched=True,
        fused=True,
        trainers=("grpo",),
    ),
    "fastpack, prompts shared, fused loss": Variant(
        "both of these", patched=True, fused=True, shared=True, trainers=("grpo",)
    ),
    "fastpack packed": Variant("patched, fed the flattened batches", packed=True, patched=True),
    "fastpack collated": Variant(
        "the same, but lengths are read in the collator, not from the device", packed=True, patched=True, collated=True
    ),
    "fastpack fused loss": Variant(
        "the same, but the trainer's loss is fused with the head", packed=True, patched=True, collated=True, fused=True
    ),
}
"""The variants by name; the others are compared with the first one."""
