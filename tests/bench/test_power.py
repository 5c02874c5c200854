"""What the GPU draws: nvidia-smi's lines, from a stand-in."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import pytest
import torch
from test_showing import made_up, outcome, printed

from fastpack.bench.clock import Clock
from fastpack.bench.contestants import CONTESTANTS
from fastpack.bench.flags import add_arguments, make_settings
from fastpack.bench.power import Drawn, PowerMeter, mean_of
from fastpack.errors import FastpackError

SMI = f"""#!{sys.executable}
import sys, time
from datetime import datetime
fields = next(a for a in sys.argv if a.startswith("--query-gpu=")).partition("=")[2].split(",")
told = {{"power.limit": 700.0, "clocks.sm": 1500, "clocks.max.sm": 1980}}
turn = 0
while True:
    told["power.draw.instant"] = 600.0 + turn % 2
    turn += 1
    now = datetime.now().strftime("%Y/%m/%d %H:%M:%S.%f")[:-3]
    print(", ".join(now if f == "timestamp" else str(told[f]) for f in fields), flush=True)
    time.sleep(0.02)
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "nvidia-smi"
    path.write_text(SMI)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return path


def at(second: int, *values: object) -> str:
    return ", ".join(map(str, (f"2026/11/22 04:00:{second:02}.500", *values)))


def moment(second: int) -> datetime:
    return datetime(2026, 11, 22, 4, 0, second)


def test_means_of_the_time_asked_for() -> None:
    lines = [at(1, 100, 400, 700, 1980), at(3, 600, 1500, 700, 1980), at(5, 700, 1600, 700, 1980)]
    lines += [at(6, "[N/A]", 1, 700, 1980), "2026/11/22 04:00", "", at(9, 100, 400, 700, 1980)]
    assert mean_of(lines, moment(2), moment(8)) == Drawn(650, 1550, 700, 1980)
    assert mean_of([at(3, 600, 1500, "[N/A]", 1980)], moment(2), moment(8)) == Drawn(600, 1500, None, 1980)


def test_why_nothing_is_known() -> None:
    assert "in the 6.0 s" in str(mean_of([at(9, 100, 400, 700, 1980)], moment(2), moment(8)).unknown)
    assert mean_of(["No devices were found\n"], moment(2), moment(8)).unknown == "No devices were found"
    assert mean_of([at(3, 600, 1500)], moment(2), moment(8)).unknown == at(3, 600, 1500), "a line that was cut off"
    assert "[N/A]" in str(mean_of([at(3, "[N/A]", 1, 700, 1980)], moment(2), moment(8)).unknown)


def test_the_meter_counts_the_timed_steps(smi: Path) -> None:
    """The clock tells it when they have ended and how long they took, and nothing runs on behind it."""
    meter = PowerMeter("1234")
    with meter:
        while not meter._lines:
            assert meter._process.poll() is None
            time.sleep(0.01)
        clock = Clock(2, 3, profile=False, power=meter)
        ended: list[bool] = []
        for _ in range(5):
            clock.begin()
            time.sleep(0.1)
            clock.end()
            ended.append(meter._until != datetime.min)
    assert meter._process.poll() is not None
    assert ended == [False] * 4 + [True]
    assert meter._span.total_seconds() == pytest.approx(sum(clock.seconds), abs=1e-5)
    drawn = meter.drawn()
    assert 600 < drawn.watts < 601
    assert drawn == Drawn(drawn.watts, 1500, 700, 1980)


def test_the_meter_ends_with_what_failed(smi: Path) -> None:
    meter = PowerMeter("1234")
    with pytest.raises(ZeroDivisionError), meter:
        raise ZeroDivisionError
    assert meter._process.poll() is not None


def test_what_nvidia_smi_says_instead_is_shown(smi: Path) -> None:
    smi.write_text("#!/bin/sh\necho no such device >&2\nexit 6\n")
    meter = PowerMeter("1234")
    with meter:
        meter._process.wait()
        meter.end(1.0)
    drawn = meter.drawn()
    assert drawn.unknown == "no such device"
    text = printed(outcome([made_up("fastpack", 1500, drawn=asdict(drawn))]))
    assert "power of fastpack: no such device" in text
    assert "MHz" not in text


def test_it_is_shown_where_it_is_known() -> None:
    drawn = asdict(Drawn(689.6, 1581.2, 700, 1980))
    rows = [
        made_up(name, 500, drawn=drawn, seconds=[2.17, 2.66, 2.17, 2.66, 2.2], held_memory=130.1)
        for name in CONTESTANTS
    ]
    text = printed(outcome(rows))
    cells = [
        [cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "│ kernel  " in line
    ]
    assert [[row[0], *row[-2:]] for row in cells] == [[name, "690", "1,581"] for name in CONTESTANTS]
    assert "W: on average, of 700 at most; MHz: on average, of 1,980 at most" in " ".join(text.split())
    assert "…" not in text
    assert "MHz" not in printed(outcome([made_up("stock padded", 500)]))


def test_where_nobody_can_be_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args(["--power"])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FastpackError, match="needs a GPU"):
        make_settings(arguments, on_gpu=False)
    with pytest.raises(FastpackError, match="nvidia-smi"):
        make_settings(arguments, on_gpu=True)
    assert not make_settings(parser.parse_args([]), on_gpu=True).power


@pytest.mark.gpu
def test_a_gpu_tells() -> None:
    meter = PowerMeter(str(torch.cuda.get_device_properties(0).uuid))
    with meter:
        x = torch.randn(4096, 4096, device="cuda")
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            x @ x
            torch.cuda.synchronize()
        meter.end(1.5)
    drawn = meter.drawn()
    assert drawn.unknown is None
    assert drawn.watts_limit is not None
    assert drawn.mhz_limit is not None
    assert 10 < drawn.watts <= 1.2 * drawn.watts_limit
    assert 100 < drawn.mhz <= drawn.mhz_limit
