"""Kernels fit into the shared memory of GPUs that this machine doesn't have, or are not chosen there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def compiled(script: str, cases: list[Any]) -> list[dict[str, Any]]:
    """Return what a script beside this file prints of each case, in a process that does not interpret kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name(script)), json.dumps(cases)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    results: list[dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    return results


@pytest.mark.slow
def test_what_kernels_take() -> None:
    result = compiled("compiled.py", FITS + DOES_NOT)
    for case, built in zip(FITS, result, strict=False):
        assert not built["overwritten"], built
        assert built["stages"] >= 1, case
        assert 0 < built["taken"] <= built["limit"], (case, built)
    for case, built in zip(DOES_NOT, result[len(FITS) :], strict=True):
        assert built["stages"] == 0, case


ATTENTION = [
    (90, 32, 8, 128, None, True),
    (90, 14, 2, 64, 200, True),
    (90, 32, 8, 128, None, False),
    (80, 8, 1, 256, None, True),
    (75, 14, 2, 64, None, True),
]
"""Compute capability, heads, key/value heads, head size, window, whether it is a tree."""


@pytest.mark.slow
def test_attention_compiles() -> None:
    """Triton's interpreter lets pass what its compiler refuses, such as a name with two types in a loop."""
    result = compiled("compiled_attention.py", ATTENTION)
    for case, built in zip(ATTENTION, result, strict=True):
        assert not built["overwritten"], (case, built)
        assert set(built["taken"]) == {"forward_kernel", "queries_kernel", "keys_kernel"}, case
        assert all(0 < taken <= built["limit"] for taken in built["taken"].values()), (case, built)


RECURRENCES = [
    ("ssd", 90, "bf16", 128, 1, 128, 64),
    ("ssd", 90, "bf16", 32, 2, 256, 128),
    ("ssd", 89, "fp32", 32, 1, 256, 128),
    ("ssd", 75, "fp16", 48, 1, 128, 64),
    ("ssd", 75, "fp16", 32, 2, 256, 128),
    ("conv", 75, "fp16", 5376, 4),
    ("conv", 90, "bf16", 2048, 3),
]
"""Op, compute capability, dtype; heads, groups, size of a state and of a head, or channels and taps.

Bamba, Falcon-H1 34B, Granite 4; and LFM2.
"""


@pytest.mark.slow
def test_recurrences_compile() -> None:
    result = compiled("compiled_recurrences.py", RECURRENCES)
    for case, built in zip(RECURRENCES, result, strict=True):
        assert not built["overwritten"], (case, built)
        assert len(built["taken"]) == {"ssd": 5, "conv": 2}[str(case[0])], case
        assert all(0 < taken <= built["limit"] for taken in built["taken"].values()), (case, built)


DELTA_RULE = [
    (90, "bfloat16", 128, 128, 2, False),
    (80, "bfloat16", 128, 128, 1, False),
    (89, "float16", 96, 192, 1, False),
    (90, "float32", 128, 128, 1, False),
    (90, "bfloat16", 128, 128, 1, True),
    (80, "bfloat16", 128, 128, 1, True),
    (90, "float32", 128, 128, 1, True),
]
"""Compute capability, dtype, K, V, heads of values that share a key, whether the decay is one per channel."""
T4 = 65_536
"""Bytes of shared memory: less than on any GPU that runs these kernels."""


@pytest.mark.slow
def test_delta_rule_compiles() -> None:
    result = compiled("compiled_delta_rule.py", DELTA_RULE)
    for case, built in zip(DELTA_RULE, result, strict=True):
        assert not built["overwritten"], (case, built)
        limit = T4 if case[:4] == (80, "bfloat16", 128, 128) else built["limit"]
        assert len(built["taken"]) == (11 if case[5] else 9), case
        assert all(0 <= taken <= limit for taken in built["taken"].values()), (case, built)
        assert built["stages"] >= 1, case


@pytest.mark.slow
def test_a_pipelined_loop_that_overwrites_its_tiles_is_caught() -> None:
    """Kernels that read their states into registers, too, if their loops are pipelined after all; see pipelines.py."""
    cases = [(90, "bfloat16", 128, 128, 2, by_channel, True) for by_channel in (False, True)]
    for built in compiled("compiled_delta_rule.py", cases):
        assert {line.partition(":")[0] for line in built["overwritten"]} == {"_output_gradients_kernel"}
    (built,) = compiled("compiled_recurrences.py", [("ssd", 90, "bf16", 128, 1, 128, 64, 3)])
    assert {line.partition(":")[0] for line in built["overwritten"]} == {"_heads_kernel"}
