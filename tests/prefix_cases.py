"""Shared by the tests of prefix sharing: groups of sequences that begin alike, and the counts of sharing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tiny import VOCAB
from torch import Tensor

from fastpack.model.model_runtime import runtime_of
from fastpack.model.prefix_sharing import PrefixSharing
from fastpack.model.unwrap import find_parts

PROMPTS = (12, 1, 19, 7)
"""One of a single token, and one longer than every window of the tiny configs."""


def words(count: int, seed: int) -> Tensor:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def grouped(completions: Sequence[Sequence[int]], prompts: Sequence[int] = PROMPTS) -> list[Tensor]:
    """Return one completion of each prompt, then the next of each, as TRL orders chosen and rejected ones.

    Completions of one prompt begin with different tokens, so that nothing else is in common.
    """
    sequences = []
    for which, lengths in enumerate(completions):
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            completion = words(length, 100 + 10 * which + number)
            completion[:1] = 3 + which
            sequences.append(torch.cat([words(prompt, number), completion]))
    return sequences


def pairs() -> list[Tensor]:
    """Return chosen and rejected completions of four prompts, one completion with a single token."""
    return grouped([(5, 8, 1, 14), (7, 3, 9, 16)])


SAVED = sum(PROMPTS)
"""Tokens of :func:`pairs` that come twice. Prompts differ in their first token: nothing else is in common."""


def sharing(model: Any) -> PrefixSharing:
    runtime = runtime_of(find_parts(model).backbone)
    result = None if runtime is None else runtime.sharing
    assert result is not None
    return result


def nodes(sequences: Sequence[Tensor]) -> int:
    """Return the number of the trie's nodes, which are the different beginnings."""
    return len({tuple(s[: i + 1].tolist()) for s in sequences for i in range(len(s))})
