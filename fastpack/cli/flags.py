"""A command's flags, declared as a table: each flag's name, and what ``argparse`` takes for it."""

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
        command: its name.
        what: what it does, for people; text after an empty line is shown after the flags.
        flags: its flags.
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
    """Return the type of a flag that takes whole numbers from ``least`` on."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text}: pass {least} or more")
        return value

    return number


POSITIVE = at_least(1)
