"""The longest sequence, and the most tokens in short ones, with which a card holds a step of training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, floor
from typing import Any

from fastpack.errors import DoesNotFitError, PatchError
from fastpack.layers import decoder
from fastpack.memory import step
from fastpack.memory.settings import MODES, TrainingSettings
from fastpack.memory.sizes import ModelSizes
from fastpack.memory.terms import Moment
from fastpack.offload import activations, checkpoints, saved
from fastpack.ops.linear.gated_mlp import bytes_per_token

GIB = 2**30
CARDS = (8, 12, 16, 24, 32, 40, 48, 80)
"""Memory sizes of cards, in GiB."""
RESERVE = 1.0
"""GiB of a card that are not given to tensors: half for CUDA's context, half for what the allocator can't use."""
LIMIT = 2**26
"""The largest number of tokens that is looked for."""


@dataclass(frozen=True)
class Fit:
    """The batches that a card holds.

    Attributes:
        card: the card's memory in GiB, as vendors name it.
        reserve: the GiB of it that are not given to tensors.
        sequence: the number of tokens of the longest single sequence.
        tokens: the most tokens in sequences of ``length``.
        length: the length of these sequences.
        moment: the moment at which the longest sequence takes the most memory; its terms are the sum.
        host: the GiB of pinned host memory that the longest sequence fills.
    """

    card: float
    reserve: float
    sequence: int
    tokens: int
    length: int
    moment: Moment
    host: float

    @property
    def peak(self) -> float:
        """The GiB in tensors with the longest sequence."""
        return self.moment.of(self.sequence) / GIB

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers, as JSON has them."""
        parts = [
            {"name": term.name, "formula": term.formula, "per_token": term.per_token, "bytes": term.of(self.sequence)}
            for term in self.moment.terms
        ]
        numbers = {name: getattr(self, name) for name in ("card", "reserve", "sequence", "tokens", "length", "host")}
        return {**numbers, "peak": self.peak, "moment": self.moment.name, "terms": parts}


def fit_card(
    sizes: ModelSizes, settings: TrainingSettings, card: float, *, length: int = 512, reserve: float = RESERVE
) -> Fit:
    """Return the largest batches that a card holds.

    Every smaller batch fits, too. Numbers of tokens are rounded down to two digits and a half: 91,500, 9,150.

    Args:
        sizes: the model's sizes.
        settings: the settings of the training run.
        card: the card's memory in GiB.
        length: the length of short sequences.
        reserve: the GiB that are not given to tensors.

    Raises:
        DoesNotFitError: the card is too small for any batch; the message says what would fit.
        PatchError: the card or the reserve has no possible size.
    """
    if card <= 0 or reserve < 0:
        raise PatchError(f"vram={card:g} and reserve={reserve:g}; pass the GiB of a card, such as 24, and 0 or more.")
    budget = (card - reserve) * GIB
    alone = _most(lambda tokens: step.peak(sizes, settings, tokens)[1], budget, _edges(sizes, settings, None))
    if alone < 2:
        raise DoesNotFitError(_why_not(sizes, settings, card, reserve))
    packed = _most(
        lambda tokens: step.peak(sizes, settings, tokens, length)[1], budget, _edges(sizes, settings, length)
    )
    sequence = _rounded(alone)
    moment, _ = step.peak(sizes, settings, sequence)
    return Fit(card, reserve, sequence, _rounded(packed), length, moment, host_bytes(sizes, settings, sequence) / GIB)


def host_bytes(sizes: ModelSizes, settings: TrainingSettings, tokens: int) -> int:
    """Return the bytes of pinned host memory that one sequence fills, without what its buffers are rounded up by."""
    batch = step.Step(sizes, settings, tokens, tokens)
    b = settings.itemsize
    inputs = max(0, sizes.layers + 1 - (settings.mode != "full") - saved.KEEP) if batch.offloads else 0
    results = max(0, sizes.layers - activations.KEEP) if batch.offloads_attention else 0
    return tokens * (inputs * sizes.hidden * b + results * (sizes.queries * b + 4 * sizes.heads))


def _most(nbytes: Callable[[int], float], budget: float, edges: list[int]) -> int:
    """Return the largest number of tokens up to which every batch fits, or 0.

    Args:
        nbytes: the bytes of a batch, which grow with its tokens between edges.
        budget: the bytes that there are.
        edges: the numbers of tokens at which they may fall.
    """
    fits = 0
    for edge in (*sorted(edges), LIMIT):
        if edge > fits and nbytes(edge) <= budget:
            fits = edge
            continue
        low, high = fits, edge
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if nbytes(middle) <= budget else (low, middle)
        return low
    return fits


def _edges(sizes: ModelSizes, settings: TrainingSettings, length: int | None) -> list[int]:
    """Return the last numbers of tokens before something else is computed."""
    b = settings.itemsize
    tiles = 2 * decoder.TILE_BYTES // bytes_per_token(sizes.intermediate, settings.dtype)
    offload = ceil(checkpoints.MIN_BYTES / (sizes.hidden * b)) - 1
    attention = ceil(step.LONG * (sizes.queries * b + 4 * sizes.heads) / (2 * sizes.queries)) - 1
    return [edge for edge in (tiles, offload, *([] if length else [attention])) if edge > 0]


def _rounded(tokens: int) -> int:
    """Round down to half of the third digit."""
    unit = max(1, 10 ** (len(str(tokens)) - 3) // 2)
    return floor(tokens / unit) * unit


def _why_not(sizes: ModelSizes, settings: TrainingSettings, card: float, reserve: float) -> str:
    def needed(settings: TrainingSettings) -> float:
        return step.peak(sizes, settings, 2)[1] / GIB

    others = {mode: needed(replace(settings, mode=mode)) for mode in MODES}  # type: ignore[arg-type]
    fitting = [f"--mode {mode} ({gib:.1f} GiB)" for mode, gib in others.items() if gib <= card - reserve]
    what = f"weights, optimizer and gradients take {needed(settings):.1f} GiB with mode={settings.mode!r}"
    mend = f"Use {' or '.join(fitting)}." if fitting else f"Use a card of {ceil(min(others.values()) + reserve)} GB."
    weights = sizes.parameters * settings.itemsize / GIB
    return (
        f"{sizes.name} does not fit {card:g} GB: {what} (weights alone, unquantised: {weights:.1f} GiB), and "
        f"{card - reserve:g} GiB are left beside the reserve of {reserve:g}. {mend}"
    )
