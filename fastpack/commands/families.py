"""``fastpack families``: which families of models are covered, and on which rung."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Print the table, for people, for the README or for programs."""
    parser = argparse.ArgumentParser(prog="fastpack families", description="The families of models that are covered.")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="the table of the README")
    form.add_argument("--json", action="store_true", help="a list of objects")
    given = parser.parse_args(arguments)
    rows = family_rows()
    if given.json:
        print(json.dumps(rows, indent=2))
    elif given.markdown:
        print(markdown(rows))
    else:
        _print_table(rows)
    return 0


def family_rows() -> list[dict[str, str]]:
    """``model_type``, ``rung`` and ``backbone`` of each family, those of the highest rung first."""
    from fastpack.families import FAMILIES

    rows = [
        {"model_type": name, "rung": str(family.rung), "backbone": family.backbone} for name, family in FAMILIES.items()
    ]
    order = list(RUNGS)
    return sorted(rows, key=lambda row: (order.index(row["rung"]), row["model_type"]))


def markdown(rows: Sequence[dict[str, str]]) -> str:
    """The rows as a Markdown table, one line a rung, since there are many."""
    lines = ["| rung | what runs | families |", "|---|---|---|"]
    for rung, what in RUNGS.items():
        names = [f"`{row['model_type']}`" for row in rows if row["rung"] == rung]
        if names:
            lines.append(f"| **{rung}** ({len(names)}) | {what} | {', '.join(names)} |")
    return "\n".join(lines)


RUNGS = {
    "fast": "fastpack's own forwards: packed attention, norms and MLP",
    "varlen": "packed attention; everything else is the stock model, on real tokens only",
    "re-padded mixer": "what mixes tokens and knows no boundaries runs on one row a sequence; attention is packed, and "
    "the rest runs on real tokens only",
    "re-padded model": "the stock model on rows of equal length: exact, no faster",
}


def _print_table(rows: Sequence[dict[str, str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{len(rows)} families", title_justify="left", box=box.ROUNDED)
    table.add_column("model_type", style="bold", no_wrap=True)
    table.add_column("rung", no_wrap=True)
    table.add_column("backbone", no_wrap=True)
    for row in rows:
        table.add_row(row["model_type"], row["rung"], row["backbone"], style="" if row["rung"] == "fast" else "dim")
    console = Console()
    console.print(table)
    for rung, what in RUNGS.items():
        console.print(f"[bold]{rung}[/bold]: {what}")
