"""``fastpack bench``: see :mod:`fastpack.bench`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fastpack.bench.flags import add_arguments, check_together, run
from fastpack.commands import require, require_one_process, require_trl_on_cpu


def main(arguments: Sequence[str]) -> int:
    """Parse the flags and run the benchmark; 1 where losses disagree, or an op of ours is not exact enough."""
    parser = argparse.ArgumentParser(
        prog="fastpack bench",
        description="Train the same model in several ways, each in a process of its own, and compare.",
    )
    add_arguments(parser)
    given = parser.parse_args(arguments)
    require_one_process("bench")
    check_together(given, parser)
    if given.plot:
        require("bench --plot", "matplotlib")
    if given.ops is None:
        _require_what_training_needs(given)
    return run(given)


def _require_what_training_needs(given: argparse.Namespace) -> None:
    import torch

    if given.loop == "trl":
        require("bench", "trl", "datasets")
        if not torch.cuda.is_available():
            require_trl_on_cpu("bench")
    if given.mode == "qlora":
        require("bench --mode qlora", "bitsandbytes")
