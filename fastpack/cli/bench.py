"""``fastpack bench``: its flags, and what they ask for; see :mod:`fastpack.bench`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from fastpack.bench.flops import head_dim
from fastpack.bench.lengths import make_lengths
from fastpack.bench.models import dtype_of
from fastpack.bench.same_losses import NOT_COMPARED
from fastpack.bench.settings import Settings
from fastpack.bench.shapes import SHAPES, make_config
from fastpack.bench.variants import CONTESTANTS, TRAINERS
from fastpack.cli import UsageError, require, require_file, require_one_process, require_picture, require_trl_on_cpu
from fastpack.patching.options import OFFLOADS, PatchOptions

OF_OPS = ("ops", "tokens", "lengths", "json")
"""Flags that ``--ops`` takes."""


def main(arguments: Sequence[str]) -> int:
    """Parse the flags and run the benchmark; see :func:`run`."""
    parser = make_parser()
    given = parser.parse_args(arguments)
    require_one_process("bench")
    check_together(given, parser)
    if given.plot:
        require("bench --plot", "matplotlib")
    if given.ops is None and given.loop == "trl":
        require("bench", "trl", "datasets")
        if not torch.cuda.is_available():
            require_trl_on_cpu("bench")
    if given.mode == "qlora":
        require("bench --mode qlora", "bitsandbytes")
    return run(given)


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog="fastpack bench",
        description="Train the same model in several ways, each in a process of its own, and compare.",
        epilog="Exit codes: 1 where losses disagree, or an op of ours is not exact enough; 2 where a flag is to be "
        f"mended; {NOT_COMPARED} where several were to be compared and fewer than two ran, or no op was compared.",
    )
    parser.add_argument("--shape", choices=SHAPES, help="default: llama8b on a GPU, tiny on a CPU")
    parser.add_argument("--mode", choices=("full", "lora", "qlora"), default="full")
    parser.add_argument("--trainer", choices=TRAINERS, default="sft", help="TRL's SFTTrainer, or its DPOTrainer")
    parser.add_argument("--rows", type=_positive, help="rows of a batch, of dpo pairs (default: 16, of dpo 4)")
    parser.add_argument("--steps", type=_positive, default=20, help="timed steps")
    parser.add_argument("--warmup", type=_not_negative, help="steps before those (default: 3, with --graphs 5)")
    parser.add_argument(
        "--lengths",
        "--data",
        type=_not_empty,
        help="'alpaca', a number of tokens, or a JSON file of lengths; of dpo 'chat', a number, or a JSON file of "
        "[prompt, chosen, rejected], all in tokens; of --ops over sequences",
    )
    parser.add_argument("--max-length", type=_positive, help="truncate rows to so many tokens")
    parser.add_argument(
        "--loop",
        choices=("trl", "plain"),
        default="trl",
        help="TRL's trainer, or a plain loop, which reads the gradients' norms in steps of --warmup alone",
    )
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing, for everybody")
    parser.add_argument(
        "--trainer-waits",
        action="store_true",
        help="leave logging_nan_inf_filter and accelerator_config at their defaults, with which transformers' trainer "
        "waits for the device in every step",
    )
    what = "; ".join(f"{name}: {contestant.what}" for name, contestant in CONTESTANTS.items())
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, metavar="NAME", help=what)
    ours = parser.add_argument_group("how fastpack patches")
    ours.add_argument("--attention", default="auto", help="attention backend")
    ours.add_argument("--kernels", choices=("auto", "torch", "triton"), default="auto")
    ours.add_argument("--graphs", choices=("auto",), nargs="?", const="auto", help="CUDA graphs")
    ours.add_argument("--offload", choices=OFFLOADS, help="with --checkpointing: what waits in host memory")
    ours.add_argument("--loss", choices=("fused",), nargs="?", const="fused", help="the loss of --loop plain")
    found = parser.add_argument_group("what is written")
    found.add_argument("--json", type=Path, help="write the figures here")
    found.add_argument("--plot", type=Path, help="draw those of training here (PNG, SVG or PDF)")
    ops = parser.add_argument_group("instead of training, each op by itself")
    ops.add_argument(
        "--ops", nargs="*", metavar="NAME", help="against plain torch and Liger, over a sweep of T; default: all"
    )
    ops.add_argument("--tokens", type=_positive, nargs="+", help="the sweep")
    return parser


def check_together(given: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Raise where a flag is not at its default and nobody would read it.

    Raises:
        UsageError: training's flags with ``--ops``, or the sweep's without.
    """
    if given.ops is None:
        if given.tokens is not None:
            raise UsageError("--tokens is the sweep of --ops: pass that too, or set rows and lengths of training.")
        return
    changed = [name for name, value in vars(given).items() if value != parser.get_default(name)]
    if others := [f"--{name.replace('_', '-')}" for name in changed if name not in OF_OPS]:
        raise UsageError(f"--ops measures ops by themselves, and trains nothing: leave out {', '.join(others)}.")


