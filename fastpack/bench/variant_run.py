"""Build a variant's model, train it, and print its results.

Run as ``python -m fastpack.bench.variant_run '{"variant": ...}'`` by :mod:`fastpack.bench.runner`; the last line
that it prints is its results, as JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import torch

import fastpack
from fastpack.bench.loops import train_plainly, train_with_trl
from fastpack.bench.measure import StepTimer, begin_peaks, gpu_peaks
from fastpack.bench.models import LossNotFusedError, build_model
from fastpack.bench.settings import OUT_OF_MEMORY, RunResult, RunSettings
from fastpack.bench.unsloth_model import build_unsloth_model
from fastpack.trainers.metrics.counting import resident_bytes


def run(settings: RunSettings) -> RunResult:
    """Train ``warmup + steps`` steps, and measure the last ``steps``."""
    on_gpu = torch.cuda.is_available()
    timer = StepTimer(settings.warmup)
    train = train_plainly if settings.loop == "plain" else train_with_trl
    try:
        build = build_unsloth_model if settings.spec.unsloth else build_model
        model, backend = build(settings, torch.device("cuda" if on_gpu else "cpu"))
        begin_peaks()
        if on_gpu and settings.vram is not None:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, settings.vram * 2**30 / total))
        first = train(model, settings, timer)
    except torch.OutOfMemoryError:
        return RunResult(settings.variant, error=OUT_OF_MEMORY, **_peaks())
    except LossNotFusedError as error:
        return RunResult(settings.variant, error=str(error))
    batches = settings.timed_batches()
    tokens = [sum(batch) for batch in batches]
    return RunResult(
        variant=settings.variant,
        backend=str(fastpack.report(model).backend) if settings.spec.patched else backend,
        seconds=timer.seconds(),
        tokens=tokens,
        slots=sum(tokens) if settings.spec.packed else sum(max(batch) * len(batch) for batch in batches),
        **_peaks(),
        losses=first.losses,
        gradient_norms=first.norms,
        expert_norms=first.expert_norms,
    )


def _peaks() -> dict[str, Any]:
    """Return the fields of a result that measure memory."""
    peaks = gpu_peaks()
    if peaks is None:
        return {"peak_memory": (resident_bytes() or 0) / 2**30}
    return {"peak_memory": peaks[0], "held_memory": peaks[1]}


def main() -> None:
    """Run with the settings of the first argument, and print the results."""
    print(json.dumps(asdict(run(RunSettings(**json.loads(sys.argv[1]))))))


if __name__ == "__main__":
    main()
