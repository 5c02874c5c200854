"""The ``fastpack`` command: which part is asked for, and one clear line where it can't be done.

Each subcommand is a module of :mod:`fastpack.cli`, imported only when it is called, and when what it needs is
there.
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
    "demo": "train a tiny model stock, then patched, and compare; without network",
    "bench": "stock padded, stock padding_free and fastpack: time, memory and losses, in one run",
    "verify": "prove on a model that sequences don't see each other",
    "smoke": "every architecture, built tiny: proved exact and trained; a table, an exit code",
    "doctor": "what is installed, and what this machine can use",
    "families": "the families of models that are covered",
}

TRAINING = ("trl", "datasets")
NEEDED = {
    "sft": TRAINING,
    "dpo": TRAINING,
    "demo": (*TRAINING, "matplotlib"),
    "smoke": TRAINING,
}
"""The optional packages without which a command can't be imported."""

INTERRUPTED = 130
"""What shells give a command that Ctrl-C ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code: 2 where the user has something to mend."""
    parser = argparse.ArgumentParser(
        prog="fastpack",
        description="Make any Hugging Face causal LM train without padding, exactly.",
        epilog="\n".join(["commands:", *(f"  {name:<18}{what}" for name, what in COMMANDS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fastpack {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="command", help="one of those below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="see `fastpack COMMAND --help`")
    args = parser.parse_args(arguments)
    quiet()
    try:
        require(args.command, *NEEDED.get(args.command, ()))
        code: int = importlib.import_module(f"fastpack.cli.{args.command}").main(args.arguments)
    except FastpackError as error:
        # messages of libraries may span lines; the terminal gets one
        print(f"fastpack {args.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nfastpack {args.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code
