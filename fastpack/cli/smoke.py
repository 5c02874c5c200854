"""``fastpack smoke``: build tiny models of many architectures, prove and train each, and print a table."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fastpack.attention_dispatch import BACKENDS, AttentionShape, Visibility
from fastpack.attention_dispatch import choose as choose_backend
from fastpack.cli import UsageError, require_file
from fastpack.cli.flags import POSITIVE, make_parser
from fastpack.errors import BackendUnavailableError
from fastpack.exactness import tiny
from fastpack.exactness.family_settings import HEADS, KV_HEADS, NOT_BUILT, TRAITS
from fastpack.exactness.image_settings import NOT_BUILT as IMAGES_NOT_BUILT
from fastpack.exactness.image_text import image_text_types
from fastpack.families.refused import REFUSED
from fastpack.families.registry import FAMILIES, family_named
from fastpack.families.spec import TIERS
from fastpack.testing.processes import run
from fastpack.testing.record import Record, Setting
from fastpack.testing.worker import EACH, MODES, USUAL, Task
from fastpack.utils.console import counted, headed, room_for, without_empty

_MOST_USED = """
    llama mistral mixtral ministral qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe_text
    gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4 gemma4_text phi phi3 phimoe gpt2 gpt_neo gpt_neox gptj
    gpt_bigcode gpt_oss opt bloom falcon mpt mamba mamba2 falcon_mamba falcon_h1 jamba bamba zamba2 granite granitemoe
    granitemoehybrid nemotron nemotron_h cohere cohere2 olmo olmo2 olmo3 olmo_hybrid olmoe stablelm starcoder2
    deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 glm glm4 glm4_moe glm_moe_dsa ernie4_5 exaone4 hunyuan_v1_dense
    seed_oss smollm3 lfm2 lfm2_moe recurrent_gemma rwkv xlstm codegen persimmon dbrx biogpt minimax kimi_linear
    llama4_text bert
"""

MOST_USED: tuple[str, ...] = tuple(_MOST_USED.split())
"""The default families of the causal-LM mapping: those that are fine-tuned most, and some more."""

MOST_USED_ON_IMAGES: tuple[str, ...] = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "internvl"),
    *("llava", "mistral3", "idefics3", "smolvlm", "lfm2_vl", "paligemma"),
)
"""The default families of the image-text mapping, beside those of :data:`MOST_USED` that are in it."""

WHAT = """Build tiny models of many architectures, patch them, prove them exact, and train them for three steps.