def make_settings(given: argparse.Namespace, *, on_gpu: bool) -> Settings:
    """Return what the flags ask for.

    Raises:
        UsageError: what would do nothing here: a loss where TRL's trainer has its own, a trainer's waits where there
            is none, offloading of what is not checkpointed, graphs and offloading on a CPU; a plain loop of DPO.
    """
    dpo, plain = given.trainer == "dpo", given.loop == "plain"
    for wrong, why in (
        (dpo and plain, "--loop plain is for --trainer sft: TRL's DPOTrainer alone has the loss."),
        (
            given.loss and not plain,
            "--loss is for --loop plain: TRL's trainers bring a loss of their own; in 'fastpack fused loss' the "
            "SFTTrainer was given ours.",
        ),
        (given.trainer_waits and plain, "--trainer-waits is for --loop trl: a plain loop has no trainer."),
        (
            given.offload and not given.checkpointing,
            "--offload is for what is checkpointed: pass --checkpointing too.",
        ),
        (given.graphs and not on_gpu, "--graphs needs a GPU. Leave --graphs out."),
        (given.offload and not on_gpu, "--offload needs a GPU. Leave --offload out."),
    ):
        if wrong:
            raise UsageError(why)
    return Settings(
        contestant="",
        trainer=given.trainer,
        shape=given.shape or ("llama8b" if on_gpu else "tiny"),
        mode=given.mode,
        rows=given.rows or (4 if dpo else 16),
        steps=given.steps,
        warmup=given.warmup if given.warmup is not None else 5 if given.graphs else 3,
        lengths=given.lengths or ("chat" if dpo else "alpaca"),
        max_length=given.max_length,
        checkpointing=given.checkpointing,
        loop=given.loop,
        attention=given.attention,
        kernels=given.kernels,
        graphs=given.graphs,
        loss=given.loss,
        offload=given.offload,
        trainer_waits=given.trainer_waits,
    )


def check(settings: Settings, *, on_gpu: bool) -> None:
    """Raise what contestants would stumble over, each in a process of its own.

    Raises:
        UsageError: no such lengths, or rows with nothing to predict.
        KernelUnavailableError: kernels that nothing here can run.
        BackendUnavailableError: no such attention backend, or one that can't serve here.
    """
    from fastpack.attention_dispatch import AttentionShape
    from fastpack.attention_dispatch import choose as choose_backend

    PatchOptions(settings.attention, settings.kernels, settings.graphs, settings.loss, settings.offload).check()
    config = make_config(settings.shape)
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, head_dim(config)
    device = torch.device("cuda" if on_gpu else "cpu")
    shape = AttentionShape(device, dtype_of(settings, device), heads, kv_heads, size, size)
    choose_backend(shape, settings.attention)
    try:
        settings.timed_batches()
        rows = [] if settings.trainer == "dpo" else settings.row_lengths()
    except (OSError, ValueError) as error:
        raise UsageError(f"--lengths {settings.lengths}: {error}") from error
    if any(max(rows[at : at + settings.rows]) < 2 for at in range(0, len(rows), settings.rows)):
        flag = "--max-length 1" if settings.max_length == 1 else f"--lengths {settings.lengths}"
        raise UsageError(
            f"{flag}: a batch of {settings.rows} would have rows of one token alone, with nothing to predict; pass "
            "2 or more."
        )


