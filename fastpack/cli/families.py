"""``fastpack families``: show families, TRL's trainers or a sweep's results, and update the lock file."""

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

from fastpack.cli import UsageError
from fastpack.errors import UntriedVersionWarning
from fastpack.exactness import tiny
from fastpack.exactness.image_settings import NOT_BUILT
from fastpack.exactness.image_text import build_named, image_text_types
from fastpack.families.lock import (
    LOCK,
    as_text,
    hash_of,
    is_proved,
    packed_name,
    specs_of,
    stock_mixing,
    with_release,
)
from fastpack.families.lock import proved as locked
from fastpack.families.registry import FAMILIES, family_named
from fastpack.families.source import UNREADABLE
from fastpack.model.unwrap import find_parts
from fastpack.patching.match import settle
from fastpack.patching.recognise import recognise
from fastpack.patching.report import WORDS
from fastpack.patching.twin import match_by_twin
from fastpack.testing.record import Record, Row
from fastpack.testing.worker import IMAGE_BOUND, IMAGES
from fastpack.trainers.supported import ABSENT, TRL_TRIED, trainer_rows, trainers_markdown
from fastpack.utils.classes import stock_class


def main(arguments: Sequence[str]) -> int:
    """Print the table of families or of trainers, or the results of a sweep, and return the exit code.

    Raises:
        UsageError: a file is not the result of a sweep, or options don't go together.
    """
    parser = argparse.ArgumentParser(prog="fastpack families", description="List the model families that are covered.")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print a table in Markdown")
    form.add_argument("--json", action="store_true", help="print a JSON list of objects")
    parser.add_argument("--trainers", action="store_true", help="list TRL's trainers instead of model families")
    form.add_argument(
        "--from",
        dest="run",
        type=Path,
        metavar="RUN.json",
        help="print what a sweep proved, in Markdown; the file is from gists/smoke.sh --all --json RUN.json",
    )
    parser.add_argument(
        "--lock",
        action="store_true",
        help="with --from: add the proved classes of the installed transformers to the lock file",
    )
    args = parser.parse_args(arguments)
    if args.trainers and args.run is not None:
        raise UsageError("--from prints families that a sweep proved: leave out either --from or --trainers")
    rows = trainer_rows() if args.trainers else family_rows()
    if args.run is None and args.lock:
        raise UsageError("--lock adds the classes that a sweep proved: pass the sweep's results with --from RUN.json")
    if args.lock:
        _update_lock_file(_read_run(args.run), LOCK)
    elif args.run is not None:
        print(proved(_read_run(args.run)))
    elif args.json:
        print(json.dumps(rows, indent=2))
    elif args.markdown:
        print(trainers_markdown() if args.trainers else markdown(rows))
    elif args.trainers:
        _print_trainers(rows)
    else:
        _print_table(rows)
    return 0


def family_rows() -> list[dict[str, str]]:
    """Return ``model_type``, ``tier`` and ``backbone`` of each family, the highest tier first.

    An image-text model has the tier of its text model, which is its backbone.
    """
    of_images = {name: family_named(name) for name in image_text_types() if name not in NOT_BUILT}
    families = {name: family for name, family in {**of_images, **FAMILIES}.items() if family is not None}
    rows = [
        {"model_type": name, "tier": str(family.tier), "backbone": family.backbone} for name, family in families.items()
    ]
    order = list(WORDS)
    return sorted(rows, key=lambda row: (order.index(row["tier"]), row["model_type"]))


def markdown(rows: Sequence[dict[str, str]]) -> str:
    """Return the rows as a Markdown table with one line for each tier."""
    lines = ["| tier | what runs | families |", "|---|---|---|"]
    for tier in dict.fromkeys([*WORDS, *(row["tier"] for row in rows)]):  # old sweeps may have other tiers
        names = [f"`{row['model_type']}`" for row in rows if row["tier"] == tier]
        if names:
            lines.append(f"| **{tier}** ({len(names)}) | {WORDS.get(tier, '')} | {', '.join(names)} |")
    return "\n".join(lines)


def _print_trainers(rows: Sequence[dict[str, str]]) -> None:
    table = Table(*rows[0], title=f"{len(rows)} trainers of TRL {TRL_TRIED}", title_justify="left", box=box.ROUNDED)
    for row in rows:
        table.add_row(*row.values())
    console = Console()
    console.print(table)
    console.print(f"Not in TRL {TRL_TRIED}: {', '.join(ABSENT)}.")


def _print_table(rows: Sequence[dict[str, str]]) -> None:
    table = Table(*rows[0], title=f"{len(rows)} families", title_justify="left", box=box.ROUNDED)
    for row in rows:
        table.add_row(*row.values(), style="" if row["tier"] == "fast" else "dim")
    console = Console()
    console.print(table)
    for tier, what in WORDS.items():
        console.print(f"[bold]{tier}[/bold]: {what}")
    console.print("fastpack verify MODEL shows the tier that a model gets here, and proves the model exact.")


def _read_run(run: Path) -> Record:
    """Return the results of a sweep that proved at least one family.

    Raises:
        UsageError: the file can't be read, or is not the result of a sweep.
    """
    try:
        record = Record.read(run)
        proved(record)
    except OSError as error:
        raise UsageError(f"--from {run}: {error.strerror or error}; pass a file of gists/smoke.sh --json") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{run} is not a file of gists/smoke.sh --json: {error!r}") from error
    return record


