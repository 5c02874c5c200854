"""``fastpack doctor``: show which versions are installed, tried or too old, and what this machine can use."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

import fastpack
from fastpack.attention_dispatch import BACKENDS, AttentionShape, Visibility, explain
from fastpack.cli.flags import make_parser
from fastpack.utils.console import WIDTH, room_for
from fastpack.utils.versions import NEWEST_TRIED, install_command, is_too_old, is_untried, version_of, version_ranges

PACKAGES = {
    "torch": "tensors and kernels",
    "transformers": "the models",
    "peft": "LoRA and other adapters",
    "accelerate": "devices and ranks",
    "trl": "the trainers",
    "datasets": "data sets",
    "bitsandbytes": "4-bit and 8-bit weights",
    "flash-attn": "attention on GPUs from Ampere on (torch carries a copy of its kernel)",
    "flash-attn-4": "attention on Hopper: up to 1.5 x as fast as ours on sequences of 768 tokens and more",
    "xformers": "attention, including on GPUs before Ampere",
    "triton": "fused kernels on GPUs",
    "liger-kernel": "other fused kernels, not needed by fastpack",
    "matplotlib": "the plot of `fastpack demo`",
}
DTYPES = ("float32", "bfloat16", "float16")
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
"""The attention heads for which backends are checked: those of an 8 B Llama."""


def main(arguments: Sequence[str]) -> int:
    """Print the findings; return 1 if an installed package is too old, else 0."""
    flags = {"--json": {"action": "store_true", "help": "print the same as JSON"}}
    args = make_parser("doctor", "Show what is installed, and what this machine can use.", flags).parse_args(arguments)
    findings = examine()
    if args.json:
        print(json.dumps(findings, indent=2))
    else:
        _print_findings(findings)
    return 1 if _too_old(findings) else 0


def examine() -> dict[str, Any]:
    """Return versions, devices and backends; for each device and dtype, why a backend can't serve, or None."""
    devices = _devices()
    return {
        "fastpack": fastpack.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: _package(name) for name in PACKAGES},
        "devices": {str(device): what for device, what in devices.items()},
        "attention": {
            "heads": HEADS,
            "kv_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "devices": {str(device): _backends(device) for device in devices},
            "backends": {name: backend.LIMITS._asdict() for name, backend in BACKENDS.items()},
        },
    }


def _package(name: str) -> dict[str, Any]:
    needed, version = version_ranges().get(name), version_of(name)
    return {
        "version": version,
        "needed": None if needed is None else str(needed),
        "newest_tried": NEWEST_TRIED.get(name),
        "supported": None if version is None or needed is None else not is_too_old(name, version),
        "tried": None if version is None or name not in NEWEST_TRIED else not is_untried(name, version),
        "purpose": PACKAGES[name],
    }


def _too_old(findings: dict[str, Any]) -> list[str]:
    return [name for name, package in findings["packages"].items() if package["supported"] is False]


def _devices() -> dict[torch.device, str]:
    devices = {torch.device("cpu"): f"{platform.machine()}, {torch.get_num_threads()} threads"}
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = f"{gpu.total_memory / 2**30:.0f} GiB"
        devices[torch.device("cuda", index)] = f"{gpu.name}, {memory}, compute capability {gpu.major}.{gpu.minor}"
    if torch.backends.mps.is_available():
        devices[torch.device("mps")] = "Apple GPU"
    return devices


def _backends(device: torch.device) -> dict[str, dict[str, str | None]]:
    """Return, by backend and dtype, why the backend can't serve on this device, or None if it can."""
    shapes = {
        name: AttentionShape(device, getattr(torch, name), HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, Visibility())
        for name in DTYPES
    }
    why = {name: explain(shape) for name, shape in shapes.items()}
    return {backend: {dtype: why[dtype][backend] for dtype in DTYPES} for backend in why[DTYPES[0]]}


def _table(title: str, *headings: str) -> Table:
    """Return a table in which all but the first column, and versions, may wrap."""
    columns = [Column(name, no_wrap=name in (headings[0], "version")) for name in headings]
    return Table(*columns, title=title, title_justify="left", box=box.ROUNDED)


def _print_findings(findings: dict[str, Any]) -> None:
    console = Console(width=room_for(WIDTH), highlight=False)
    console.print(f"fastpack {findings['fastpack']}, python {findings['python']}, {findings['system']}")
    table = _table("Packages", "package", "version", "range", "newest tried", "what for")
    for name, package in findings["packages"].items():
        version = package["version"] or "not installed"
        if package["supported"] is False:
            version = f"[red]{version}: too old[/red]"
        elif package["tried"] is False:
            version = f"[yellow]{version}: not tried[/yellow]"
        table.add_row(name, version, package["needed"] or "any", package["newest_tried"] or "", package["purpose"])
    console.print(table)
    if old := _too_old(findings):
        console.print(f"[red]too old:[/red] {install_command(*old)}", soft_wrap=True)
    table = _table(
        "Attention backends, in the order in which attention='auto' tries them", "backend", "serves", "install", "needs"
    )
    for name, limits in findings["attention"]["backends"].items():
        serves = (*["windows"] * ("window" in BACKENDS[name].SERVES), *limits["serves"])
        table.add_row(name, ", ".join(serves), escape(limits["install"]), limits["needs"])
    console.print(table)
    console.print(
        f"Here, for {HEADS}/{KV_HEADS} heads of {HEAD_DIM}; [green]auto[/green] marks what attention='auto' takes"
    )
    for device, backends in findings["attention"]["devices"].items():
        table = _table(f"{device}: {findings['devices'][device]}", "backend", *DTYPES, "why not")
        served: set[str] = set()
        for name, why in backends.items():
            cells = ["no" if why[dtype] else "yes" if dtype in served else "[green]auto[/green]" for dtype in DTYPES]
            served |= {dtype for dtype in DTYPES if why[dtype] is None}
            table.add_row(name, *cells, escape("; ".join(dict.fromkeys(filter(None, why.values())))))
        console.print(table)