def choose(
    only: list[str] | None, *, on_gpu: bool, trainer: str = "sft", graphs: str | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return who takes part, and who of this trainer's ways does not and why.

    Raises:
        UsageError: one that was asked for by name can't.
    """
    ways = {name: contestant for name, contestant in CONTESTANTS.items() if trainer in contestant.trainers}
    reasons = {name: contestant.unavailable(on_gpu, graphs) for name, contestant in ways.items()}
    for name in only or ():
        if name not in ways:
            raise UsageError(f"--only {name!r}: not a way of --trainer {trainer}, whose are {', '.join(ways)}.")
        if reasons[name] is not None:
            raise UsageError(f"--only {name!r}: it {reasons[name]}.")
    if only:
        return only, {}
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    return [name for name in ways if name not in left_out], left_out


def run(given: argparse.Namespace) -> int:
    """Do what the flags ask for.

    Returns:
        1 where losses disagree, or an op of ours is not exact enough; :data:`NOT_COMPARED` where several contestants
        were to run and fewer than two did, or no op was compared, so that nothing says whether they agree; else 0.
    """
    on_gpu = torch.cuda.is_available()
    require_picture("--plot", given.plot)
    require_file("--json", given.json)
    if given.ops is not None:
        return _run_ops(given)
    from fastpack.bench.runner import run_all
    from fastpack.bench.table import print_outcome

    settings = make_settings(given, on_gpu=on_gpu)
    names, left_out = choose(given.only, on_gpu=on_gpu, trainer=given.trainer, graphs=given.graphs)
    check(settings, on_gpu=on_gpu)
    outcome = run_all(settings, names, left_out=left_out, on_gpu=on_gpu)
    print_outcome(outcome)
    if given.json:
        given.json.write_text(json.dumps(outcome.to_dict(), indent=1))
    if given.plot and outcome.verdict.agree and outcome.ran:
        from fastpack.bench.plot import save_plot

        save_plot(outcome, given.plot)
    if not outcome.verdict.agree:
        return 1
    return 0 if outcome.verdict.compared or len(names) == 1 else NOT_COMPARED


def _run_ops(given: argparse.Namespace) -> int:
    """Measure these ops, or all.

    Raises:
        UsageError: there is no op of such a name, there are no such lengths, or nothing that is measured has any.
    """
    from fastpack.bench.ops.runner import all_cases, run_ops

    cases = all_cases()
    for name in given.ops:
        if name not in cases:
            raise UsageError(f"--ops {name!r}: no such op. Choose from: {', '.join(cases)}.")
    chosen = [cases[name] for name in given.ops or cases]
    if given.lengths is not None:
        if not any(case.packed for case in chosen):
            of_packed = ", ".join(name for name, case in cases.items() if case.packed)
            raise UsageError(f"--lengths is for ops over packed sequences, none of which is asked for: {of_packed}.")
        try:
            make_lengths(1, kind=given.lengths)
        except (OSError, ValueError) as error:
            raise UsageError(f"--lengths {given.lengths}: {error}") from error
    outcome = run_ops(chosen, given.tokens, given.lengths or "alpaca")
    if given.json:
        given.json.write_text(json.dumps(outcome.to_dict(), indent=1))
    if outcome.inexact:
        return 1
    return 0 if outcome.compared else NOT_COMPARED


def _not_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("it is empty; pass a word, a number or a file, or leave it out")
    return text


def _positive(text: str) -> int:
    return _at_least(1, text)


def _not_negative(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}")
    return number
