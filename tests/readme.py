"""What the README claims of families, read out of the part of it that a run wrote."""

from __future__ import annotations

import re
from pathlib import Path

from fastpack.cli.families import BEGIN, END

MEND = "bash gists/smoke.sh --all --json run.json && fastpack families --from run.json --into README.md"


def section() -> str:
    """The part between the marks."""
    text = (Path(__file__).parent.parent / "README.md").read_text()
    return text[text.index(BEGIN) : text.index(END)]


def claimed() -> dict[str, str]:
    """The tier of each family in its table."""
    rows = re.findall(r"^\| \*\*(.+?)\*\* \((\d+)\) \| .*? \| (.+) \|$", section(), re.MULTILINE)
    told = {name: tier for tier, _, names in rows for name in re.findall(r"`(.+?)`", names)}
    assert sum(int(count) for _, count, _ in rows) == len(told)
    return told
