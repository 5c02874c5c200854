"""``fastpack families``: which families of models are covered, and on which tier; what a run of them proved, and the
lock file of the sources that it was proved on."""

from __future__ import annotations

import argparse
import json
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from fastpack.cli import UsageError, require_file
from fastpack.errors import UntriedVersionWarning
from fastpack.exactness import tiny
from fastpack.families.lock import (
    LOCK,
    as_text,
    forms_of,
    hash_of,
    is_proved,
    packed_name,
    stock_mixing,
    with_release,
)
from fastpack.families.lock import proved as locked
from fastpack.families.registry import FAMILIES
from fastpack.families.source import UNREADABLE
from fastpack.families.spec import Family
from fastpack.model.unwrap import find_parts
from fastpack.patching.match import settle
from fastpack.patching.recognise import recognise
from fastpack.patching.report import WORDS
from fastpack.patching.twin import match_by_twin
from fastpack.testing.record import Record
from fastpack.utils.classes import stock_class

BEGIN = "<!-- families: written by `fastpack families --from RUN.json --into README.md` -->"
END = "<!-- /families -->"


def main(arguments: Sequence[str]) -> int:
    """Print the table, for people, for the README or for programs.

    Raises: UsageError where the files named are not what they should be.
    """
    parser = argparse.ArgumentParser(prog="fastpack families", description="The families of models that are covered.")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="a table in Markdown")
    form.add_argument("--json", action="store_true", help="a list of objects")
    form.add_argument(
        "--from",
        dest="run",
        type=Path,
        metavar="RUN.json",
        help="what this run proved: gists/smoke.sh --all --json RUN.json",
    )
    parser.add_argument("--into", type=Path, metavar="README.md", help="write what the run proved between its marks")
    parser.add_argument(
        "--lock",
        action="store_true",
        help="enter the sources of the families that the run proved, with the installed transformers, in the lock file",
    )
    given = parser.parse_args(arguments)
    rows = family_rows()
    if given.run is None and (given.into is not None or given.lock):
        raise UsageError("--into and --lock write what a run proved: name the run with --from RUN.json")
    if given.lock:
        _lock(_read_run(given.run), LOCK)
    elif given.run is not None:
        _show_run(given.run, given.into)
    elif given.json:
        print(json.dumps(rows, indent=2))
    elif given.markdown:
        print(markdown(rows))
    else:
        _print_table(rows)
    return 0


def family_rows() -> list[dict[str, str]]:
    """``model_type``, ``tier`` and ``backbone`` of each family, those of the highest tier first."""
    rows = [
        {"model_type": name, "tier": _tier(family), "backbone": family.backbone} for name, family in FAMILIES.items()
    ]
    order = list(WORDS)
    return sorted(rows, key=lambda row: (order.index(row["tier"]), row["model_type"]))


def _tier(family: Family) -> str:
    """The one that it is on without kernels of others: convolutions alone run packed everywhere."""
    return "varlen" if {spec.scan for spec in family.mixers.values()} == {"conv"} else str(family.tier)


def markdown(rows: Sequence[dict[str, str]]) -> str:
    """The rows as a Markdown table, one line a tier, since there are many."""
    lines = ["| tier | what runs | families |", "|---|---|---|"]
    for tier in dict.fromkeys([*WORDS, *(row["tier"] for row in rows)]):  # a run of another version may name others
        names = [f"`{row['model_type']}`" for row in rows if row["tier"] == tier]
        if names:
            lines.append(f"| **{tier}** ({len(names)}) | {WORDS.get(tier, '')} | {', '.join(names)} |")
    return "\n".join(lines)


def _print_table(rows: Sequence[dict[str, str]]) -> None:
    table = Table(*rows[0], title=f"{len(rows)} families", title_justify="left", box=box.ROUNDED)
    for row in rows:
        table.add_row(*row.values(), style="" if row["tier"] == "fast" else "dim")
    console = Console()
    console.print(table)
    for tier, what in WORDS.items():
        console.print(f"[bold]{tier}[/bold]: {what}")
    scans = {name: {spec.scan for spec in family.mixers.values()} for name, family in FAMILIES.items()}
    recurrent = sorted(name for name, found in scans.items() if found - {"conv"} and None not in found)
    console.print(
        f"{', '.join(recurrent)}: varlen too on a GPU, where kernels of flash-linear-attention or mamba-ssm run "
        "their recurrence packed."
    )
    console.print("Others find their tier when they are patched: fastpack verify MODEL says which, and proves it.")


def _show_run(run: Path, into: Path | None) -> None:
    """Print what a run proved, or write it between the marks of a file."""
    record = _read_run(run)
    section = proved(record)
    if into is None:
        print(section)
        return
    if not into.is_file():
        raise UsageError(f"--into {into}: no such file; pass one that has the lines {BEGIN} and {END}")
    require_file("--into", into)
    before, _, behind = into.read_text(encoding="utf-8").partition(BEGIN)
    _, found, behind = behind.partition(END)
    if not found:
        raise UsageError(f"{into} should have one line {BEGIN} and behind it one line {END}")
    if others := _not_in_both(record):
        raise UsageError(
            f"--into {into}: the run and transformers' causal-LM mapping here do not have the same names: only one has "
            f"{', '.join(others)}. Run gists/smoke.sh --all --json RUN.json, or leave --into out"
        )
    into.write_text(f"{before}{BEGIN}\n\n{section}\n\n{END}{behind}", encoding="utf-8")


