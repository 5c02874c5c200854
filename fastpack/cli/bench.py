"""``fastpack bench``: its flags and their checks; :mod:`fastpack.bench` does the work."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from fastpack.attention_dispatch import AttentionShape, Visibility, choose
from fastpack.bench.lengths import make_lengths
from fastpack.bench.models import dtype_of
from fastpack.bench.same_losses import NOT_COMPARED
from fastpack.bench.settings import RunSettings
from fastpack.bench.shapes import SHAPES, has_experts, has_images, make_config, takes_flash_attention, vocabulary
from fastpack.bench.variants import IMAGE_TRAINERS, ROLLOUTS, TRAINERS, VARIANTS
from fastpack.cli import UsageError, require, require_file, require_one_process, require_picture, require_trl_on_cpu
from fastpack.cli.flags import POSITIVE, above_zero, at_least, make_parser
from fastpack.ops.implementation import IMPLEMENTATIONS
from fastpack.patching.options import OFFLOADS, PatchOptions

WHAT = f"""Train the same model in several variants, each in its own process, and compare them.

Exit codes: 1 if losses disagree; 2 if a flag is wrong; {NOT_COMPARED} if several variants were to be compared and
fewer than two ran."""

FLAGS: dict[str, dict[str, Any]] = {
    "--shape": {"choices": SHAPES, "help": "default: llama8b on a GPU, qwen0.5b with distill, tiny on a CPU"},
    "--mode": {
        "choices": ("full", "lora", "qlora", "mxfp4"),
        "default": "full",
        "help": "with all but full, LoRA is on all linear layers except the head; in shapes with experts "
        "these are q_proj, k_proj, v_proj and o_proj, since routers and experts are plain parameters; with qlora, all "
        "linear layers except the head are 4-bit, and so are experts; with mxfp4, "
        "the experts of gpt-oss are as its checkpoints have them",
    },
    "--rank": {"type": POSITIVE, "help": "with every --mode but full: LoRA's rank (default: 16)"},
    "--lora-experts": {
        "action": "store_true",
        "help": "with every --mode but full: LoRA on the experts too, by PEFT's target_parameters, in every variant",
    },
    "--trainer": {
        "choices": TRAINERS,
        "default": "sft",
        "help": "TRL's SFTTrainer, its DPOTrainer, or the update of its GRPOTrainer or DistillationTrainer on drawn "
        "completions",
    },
    "--rows": {
        "type": POSITIVE,
        "help": "rows in a step (default: 16); with dpo, pairs (default: 4); with grpo, prompts of several completions "
        "each (default: 4); with distill, prompts of one completion each",
    },
    "--steps": {"type": POSITIVE, "default": 20, "help": "timed steps"},
    "--warmup": {"type": at_least(0), "help": "untimed steps before the timed ones (default: 3, with --graphs 5)"},
    "--lengths": {
        "help": "'alpaca', a number of tokens, a range such as 500-2000, or a JSON file of lengths; for dpo, 'chat', a "
        "number, or a JSON file of [prompt, chosen, rejected], all in tokens; with grpo and distill, of prompts; with "
        "--ops, only for ops over packed sequences",
    },
    "--data": {"dest": "lengths", "metavar": "LENGTHS", "help": "the same as --lengths"},
    "--max-length": {"type": at_least(2), "help": "truncate rows to this many tokens"},
    "--loop": {
        "choices": ("trl", "plain"),
        "default": "trl",
        "help": "TRL's trainer, or a plain loop, which reads gradient norms only in the --warmup steps",
    },
    "--checkpointing": {"action": "store_true", "help": "gradient checkpointing, in every variant"},
    "--vram": {
        "type": above_zero,
        "metavar": "GIB",
        "help": "once the model is built, let torch's allocator hold only this much memory, in every variant",
    },
    "--trainer-waits": {
        "action": "store_true",
        "help": "leave logging_nan_inf_filter and accelerator_config at their defaults, where transformers' "
        "trainer waits for the device in every step",
    },
    "--only": {
        "nargs": "+",
        "choices": VARIANTS,
        "metavar": "NAME",
        "help": "run only these variants: "
        + "; ".join(f"{name}: {variant.what}" for name, variant in VARIANTS.items()),
    },
}
GROUPS: dict[str, dict[str, dict[str, Any]]] = {
    "how fastpack patches": {
        "--attention": {"default": "auto", "help": "attention backend"},
        "--kernels": {"choices": IMPLEMENTATIONS, "default": "auto"},
        "--graphs": {"choices": ("auto",), "nargs": "?", "const": "auto", "help": "CUDA graphs"},
        "--offload": {"choices": OFFLOADS, "help": "with --checkpointing: the tensors that are kept in host memory"},
        "--loss": {
            "choices": ("fused",),
            "nargs": "?",
            "const": "fused",
            "help": "with --loop plain: fuse the loss with the head",
        },
    },
    "with --trainer grpo and distill": {
        "--completions": {
            "metavar": "LENGTHS",
            "help": "'chat' (the default), a number of tokens, a range such as 500-2000, or a JSON file of lengths",
        },
        "--generations": {"type": at_least(2), "help": "with grpo: completions of each prompt (default: 8)"},
        "--teacher": {
            "choices": SHAPES,
            "help": "with distill: a shape with the same vocabulary (default: qwen3-8b on a GPU, tiny on a CPU)",
        },
        "--micro-batches": {
            "type": POSITIVE,
            "help": "the micro-batches of a step, in every variant (default: 1)",
        },
        "--max-tokens": {
            "type": POSITIVE,
            "help": "fastpack splits micro-batches into pieces of at most this many tokens",
        },
    },
    "output files": {
        "--json": {"type": Path, "help": "write the results here"},
        "--plot": {"type": Path, "help": "draw the results of training here (PNG, SVG or PDF)"},
    },
    "time each op by itself instead of training": {
        "--ops": {
            "nargs": "*",
            "metavar": "NAME",
            "help": "the ops to compare with plain torch and Liger, over a sweep of T; default: all",
        },
        "--tokens": {"type": POSITIVE, "nargs": "+", "help": "with --ops: the values of T"},
    },
}
OF_OPS = ("ops", "tokens", "lengths", "json")
"""Flags that ``--ops`` takes."""
PARSER = make_parser("bench", WHAT, FLAGS, GROUPS)


def check_together(args: argparse.Namespace) -> None:
    """Raise if the user changed a flag that this run does not read.

    Raises:
        UsageError: training flags came with ``--ops``, or ``--tokens`` without it.
    """
    if args.ops is None:
        if args.tokens is not None:
            raise UsageError("--tokens sets the sweep of --ops: pass --ops too, or set --rows and --lengths to train.")
        return
    changed = [name for name, value in vars(args).items() if value != PARSER.get_default(name)]
    if others := [f"--{name.replace('_', '-')}" for name in changed if name not in OF_OPS]:
        raise UsageError(f"--ops measures ops by themselves, and trains nothing: leave out {', '.join(others)}.")


def make_settings(args: argparse.Namespace, *, on_gpu: bool) -> RunSettings:
    """Return the settings that the flags describe.

    Raises:
        UsageError: a flag would have no effect: ``--loss`` or ``--trainer-waits`` with the wrong loop, ``--offload``
            without checkpointing, ``--rank`` without LoRA, ``--lora-experts`` without LoRA or experts, graphs,
            offloading or ``--vram`` on a CPU, a plain loop for another trainer than SFT's, images for DPO or
            distillation, or flags of rollouts without any. Or MXFP4 can't be loaded here, the teacher has another
            vocabulary, or micro-batches would be uneven.
    """
    dpo, plain = args.trainer == "dpo", args.loop == "plain"
    sft, distill = args.trainer == "sft", args.trainer == "distill"
    shape: str = args.shape or (("qwen0.5b" if distill else "llama8b") if on_gpu else "tiny")
    rows: int = args.rows or (16 if sft or distill else 4)
    teacher = args.teacher or (("qwen3-8b" if on_gpu else "tiny") if distill else None)
    for wrong, why in (
        (
            args.trainer not in IMAGE_TRAINERS and has_images(shape),
            f"--shape {shape} trains on images, and is for --trainer sft and grpo. Pass another shape.",
        ),
        *_wrong_rollouts(args, shape, teacher, rows),
        (not sft and plain, f"--loop plain is for --trainer sft: only TRL's trainer has the loss of {args.trainer}."),
        (
            args.loss and not plain,
            "--loss is for --loop plain: TRL's trainers have their own loss; the variant 'fastpack fused "
            "loss' gives the SFTTrainer ours.",
        ),
        (args.trainer_waits and plain, "--trainer-waits is for --loop trl: a plain loop has no trainer."),
        (
            args.lora_experts and not has_experts(shape),
            f"--lora-experts is for shapes with experts, and {shape} has none. Pass another --shape.",
        ),
        (args.lora_experts and args.mode == "full", "--lora-experts adds adapters: pass --mode lora too."),
        (args.rank and args.mode == "full", "--rank is LoRA's: pass --mode lora or qlora too."),
        (
            args.offload and not args.checkpointing,
            "--offload is for checkpointed layers: pass --checkpointing too.",
        ),
        (
            args.mode == "mxfp4" and (not on_gpu or not shape.startswith("gpt-oss")),
            "--mode mxfp4 needs a GPU and --shape gpt-oss-20b, whose checkpoints have MXFP4.",
        ),
        (
            args.mode == "mxfp4" and importlib.util.find_spec("kernels") is None,
            "--mode mxfp4 loads a model as transformers does, which needs a package: pip install kernels.",
        ),
        (args.graphs and not on_gpu, "--graphs needs a GPU. Leave --graphs out."),
        (args.offload and not on_gpu, "--offload needs a GPU. Leave --offload out."),
        (args.vram and not on_gpu, "--vram limits the memory of a GPU, and there is none here. Leave --vram out."),
    ):
        if wrong:
            raise UsageError(why)
    defaults: dict[str, Any] = {
        "shape": shape,
        "rows": rows,
        "teacher": teacher,
        "warmup": 5 if args.graphs else 3,
        "lengths": "chat" if dpo else "alpaca",
    }
    flags = {setting.name: getattr(args, setting.name, None) for setting in fields(RunSettings)}
    return RunSettings("", **defaults | {name: value for name, value in flags.items() if value is not None})


def _wrong_rollouts(
    args: argparse.Namespace, shape: str, teacher: str | None, rows: int
) -> Iterator[tuple[object, str]]:
    """Yield conditions on the flags of rollouts that must not hold, and the messages if they do."""
    grpo, distill = args.trainer == "grpo", args.trainer == "distill"
    for name in ("completions", "micro_batches", "max_tokens"):
        flag = f"--{name.replace('_', '-')}"
        given = getattr(args, name) is not None
        yield given and not grpo and not distill, f"{flag} is for --trainer grpo and distill. Leave {flag} out."
    yield args.generations is not None and not grpo, "--generations is for --trainer grpo. Leave --generations out."
    yield args.teacher is not None and not distill, "--teacher is for --trainer distill. Leave --teacher out."
    if teacher is not None and vocabulary(teacher) != vocabulary(shape):
        alike = [name for name in SHAPES if vocabulary(name) == vocabulary(shape) and not has_images(name)]
        yield (
            True,
            f"--teacher {teacher} has {vocabulary(teacher):,} token ids, but --shape {shape} has "
            f"{vocabulary(shape):,}. Pass a teacher with the same vocabulary: {', '.join(alike)}.",
        )
    yield distill and teacher is not None and has_images(teacher), f"--teacher {teacher} is a shape of images."
    sequences, parts = rows * ((args.generations or RunSettings.generations) if grpo else 1), args.micro_batches or 1
    yield sequences % parts, f"--micro-batches {parts} does not divide the {sequences} sequences of a step."


def check(settings: RunSettings, *, on_gpu: bool) -> None:
    """Raise now for settings that would fail in every variant's process.

    Raises:
        UsageError: the lengths can't be read.
        KernelUnavailableError: the requested kernels can't run here.
        BackendUnavailableError: the attention backend does not exist, or can't serve here.
    """
    PatchOptions(settings.attention, settings.kernels, settings.graphs, settings.loss, settings.offload).check()
    config = make_config(settings.shape).get_text_config()
    device = torch.device("cuda" if on_gpu else "cpu")
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    choose(
        AttentionShape(device, dtype_of(device), heads, config.num_key_value_heads, size, size, Visibility()),
        settings.attention,
    )
    if settings.trainer in ROLLOUTS:
        check_lengths(settings.completions, settings.completion_lengths, "--completions")
    check_lengths(settings.lengths, settings.row_lengths)


def check_lengths(kind: str, read: Callable[[], object], flag: str = "--lengths") -> None:
    """Raise unless lengths can be read.

    Raises:
        UsageError: they can't.
    """
    try:
        read()
    except (OSError, ValueError) as error:
        raise UsageError(f"{flag} {kind}: {error}") from error


def choose_variants(
    only: list[str] | None,
    *,
    on_gpu: bool,
    trainer: str = "sft",
    graphs: str | None = None,
    shape: str = "tiny",
    loop: str = "trl",
    mode: str = "full",
) -> tuple[list[str], dict[str, str]]:
    """Return the variants to run, and the reasons why this trainer's other variants on the same data are left out.

    Raises:
        UsageError: a variant named in ``only`` can't run here.
    """
    images, flash = has_images(shape), takes_flash_attention(shape)
    ways = {name: each for name, each in VARIANTS.items() if each.trains(trainer, images=images)}
    reasons = {
        name: variant.unavailable(on_gpu, graphs, flash=flash, loop=loop, mode=mode) for name, variant in ways.items()
    }
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    for name in only or ():
        if name not in ways:
            data = " on images" if images else ""
            raise UsageError(
                f"--only {name!r}: not a variant of --trainer {trainer}{data}, which has {', '.join(ways)}."
            )
        if name in left_out:
            raise UsageError(f"--only {name!r}: it {left_out[name]}.")
    return (only, {}) if only else ([name for name in ways if name not in left_out], left_out)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark.

    Returns:
        1 if losses disagree; :data:`NOT_COMPARED` if several variants were to run and fewer than two did, so that
        agreement is unknown; else 0.
    """
    args = PARSER.parse_args(arguments)
    require_one_process("bench")
    check_together(args)
    require_file("--json", args.json)
    code, results = _train(args) if args.ops is None else (0, _time_ops(args))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return code


