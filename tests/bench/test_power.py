"""What the GPU draws: nvidia-smi's lines, from a stand-in."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest
import torch
from test_showing import made_up, outcome, printed

from fastpack.bench.clock import Clock
from fastpack.bench.flags import add_arguments, make_settings
from fastpack.bench.power import QUERY, Drawn, PowerMeter, mean_of
from fastpack.errors import FastpackError

SMI = f"""#!{sys.executable}
import sys, time
from datetime import datetime
fields = next(a for a in sys.argv if a.startswith("--query-gpu=")).partition("=")[2].split(",")
told = {{"power.draw": 600.0, "power.limit": 700.0, "clocks.sm": 1500, "clocks.max.sm": 1980}}
turn = 0
while True:
    told["power.draw"] = 600.0 + turn % 2
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


def test_means_of_the_time_asked_for() -> None:
    lines = [at(1, 100, 700, 400, 1980), at(3, 600, 700, 1500, 1980), at(5, 700, 700, 1600, 1980)]
    lines += [at(6, "[N/A]", 700, 1, 1980), "2026/11/22 04:00", "", at(9, 100, 700, 400, 1980)]
    since, until = datetime(2026, 11, 22, 4, 0, 2), datetime(2026, 11, 22, 4, 0, 8)
    assert mean_of(lines, since, until) == Drawn(650, 700, 1550, 1980)
    assert mean_of(lines, datetime(2026, 11, 22, 4, 0, 10), datetime(2026, 11, 22, 4, 0, 20)) is None
    assert mean_of([at(3, 600, 700)], since, until) is None, "a line that was cut off"


def test_the_meter_counts_the_timed_steps(smi: Path) -> None:
    """The clock tells it when they begin and end, and nothing runs on behind it."""
    meter = PowerMeter("1234")
    with meter:
        clock = Clock(2, 3, profile=False, power=meter)
        seen: list[tuple[datetime, datetime]] = []
        for _ in range(5):
            clock.begin()
            time.sleep(0.1)
            clock.end()
            seen.append((meter._since, meter._until))
    assert meter._process.poll() is not None
    begun = [since != datetime.max for since, _ in seen]
    ended = [until != datetime.max for _, until in seen]
    assert (begun, ended) == ([False, True, True, True, True], [False] * 4 + [True])
    drawn = meter.drawn
    assert drawn is not None
    assert 600 < drawn.watts < 601
    assert (drawn.watts_limit, drawn.mhz, drawn.mhz_limit) == (700, 1500, 1980)


def test_the_meter_ends_with_what_failed(smi: Path) -> None:
    meter = PowerMeter("1234")
    with pytest.raises(ZeroDivisionError), meter:
        raise ZeroDivisionError
    assert meter._process.poll() is not None
    assert meter.drawn is None


def test_nothing_told(tmp_path: Path, smi: Path) -> None:
    smi.write_text("#!/bin/sh\necho no such device\nexit 6\n")
    meter = PowerMeter("1234")
    with meter:
        meter.begin()
        subprocess.run([sys.executable, "-c", ""], check=True)
        meter.end()
    assert meter.drawn is None


def test_it_is_shown_where_it_is_known() -> None:
    drawn = {"watts": 689.6, "watts_limit": 700.0, "mhz": 1581.2, "mhz_limit": 1980.0}
    text = printed(outcome([made_up("stock padded", 500), made_up("fastpack", 1500, drawn=drawn)]))
    (line,) = (line for line in text.splitlines() if "fastpack " in line and "kernel" in line)
    assert [cell.strip() for cell in line.strip("│").split("│")][-2:] == ["690", "1,581"]
    assert "of 700 W" in text
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
    assert set(QUERY) > {"power.draw"}
    with meter:
        time.sleep(1.0)
        meter.begin()
        x = torch.randn(4096, 4096, device="cuda")
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            x @ x
            torch.cuda.synchronize()
        meter.end()
    drawn = meter.drawn
    assert drawn is not None
    assert 10 < drawn.watts <= 1.2 * drawn.watts_limit
    assert 100 < drawn.mhz <= drawn.mhz_limit