def _update_lock_file(record: Record, lock_file: Path) -> None:
    """Add the classes of the families that a sweep proved to the lock file.

    Raises:
        UsageError: the sweep ran with another release of transformers than the installed one.
    """
    import transformers

    release = transformers.__version__
    if record.versions.get("transformers") != release:
        raise UsageError(
            f"the run was made with transformers {record.versions.get('transformers')}, but {release} is installed. "
            "Run gists/smoke.sh --all --json RUN.json again"
        )
    sources: dict[str, str] = {}
    for family in exact_families(record):
        sources |= sources_of(family)
    lock_file.write_text(as_text(with_release(locked(), sources, release)), encoding="utf-8")
    print(f"{len(sources)} classes of transformers {release} are in {lock_file}")


def _names_tried(record: Record) -> str:
    """Return how many names of the causal-LM mapping a sweep tried, in words."""
    only_images = {*image_text_types()} - {*tiny.model_types()}
    tried = {row.family for row in record.rows} - only_images
    every = tried == {*tiny.model_types()}
    return (
        f"{len(tried)} names in transformers' causal-LM mapping" if every else f"the {len(tried)} names that were tried"
    )


def exact_families(record: Record) -> dict[str, str]:
    """Return the families that a sweep proved, each with its tier: tried in mode ``exact``, without a failed row."""
    failed = {row.family for row in record.rows if row.problem is not None}
    return {row.family: row.tier for row in record.rows if row.kinds and row.family not in failed}


def proved(record: Record) -> str:
    """Return what a sweep proved, as Markdown: the tiers, the inputs, the machine, and the refused families.

    Raises:
        ValueError: the sweep proved no family (:func:`exact_families`).
    """
    failed = sorted({row.family for row in record.rows if row.problem is not None})
    refused = {row.family: row.refused for row in record.rows if row.refused is not None}
    tiers = exact_families(record)
    exact = [row for row in record.rows if row.kinds and row.family in tiers]
    if not exact:
        raise ValueError("it proved no family exact")
    text, images = ([row for row in exact if (row.mode == IMAGES) is on] for on in (False, True))
    only_images = {*image_text_types()} - {*tiny.model_types()}
    summary = (
        f"{len(tiers.keys() - only_images)} of {_names_tried(record)} give the same logits and gradients as each "
        f"sequence alone, within {_errors(text)} (allowed are 1e-5, or 1.5 times the stock model's own error if that "
        f"is more). The inputs were {_inputs(text)}; the models were in training mode, with `use_cache` at its "
        f"default. Each model was built tiny from its own config, in its own process, on {record.made_with}."
    )
    if images:
        tried = {row.family for row in record.rows} & {*image_text_types()}
        summary += (
            f" {len({row.family for row in images})} of {len(tried)} names in transformers' image-text mapping "
            "also give those of each row of text and images alone, the tower's gradients included, within "
            f"{_errors(images)} (allowed are {IMAGE_BOUND:.0e}). The inputs were {_inputs(images)}."
        )
    lines = [markdown([{"model_type": family, "tier": tier} for family, tier in sorted(tiers.items())]), ""]
    lines += textwrap.wrap(summary, 120, break_long_words=False, break_on_hyphens=False)
    if failed:
        lines += ["", f"Not proved: {', '.join(f'`{family}`' for family in failed)}."]
    if refused:
        lines += ["", "Refused:", "", *(f"- `{family}`: {why}" for family, why in sorted(refused.items()))]
    return "\n".join(lines)


def _errors(rows: Sequence[Row]) -> str:
    """Return the largest error of rows in each dtype, in words."""
    dtypes = sorted({row.dtype for row in rows})
    worst = {dtype: max(row.error or 0.0 for row in rows if row.dtype == dtype) for dtype in dtypes}
    return " and ".join(f"{error:.1e} in {dtype}" for dtype, error in worst.items())


def _inputs(rows: Sequence[Row]) -> str:
    return ", ".join(dict.fromkeys(kind for row in rows for kind in row.kinds))


def sources_of(model_type: str) -> dict[str, str]:
    """Return the hashes of the classes of a family's tiny model, for the lock file.

    These are the classes whose specs are proved or match now, and the classes whose stock forward mixes tokens. A
    packed mixer's hash is only returned if it is in the lock file already.

    Warns:
        FastpackWarning: a class does not compute what its spec says; the class is left out.
    """
    parts = find_parts(build_named(model_type))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntriedVersionWarning)  # this run tries those versions
        recognised = settle(recognise(parts), match_by_twin, head=True)
    family, specs = recognised.family, recognised.specs
    modules = [*recognised.backbone.modules(), *([] if parts.head is None else [parts.head])]
    classes: dict[str, Any] = {
        cls.__name__: cls for cls in map(stock_class, modules) if cls.__module__ == family.module
    }
    entries = {name: classes[cls] for name, cls, spec in specs_of(family) if cls in classes and specs.get(cls) == spec}
    entries |= {name: classes[name] for name in stock_mixing(family) if name in classes}
    sources = {name: hash_of(cls, family) for name, cls in entries.items()}
    sources |= {packed_name(name): h for name, h in sources.items() if is_proved(packed_name(name), h)}
    return {name: source for name, source in sources.items() if source != UNREADABLE}
