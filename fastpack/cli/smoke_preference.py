"""``python -m fastpack.testing.preference``: see the package."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fastpack.cli import UsageError, quiet, require, require_file, require_trl_on_cpu
from fastpack.errors import FastpackError
from fastpack.testing.preference.cases import LOSSES, TRAINERS, WIDER, Case, Work, all_cases, run
from fastpack.testing.preference.judge import FIGURES, STEP_BOUND, SUM_BOUND, differences, problems
from fastpack.utils.console import counted, room_for

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
MADE_UP_PAIRS = 256
"""Of which the tokenizer is trained where no data is given."""


def main(arguments: Sequence[str] | None = None) -> int:
    """1 where a patched run is not equal to the stock one, 2 where something is missing or nothing was compared."""
    given = _parser().parse_args(arguments)
    try:
        require("smoke", "trl", "datasets")
        require_file("--json", given.json)
        _quiet()
        cases, work = chosen_cases(given), make_work(given)
    except FastpackError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = [row_of(case, work) for case in track(cases, "", transient=True)]
    console = Console(width=room_for(150))
    each = f"{counted(given.steps, 'step')} of {counted(given.pairs, 'pair')}"
    title = f"{counted(len(rows), 'run')} of {each} each, patched against stock"
    console.print(table(rows, title))
    console.print(LEGEND, style="dim", highlight=False)
    for row in rows:
        if row["left_out"] is not None:
            print(f"{row['trainer']}, {row['variant']}: left out: {row['left_out']}")
        for problem in row["problems"]:
            print(f"{row['trainer']}, {row['variant']}: {problem}", file=sys.stderr)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))
    if all(row["off"] is None for row in rows):
        print("error: nothing was compared", file=sys.stderr)
        return 2
    return 1 if any(row["problems"] for row in rows) else 0


def make_work(given: argparse.Namespace) -> Work:
    """Data, tokenizer and config as asked for, or made up.

    Raises:
        UsageError: data without prompt, chosen and rejected; too few of them; data without a tokenizer; no such
            tokenizer or config; no pairs, steps or tokens.
    """
    import torch
    from transformers import AutoConfig, AutoTokenizer

    from fastpack.cli.demo.data import make_pairs, tiny_llama, train_tokenizer

    if not torch.cuda.is_available():
        require_trl_on_cpu("smoke")
    for flag, number in (("--pairs", given.pairs), ("--steps", given.steps), ("--max-length", given.max_length)):
        if number < 1:
            raise UsageError(f"{flag} {number}: pass 1 or more")
    count = given.pairs * given.steps
    if given.data is None:
        made_up = make_pairs(max(count, MADE_UP_PAIRS), given.seed)
        rows, tokenizer = made_up[:count], train_tokenizer(made_up)
    else:
        if given.tokenizer is None:
            raise UsageError("--data needs --tokenizer FOLDER")
        rows, tokenizer = read_pairs(given.data, count), _loaded(AutoTokenizer, "--tokenizer", given.tokenizer)
    config = _loaded(AutoConfig, "--config", given.config) if given.config else tiny_llama(tokenizer, **SIZES)
    return Work(rows, tokenizer, config, given)


def _loaded(auto: Any, flag: str, name: str) -> Any:
    try:
        return auto.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise UsageError(f"{flag} {name}: nothing that can be loaded: {' '.join(str(error).split())}") from error


def read_pairs(path: Path, count: int) -> list[dict[str, Any]]:
    """The first ``count`` rows of a JSON-lines file.

    Raises:
        UsageError: there is no such file; there are fewer; one is no preference, and the message names its line.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            filled = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
            rows = [_read_pair(number, line) for number, line in itertools.islice(filled, count)]
    except OSError as error:
        raise UsageError(f"--data {path}: {error.strerror or error}; pass a file of JSON lines") from error
    except ValueError as error:
        raise UsageError(f"--data {path}, {error}") from error
    if len(rows) < count:
        raise UsageError(f"{path} holds {len(rows)} rows, the steps take {count}: pass fewer --pairs or --steps")
    return rows


def _read_pair(number: int, line: str) -> dict[str, Any]:
    """The preference of one line.

    Raises:
        ValueError: it is none, and the message names the line.
    """
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number} is no JSON: {error}; a line holds prompt, chosen and rejected") from error
    missing = [name for name in ("prompt", "chosen", "rejected") if not isinstance(row, dict) or name not in row]
    if missing:
        raise ValueError(f"line {number}: it has no {' and no '.join(missing)}")
    found: dict[str, Any] = row
    return found


