"""``fastpack smoke-preference``: TRL's preference trainers on the same pairs, patched and stock, step by step."""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoConfig, AutoTokenizer

from fastpack.cli import UsageError, loading_errors, require_file, require_trl_on_cpu
from fastpack.cli.demo.data import make_pairs, tiny_llama, train_tokenizer
from fastpack.cli.flags import POSITIVE, make_parser
from fastpack.testing.preference.cases import LOSSES, TRAINERS, WIDER, Case, Work, all_cases, run
from fastpack.testing.preference.judge import FIGURES, STEP_BOUND, SUM_BOUND, differences, problems
from fastpack.utils.console import counted, headed, room_for

WHAT = (
    "Train TRL's DPO, KTO, reward and GRPO trainers on the same pairs, stock and patched, in float32, and compare "
    "every step: a table, and 1 where they differ."
)
FLAGS: dict[str, dict[str, Any]] = {
    "--data": {"type": Path, "help": "JSON lines of prompt, chosen, rejected; made up where not given"},
    "--tokenizer": {"help": "folder of the tokenizer of --data"},
    "--config": {"help": "of the models (default: a Llama of two small layers)"},
    "--trainers": {"nargs": "+", "choices": tuple(TRAINERS), "default": list(TRAINERS), "help": "default: all"},
    "--loss-types": {"nargs": "+", "choices": ("all", *LOSSES), "default": ["all"], "help": "of DPO, plain"},
    "--variants": {"nargs": "+", "metavar": "NAME", "help": "only these lines of the table"},
    "--pairs": {"type": POSITIVE, "default": 4, "help": "of a batch; an even number (default: 4)"},
    "--steps": {"type": POSITIVE, "default": 3, "help": "default: 3"},
    "--max-length": {
        "type": POSITIVE,
        "default": 512,
        "help": "tokens of a prompt and its completion (default: 512)",
    },
    # with larger ones AdamW makes whole steps of gradients that are nothing but rounding
    "--learning-rate": {"type": float, "default": 1e-6, "help": "default: 1e-6, TRL's own for DPO"},
    "--seed": {"type": int, "default": 0},
    "--noise": {"action": "store_true", "help": "train stock again, padded wider: float32's own noise"},
    "--json": {"type": Path, "help": "write the differences here"},
}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
MADE_UP_PAIRS = 256
"""Of which the tokenizer is trained where no data is given."""
COLUMNS = {"prompt", "chosen", "rejected"}


def main(arguments: Sequence[str]) -> int:
    """Return 1 where a patched run is not equal to the stock one.

    Raises:
        UsageError: something is missing, or nothing was compared.
    """
    given = make_parser("smoke-preference", WHAT, FLAGS).parse_args(arguments)
    require_file("--json", given.json)
    _quiet()
    cases, work = chosen_cases(given), make_work(given)
    rows = [row_of(case, work) for case in track(cases, "", transient=True)]
    console = Console(width=room_for(150))
    each = f"{counted(given.steps, 'step')} of {counted(given.pairs, 'pair')}"
    console.print(table(rows, f"{counted(len(rows), 'run')} of {each} each, patched against stock"))
    console.print(LEGEND, style="dim", highlight=False)
    for row in rows:
        name = f"{row['trainer']}, {row['variant']}"
        if row["left_out"] is not None:
            print(f"{name}: left out: {row['left_out']}")
        for problem in row["problems"]:
            print(f"{name}: {problem}", file=sys.stderr)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))
    if all(row["off"] is None for row in rows):
        raise UsageError("nothing was compared")
    return 1 if any(row["problems"] for row in rows) else 0


def make_work(given: argparse.Namespace) -> Work:
    """Return data, tokenizer and config as asked for, or made up.

    Raises:
        UsageError: data without prompt, chosen and rejected; too few of them; data without a tokenizer; no such
            tokenizer or config.
    """
    if not torch.cuda.is_available():
        require_trl_on_cpu("smoke-preference")
    count = given.pairs * given.steps
    if given.data is None:
        made_up = make_pairs(max(count, MADE_UP_PAIRS), given.seed)
        rows, tokenizer = made_up[:count], train_tokenizer(made_up)
    elif given.tokenizer is None:
        raise UsageError("--data needs --tokenizer FOLDER")
    else:
        rows, tokenizer = read_pairs(given.data, count), _loaded(AutoTokenizer, "--tokenizer", given.tokenizer)
    config = _loaded(AutoConfig, "--config", given.config) if given.config else tiny_llama(tokenizer, **SIZES)
    return Work(rows, tokenizer, config, given)


