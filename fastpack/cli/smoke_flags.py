"""The flags of ``fastpack smoke``, what of them is refused before anything runs, and the families meant."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fastpack.attention_dispatch import BACKENDS, AttentionShape, Visibility
from fastpack.attention_dispatch import choose as choose_backend
from fastpack.cli import UsageError, require_file
from fastpack.cli.flags import POSITIVE
from fastpack.errors import BackendUnavailableError
from fastpack.exactness import tiny
from fastpack.exactness.special import HEADS, KV_HEADS, NOT_BUILT, TRAITS
from fastpack.families.refused import REFUSED
from fastpack.families.registry import FAMILIES
from fastpack.families.spec import RUNGS
from fastpack.testing.most_used import MOST_USED
from fastpack.testing.setting import Setting
from fastpack.testing.worker import EACH, MODES, USUAL

WHAT = """Build many architectures tiny, prove them exact patched, and train three steps.

Modes: exact (every kind of input against each sequence alone), verify (fastpack.verify alone, which bounds each model
by its own rounding), and with TRL plain, lora and packed."""
FLAGS: dict[str, dict[str, Any]] = {
    "families": {"nargs": "*", "metavar": "FAMILY", "help": "default: those that people use most"},
    "--all": {"action": "store_true", "help": "every family of transformers' causal-LM mapping"},
    "--tier": {"choices": RUNGS, "help": "with --all: only the families of this tier"},
    "--modes": {"nargs": "+", "choices": MODES, "default": list(USUAL)},
    "--backends": {
        "choices": (EACH, "auto", *BACKENDS),
        "default": EACH,
        "help": "every one that can serve, or one",
    },
    "--jobs": {
        "type": POSITIVE,
        "default": min(os.cpu_count() or 1, 8),
        "help": "processes at a time (default: one a core, 8 at most)",
    },
    "--timeout": {"type": float, "default": 300.0, "help": "seconds for a family"},
    "--device": {"choices": ("cpu", "cuda"), "help": "default: cuda where there is one"},
    "--dtype": {"choices": ("float32", "bfloat16", "float16"), "help": "default: bfloat16 on a GPU"},
    "--json": {"type": Path, "help": "write the run here; fastpack families reads it"},
}


def check(given: argparse.Namespace) -> None:
    """Raise what every family's process would stumble over, and where a flag would do nothing.

    Raises:
        UsageError: it names the flag, what came and what may.
    """
    require_file("--json", given.json)
    if given.families and given.all:
        raise UsageError(f"--all is every family, and {', '.join(given.families)} would be some: leave either out.")
    if given.tier is not None and not given.all:
        raise UsageError(f"--tier {given.tier} chooses among all families: pass --all with it.")
    for name in given.families:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise UsageError(f"{name!r} is no name of a family: pass a model_type, like llama; --all is every one.")
    if not (given.timeout > 0 and math.isfinite(given.timeout)):
        raise UsageError(f"--timeout {given.timeout:g}: pass the seconds that a family may take, more than 0.")
    if given.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device here; pass --device cpu.")
    _check_backend(given.backends, Setting.of_this_machine(given.device, given.dtype))


def _check_backend(name: str, setting: Setting) -> None:
    if name in (EACH, "auto"):
        return
    device, dtype, size = torch.device(setting.device), getattr(torch, setting.dtype), setting.head_dim
    try:
        choose_backend(AttentionShape(device, dtype, HEADS, KV_HEADS, size, size, Visibility()), name)
    except BackendUnavailableError as error:
        raise UsageError(f"--backends {name}: {error}") from error


def choose(named: Sequence[str], *, everyone: bool, tier: str | None = None) -> tuple[Sequence[str], Sequence[str]]:
    """Return those named, or everyone in transformers' causal-LM mapping (of one tier), or those that people use most;
    and those of them that this release of transformers does not have.

    A name that nobody knows is run, and fails.
    """
    here = tiny.model_types()
    known = {*FAMILIES, *REFUSED, *MOST_USED, *NOT_BUILT, *TRAITS}
    if named:
        absent = [name for name in named if name not in here and name in known]
        return [name for name in named if name not in absent], absent
    if tier is not None:
        return [name for name in here if name in FAMILIES and FAMILIES[name].rung == tier], ()
    if everyone:
        return here, sorted(known - {*here})
    return [name for name in here if name in MOST_USED], [name for name in MOST_USED if name not in here]