def chosen_cases(given: argparse.Namespace) -> list[Case]:
    """Those asked for by trainer, loss and variant.

    Raises:
        UsageError: none of these trainers has a variant of this name, with these losses.
    """
    losses = LOSSES if "all" in given.loss_types else given.loss_types
    cases = [case for case in all_cases(losses) if case.trainer in given.trainers]
    known = {case.variant for case in cases}
    unknown = [name for name in given.variants or () if name not in known]
    if unknown:
        raise UsageError(
            f"--variants {', '.join(map(repr, unknown))}: {', '.join(given.trainers)} with these losses have none of "
            f"this name, only {', '.join(map(repr, sorted(known)))}"
        )
    return [case for case in cases if not given.variants or case.variant in given.variants]


def row_of(case: Case, work: Work) -> dict[str, Any]:
    """Train a case stock and patched, and for the noise stock with wider padding.

    Returns:
        ``trainer`` and ``variant``; how far it and float32 itself are ``off`` (``noise``); the ``problems``, of which
        there are none where the two runs are equal; or why the stock trainer can't be run so, as ``left_out``.
    """
    row: dict[str, Any] = {"trainer": case.trainer, "variant": case.variant, "off": None, "noise": None}
    row |= {"problems": [], "left_out": None}
    try:
        stock, beta = run(case, work, patch=False)
        if work.given.noise:
            row["noise"] = differences(run(case, work, patch=False, wider=True)[0], stock, beta)
    except Exception as error:  # noqa: BLE001 - nothing of fastpack runs here, and anything may be wrong elsewhere
        said = f"the stock model can't be trained so: {type(error).__name__}: {str(error)[:200]}"
        return {**row, "left_out": said}
    patched, _ = run(case, work, patch=True)
    row["off"] = differences(patched, stock, beta)
    row["problems"] = problems(
        patched,
        stock,
        beta=beta,
        starts_at_ln_2=case.starts_at_ln_2,
        steepness=case.steepness,
        has_log_probs=case.trainer in ("dpo", "kto"),
    )
    return row


OF_FLOAT32 = "(float32)"
LEGEND = (
    "The largest difference over all steps, relative; rewards: of beta times the largest log-probability (other "
    f"scores: of the largest). {OF_FLOAT32}: the stock run with batches padded to a multiple of {WIDER}. Bounds: "
    f"{SUM_BOUND:g} for log_probs and DPO's rewards, {STEP_BOUND:g} for the rest, or what rounding the largest "
    "log-probability does to a loss if that is more."
)


def table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """For people: a line for each case; beside each figure what float32 itself is off by, where that was measured."""
    noise = any(row["noise"] for row in rows)
    made = Table("trainer", "variant", title=title, title_justify="left", box=box.ROUNDED)
    for name in FIGURES:
        made.add_column(name, justify="right")
        if noise:
            made.add_column(OF_FLOAT32, justify="right", style="dim")
    made.add_column("", no_wrap=True)  # the verdict is read on a narrow terminal too
    for row in rows:
        measured = [row["off"] or {}, row["noise"] or {}][: 1 + noise]
        values = [off.get(name, math.nan) for name in FIGURES for off in measured]
        shown = ["" if math.isnan(value) else f"{value:.0e}" for value in values]
        said = "FAILED" if row["problems"] else "equal" if row["off"] else "left out"
        made.add_row(row["trainer"], row["variant"], *shown, said, style="bold red" if row["problems"] else None)
    return made


def _quiet() -> None:
    import datasets
    import transformers

    quiet()
    datasets.disable_progress_bars()
    datasets.disable_caching()  # or a precomputed reference of the stock run would be read by the patched one
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastpack.testing.preference",
        description="Train TRL's DPO, KTO, reward and GRPO trainers on the same pairs, stock and patched, in float32, "
        "and compare every step: a table, and 1 where they differ.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", type=Path, help="JSON lines of prompt, chosen, rejected; made up where not given")
    parser.add_argument("--tokenizer", help="folder of the tokenizer of --data")
    parser.add_argument("--config", help="of the models (default: a Llama of two small layers)")
    parser.add_argument("--trainers", nargs="+", choices=tuple(TRAINERS), default=list(TRAINERS))
    parser.add_argument("--loss-types", nargs="+", choices=("all", *LOSSES), default=["all"], help="of DPO, plain")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="only these lines of the table")
    parser.add_argument("--pairs", type=int, default=4, help="of a batch; an even number")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--max-length", type=int, default=512, help="tokens of a prompt and its completion")
    # with larger ones AdamW makes whole steps of gradients that are nothing but rounding
    parser.add_argument("--learning-rate", type=float, default=1e-6, help="default: 1e-6, TRL's own for DPO")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", action="store_true", help="train stock again, padded wider: float32's own noise")
    parser.add_argument("--json", type=Path, help="write the differences here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
