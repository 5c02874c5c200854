"""A command's flags as a table: each flag's name, and its keywords for ``argparse``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

Flags = Mapping[str, Mapping[str, Any]]


def make_parser(
    command: str, what: str, flags: Flags, groups: Mapping[str, Flags] | None = None
) -> argparse.ArgumentParser:
    """Return the parser of a command.

    Args:
        command: the command's name.
        what: its description for the help text; text after an empty line is shown after the flags.
        flags: the command's flags.
        groups: further flags, by the title of their group.
    """
    description, _, epilog = what.partition("\n\n")
    parser = argparse.ArgumentParser(prog=f"fastpack {command}", description=description, epilog=epilog)
    for title, group in {"": flags, **(groups or {})}.items():
        target = parser.add_argument_group(title) if title else parser
        for name, how in group.items():
            target.add_argument(name, **how)
    return parser


def at_least(least: int) -> Callable[[str], int]:
    """Return the ``argparse`` type of a flag that takes whole numbers, ``least`` or more."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text}: pass {least} or more")
        return value

    return number


def above_zero(text: str) -> float:
    """Return the number of a flag that takes numbers above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: pass a number above 0")
    return value


POSITIVE = at_least(1)
