"""``fastpack doctor``: what is installed, whether it was tried and is recent enough, and what this machine can use."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import fastpack
from fastpack.utils.versions import NEWEST_TRIED, install_command, is_too_old, is_untried, version_of, version_ranges

if TYPE_CHECKING:
    import torch
    from rich.table import Table

PACKAGES = {
    "torch": "tensors and kernels",
    "transformers": "the models",
    "peft": "LoRA and other adapters",
    "accelerate": "devices and ranks",
    "trl": "the trainers",
    "datasets": "data sets",
    "bitsandbytes": "4-bit and 8-bit weights",
    "flash-attn": "attention on GPUs from Ampere on (torch carries a copy of its kernel)",
    "xformers": "attention, including on GPUs before Ampere",
    "triton": "fused kernels on GPUs",
    "liger-kernel": "other fused kernels, not needed by fastpack",
    "matplotlib": "the plots of `fastpack demo` and `fastpack bench`",
}
DTYPES = ("float32", "bfloat16", "float16")
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
"""The attention asked about: that of a Llama of 8 B."""


def main(arguments: Sequence[str]) -> int:
    """Print the findings; the exit code is 1 where an installed package is too old."""
    parser = argparse.ArgumentParser(prog="fastpack doctor", description="What is installed, and what can be used.")
    parser.add_argument("--json", action="store_true", help="the same for programs")
    given = parser.parse_args(arguments)
    findings = examine()
    if given.json:
        print(json.dumps(findings, indent=2))
    else:
        _print_findings(findings)
    return 0 if all(package["supported"] is not False for package in findings["packages"].values()) else 1


def examine() -> dict[str, Any]:
    """Versions, devices, and for each device and dtype why a backend can't serve, or None."""
    devices = _devices()
    return {
        "fastpack": fastpack.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": _packages(),
        "devices": {name: what for name, (_, what) in devices.items()},
        "attention": {
            "heads": HEADS,
            "kv_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "devices": {name: _backends(device) for name, (device, _) in devices.items()},
        },
    }


def _packages() -> dict[str, dict[str, Any]]:
    ranges = version_ranges()
    found: dict[str, dict[str, Any]] = {}
    for name, purpose in PACKAGES.items():
        version = version_of(name)
        found[name] = {
            "version": version,
            "needed": str(ranges[name]) if name in ranges else None,
            "newest_tried": NEWEST_TRIED.get(name),
            "supported": None if version is None or name not in ranges else not is_too_old(name, version),
            "tried": None if version is None or name not in NEWEST_TRIED else not is_untried(name, version),
            "purpose": purpose,
        }
    return found


def _devices() -> dict[str, tuple[torch.device, str]]:
    import torch

    found = {"cpu": (torch.device("cpu"), f"{platform.machine()}, {torch.get_num_threads()} threads")}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = (
            torch.device("cuda", index),
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
            f"compute capability {properties.major}.{properties.minor}",
        )
    if torch.backends.mps.is_available():
        found["mps"] = (torch.device("mps"), "Apple GPU")
    return found


def _backends(device: torch.device) -> dict[str, dict[str, str | None]]:
    import torch

    from fastpack.attention_dispatch import AttentionShape, explain

    by_dtype = {
        dtype: explain(
            AttentionShape(
                device=device,
                dtype=getattr(torch, dtype),
                num_heads=HEADS,
                num_kv_heads=KV_HEADS,
                head_dim=HEAD_DIM,
                value_dim=HEAD_DIM,
            )
        )
        for dtype in DTYPES
    }
    return {name: {dtype: by_dtype[dtype][name] for dtype in DTYPES} for name in by_dtype[DTYPES[0]]}


def _print_findings(findings: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    console.print(
        f"fastpack {findings['fastpack']}, python {findings['python']}, {findings['system']}", highlight=False
    )
    console.print(_package_table(findings["packages"]))
    old = [name for name, package in findings["packages"].items() if package["supported"] is False]
    if old:
        console.print(f"[red]too old:[/red] {install_command(*old)}", highlight=False, markup=True, soft_wrap=True)
    console.print(
        f"Attention with {HEADS}/{KV_HEADS} heads of {HEAD_DIM}; [green]auto[/green]: what attention='auto' takes",
        highlight=False,
    )
    for device, what in findings["devices"].items():
        console.print(_backend_table(device, what, findings["attention"]["devices"][device]))


def _package_table(packages: dict[str, dict[str, Any]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title="Packages", title_justify="left", box=box.ROUNDED)
    for heading in ("package", "version", "range", "newest tried", "what for"):
        table.add_column(heading, no_wrap=heading != "what for")
    for name, package in packages.items():
        version, style = package["version"] or "not installed", "dim" if package["version"] is None else ""
        if package["supported"] is False:
            version = f"[red]{version}: too old[/red]"
        elif package["tried"] is False:
            version = f"[yellow]{version}: not tried[/yellow]"
        ranges = package["needed"] or "any", package["newest_tried"] or ""
        table.add_row(name, version, *ranges, package["purpose"], style=style)
    return table


def _backend_table(device: str, what: str, backends: dict[str, dict[str, str | None]]) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"{device}: {what}", title_justify="left", box=box.ROUNDED)
    table.add_column("backend", style="bold", no_wrap=True)
    for dtype in DTYPES:
        table.add_column(dtype, no_wrap=True)
    table.add_column("why not")
    chosen = {dtype: next((name for name, why in backends.items() if why[dtype] is None), None) for dtype in DTYPES}
    for name, why in backends.items():
        cells = []
        for dtype in DTYPES:
            usable = "[green]auto[/green]" if chosen[dtype] == name else "yes"
            cells.append(usable if why[dtype] is None else "[dim]no[/dim]")
        reasons = dict.fromkeys(reason for reason in why.values() if reason is not None)
        table.add_row(name, *cells, f"[dim]{escape('; '.join(reasons))}[/dim]")
    return table