Modes: exact (compare every kind of input with each sequence alone), images (the same on rows with images, for the names
of transformers' image-text mapping), experts (the same with LoRA on every stack of experts), verify (only
fastpack.verify, whose bound is the model's own rounding), and training with TRL: plain, lora and packed."""
FLAGS: dict[str, dict[str, Any]] = {
    "families": {"nargs": "*", "metavar": "FAMILY", "help": "default: the families that are used most"},
    "--all": {"action": "store_true", "help": "every family of transformers' causal-LM and image-text mappings"},
    "--tier": {"choices": TIERS, "help": "with --all: only the families of this tier"},
    "--modes": {"nargs": "+", "choices": MODES, "default": list(USUAL)},
    "--backends": {
        "choices": (EACH, "auto", *BACKENDS),
        "default": EACH,
        "help": "each: every backend that can serve; or the name of one",
    },
    "--jobs": {
        "type": POSITIVE,
        "default": min(os.cpu_count() or 1, 8),
        "help": "processes at a time (default: one a core, 8 at most)",
    },
    "--timeout": {"type": float, "default": 300.0, "help": "seconds for a family"},
    "--device": {"choices": ("cpu", "cuda"), "help": "default: cuda if there is one"},
    "--dtype": {"choices": ("float32", "bfloat16", "float16"), "help": "default: bfloat16 on a GPU"},
    "--json": {"type": Path, "help": "write the results here, for fastpack families"},
}


def main(arguments: Sequence[str]) -> int:
    """Run the families, print the results, and return 1 if any row failed, else 0.

    Raises:
        UsageError: flags don't go together, or ask for what this machine lacks.
    """
    args = make_parser("smoke", WHAT, FLAGS).parse_args(arguments)
    check(args)
    names, absent = choose(args.families, everyone=args.all, tier=args.tier)
    setting = Setting.of_this_machine(args.device, args.dtype)
    start = time.monotonic()
    results = run(names, Task(tuple(args.modes), args.backends, setting), jobs=args.jobs, timeout=args.timeout)
    rows = list(chain.from_iterable(track(results, "", total=len(names), transient=True)))
    record = Record.of_now(setting.named(), time.monotonic() - start, absent, rows)
    console = Console(width=room_for(150))
    console.print(heading(record), highlight=False)
    console.print(without_empty(table(record)))
    for row in rows:
        if row.refused is not None:
            print(f"{row.family}: refused: {row.refused}")
        if row.left_out is not None:
            print(f"{row.family} ({row.mode}): left out: {row.left_out}")
    if absent:
        print(f"not in transformers {record.versions['transformers']}: {', '.join(absent)}")
    failed = [row for row in rows if row.problem is not None]
    for row in failed:
        print(f"{row.family} ({row.mode}, {row.backend or 'no backend'}): {row.problem}", file=sys.stderr)
    if args.json:
        args.json.write_text(json.dumps(record.to_dict(), indent=1))
    return 1 if failed else 0


VERDICTS = ("exact", "refused", "left out", "FAILED")
NUMBERS = ("off by", "allowed", "losses off by", "x padded")


def heading(record: Record) -> str:
    """Return the counts of the verdicts, and the machine and versions of the run."""
    rows = record.rows
    families = len({row.family for row in rows})
    of = "1 family" if families == 1 else f"{families} families"
    counts = [f"{sum(row.verdict == verdict for row in rows)} {verdict}" for verdict in VERDICTS]
    return f"{counted(len(rows), 'run')} of {of} in {record.seconds:.0f} s: {', '.join(counts)}\n{record.made_with}"


def table(record: Record) -> Table:
    """Return a table with a line for each family, mode and backend."""
    summary = headed("family", "mode", "tier", "attention", "dtype", *NUMBERS, "", right=NUMBERS)
    before = ""
    for row in record.rows:
        cells = [f"{value:.1e}" if value is not None else "" for value in (row.error, row.bound, row.loss)]
        speed = f"{row.speed:.1f}" if row.speed is not None else ""
        name = row.family if row.family != before else ""
        style = {"FAILED": "bold red", "refused": "dim", "left out": "dim"}.get(row.verdict)
        summary.add_row(name, row.mode, row.tier, row.backend, row.dtype, *cells, speed, row.verdict, style=style)
        before = row.family
    return summary


def check(args: argparse.Namespace) -> None:
    """Raise if every family's process would fail, or if a flag would have no effect.

    Raises:
        UsageError: the message has the flag, its value, and what is allowed.
    """
    require_file("--json", args.json)
    if args.families and args.all:
        raise UsageError(f"--all runs every family: leave out either --all or {', '.join(args.families)}.")
    if args.tier is not None and not args.all:
        raise UsageError(f"--tier {args.tier} chooses among all families: pass --all with it.")
    for name in args.families:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise UsageError(f"{name!r} is not the name of a family: pass a model_type, like llama, or --all.")
    if not (args.timeout > 0 and math.isfinite(args.timeout)):
        raise UsageError(f"--timeout {args.timeout:g}: pass the seconds that a family may take, more than 0.")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device here; pass --device cpu.")
    _check_backend(args.backends, Setting.of_this_machine(args.device, args.dtype))


def _check_backend(name: str, setting: Setting) -> None:
    if name in (EACH, "auto"):
        return
    device, dtype, size = torch.device(setting.device), getattr(torch, setting.dtype), setting.head_dim
    try:
        choose_backend(AttentionShape(device, dtype, HEADS, KV_HEADS, size, size, Visibility()), name)
    except BackendUnavailableError as error:
        raise UsageError(f"--backends {name}: {error}") from error


def choose(named: Sequence[str], *, everyone: bool, tier: str | None = None) -> tuple[Sequence[str], Sequence[str]]:
    """Return the families to run, and the requested families that this release of transformers does not have.

    The families to run are the named ones, or all of transformers' causal-LM and image-text mappings (or those of one
    tier), or :data:`MOST_USED`. An unknown name is run, and fails.
    """
    here = list(dict.fromkeys([*tiny.model_types(), *image_text_types()]))
    most_used = (*MOST_USED, *MOST_USED_ON_IMAGES)
    listed = {*FAMILIES, *REFUSED, *most_used, *NOT_BUILT, *IMAGES_NOT_BUILT, *TRAITS}
    if named:
        absent = [name for name in named if name not in here and name in listed]
        return [name for name in named if name not in absent], absent
    if tier is not None:
        rows = {name: family_named(name) for name in here if name not in {*NOT_BUILT, *IMAGES_NOT_BUILT, *REFUSED}}
        return [name for name, row in rows.items() if row is not None and row.tier == tier], ()
    if everyone:
        return here, sorted(listed - {*here})
    return [name for name in here if name in most_used], [name for name in most_used if name not in here]
