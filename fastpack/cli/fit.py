"""``fastpack fit MODEL``: show the longest batches that cards hold when a model trains with fastpack."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from transformers import AutoConfig

from fastpack.bench.shapes import SHAPES, make_config
from fastpack.cli import UsageError, loading_errors, require_there
from fastpack.cli.flags import POSITIVE, above_zero, at_least, make_parser
from fastpack.errors import DoesNotFitError
from fastpack.memory.fit import CARDS, GIB, RESERVE, Fit, fit_card
from fastpack.memory.settings import ATTENTIONS, LOSSES, MODES, TrainingSettings
from fastpack.memory.sizes import read_sizes
from fastpack.utils.console import WIDTH, headed, room_for

WHAT = f"""Show the longest single sequence, and the most tokens in short ones, that a card holds when a model trains \
with fastpack. Only the model's config is read.

MODEL is a folder with a config.json, a name on the hub, or one of: {", ".join(SHAPES)}. Memory is what torch's
allocator gives to tensors, at the peak of a step; fragments that it can't use come on top, fewer with
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. Exit code 2 if the card of --vram is too small."""
FLAGS: dict[str, dict[str, Any]] = {
    "model": {"metavar": "MODEL", "help": "see below"},
    "--vram": {"type": above_zero, "metavar": "GIB", "help": "the memory of a card, for example 24; default: a table"},
    "--mode": {"choices": MODES, "default": "qlora", "help": "default: qlora; LoRA is on all linear layers"},
    "--rank": {"type": POSITIVE, "default": TrainingSettings.rank, "help": "LoRA's rank (default: %(default)s)"},
    "--checkpointing": {"action": argparse.BooleanOptionalAction, "default": True, "help": "default: with it"},
    "--offload": {"choices": ("none", "checkpoints"), "help": "default: checkpoints, if there is checkpointing"},
    "--loss": {"choices": LOSSES, "default": "fused", "help": "fastpack's (the default), or that of TRL's trainers"},
    "--attention": {
        "choices": ATTENTIONS,
        "default": "auto",
        "help": "auto (the default) for the fastest kernel, triton_packed for the one that needs the least memory",
    },
    "--accumulation": {"action": "store_true", "help": "several micro-batches are a step, so that gradients wait"},
    "--length": {"type": at_least(2), "default": 512, "help": "tokens of a short sequence (default: %(default)s)"},
    "--reserve": {
        "type": float,
        "default": RESERVE,
        "metavar": "GIB",
        "help": "what the CUDA context and the allocator's fragments take (default: %(default)s)",
    },
    "--explain": {"action": "store_true", "help": "with --vram: show every term of the peak"},
    "--json": {"action": "store_true", "help": "print the same as JSON"},
}


def main(arguments: Sequence[str]) -> int:
    """Print what fits.

    Raises:
        UsageError: the model's config can't be loaded, or flags don't go together.
        UnsupportedModelError: the memory of the model's parts was not worked out.
        DoesNotFitError: the card of ``--vram`` is too small.
    """
    args = make_parser("fit", WHAT, FLAGS).parse_args(arguments)
    if args.explain and args.vram is None:
        raise UsageError("--explain shows the peak on one card: pass --vram GIB too.")
    settings = _settings(args)
    settings.check()
    sizes = read_sizes(_config(args.model))
    found: dict[float, Fit | None] = {}
    for card in sorted({*CARDS, *([] if args.vram is None else [args.vram])}):
        try:
            found[card] = fit_card(sizes, settings, card, length=args.length, reserve=args.reserve)
        except DoesNotFitError:
            if card == args.vram:
                raise
            found[card] = None
    chosen = None if args.vram is None else found[args.vram]
    if args.json:
        cards = {f"{card:g}": None if fit is None else fit.to_dict() for card, fit in found.items()}
        print(json.dumps({"model": sizes.name, "parameters": sizes.parameters, "cards": cards}, indent=2))
        return 0
    console = Console(width=room_for(WIDTH), highlight=False)
    console.print(
        f"{args.model}: {sizes.name}, {sizes.parameters / 1e9:.2f} billion parameters; {_described(settings)}"
    )
    _print_cards(console, found, args)
    if chosen is not None and args.explain:
        _print_terms(console, chosen)
    _print_settings(console, settings)
    return 0


def _settings(args: argparse.Namespace) -> TrainingSettings:
    offload: Any = args.offload or ("checkpoints" if args.checkpointing else "none")
    return TrainingSettings(
        mode=args.mode,
        rank=args.rank,
        checkpointing=args.checkpointing,
        offload=None if offload == "none" else offload,
        loss=args.loss,
        accumulation=args.accumulation,
        attention=args.attention,
    )


def _config(name: str) -> Any:
    """Return the config of a bench shape, or the one in a folder or on the hub."""
    if name in SHAPES:
        return make_config(name)
    require_there(name)
    try:
        return AutoConfig.from_pretrained(name)
    except loading_errors() as error:
        raise UsageError(
            f"{name}: no config there ({error}). Pass a folder with a config.json, a name on the hub, or one of: "
            f"{', '.join(SHAPES)}."
        ) from error


def _described(settings: TrainingSettings) -> str:
    rank = "" if settings.mode == "full" else f" of rank {settings.rank}"
    checkpointing = "checkpointing" if settings.checkpointing else "no checkpointing"
    return f"{settings.mode}{rank}, {checkpointing}, offload {settings.offload or 'none'}, loss {settings.loss}"


def _print_cards(console: Console, found: dict[float, Fit | None], args: argparse.Namespace) -> None:
    """Print a table of cards; the card of ``--vram`` is bold."""
    columns = ("card", "one sequence", f"sequences of {args.length:,}", "in tensors", "peak", "host memory")
    table = headed(*columns, title="The most tokens of a batch", right=columns)
    for card, fit in found.items():
        cells = ["too small", "", "", "", ""]
        if fit is not None:
            cells = [f"{fit.sequence:,}", f"{fit.tokens:,}", f"{fit.peak:.1f} GiB", fit.moment.name]
            cells += [f"{fit.host:.0f} GiB" if fit.host else ""]
        table.add_row(f"{card:g} GB", *cells, style="bold" if card == args.vram else "")
    console.print(table)


def _print_terms(console: Console, fit: Fit) -> None:
    title = f"{fit.sequence:,} tokens on {fit.card:g} GB, at the peak: {fit.moment.name}"
    table = headed("what", "formula", "bytes a token", "GiB", title=title, right=("bytes a token", "GiB"))
    for term in fit.moment.terms:
        per_token = f"{term.per_token:,.0f}" if term.per_token else ""
        table.add_row(term.name, term.formula, per_token, f"{term.of(fit.sequence) / GIB:.3f}")
    table.add_section()
    table.add_row("sum", "", f"{sum(term.per_token for term in fit.moment.terms):,.0f}", f"{fit.peak:.3f}")
    console.print(table)
    console.print(
        "H hidden size, I inside the MLP, Q query heads, K key heads, N number of heads, R table width, r rank, V "
        "vocabulary, C rows of a chunk of logits, M tokens of a tile; b bytes of an element",
        style="dim",
    )


def _print_settings(console: Console, settings: TrainingSettings) -> None:
    options = [] if settings.attention == "auto" else [f'attention="{settings.attention}"']
    options += [] if settings.offload is None else [f'offload="{settings.offload}"']
    options += ['loss="fused"'] if settings.loss == "fused" else []
    console.print(f"reached with: fastpack.patch(trainer, {', '.join(options)})", soft_wrap=True)
    console.print(
        f"trainer: gradient_checkpointing={settings.checkpointing}, optim='adamw_torch_fused'", soft_wrap=True
    )
    console.print("environment: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", soft_wrap=True)
