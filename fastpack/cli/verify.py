"""``fastpack verify MODEL``: patch a model, and prove on it that sequences don't see each other."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

import fastpack
from fastpack.cli import UsageError, loading_errors, read_dtype, require_there
from fastpack.cli.flags import make_parser
from fastpack.ops.implementation import IMPLEMENTATIONS, use_triton

WHAT = """Patch a model, and compare its results for a batch with its results for each sequence alone.

Exit codes: 0 exact, 1 not exact, 3 undecidable in this dtype."""
FLAGS: dict[str, dict[str, Any]] = {
    "model": {"help": "a folder or a name on the hub; with --random, also a config.json"},
    "--random": {"action": "store_true", "help": "random weights of the model's config"},
    "--dtype": {"default": "auto", "help": "float32, bfloat16, float16 (default: the checkpoint's)"},
    "--device": {"help": "default: cuda if there is one"},
    "--attention": {"default": "auto", "help": "attention backend"},
    "--kernels": {"choices": IMPLEMENTATIONS, "default": "auto"},
    "--json": {"action": "store_true", "help": "print the results as JSON"},
}
EXIT_CODES = {"exact": 0, "not exact": 1, "can't tell": 3}


def main(arguments: Sequence[str]) -> int:
    """Verify a model and print the results; return 1 if a check failed, 3 if rounding would hide a failure."""
    args = make_parser("verify", WHAT, FLAGS).parse_args(arguments)
    device = _device(args)
    model = _load(args, device)
    fastpack.patch(model, attention=args.attention, kernels=args.kernels)
    try:
        verification = fastpack.verify(model)
    except (fastpack.ContaminationError, fastpack.InconclusiveError) as error:
        verification = error.verification
    if args.json:
        print(json.dumps({**verification.to_dict(), "tier": fastpack.report(model).tier}, indent=2))
    else:
        Console().print(fastpack.report(model), verification)
    return EXIT_CODES[verification.verdict]


def _device(args: argparse.Namespace) -> torch.device:
    """Return the device for the model, after checking that the requested kernels run on it."""
    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        probe = torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was compiled with CUDA
        raise UsageError(f"--device {name} can't be used here: {str(error).splitlines()[0]}") from error
    use_triton(args.kernels, probe)
    return probe.device


def _load(args: argparse.Namespace, device: Any) -> Any:
    dtype: Any = args.dtype if args.dtype == "auto" else read_dtype(args.dtype)
    require_there(args.model)
    if args.model.endswith(".json") and not args.random:
        raise UsageError(f"{args.model}: a config has no weights; pass --random with it, or a model's folder or name")
    try:
        if args.random:
            settings = {} if dtype == "auto" else {"dtype": dtype}
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model), **settings).to(device)
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(device)
    except loading_errors() as error:
        raise UsageError(f"{args.model} can't be loaded: {error}") from error
