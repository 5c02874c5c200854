"""The flags of ``fastpack bench``, and what they ask for."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fastpack.bench import power
from fastpack.bench.contestants import CONTESTANTS, TRAINERS
from fastpack.bench.flops import head_dim
from fastpack.bench.gate import NOT_COMPARED
from fastpack.bench.models import dtype_of
from fastpack.bench.settings import Settings
from fastpack.bench.shapes import SHAPES, make_config
from fastpack.commands import UsageError, require_file, require_picture
from fastpack.patching.options import OFFLOADS, PatchOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.epilog = (
        "Exit codes: 1 where losses disagree, or an op of ours is not exact enough; 2 where a flag is to be mended; "
        f"{NOT_COMPARED} where several were to be compared and fewer than two ran, or no op was compared."
    )
    parser.add_argument("--shape", choices=SHAPES, default=None, help="default: llama8b on a GPU, tiny on a CPU")
    parser.add_argument("--mode", choices=("full", "lora", "qlora"), default="full")
    parser.add_argument("--trainer", choices=TRAINERS, default="sft", help="TRL's SFTTrainer, or its DPOTrainer")
    parser.add_argument("--rows", type=_positive, help="rows of a batch, of dpo pairs (default: 16, of dpo 4)")
    parser.add_argument("--steps", type=_positive, default=20, help="timed steps")
    parser.add_argument("--warmup", type=_not_negative, help="steps before those (default: 3, with --graphs 5)")
    parser.add_argument(
        "--lengths",
        "--data",
        type=_not_empty,
        help="'alpaca', a number of tokens, or a JSON file of lengths; of dpo 'chat', a number, or a file of "
        "[prompt, chosen, rejected], which python -m fastpack.bench.pair_lengths makes; of --ops over sequences",
    )
    parser.add_argument("--max-length", type=_positive, help="truncate rows to so many tokens")
    parser.add_argument("--loop", choices=("trl", "plain"), default="trl", help="TRL's trainer, or a plain loop")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing, for everybody")
    what = "; ".join(f"{name}: {contestant.what}" for name, contestant in CONTESTANTS.items())
    parser.add_argument(
        "--trainer-waits",
        action="store_true",
        help="leave logging_nan_inf_filter and accelerator_config at their defaults, with which transformers' trainer "
        "waits for the device in every step",
    )
    parser.add_argument(
        "--power", action="store_true", help="ask nvidia-smi ten times a second what the GPU draws, and for its clock"
    )
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=None, metavar="NAME", help=what)
    ours = parser.add_argument_group("how fastpack patches")
    ours.add_argument("--attention", default="auto", help="attention backend")
    ours.add_argument("--kernels", choices=("auto", "torch", "triton"), default="auto")
    ours.add_argument("--graphs", choices=("auto",), nargs="?", const="auto", help="CUDA graphs")
    ours.add_argument("--offload", choices=OFFLOADS, help="with --checkpointing: what waits in host memory")
    ours.add_argument("--loss", choices=("fused",), nargs="?", const="fused", help="the loss of --loop plain")
    found = parser.add_argument_group("what is written")
    found.add_argument("--json", type=Path, help="write the figures here")
    found.add_argument("--plot", type=Path, help="draw them here (PNG, SVG or PDF)")
    ops = parser.add_argument_group("instead of training, each op by itself")
    ops.add_argument(
        "--ops", nargs="*", metavar="NAME", help="against plain torch and Liger, over a sweep of T; default: all"
    )
    ops.add_argument("--tokens", type=_positive, nargs="+", help="the sweep")


OF_OPS = ("ops", "tokens", "lengths", "json", "plot")
"""Flags that ``--ops`` takes."""


def check_together(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Raise where a flag is not at its default and nobody would read it.

    Raises:
        UsageError: training's flags with ``--ops``, or the sweep's without.
    """
    if arguments.ops is None:
        if arguments.tokens is not None:
            raise UsageError("--tokens is the sweep of --ops: pass that too, or set rows and lengths of training.")
        return
    given = [name for name, value in vars(arguments).items() if value != parser.get_default(name)]
    if others := [f"--{name.replace('_', '-')}" for name in given if name not in OF_OPS]:
        raise UsageError(f"--ops measures ops by themselves, and trains nothing: leave out {', '.join(others)}.")


