"""``fastpack bench``: see :mod:`fastpack.bench`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fastpack.bench.runner import add_arguments
from fastpack.bench.runner import main as run


def main(arguments: Sequence[str]) -> int:
    """Parse the flags and run the benchmark; 1 where losses disagree."""
    parser = argparse.ArgumentParser(
        prog="fastpack bench",
        description="Train the same model in several ways, each in a process of its own, and compare.",
    )
    add_arguments(parser)
    return run(parser.parse_args(arguments))
