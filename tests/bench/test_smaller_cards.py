"""``fastpack bench --vram`` imitates a smaller card, and ``--rank`` sets LoRA's rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastpack.bench import variant_run
from fastpack.bench.flops import needed_flops
from fastpack.bench.models import build_model
from fastpack.bench.settings import LORA_RANK, OUT_OF_MEMORY, RunSettings
from fastpack.cli.bench import PARSER, make_settings
from fastpack.errors import FastpackError


def settings_of(*flags: str, on_gpu: bool = False) -> RunSettings:
    return make_settings(PARSER.parse_args(flags), on_gpu=on_gpu)


@pytest.mark.parametrize("rank", [None, 4])
def test_rank(rank: int | None) -> None:
    settings = settings_of("--mode", "lora", "--loop", "plain", *([] if rank is None else ["--rank", str(rank)]))
    model, _ = build_model(RunSettings("stock padded", mode="lora", rank=settings.rank), torch.device("cpu"))
    ranks = {len(p) for name, p in model.named_parameters() if ".lora_A." in name}
    assert ranks == {settings.rank} == {rank or LORA_RANK}


def test_rank_is_in_the_floor() -> None:
    small, large = (RunSettings("fastpack", mode="lora", rank=rank, checkpointing=True) for rank in (4, 8))
    assert needed_flops(small) < needed_flops(large)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rank", "4"], "--rank is LoRA's: pass --mode lora or qlora too"),
        (["--vram", "24"], "--vram limits the memory of a GPU, and there is none here"),
    ],
)
def test_flags_without_effect(flags: list[str], message: str) -> None:
    with pytest.raises(FastpackError, match=message):
        settings_of(*flags)


@pytest.mark.parametrize(("vram", "fraction"), [(None, []), (24.0, [0.3]), (100.0, [1.0])])
def test_the_allocator_is_limited(vram: float | None, fraction: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def too_large(*args: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 4 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=80 * 2**30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    monkeypatch.setattr(variant_run, "build_model", lambda *args: (None, ""))
    monkeypatch.setattr(variant_run, "train_with_trl", too_large)
    flags = [] if vram is None else ["--vram", str(vram)]
    settings = settings_of("--shape", "tiny", *flags, on_gpu=True)
    result = variant_run.run(RunSettings("fastpack", vram=settings.vram))
    assert (result.error, result.peak_memory, result.held_memory) == (OUT_OF_MEMORY, 3, 4)
    assert limits == pytest.approx(fraction)
