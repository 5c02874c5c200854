"""``fastpack verify MODEL``: patch a model, and prove on it that sequences don't see each other."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastpack.commands import UsageError, loading_errors, quiet, read_dtype


def main(arguments: Sequence[str]) -> int:
    """Print the table; return 1 where a check failed, and 3 where rounding would hide a failure."""
    parser = argparse.ArgumentParser(
        prog="fastpack verify",
        description="Patch a model, and compare it with itself on each sequence alone. "
        "Exit codes: 0 exact, 1 not exact, 3 nobody can tell in this dtype.",
    )
    parser.add_argument("model", help="a folder or a name on the hub; with --random, also a config.json")
    parser.add_argument("--random", action="store_true", help="random weights of the model's config")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16, float16 (default: the checkpoint's)")
    parser.add_argument("--device", help="default: cuda where there is one")
    parser.add_argument("--attention", default="auto", help="attention backend")
    parser.add_argument("--kernels", choices=("auto", "torch", "triton"), default="auto")
    parser.add_argument("--json", action="store_true", help="the figures for programs")
    given = parser.parse_args(arguments)
    import fastpack

    quiet()
    device = _device(given)
    model = _load(given, device)
    fastpack.patch(model, attention=given.attention, kernels=given.kernels)
    try:
        found = fastpack.verify(model)
    except (fastpack.ContaminationError, fastpack.InconclusiveError) as error:
        found = error.verification
    if given.json:
        print(json.dumps({**found.to_dict(), "rung": fastpack.report(model).rung}, indent=2))
    else:
        from rich.console import Console

        Console().print(fastpack.report(model), found)
    return EXIT_CODES[found.verdict]


EXIT_CODES = {"exact": 0, "not exact": 1, "can't tell": 3}


def _device(given: argparse.Namespace) -> Any:
    """Where the model is to be, which the kernels asked for can serve."""
    import torch

    from fastpack.ops.implementation import use_triton

    name = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        there = torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was compiled with CUDA
        raise UsageError(f"--device {name} can't be used here: {str(error).splitlines()[0]}") from error
    if there.is_meta:
        raise UsageError("--device meta holds shapes without numbers, and nothing can be compared: pass cpu or cuda")
    use_triton(given.kernels, there)
    return there.device


def _load(given: argparse.Namespace, device: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype: Any = given.dtype if given.dtype == "auto" else read_dtype(given.dtype)
    if given.model.endswith(".json") and not (given.random and Path(given.model).is_file()):
        raise UsageError(f"{given.model}: pass --random with a config.json that exists, or a model's folder or name")
    if given.model.startswith((".", "/", "~")) and not Path(given.model).expanduser().exists():
        raise UsageError(f"{given.model}: there is nothing there; pass a model's folder, or its name on the hub")
    try:
        if given.random:
            settings = {} if dtype == "auto" else {"dtype": dtype}
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(given.model), **settings).to(device)
        return AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype).to(device)
    except loading_errors() as error:
        raise UsageError(f"{given.model} can't be loaded: {error}") from error
