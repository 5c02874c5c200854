"""The benchmark of several GPUs, by torchrun on two processes of a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fastpack.bench.ranks import AGREE, WAYS, Measured, disagreement, make_documents


def launch(*arguments: str, torchrun: bool = True) -> subprocess.CompletedProcess[str]:
    launcher = ["torch.distributed.run", "--nproc-per-node", "2", "-m"] if torchrun else []
    command = [sys.executable, "-m", *launcher, "fastpack.bench.ranks", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "150"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


def test_every_way(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    settings = ["--tokens", "96", "--documents", "32", "--steps", "2", "--warmup", "1", "--json", str(figures)]
    done = launch("--shape", "tiny-moe", *settings)
    assert done.returncode == 0, done.stderr
    results = {result["way"]: result for result in json.loads(figures.read_text())}
    assert list(results) == list(WAYS)
    assert {name: (result["ranks"], result["tokens"]) for name, result in results.items()} == {
        "one": (1, 96),
        "ddp": (2, 192),
        "context": (2, 96),
        "context-long": (2, 192),
        "base": (2, 192),
        "fsdp": (2, 192),
        "experts": (2, 192),
    }
    measured = [Measured(**result) for result in results.values()]
    loss, norm = disagreement(measured)
    assert loss <= 1e-5
    assert norm <= 1e-4
    for index, way in enumerate(measured):
        if not WAYS[way.way].long:  # the control: another batch
            others = [*measured[:index], replace(way, loss=results["context-long"]["loss"]), *measured[index + 1 :]]
            assert disagreement(others)[0] > AGREE[0]
            halved = [*measured[:index], replace(way, norm=way.norm / 2), *measured[index + 1 :]]
            assert disagreement(halved)[1] > AGREE[1]
    assert all(result["seconds"] > 0 for result in results.values())
    assert all(f"{name}: {way.what}" in done.stdout for name, way in WAYS.items())
    assert "on the same batch, first losses are" in done.stdout
    assert "DISAGREE" not in done.stdout


def test_one_way_is_compared_with_nothing() -> None:
    done = launch("ddp", "--shape", "tiny", "--tokens", "32", "--steps", "1", "--warmup", "0")
    assert done.returncode == 0, done.stderr
    assert "nothing was compared" in done.stdout
    assert "on the same batch, first losses are" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "torchrun", "said"),
    [
        (["ddp"], False, "launch it with torchrun"),
        (["ddp", "pipeline"], True, "unknown way 'pipeline'; the ways are one,"),
    ],
)
def test_what_is_refused(arguments: list[str], torchrun: bool, said: str) -> None:
    done = launch(*arguments, torchrun=torchrun)
    assert done.returncode != 0
    assert said in " ".join(done.stderr.split())


def test_documents() -> None:
    assert make_documents(1000, 0) == [1000]
    lengths = make_documents(10_000, 200)
    assert sum(lengths) == 10_000
    assert all(100 <= length <= 300 for length in lengths[:-1])
    assert len(set(lengths)) > 20