def _read_run(run: Path) -> Record:
    """Return a run that proved at least one family.

    Raises: UsageError where the file can't be read, or is no such run.
    """
    try:
        record = Record.read(run)
        proved(record)
    except OSError as error:
        raise UsageError(f"--from {run}: {error.strerror or error}; pass what gists/smoke.sh --json wrote") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{run} is no run of gists/smoke.sh --json: {error!r}") from error
    return record


def _lock(record: Record, lock_file: Path) -> None:
    """Enter the sources of the families that a run proved, each class that is proved or matched.

    Raises: UsageError where the run was made with another transformers than the installed one.
    """
    import transformers

    release = transformers.__version__
    if record.versions.get("transformers") != release:
        raise UsageError(
            f"the run was made with transformers {record.versions.get('transformers')}, whose sources are not here: "
            f"installed is {release}. Run gists/smoke.sh --all --json RUN.json anew"
        )
    found: dict[str, str] = {}
    for family in exact_families(record):
        found |= sources_of(family)
    lock_file.write_text(as_text(with_release(locked(), found, release)), encoding="utf-8")
    print(f"{len(found)} classes of transformers {release} are in {lock_file}")


def _not_in_both(record: Record) -> list[str]:
    """Names that a run tried and transformers' causal-LM mapping here does not have, or the other way round."""
    return sorted({row.family for row in record.rows} ^ set(tiny.model_types()))


def exact_families(record: Record) -> dict[str, str]:
    """Return the families that a run proved, each with its tier: tried in mode ``exact``, and no row of them failed."""
    failed = {row.family for row in record.rows if row.problem is not None}
    return {row.family: row.tier for row in record.rows if row.kinds and row.family not in failed}


def proved(record: Record) -> str:
    """What a run proved, as Markdown: the table of tiers, what was tried, on what, and who was refused and why.

    Only families that the run tried in mode ``exact`` are claimed, and those alone of which no row failed.

    Raises: ValueError where the run has no such row.
    """
    failed = sorted({row.family for row in record.rows if row.problem is not None})
    refused = {row.family: row.refused for row in record.rows if row.refused is not None}
    tiers = exact_families(record)
    exact = [row for row in record.rows if row.kinds and row.family in tiers]
    if not exact:
        raise ValueError("no family was proved exact in it")
    kinds = dict.fromkeys(kind for row in exact for kind in row.kinds)
    worst = {dtype: max(row.error or 0.0 for row in exact if row.dtype == dtype) for dtype in {r.dtype for r in exact}}
    figures = " and ".join(f"{error:.1e} in {dtype}" for dtype, error in sorted(worst.items()))
    total = len({row.family for row in record.rows})
    names = (
        f"the {total} names that were tried"
        if _not_in_both(record)
        else f"{total} names in transformers' causal-LM mapping"
    )
    told = (
        f"{len(tiers)} of {names} give what each sequence alone gives, logits and every gradient, off by "
        f"{figures} at most (1e-5 is allowed, or 1.5 times what the stock model itself is off by where that is more). "
        f"Tried were {', '.join(kinds)}; in training mode, with `use_cache` at its default. Each model was built tiny "
        f"from its own config, in a process of its own, on {record.made_with}."
    )
    lines = [markdown([{"model_type": family, "tier": tier} for family, tier in sorted(tiers.items())]), ""]
    lines += textwrap.wrap(told, 120, break_long_words=False, break_on_hyphens=False)
    if failed:
        lines += ["", f"Not proved: {', '.join(f'`{family}`' for family in failed)}."]
    if refused:
        lines += ["", "Refused:", "", *(f"- `{family}`: {why}" for family, why in sorted(refused.items()))]
    return "\n".join(lines)


def sources_of(model_type: str) -> dict[str, str]:
    """Return the hashes of the classes of a family's tiny model: those whose forms are proved, or matched now, and
    those that mix tokens in their stock forward; packed only those that were read.

    Warns:
        FastpackWarning: a class does not compute what its row says; it is left out.
    """
    parts = find_parts(tiny.build_tiny(model_type))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntriedVersionWarning)  # they are entered
        known = settle(recognise(parts), match_by_twin, head=True)
    family, specs = known.family, known.specs
    modules = [*known.backbone.modules(), *([] if parts.head is None else [parts.head])]
    classes: dict[str, Any] = {
        cls.__name__: cls for cls in map(stock_class, modules) if cls.__module__ == family.module
    }
    entries = {name: classes[cls] for name, cls, form in forms_of(family) if cls in classes and specs.get(cls) == form}
    entries |= {name: classes[name] for name in stock_mixing(family) if name in classes}
    found = {name: hash_of(cls, family) for name, cls in entries.items()}
    found |= {packed_name(name): h for name, h in found.items() if is_proved(packed_name(name), h)}
    return {name: source for name, source in found.items() if source != UNREADABLE}