def _train(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Train every variant; return the exit code and all measurements."""
    on_gpu = torch.cuda.is_available()
    if args.plot:
        require("bench --plot", "matplotlib")
        require_picture("--plot", args.plot)
    if args.loop == "trl":
        require("bench", "trl", "datasets")
        if not on_gpu:
            require_trl_on_cpu("bench")
    if args.mode == "qlora":
        require("bench --mode qlora", "bitsandbytes")
    from fastpack.bench.plot import save_plot
    from fastpack.bench.runner import run_all
    from fastpack.bench.table import print_outcome

    settings = make_settings(args, on_gpu=on_gpu)
    names, left_out = choose_variants(
        args.only,
        on_gpu=on_gpu,
        trainer=args.trainer,
        graphs=args.graphs,
        shape=settings.shape,
        loop=settings.loop,
        mode=settings.mode,
    )
    check(settings, on_gpu=on_gpu)
    outcome = run_all(settings, names, left_out=left_out, on_gpu=on_gpu)
    print_outcome(outcome)
    if args.plot:
        save_plot(outcome, args.plot)
    code = 0 if outcome.verdict.compared or len(names) == 1 else NOT_COMPARED
    return code if outcome.verdict.agree else 1, outcome.to_dict()


def _time_ops(args: argparse.Namespace) -> dict[str, Any]:
    """Time the named ops, or all; return all measurements.

    Raises:
        UsageError: an op does not exist, the lengths can't be read, or none of the ops has lengths.
    """
    from fastpack.bench.ops.runner import CASES, run_ops

    for name in args.ops:
        if name not in CASES:
            raise UsageError(f"--ops {name!r}: no such op. Choose from: {', '.join(CASES)}.")
    chosen = [CASES[name] for name in args.ops or CASES]
    if args.lengths is None:
        return run_ops(chosen, args.tokens)
    if args.ops and "attention" not in args.ops:
        raise UsageError("--lengths is for ops over packed sequences: add attention to --ops, or leave --lengths out.")
    check_lengths(args.lengths, lambda: make_lengths(1, kind=args.lengths))
    return run_ops(chosen, args.tokens, args.lengths)
