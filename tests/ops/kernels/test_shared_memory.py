"""Kernels fit into the shared memory of GPUs that this machine doesn't have, or are not chosen there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

FITS = [
    (75, "fp16", 64, 1, "expand"),
    (75, "fp16", 16, 3, "shrink"),
    (89, "bf16", 128, 1, "shrink"),
    (89, "bf16", 64, 3, "reduce"),
    (89, "bf16", 64, 3, "glu"),
    (90, "bf16", 128, 3, "expand"),
    (90, "bf16", 128, 3, "shrink"),
    (90, "bf16", 128, 3, "reduce"),
    (90, "fp32", 16, 3, "reduce"),
    (90, "bf16", 128, 3, "glu"),
    (90, "bf16", 16, 2, "matmul"),
    (90, "fp16", 48, 4, "matmul"),
    (90, "bf16", 16, 2, "outputs"),
    (90, "bf16", 256, 2, "outputs"),
    (75, "fp16", 16, 1, "grouped"),
    (80, "bf16", 0, 1, "grouped"),
    (89, "fp32", 128, 1, "grouped"),
    (90, "bf16", 0, 1, "grouped"),
    (90, "bf16", 16, 1, "grouped"),
    (90, "bf16", 128, 1, "grouped"),
    (89, "fp32", 16, 1, "outer"),
    (90, "bf16", 4096, 1, "outer"),
]
"""Compute capability, dtype, rank, number of projections, kernel."""
DOES_NOT = [(75, "fp16", 128, 1, "expand"), (89, "fp32", 128, 3, "shrink"), (90, "fp32", 128, 3, "glu")]


@pytest.mark.slow
def test_what_kernels_take() -> None:
    kwargs = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compiled.py")
    command = [sys.executable, str(script), json.dumps(FITS + DOES_NOT)]
    run = subprocess.run(command, env=kwargs, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    result = json.loads(run.stdout.splitlines()[-1])
    for case, built in zip(FITS, result, strict=False):
        assert built["stages"] >= 1, case
        assert 0 < built["taken"] <= built["limit"], (case, built)
    for case, built in zip(DOES_NOT, result[len(FITS) :], strict=True):
        assert built["stages"] == 0, case