def _loaded(auto: Any, flag: str, name: str) -> Any:
    try:
        return auto.from_pretrained(name)
    except loading_errors() as error:
        raise UsageError(f"{flag} {name}: nothing that can be loaded: {error}") from error


def read_pairs(path: Path, count: int) -> list[dict[str, Any]]:
    """Return the first ``count`` rows of a JSON-lines file.

    Raises:
        UsageError: there is no such file; there are fewer; one is no preference, and the message names its line.
    """
    if not path.is_file():
        raise UsageError(f"--data {path}: no such file; pass a file of JSON lines")
    with path.open(encoding="utf-8") as lines:
        filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    rows = []
    for number, line in filled:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"--data {path}, line {number} is no JSON: {error}") from error
        if not isinstance(row, dict) or not row.keys() >= COLUMNS:
            raise UsageError(f"--data {path}, line {number} has no {', '.join(sorted(COLUMNS))}")
        rows.append(row)
    if len(rows) < count:
        raise UsageError(f"{path} holds {len(rows)} rows, the steps take {count}: pass fewer --pairs or --steps")
    return rows


def chosen_cases(given: argparse.Namespace) -> list[Case]:
    """Return those asked for by trainer, loss and variant.

    Raises:
        UsageError: none of these trainers has a variant of this name, with these losses.
    """
    losses = LOSSES if "all" in given.loss_types else given.loss_types
    cases = [case for case in all_cases(losses) if case.trainer in given.trainers]
    known = {case.variant for case in cases}
    wanted = set(given.variants or known)
    if unknown := sorted(wanted - known):
        raise UsageError(
            f"--variants {', '.join(map(repr, unknown))}: {', '.join(given.trainers)} with these losses have none of "
            f"this name, only {', '.join(map(repr, sorted(known)))}"
        )
    return [case for case in cases if case.variant in wanted]


def row_of(case: Case, work: Work) -> dict[str, Any]:
    """Train a case stock and patched, and for the noise stock with wider padding.

    Returns:
        ``trainer`` and ``variant``; how far it and float32 itself are ``off`` (``noise``); the ``problems``, of which
        there are none where the two runs are equal; or why the stock trainer can't be run so, as ``left_out``.
    """
    row: dict[str, Any] = {"trainer": case.trainer, "variant": case.variant}
    row |= {"off": None, "noise": None, "problems": []}
    try:
        stock, beta = run(case, work, patch=False)
        if work.given.noise:
            row["noise"] = differences(run(case, work, patch=False, wider=True)[0], stock, beta)
    except Exception as error:  # noqa: BLE001 - nothing of fastpack runs here, and anything may be wrong elsewhere
        return {**row, "left_out": f"the stock model can't be trained so: {type(error).__name__}: {str(error)[:200]}"}
    patched, _ = run(case, work, patch=True)
    found = problems(
        patched,
        stock,
        beta=beta,
        starts_at_ln_2=case.starts_at_ln_2,
        steepness=case.steepness,
        has_log_probs=case.trainer in ("dpo", "kto"),
    )
    return {**row, "left_out": None, "off": differences(patched, stock, beta), "problems": found}


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
    figures = [name for figure in FIGURES for name in (figure, OF_FLOAT32)[: 1 + noise]]
    made = headed("trainer", "variant", *figures, "", title=title, right=figures)
    for row in rows:
        measured = [row["off"] or {}, row["noise"] or {}][: 1 + noise]
        values = [off.get(name, math.nan) for name in FIGURES for off in measured]
        shown = ["" if math.isnan(value) else f"{value:.0e}" for value in values]
        said = "FAILED" if row["problems"] else "equal" if row["off"] else "left out"
        made.add_row(row["trainer"], row["variant"], *shown, said, style="bold red" if row["problems"] else None)
    return made


def _quiet() -> None:
    datasets.disable_progress_bars()
    datasets.disable_caching()  # or a precomputed reference of the stock run would be read by the patched one
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
