"""The options of a patch, and the check of their values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

from fastpack.attention_dispatch import check_name
from fastpack.errors import KernelUnavailableError, PatchError
from fastpack.ops.implementation import Implementation, why_no_kernels

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fastpack.data.token_budget import TooLong

Graphs = Literal["auto"] | None
Loss = Literal["fused"] | None
OffloadKind = Literal["checkpoints", "activations"]
Offload = OffloadKind | None
SharePrefixes = Literal["auto"] | None
OFFLOADS: tuple[str, ...] = get_args(OffloadKind)


@dataclass(frozen=True)
class TokenBudget:
    """A limit on the tokens of a trainer's micro-batches.

    Pass it, or just its ``max_tokens``, to :func:`fastpack.patch` with a trainer that is already built: transformers'
    ``Trainer``, or TRL's for SFT, DPO, KTO, rewards, GRPO, RLOO or distillation.

    **Full batches** (the default). Micro-batches are filled with whole examples up to ``max_tokens``, in random order;
    ``per_device_train_batch_size`` is ignored. An optimiser step has ``gradient_accumulation_steps`` micro-batches.
    Each example comes once per epoch, even with ``dataloader_drop_last``.

    **Same steps** (``same_steps=True``). The trainer keeps its own batches, so each optimiser step has the same
    examples as without a budget. A batch over the budget runs in pieces, each with its own forward and backward. GRPO,
    RLOO and distillation generate their batches and always work this way; leave ``same_steps`` out for them. With
    ``share_prefixes="auto"``, completions of one prompt stay together, and their prompt counts once. A stream
    (``IterableDataset``) needs ``same_steps=True``: its lengths are unknown beforehand, so an example over the budget
    runs alone and is not an error.

    **Images.** Their tokens count as any others. A data set of images has no ids before the processor has made them, so
    each example is collated once, alone, to count its tokens; a ``length`` column that counts them spares this. A batch
    of images can only be split if its rows' images are known, as in GRPO, RLOO and distillation.

    **Losses.** The loss of an optimiser step is the mean over all of the step's trained tokens, pairs or sequences, on
    all ranks and in all micro-batches. So its gradient is that of one big batch, even if micro-batches are uneven. That
    also holds for your own ``compute_loss`` or ``compute_loss_func``. It may return the mean over its micro-batch or
    divide by ``num_items_in_batch``: it gets the label count of its own micro-batch, so both are the same mean. (To say
    which of the two your loss does, set ``loss_is_scaled_for_ga`` on the trainer; your loss then gets the step's count,
    or no count.)

    For a classifier, transformers' ``Trainer`` adds up the means of accumulated micro-batches, so stock gradients are
    ``gradient_accumulation_steps`` times these. Two kinds of values are still computed per micro-batch: those that a
    loss computes from a whole micro-batch (KTO's KL, the auxiliary loss of experts), and the means that a trainer logs.

    **Several ranks.** The budget holds on each rank. All ranks run the same number of micro-batches, balanced by
    their cost, and the same number of pieces.

    **Resuming.** Schedules, checkpoints and resuming in the middle of an epoch work as in the stock trainer. Resuming
    raises if the checkpoint has another budget, other sequence lengths in the data, or another number of processes.
    Other data with the same lengths pass, as in the stock trainer. A run that resumes without ``max_tokens`` has no
    such check.

    Setting up a budget raises :class:`~fastpack.PackingError` if the data set's lengths can't be known or an example is
    over the budget (the message names it). It raises :class:`~fastpack.PatchError`, and says why, if the trainer can't
    follow a budget exactly:

    - always: an unknown trainer; DPO's ``aot`` losses; GRPO's ``top_entropy_quantile`` and entropy bonus; ranks that
      share a batch (tensor, context or sequence parallelism); ``split_batches`` and ``dispatch_batches``;
      for losses over tokens, ``average_tokens_across_devices=False`` on several ranks; a ``model_init`` that doesn't
      patch its models with the same options;
    - with full batches: another order of the data (``train_sampling_strategy`` of ``sequential`` or
      ``group_by_length``, or the trainer's own ``_get_train_sampler``);
    - with same steps, GRPO and RLOO: the auxiliary loss of experts; KTO's losses with a KL; a collator that makes one
      row of a batch; DeepSpeed; ``even_batches=False`` on several ranks without ``dataloader_drop_last``.

    Attributes:
        max_tokens: the largest number of real tokens in a micro-batch on each rank; both sides of a pair count.
        same_steps: whether the trainer keeps its own batches, which are then split.
        too_long: what to do with an example longer than ``max_tokens``: ``error`` raises; ``truncate`` keeps its first
            tokens, with full batches of ``input_ids`` only (set ``max_length`` in the trainer's config for pairs).

    Example:
        >>> trainer = SFTTrainer(model, args=SFTConfig(gradient_accumulation_steps=4), train_dataset=data)
        >>> fastpack.patch(trainer, max_tokens=8192)  # full batches
        >>> fastpack.patch(trainer, max_tokens=fastpack.TokenBudget(8192, same_steps=True))  # the trainer's batches
        >>> fastpack.patch(trainer)  # no budget
    """

    max_tokens: int
    same_steps: bool = False
    too_long: TooLong = "error"


class PatchKeywords(TypedDict, total=False):
    """The keywords of :func:`fastpack.patch`, for functions that pass them on."""

    attention: str
    kernels: Implementation
    graphs: Graphs
    loss: Loss
    offload: Offload
    share_prefixes: SharePrefixes
    context_mesh: DeviceMesh | None
    strict: bool
    max_tokens: int | TokenBudget | None


def not_a_choice(name: str, value: object, allowed: Sequence[Any]) -> PatchError:
    """Return the error for a value that an option does not allow."""
    return PatchError(f"{name}={value!r} is not a choice. Choose one of: {', '.join(map(repr, allowed))}.")


@dataclass(frozen=True)
class PatchOptions:
    """The keyword arguments of :func:`fastpack.patch`, which documents them."""

    attention: str = "auto"
    kernels: Implementation = "auto"
    graphs: Graphs = None
    loss: Loss = None
    offload: Offload = None
    share_prefixes: SharePrefixes = None
    context_mesh: DeviceMesh | None = None
    strict: bool = False

    @property
    def spreads(self) -> bool:
        """True if ranks are to share each batch; what is no mesh is refused later."""
        size = getattr(self.context_mesh, "size", None)
        return self.context_mesh is not None and (not callable(size) or size() != 1)

    def __deepcopy__(self, memo: Any) -> PatchOptions:
        """Return the options themselves: none of them changes, and a mesh can't be copied."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the options without the mesh, whose ranks exist in this run alone."""
        return {**self.__dict__, "context_mesh": None}

    def check(self) -> None:
        """Raise unless each option has one of its allowed values.

        Raises:
            BackendUnavailableError: No attention backend has this name.
            KernelUnavailableError: ``kernels="triton"``, and Triton kernels can't run here.
            PatchError: Another option has a value that it doesn't take; or two of ``graphs``, ``share_prefixes`` and
                ``context_mesh`` are set.
        """
        check_name(self.attention)
        for name, allowed in (
            ("kernels", get_args(Implementation)),
            ("graphs", (None, "auto")),
            ("loss", (None, "fused")),
            ("offload", (None, *OFFLOADS)),
            ("share_prefixes", (None, "auto")),
            ("strict", (False, True)),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise not_a_choice(name, value, allowed)
        if self.kernels == "triton" and (reason := why_no_kernels()) is not None:
            raise KernelUnavailableError(f"kernels='triton', but {reason}")
        if self.graphs is not None and self.share_prefixes is not None:
            raise PatchError(
                f"graphs={self.graphs!r} and share_prefixes={self.share_prefixes!r} exclude each other: a recorded "
                "step needs sizes that come again, but the number of shared tokens differs in every batch. Pass only "
                "one: graphs save time if layers are small, shared prefixes if layers are big."
            )
        for name in ("graphs", "share_prefixes"):
            if self.spreads and getattr(self, name) is not None:
                raise PatchError(
                    f"{name}={getattr(self, name)!r} and context parallelism (context_mesh, or cp_size of a trainer's "
                    "accelerator) exclude each other so far. Use only one."
                )