def make_settings(arguments: argparse.Namespace, *, on_gpu: bool) -> Settings:
    """What the flags ask for.

    Raises:
        UsageError: what would do nothing here: a loss where TRL's trainer has its own, a trainer's waits where there
            is none, offloading of what is not checkpointed, graphs and offloading on a CPU; a plain loop of DPO; power
            where it can't be asked for.
    """
    dpo = arguments.trainer == "dpo"
    if dpo and arguments.loop == "plain":
        raise UsageError("--loop plain is for --trainer sft: TRL's DPOTrainer alone has the loss.")
    if arguments.loss and arguments.loop != "plain":
        raise UsageError(
            "--loss is for --loop plain: TRL's trainers bring a loss of their own; in 'fastpack fused loss' the "
            "SFTTrainer was given ours."
        )
    if arguments.trainer_waits and arguments.loop == "plain":
        raise UsageError("--trainer-waits is for --loop trl: a plain loop has no trainer.")
    if arguments.offload and not arguments.checkpointing:
        raise UsageError("--offload is for what is checkpointed: pass --checkpointing too.")
    for flag, value in (("--graphs", arguments.graphs), ("--offload", arguments.offload)):
        if value and not on_gpu:
            raise UsageError(f"{flag} needs a GPU. Leave {flag} out.")
    if arguments.power and (reason := "--power needs a GPU" if not on_gpu else power.unavailable()):
        raise UsageError(f"{reason}. Leave --power out.")
    warmup = arguments.warmup
    if warmup is None:
        warmup = 5 if arguments.graphs else 3
    return Settings(
        contestant="",
        trainer=arguments.trainer,
        shape=arguments.shape or ("llama8b" if on_gpu else "tiny"),
        mode=arguments.mode,
        rows=arguments.rows or (4 if dpo else 16),
        steps=arguments.steps,
        warmup=warmup,
        lengths=arguments.lengths or ("chat" if dpo else "alpaca"),
        max_length=arguments.max_length,
        checkpointing=arguments.checkpointing,
        loop=arguments.loop,
        attention=arguments.attention,
        kernels=arguments.kernels,
        graphs=arguments.graphs,
        loss=arguments.loss,
        offload=arguments.offload,
        trainer_waits=arguments.trainer_waits,
        power=arguments.power,
    )


def check(settings: Settings, *, on_gpu: bool) -> None:
    """Raise what contestants would stumble over, each in a process of its own.

    Raises:
        UsageError: no such lengths, or rows with nothing to predict.
        KernelUnavailableError: kernels that nothing here can run.
        BackendUnavailableError: no such attention backend, or one that can't serve here.
    """
    import torch

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
        nothing = settings.trainer == "sft" and _nothing_to_predict(settings)
    except (OSError, ValueError) as error:
        raise UsageError(f"--lengths {settings.lengths}: {error}") from error
    if nothing and settings.max_length == 1:
        raise UsageError("--max-length 1: rows of one token have nothing to predict; pass 2 or more.")
    if nothing:
        raise UsageError(
            f"--lengths {settings.lengths}: a batch of {settings.rows} would have rows of one token alone, with "
            "nothing to predict; pass lengths from 2 on."
        )


def _nothing_to_predict(settings: Settings) -> bool:
    """Whether any batch has rows of one token alone, warm-up's too."""
    lengths = settings.row_lengths()
    return any(max(lengths[at : at + settings.rows]) < 2 for at in range(0, len(lengths), settings.rows))


def choose(
    only: list[str] | None, *, on_gpu: bool, trainer: str = "sft", graphs: str | None = None
) -> tuple[list[str], dict[str, str]]:
    """Who takes part, and who of this trainer's ways does not and why.

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
    return (
        [name for name, reason in reasons.items() if reason is None],
        {name: reason for name, reason in reasons.items() if reason is not None},
    )


def run(arguments: argparse.Namespace) -> int:
    """Do what the flags ask for.

    Returns:
        1 where losses disagree, or an op of ours is not exact enough; :data:`NOT_COMPARED` where several contestants
        were to run and fewer than two did, or no op was compared, so that nothing says whether they agree; else 0.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    require_picture("--plot", arguments.plot)
    require_file("--json", arguments.json)
    if arguments.ops is not None:
        from fastpack.bench.ops.runner import main

        written = {"json_path": arguments.json, "plot_path": arguments.plot}
        return main(arguments.ops, arguments.tokens, lengths=arguments.lengths, **written)
    from fastpack.bench.runner import run_all
    from fastpack.bench.table import print_outcome

    settings = make_settings(arguments, on_gpu=on_gpu)
    names, left_out = choose(arguments.only, on_gpu=on_gpu, trainer=arguments.trainer, graphs=arguments.graphs)
    check(settings, on_gpu=on_gpu)
    outcome = run_all(settings, names, left_out=left_out, on_gpu=on_gpu)
    print_outcome(outcome)
    if arguments.json:
        arguments.json.write_text(json.dumps(outcome.to_dict(), indent=1))
    if arguments.plot and outcome.verdict.agree and outcome.ran:
        from fastpack.bench.plot import save_plot

        save_plot(outcome, arguments.plot)
    if not outcome.verdict.agree:
        return 1
    return 0 if outcome.verdict.compared or len(names) == 1 else NOT_COMPARED


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
