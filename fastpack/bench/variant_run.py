"""One variant: builds its model, trains it, and prints its results.

Run as ``python -m fastpack.bench.variant_run '{"contestant": ...}'`` by :mod:`fastpack.bench.runner`; the last line
that it prints is its results, as JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch

import fastpack
from fastpack.bench.loops import train_plainly, train_with_trl
from fastpack.bench.measure import Clock
from fastpack.bench.models import build_model
from fastpack.bench.settings import OUT_OF_MEMORY, Figures, Settings
from fastpack.trainers.metrics.counting import resident_bytes


def run(settings: Settings) -> Figures:
    """Train ``warmup + steps`` steps, and measure the last ``steps``."""
    on_gpu = torch.cuda.is_available()
    clock = Clock(settings.warmup)
    train = train_plainly if settings.loop == "plain" else train_with_trl
    try:
        model, backend = build_model(settings, torch.device("cuda" if on_gpu else "cpu"))
        if on_gpu:  # building may have taken more than training does
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        losses, norms = train(model, settings, clock)
    except torch.OutOfMemoryError:
        return Figures(settings.contestant, error=OUT_OF_MEMORY)
    batches = settings.timed_batches()
    tokens = [sum(batch) for batch in batches]
    return Figures(
        contestant=settings.contestant,
        backend=str(fastpack.report(model).backend) if settings.variant.patched else backend,
        seconds=clock.seconds(),
        tokens=tokens,
        slots=sum(tokens) if settings.variant.packed else sum(max(batch) * len(batch) for batch in batches),
        peak_memory=(torch.cuda.max_memory_allocated() if on_gpu else resident_bytes() or 0) / 2**30,
        held_memory=torch.cuda.max_memory_reserved() / 2**30 if on_gpu else None,
        losses=losses,
        gradient_norms=norms,
    )


if __name__ == "__main__":
    print(json.dumps(asdict(run(Settings(**json.loads(sys.argv[1]))))))
