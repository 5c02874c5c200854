"""The settings of a training run that decide how much memory it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from fastpack.errors import PatchError
from fastpack.patching.options import not_a_choice

Mode = Literal["full", "lora", "qlora"]
MODES: tuple[str, ...] = get_args(Mode)
FitLoss = Literal["fused", "trl"]
LOSSES: tuple[str, ...] = get_args(FitLoss)
FIT_OFFLOADS = (None, "checkpoints")
FitAttention = Literal["auto", "triton_packed"]
ATTENTIONS: tuple[str, ...] = get_args(FitAttention)


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of a training run.

    Attributes:
        mode: ``full`` trains every weight; ``lora`` trains LoRA on every linear layer except the head, in float32, as
            PEFT makes it; ``qlora`` does so in ``dtype``, as TRL does, over those layers in NF4 with double
            quantisation.
        rank: LoRA's rank.
        checkpointing: whether each layer is checkpointed, not reentrantly.
        offload: the option of :func:`fastpack.patch`: None, or ``checkpoints``.
        loss: ``fused`` for the option of :func:`fastpack.patch`, ``trl`` for the loss of TRL's trainers.
        accumulation: whether the gradients of earlier micro-batches wait when a batch begins.
        dtype: the dtype of the model and its activations.
        attention: ``auto`` for whichever kernel is the fastest; or ``triton_packed``, which needs the least memory.
    """

    mode: Mode = "qlora"
    rank: int = 32
    checkpointing: bool = True
    offload: Literal["checkpoints"] | None = "checkpoints"
    loss: FitLoss = "fused"
    accumulation: bool = False
    dtype: torch.dtype = torch.bfloat16
    attention: FitAttention = "auto"

    def check(self) -> None:
        """Raise unless each setting has one of its allowed values.

        Raises:
            PatchError: a setting has a value that it doesn't take, or offloading has no checkpoints.
        """
        choices = {"mode": MODES, "offload": FIT_OFFLOADS, "loss": LOSSES, "attention": ATTENTIONS}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise not_a_choice(name, getattr(self, name), allowed)
        if type(self.rank) is not int or self.rank < 1:
            raise PatchError(f"rank={self.rank!r}; pass LoRA's rank, an int of 1 or more.")
        if self.offload is not None and not self.checkpointing:
            raise PatchError(
                f"offload={self.offload!r} keeps the inputs of checkpointed layers on the host, but checkpointing is "
                "off. Pass offload=None (--offload none), or leave checkpointing on."
            )

    @property
    def itemsize(self) -> int:
        """The bytes of an activation's element."""
        return self.dtype.itemsize

    @property
    def adapter_itemsize(self) -> int:
        """The bytes of an element of A and B."""
        return self.itemsize if self.mode == "qlora" else torch.float32.itemsize
