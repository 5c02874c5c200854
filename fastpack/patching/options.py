"""The choices that a user has about a patch, checked in one place."""

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
    """The most tokens that a micro-batch may have, and what becomes of the trainer's own batches.

    Attributes:
        max_tokens: of a micro-batch on each rank, at most; a pair counts with both sides.
        same_steps: False fills micro-batches from the whole data set, whatever ``per_device_train_batch_size`` is, and
            an optimiser step has ``gradient_accumulation_steps`` of them. True leaves the trainer its own batches, so
            that each optimiser step holds the examples that it would hold without a budget, and splits those over it;
            so with a stream too, where nobody knows beforehand of an example that is over it, which then runs alone.
        too_long: what becomes of an example longer than ``max_tokens``: ``error``; or ``truncate``, which keeps its
            first tokens, for data sets of ``input_ids`` (``max_length`` of a trainer's config cuts pairs).
    """

    max_tokens: int
    same_steps: bool = False
    too_long: TooLong = "error"


class PatchKeywords(TypedDict, total=False):
    """The same as keywords of another call."""

    attention: str
    kernels: Implementation
    graphs: Graphs
    loss: Loss
    offload: Offload
    share_prefixes: SharePrefixes
    strict: bool
    max_tokens: int | TokenBudget | None


def not_a_choice(name: str, value: object, allowed: Sequence[Any]) -> PatchError:
    """The error for a value that an option does not take."""
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
        """Raise unless each value is one of those allowed.

        Raises:
            BackendUnavailableError: no attention backend has this name.
            KernelUnavailableError: Triton was asked for, and nothing here can run it.
            PatchError: another option has a value that it doesn't take; ``graphs`` was asked for together with
                ``share_prefixes``.
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
                "step has sizes that come again, and every batch shares another number of tokens. Pass one of them; "
                "graphs gain where layers are small, shared prefixes where they are big."
            )
