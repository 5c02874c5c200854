"""The ``fastpack`` command: run a subcommand, and print its errors on one line.

Each subcommand is a module of :mod:`fastpack.cli`. It is imported only when it is called and its packages are
installed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from fastpack import FastpackError, __version__
from fastpack.cli import quiet, require

COMMANDS = {
    "sft": "fine-tune a model with TRL's SFTTrainer, padding-free (every SFTConfig flag works)",
    "dpo": "train on preferences with TRL's DPOTrainer, padding-free (every DPOConfig flag works)",
    "grpo": "train on rewards with TRL's GRPOTrainer, padding-free (every GRPOConfig flag works)",
    "distill": "train a student on a teacher with TRL's DistillationTrainer (every DistillationConfig flag works)",
    "demo": "train a tiny model stock, then patched, and compare the runs; needs no network",
    "bench": "compare time, memory and losses of stock and patched training",
    "verify": "prove on a model that sequences don't see each other",
    "smoke": "build tiny models of many architectures, prove them exact and train them",
    "fit": "show the longest batches that cards of 8 to 80 GB hold, from a model's config alone",
    "doctor": "show what is installed, and which attention backends work here",
    "families": "list the model families that are covered",
}

TRAINING = ("trl", "datasets")
NEEDED = {
    "sft": TRAINING,
    "dpo": TRAINING,
    "grpo": TRAINING,
    "distill": TRAINING,
    "demo": (*TRAINING, "matplotlib"),
    "smoke": TRAINING,
}
"""The optional packages without which a command can't be imported."""

INTERRUPTED = 130
"""The exit code that shells give a command ended by Ctrl-C."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code, 2 for an error that the user can mend."""
    parser = argparse.ArgumentParser(
        prog="fastpack",
        description="Make any Hugging Face causal LM train without padding, exactly.",
        epilog="\n".join(["commands:", *(f"  {name:<18}{what}" for name, what in COMMANDS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fastpack {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="command", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="see `fastpack COMMAND --help`")
    args = parser.parse_args(arguments)
    quiet()
    try:
        require(args.command, *NEEDED.get(args.command, ()))
        code: int = importlib.import_module(f"fastpack.cli.{args.command}").main(args.arguments)
    except FastpackError as error:
        # library messages may span lines
        print(f"fastpack {args.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nfastpack {args.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code
