"""One contestant: builds its model, trains it, and prints its figures.

Run as ``python -m fastpack.bench.variant_run '{"contestant": ...}'`` by :mod:`fastpack.bench.runner`; the last line
that it prints is its figures, as JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch

from fastpack.bench.clock import Clock
from fastpack.bench.loops import train_plainly, train_with_trl
from fastpack.bench.models import build_model
from fastpack.bench.preference import train_with_dpo
from fastpack.bench.settings import Figures, Settings
from fastpack.bench.shapes import make_config
from fastpack.bench.variants import CONTESTANTS
from fastpack.trainers.metrics.counting import resident_bytes

OUT_OF_MEMORY = "out of memory"


def run(settings: Settings) -> Figures:
    """Train ``warmup + steps`` steps, and measure the last ``steps``."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    clock = Clock(settings.warmup)
    try:
        model, backend = build_model(settings, device)
        if on_gpu:  # building may have taken more than training does
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        vocabulary = make_config(settings.shape).vocab_size
        if settings.trainer == "dpo":
            losses, norms, backend = train_with_dpo(model, backend, settings, vocabulary, clock)
        else:
            rows = make_rows(settings.row_lengths(), vocabulary, settings.seed)
            train = train_plainly if settings.loop == "plain" else train_with_trl
            losses, norms = train(model, settings, rows, clock)
    except torch.OutOfMemoryError:
        return Figures(settings.contestant, error=OUT_OF_MEMORY)
    batches = settings.timed_batches()
    tokens = [sum(batch) for batch in batches]
    padded = sum(max(batch) * len(batch) for batch in batches)
    return Figures(
        contestant=settings.contestant,
        backend=backend,
        seconds=clock.seconds(),
        tokens=tokens,
        slots=sum(tokens) if CONTESTANTS[settings.contestant].packed else padded,
        peak_memory=(torch.cuda.max_memory_allocated() if on_gpu else resident_bytes() or 0) / 2**30,
        held_memory=torch.cuda.max_memory_reserved() / 2**30 if on_gpu else None,
        losses=losses,
        gradient_norms=norms,
    )


def make_rows(lengths: list[int], vocab_size: int, seed: int) -> list[list[int]]:
    """Random tokens, rows of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


if __name__ == "__main__":
    print(json.dumps(asdict(run(Settings(**json.loads(sys.argv[1]))))))
