"""Time LoRA on several GPUs: ranks that share data, a batch's tokens, frozen weights or experts.

Run it by torchrun, for example ``torchrun --nproc-per-node 2 -m fastpack.bench.ranks --shape llama8b --tokens 32768``.

Every way trains the same model with gradient checkpointing and the fused loss, on packed documents. All steps and ranks
have documents of the same lengths, so that ranks have equal work and no timed step prepares kernels for a new shape.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fastpack
from fastpack.bench.ceiling import machine
from fastpack.bench.measure import StepTimer, begin_peaks, gpu_peaks
from fastpack.bench.models import build_base, lora_config, with_lora
from fastpack.bench.settings import LEARNING_RATE, RunSettings
from fastpack.bench.shapes import SHAPES, has_experts
from fastpack.model.unwrap import find_parts
from fastpack.utils.console import counted, headed, room_for
from fastpack.utils.modules import decoder_layers

AGREE = 1e-4, 0.02
"""The most by which losses, and norms of gradients, of ways that train on the same batch may differ in the first step,
relative. Random tokens have nearly the same loss in every batch, so that its bound is narrow."""


@dataclass(frozen=True)
class Way:
    """A way to use several ranks.

    Attributes:
        what: what it does.
        wrap: wraps a model with adapters for training, and patches it.
        shares: whether all ranks share a batch; else each has one of its own.
        long: whether that batch has as many tokens as all ranks' batches together.
        alone: whether the first rank trains alone.
    """

    what: str
    wrap: Callable[[Any, DeviceMesh, dict[str, Any]], nn.Module]
    shares: bool = False
    long: bool = False
    alone: bool = False


@dataclass(frozen=True)
class Measured:
    """The measurements of one way.

    Attributes:
        way: its name.
        ranks: how many ranks train.
        tokens: of a step of all ranks.
        seconds: of a step.
        memory: GiB in tensors, on a GPU.
        held: GiB that the allocator held, on a GPU.
        loss: the first rank's in the first step.
        norm: of all adapters' gradients in the first step.
    """

    way: str
    ranks: int
    tokens: int
    seconds: float
    memory: float | None
    held: float | None
    loss: float
    norm: float

    @property
    def rate(self) -> float:
        """Tokens a second and rank."""
        return self.tokens / self.seconds / self.ranks


def _one(model: Any, mesh: DeviceMesh, options: dict[str, Any]) -> nn.Module:
    return fastpack.patch(model, **options)


def _ddp(model: Any, mesh: DeviceMesh, options: dict[str, Any]) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(fastpack.patch(model, **options))


def _context(model: Any, mesh: DeviceMesh, options: dict[str, Any]) -> nn.Module:
    return _ddp(model, mesh, {**options, "context_mesh": mesh})


def _fsdp(model: Any, mesh: DeviceMesh, options: dict[str, Any]) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fastpack.patch(model, **options)
    for layer in decoder_layers(find_parts(model).backbone):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _base(model: Any, mesh: DeviceMesh, options: dict[str, Any]) -> nn.Module:
    return fastpack.shard_base(fastpack.patch(model, **options), mesh)


def _experts(model: Any, mesh: DeviceMesh, options: dict[str, Any]) -> nn.Module:
    return _ddp(fastpack.shard_experts(model, mesh), mesh, options)


WAYS = {
    "one": Way("one rank alone", _one, alone=True),
    "ddp": Way("a batch for each rank, in DistributedDataParallel", _ddp),
    "context": Way("ranks share each batch: patch(context_mesh=mesh)", _context, shares=True),
    "context-long": Way("the same, with as many tokens as all ranks have in ddp", _context, shares=True, long=True),
    "base": Way("a batch for each rank, frozen weights sharded: shard_base", _base),
    "fsdp": Way("a batch for each rank, everything sharded: torch's FSDP2, a unit for each layer", _fsdp),
    "experts": Way("a batch for each rank, experts spread over the ranks: shard_experts", _experts),
}


def make_documents(tokens: int, mean: int, seed: int = 0) -> list[int]:
    """Return lengths from half to one and a half ``mean`` that sum up to ``tokens``; one if ``mean`` is 0."""
    source, lengths = random.Random(seed), list[int]()
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, source.randint(mean // 2, mean * 3 // 2)) if mean else left)
    return lengths


def run(name: str, arguments: argparse.Namespace, device: torch.device, mesh: DeviceMesh) -> Measured | None:
    """Build a model, train it in one way, and return what it took, or None on a rank that has no part in it."""
    way, rank, world = WAYS[name], dist.get_rank(), dist.get_world_size()
    if way.alone and rank:
        return None
    settings = RunSettings("fastpack packed", shape=arguments.shape, mode="lora", rank=arguments.rank)
    model: Any = with_lora(build_base(settings, device)[0], lora_config(settings)).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    vocabulary = model.config.get_text_config().vocab_size
    outer = way.wrap(model, mesh, {"loss": "fused", "offload": arguments.offload})
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=LEARNING_RATE)
    lengths = make_documents(arguments.tokens * (world if way.long else 1), arguments.documents)
    begin_peaks()
    timer, first = StepTimer(arguments.warmup), (0.0, 0.0)
    timer.mark()
    for step in range(arguments.warmup + arguments.steps):
        source = torch.Generator().manual_seed(step * world + (0 if way.shares or way.alone else rank))
        ids = torch.randint(3, vocabulary, (1, sum(lengths)), generator=source).to(device)
        packed = fastpack.PackedSeqLens.from_lengths(lengths, device=device)
        loss = outer(input_ids=ids, labels=ids, packed_seq_lens=packed, use_cache=False).loss
        loss.backward()
        if step == 0:
            first = loss.item(), gradient_norm(model)
        optimizer.step()
        optimizer.zero_grad()
        timer.mark()
    memory, held = gpu_peaks() or (None, None)
    return Measured(
        way=name,
        ranks=1 if way.alone else world,
        tokens=sum(lengths) * (1 if way.shares or way.alone else world),
        seconds=statistics.median(timer.seconds()),
        memory=memory,
        held=held,
        loss=first[0],
        norm=first[1],
    )


def gradient_norm(model: nn.Module) -> float:
    """Return the norm of all gradients; of sharded ones, of the whole."""
    gradients: list[Any] = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    whole = [gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient for gradient in gradients]
    return float(torch.nn.utils.get_total_norm(whole))


def show(results: list[Measured], arguments: argparse.Namespace, console: Console) -> None:
    """Print the table, what the ways are, and whether first losses agree."""
    documents = counted(len(make_documents(arguments.tokens, arguments.documents)), "document")
    title = f"{arguments.shape}, LoRA, {arguments.tokens:,} tokens in {documents}"
    columns = ("", "tokens a step", "step ms", "tokens/s", "a GPU", "x one", "GiB", "held")
    table = headed(*columns, title=title, right=columns[1:])
    one = next((result for result in results if WAYS[result.way].alone), None)
    for result in results:
        memory = [f"{gib:.1f}" if gib is not None else "" for gib in (result.memory, result.held)]
        times = "" if one is None else f"{result.rate * result.ranks / one.rate:.2f}"
        total = f"{result.rate * result.ranks:,.0f}"
        table.add_row(
            result.way,
            f"{result.tokens:,}",
            f"{result.seconds * 1e3:,.0f}",
            total,
            f"{result.rate:,.0f}",
            times,
            *memory,
        )
    console.print(table)
    for result in results:
        console.print(f"{result.way}: {WAYS[result.way].what}", style="dim", highlight=False)
    if sum(not WAYS[result.way].long for result in results) < 2:
        console.print("nothing was compared: fewer than two ways trained on the same batch", style="bold yellow")
    else:
        _show_agreement(results, console)
    console.print(", ".join(f"{name} {what}" for name, what in machine().items()), style="dim", highlight=False)


def _show_agreement(results: list[Measured], console: Console) -> None:
    loss, norm = disagreement(results)
    said = f"on the same batch, first losses are {loss:.1e} apart, relative, and norms of gradients {norm:.1e}"
    agree = loss <= AGREE[0] and norm <= AGREE[1]
    bounds = f"{'' if agree else 'THEY DISAGREE: '}{said} (bounds {AGREE[0]} and {AGREE[1]})"
    console.print(bounds, style="green" if agree else "bold red", highlight=False)


def disagreement(results: list[Measured]) -> tuple[float, float]:
    """Return how far losses and norms of gradients are apart at most, of ways that train on the same batches.

    The first rank's first batch is the same in all ways but long ones. Gradients are those of one rank's batch, or of
    the mean over all ranks' batches.
    """
    same = [result for result in results if not WAYS[result.way].long]
    losses = [result.loss for result in same]
    alone = [result.norm for result in same if result.tokens == same[0].tokens]
    others = [result.norm for result in same if result.tokens != same[0].tokens]
    return _spread(losses), max(_spread(alone), _spread(others))


def _spread(values: list[float]) -> float:
    return (max(values) - min(values)) / min(values) if values else 0.0


def main() -> None:
    """Time the ways of the command line, one after the other."""
    parser = argparse.ArgumentParser(prog="torchrun --nproc-per-node N -m fastpack.bench.ranks", description=__doc__)
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"some of {', '.join(WAYS)} (default: all)")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama8b")
    parser.add_argument("--tokens", type=int, default=8192, help="of a rank's batch; in context of the shared one")
    parser.add_argument("--documents", type=int, default=0, metavar="MEAN", help="the mean length; 0 for one sequence")
    parser.add_argument("--rank", type=int, default=16, help="of LoRA")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--offload", choices=("checkpoints", "activations"))
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.ways if name not in WAYS]
    if unknown:
        parser.error(f"unknown way {unknown[0]!r}; the ways are {', '.join(WAYS)}")
    if not dist.is_torchelastic_launched():
        parser.error("launch it with torchrun, which starts the ranks")
    for package in ("torch", "transformers"):
        warnings.filterwarnings("ignore", module=package)
    device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    backend, timeout = "nccl" if on_gpu else "gloo", timedelta(hours=1)
    dist.init_process_group(backend, timeout=timeout, device_id=device if on_gpu else None)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    console = Console(width=room_for(140), quiet=dist.get_rank() > 0)
    results = []
    for name in arguments.ways or [name for name in WAYS if name != "experts" or has_experts(arguments.shape)]:
        try:
            result = run(name, arguments, device, mesh)
        except torch.OutOfMemoryError:
            if not WAYS[name].alone:
                raise  # the others wait for this rank in the middle of a step
            result = None
            console.print(f"{name}: out of memory", style="red", highlight=False)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        dist.barrier()
        if result is not None and dist.get_rank() == 0:
            results.append(result)
            console.print(f"{name}: {result.rate:,.0f} tokens/s a GPU", style="dim", highlight=False)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps([asdict(result) for result in results]))
    if dist.get_rank() == 0:
        show(results, arguments, console)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
