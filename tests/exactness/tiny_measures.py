"""Measure tiny models: their size, whether results are finite, and whether a leak could be seen.

``python tests/exactness/tiny_measures.py [FAMILY ...]`` prints a line for each family, all of them by default.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastpack.exactness import tiny

ROWS, LENGTH = 2, 12
"""Longer than a window of 8, short enough for two layers of such windows to reach its end."""

LEAST_INFLUENCE = 1e-4
NOT_TEXT = ("vision", "visual", "image", "audio", "multi_modal", "embed_tokens_extend", "vq_adaptor")
"""Words in the names of parameters that token ids alone never reach."""


@dataclass(frozen=True)
class Measures:
    """The measures of one family; ``influence`` and ``share_with_gradient`` are ratios."""

    parameters: int
    shape: tuple[int, ...]
    finite: bool
    repeats: bool
    """Two forwards in training mode give the same logits: nothing is dropped, jittered or drawn."""
    influence: float
    share_with_gradient: float
    seconds: float
    building: float


def influence(model: Any, length: int = LENGTH) -> float:
    """Return how far the last position's logits move when the first token changes, over their largest value."""
    ids_BS = tiny.plain_tokens(ROWS, length)
    changed_BS = ids_BS.clone()
    changed_BS[:, 0] = tiny.FIRST_PLAIN + (ids_BS[:, 0] - tiny.FIRST_PLAIN + 7) % (tiny.AFTER_PLAIN - tiny.FIRST_PLAIN)
    with torch.no_grad():
        before_BV = model(input_ids=ids_BS, use_cache=False).logits[:, -1]
        after_BV = model(input_ids=changed_BS, use_cache=False).logits[:, -1]
    return float((after_BV - before_BV).abs().max() / before_BV.abs().max())


def share_with_gradient(model: nn.Module) -> float:
    """Return the share of the text model's parameters with a gradient that is finite and not all zeros."""
    of_text = [p for name, p in model.named_parameters() if not any(word in name for word in NOT_TEXT)]
    reached = [p for p in of_text if p.grad is not None and bool(p.grad.isfinite().all()) and bool(p.grad.any())]
    return len(reached) / len(of_text)


def measure(model_type: str) -> Measures:
    """Build the family's tiny model, run it forwards and backwards on two short rows, and measure."""
    start = time.perf_counter()
    model: Any = tiny.build_tiny(model_type)
    built = time.perf_counter()
    moved = influence(model)
    model.train()
    ids_BS = tiny.plain_tokens(ROWS, LENGTH)
    logits_BSV = model(input_ids=ids_BS, use_cache=False).logits
    # with gradients, too, since another kernel would round differently
    again_BSV = model(input_ids=ids_BS, use_cache=False).logits
    logits_BSV.square().mean().backward()
    return Measures(
        parameters=sum(p.numel() for p in model.parameters()),
        shape=tuple(logits_BSV.shape),
        finite=bool(logits_BSV.isfinite().all()),
        repeats=torch.equal(logits_BSV, again_BSV),
        influence=moved,
        share_with_gradient=share_with_gradient(model),
        seconds=time.perf_counter() - start,
        building=built - start,
    )


def main(names: list[str]) -> int:
    """Print the table and return how many families failed."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    failed = 0
    for name in names or tiny.model_types():
        if name in tiny.NOT_BUILT:
            print(f"{name:26} not built: {tiny.NOT_BUILT[name]}")
            continue
        try:
            result = measure(name)
        except Exception as error:  # noqa: BLE001 - the table is there to show what fails, and goes on
            failed += 1
            print(f"{name:26} FAILED: {type(error).__name__}: {str(error)[:200]}")
            continue
        print(
            f"{name:26}{result.parameters:>9,} parameters {result.seconds:6.2f} s ({result.building:.2f} building)  "
            f"influence {result.influence:.0e}  gradients {result.share_with_gradient:4.0%}"
            + ("" if result.finite else "  NOT FINITE")
            + ("" if result.repeats else "  draws in training mode"),
            flush=True,
        )
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
