"""``fastpack families``: which families of models are covered, and on which rung; what a run of them proved."""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastpack.commands import UsageError, require_file
from fastpack.patching.tiers import WORDS

if TYPE_CHECKING:
    from fastpack.families import Family
    from fastpack.smoke.record import Record


def main(arguments: Sequence[str]) -> int:
    """Print the table, for people, for the README or for programs.

    Raises: UsageError where the files named are not what they should be.
    """
    parser = argparse.ArgumentParser(prog="fastpack families", description="The families of models that are covered.")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="a table in Markdown")
    form.add_argument("--json", action="store_true", help="a list of objects")
    parser.add_argument(
        "--from",
        dest="run",
        type=Path,
        metavar="RUN.json",
        help="what this run proved: gists/smoke.sh --all --json RUN.json",
    )
    parser.add_argument("--into", type=Path, metavar="README.md", help="write what the run proved between its marks")
    given = parser.parse_args(arguments)
    if given.run is not None:
        if given.json or given.markdown:
            raise UsageError("--from prints what the run proved as Markdown: leave --json and --markdown out")
        return _show_run(given.run, given.into)
    if given.into is not None:
        raise UsageError("--into writes what a run proved: name the run with --from RUN.json")
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
        {"model_type": name, "rung": _rung(family), "backbone": family.backbone} for name, family in FAMILIES.items()
    ]
    order = _rungs(rows)
    return sorted(rows, key=lambda row: (order.index(row["rung"]), row["model_type"]))


def _rung(family: Family) -> str:
    """The one that it is on without kernels of others: convolutions alone run packed everywhere."""
    return "varlen" if {spec.scan for spec in family.mixers.values()} == {"conv"} else str(family.rung)


def _recurrent() -> list[str]:
    """Those whose mixers other packages' kernels run packed."""
    from fastpack.families import FAMILIES

    scans = {name: {spec.scan for spec in family.mixers.values()} for name, family in FAMILIES.items()}
    return sorted(name for name, found in scans.items() if found - {"conv"} and None not in found)


def markdown(rows: Sequence[dict[str, str]]) -> str:
    """The rows as a Markdown table, one line a rung, since there are many."""
    lines = ["| rung | what runs | families |", "|---|---|---|"]
    for rung in _rungs(rows):
        names = [f"`{row['model_type']}`" for row in rows if row["rung"] == rung]
        if names:
            lines.append(f"| **{rung}** ({len(names)}) | {WORDS.get(rung, '')} | {', '.join(names)} |")
    return "\n".join(lines)


def _rungs(rows: Sequence[dict[str, str]]) -> list[str]:
    """Those that are described here in their order, then what else the rows have."""
    return [*WORDS, *sorted({row["rung"] for row in rows} - WORDS.keys())]


BEGIN = "<!-- families: written by `fastpack families --from RUN.json --into README.md` -->"
END = "<!-- /families -->"


def _show_run(run: Path, into: Path | None) -> int:
    from fastpack.smoke.record import Record

    text = None if into is None else _marked(into)
    try:
        record = Record.read(run)
        section = proved(record)
    except OSError as error:
        raise UsageError(f"--from {run}: {error.strerror or error}; pass what gists/smoke.sh --json wrote") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{run} is no run of gists/smoke.sh --json: {error!r}") from error
    if into is None or text is None:
        print(section)
        return 0
    if not_all := _not_all(record):
        raise UsageError(f"--into {into}: {not_all}. Run gists/smoke.sh --all --json RUN.json, or leave --into out")
    between = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    into.write_text(between.sub(lambda _: f"{BEGIN}\n\n{section}\n\n{END}", text), encoding="utf-8")
    return 0


def _marked(into: Path) -> str:
    """The text of a file that has both marks and can be written."""
    if not into.is_file():
        raise UsageError(f"--into {into}: no such file; pass one that has the lines {BEGIN} and {END}")
    require_file("--into", into)
    try:
        text = into.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"--into {into} can't be read as text: {error}") from error
    if not (text.count(BEGIN) == text.count(END) == 1 and text.index(BEGIN) < text.index(END)):
        raise UsageError(f"{into} should have one line {BEGIN} and behind it one line {END}")
    return text


def _not_all(record: Record) -> str | None:
    """How the names that a run tried are not those of transformers' causal-LM mapping here; None where they are."""
    from fastpack.exactness.tiny import model_types

    mapping, tried = set(model_types()), {row.family for row in record.rows}
    said = [
        f"{len(names)} {what} ({', '.join(sorted(names)[:3])}{', ...' if len(names) > 3 else ''})"
        for names, what in ((mapping - tried, "were not tried"), (tried - mapping, "are not in it"))
        if names
    ]
    return f"of the {len(mapping)} names in transformers' causal-LM mapping {' and '.join(said)}" if said else None


def proved(record: Record) -> str:
    """What a run proved, as Markdown: the table of rungs, what was tried, on what, and who was refused and why.

    Only families that the run tried in mode ``exact`` are claimed, and those alone of which no row failed.

    Raises: ValueError where the run has no such row.
    """
    failed = sorted({row.family for row in record.rows if row.problem is not None})
    refused = {row.family: row.refused for row in record.rows if row.refused is not None}
    tried = [row for row in record.rows if row.kinds]
    exact = [row for row in tried if row.family not in failed]
    if not exact:
        raise ValueError("no family was proved exact in it")
    rungs = {row.family: row.rung for row in exact}
    lines = [markdown([{"model_type": family, "rung": rung} for family, rung in sorted(rungs.items())]), ""]
    kinds = list(dict.fromkeys(kind for row in exact for kind in row.kinds))
    worst = {dtype: max(row.error or 0.0 for row in exact if row.dtype == dtype) for dtype in {r.dtype for r in exact}}
    figures = " and ".join(f"{error:.1e} in {dtype}" for dtype, error in sorted(worst.items()))
    total = len({row.family for row in record.rows})
    of_all = f"{total} names in transformers' causal-LM mapping"
    names = f"the {total} names that were tried" if _not_all(record) else of_all
    told = (
        f"{len(rungs)} of {names} give what each sequence alone gives, logits and every gradient, off by {figures} at "
        "most (1e-5 is allowed, or 1.5 times what the stock model itself is off by where that is more). Tried were "
        f"{', '.join(kinds)}; in training mode, with `use_cache` at its default. Each model was built tiny from its "
        f"own config, in a process of its own, on {record.made_with}."
    )
    lines += textwrap.wrap(told, 120, break_long_words=False, break_on_hyphens=False)
    if failed:
        lines += ["", f"Not proved: {', '.join(f'`{family}`' for family in failed)}."]
    if refused:
        lines += ["", "Refused:", ""]
        lines += [f"- `{family}`: {why}" for family, why in sorted(refused.items())]
    return "\n".join(lines)


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
    for rung, what in WORDS.items():
        console.print(f"[bold]{rung}[/bold]: {what}")
    console.print(
        f"{', '.join(_recurrent())}: varlen too on a GPU, where kernels of flash-linear-attention or mamba-ssm run "
        "their recurrence packed."
    )
    console.print("Others find their rung when they are patched: fastpack verify MODEL says which, and proves it.")
