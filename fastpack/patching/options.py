"""The options of a patch, and the check of their values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

from fastpack.attention_dispatch import check_name
from fastpack.errors import KernelUnavailableError, PatchError
from fastpack.ops.implementation import Implementation, why_no_kernels

if TYPE_CHECKING:
    from fastpack.data.token_budget import TooLong

Graphs = Literal["auto"] | None
Loss = Literal["fused"] | None
OffloadKind = Literal["checkpoints", "activations"]
Offload = OffloadKind | None
SharePrefixes = Literal["auto"] | None
OFFLOADS: tuple[str, ...] = get_args(OffloadKind)


@dataclass(frozen=True)
class TokenBudget:
    """The most tokens that a micro-batch may have, for ``fastpack.patch(trainer, max_tokens=...)``.

    Example:
        >>> budget = fastpack.TokenBudget(8192, same_steps=True)
        >>> fastpack.patch(trainer, max_tokens=budget)  # doctest: +SKIP

    Attributes:
        max_tokens: The most tokens of a micro-batch on each rank. A preference pair counts with both of its sides.
        same_steps: False fills micro-batches from the whole data set, whatever ``per_device_train_batch_size`` is, and
            makes an optimiser step of ``gradient_accumulation_steps`` of them. True keeps the trainer's own batches, so
            that each optimiser step holds the examples that it would hold without a budget, and splits the batches that
            are over it. That works with a streamed data set, too; there an example over the budget is not known
            beforehand, and runs alone.
        too_long: The treatment of an example longer than ``max_tokens``. ``error`` raises. ``truncate`` keeps its first
            tokens, for data sets of ``input_ids``; pairs are cut by ``max_length`` of the trainer's config.
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
    strict: bool
    max_tokens: int | TokenBudget | None


def not_a_choice(name: str, value: object, allowed: Sequence[Any]) -> PatchError:
    """Return the error for a value that an option does not take."""
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
    strict: bool = False

    def check(self) -> None:
        """Raise unless each option has one of its allowed values.

        Raises:
            BackendUnavailableError: No attention backend has this name.
            KernelUnavailableError: ``kernels="triton"``, and Triton kernels can't run here.
            PatchError: Another option has a value that it doesn't take, or ``graphs`` and ``share_prefixes`` are both
                set.
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
                "step needs sizes that come again, and every batch shares another number of tokens. Pass one of them: "
                "graphs save time where layers are small, shared prefixes where they are big."
            )
