"""The work of each rank in ``test_expert_ranks.py``: experts spread over the ranks, against one process."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from expert_models import COUNTS, STACKS, expert_model, with_expert_lora
from oracle import Result, make_sequences, run_batch, trained_tokens
from rank_work import Case, checkpoint, device, grads_of, off, step
from spread_work import mesh
from tiny import VOCAB, tiny_model
from torch.nn.parallel import DistributedDataParallel

import fastpack
from fastpack.layers import experts as layer
from fastpack.ops import exchange
from fastpack.ops.experts import across_ranks

LENGTHS = (7, 1, 19, 19, 33, 5)
EXPERTS = 4


def build(family: str, lora: str | None) -> Any:
    model = expert_model(family, **{COUNTS[family]: EXPERTS})
    if lora is not None:
        model = with_expert_lora(model, target_parameters=list(STACKS) if lora == "experts" else None)
    return model.to(device())


def spread_step(
    family: str, lora: str | None, *, checkpointing: str | None = None, halves: bool = False
) -> dict[str, Any]:
    """Return the errors of a step in DDP, and the rows that came in each call.

    Each rank has sequences of its own. In the control no sums come back.
    """
    sequences = make_sequences(VOCAB, LENGTHS)
    expected = run_batch(build(family, lora), sequences, "padded right", num_items=trained_tokens(sequences))
    expected = Result([], expected.loss, expected.grads)
    case = Case("ddp", checkpointing=checkpointing)
    rows: list[int] = []

    def once(begin: Any = across_ranks.begin_exchange) -> float:
        model = build(family, lora)
        fastpack.shard_experts(model, mesh())
        names = [name for name, parameter in model.named_parameters() if hasattr(parameter, "device_mesh")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        fastpack.patch(model)
        checkpoint(model, checkpointing)
        outer = DistributedDataParallel(model, device_ids=[dist.get_rank()] if device().type == "cuda" else None)
        run = layer.experts

        def watched(x: Any, *args: Any, **kwargs: Any) -> Any:
            rows.append(kwargs["most_rows"])
            return run(x, *args, **kwargs)

        with (
            mock.patch.object(layer, "experts", watched),
            mock.patch.object(across_ranks, "begin_exchange", begin),
            mock.patch.object(across_ranks, "FEWEST_IN_HALVES", 0 if halves else 2**30),
        ):
            loss = step(outer, case, sequences)
        here = {int(p.to_local().shape[0]) for p in model.parameters() if hasattr(p, "device_mesh")}
        assert here == {EXPERTS // dist.get_world_size()}
        return off(Result([], loss, grads_of(model)), expected)

    error = once()
    calls = list(rows)

    def at_home(sums: Any, *sizes: Any) -> Any:
        return exchange_sums(sums * 0, *sizes)

    exchange_sums = across_ranks.begin_exchange
    return {"error": error, "control": once(at_home), "rows": calls}


def both(family: str) -> float:
    """Return the error if the ranks share each batch, too: one mesh for both, and no engine around it."""
    sequences = make_sequences(VOCAB, LENGTHS)
    expected = run_batch(build(family, None), sequences, "padded right")
    model = build(family, None)
    fastpack.shard_experts(model, mesh())
    fastpack.patch(model, context_mesh=mesh())
    result = run_batch(model, sequences, "padded left")
    for parameter in model.parameters():
        if parameter.grad is not None and not hasattr(parameter, "device_mesh"):
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    return off(Result([], result.loss, grads_of(model)), Result([], expected.loss, expected.grads))


def no_expert_here() -> dict[str, Any]:
    """Return the error, the rows here and whether there is a gradient if all tokens choose the first rank's experts."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    ranks = dist.get_world_size()
    group = dist.group.WORLD
    place = across_ranks.ExpertRanks(ranks, dist.get_rank(), group, 2)
    x = torch.randn(5, 8, generator=generator).requires_grad_()
    weights = torch.rand(5, 2, generator=generator).requires_grad_()
    left_out = dist.get_rank() == 0
    index = torch.tensor([[0, 1]] * 4 + [[1, 2 * ranks if left_out else 0]])  # a choice beyond all adds nothing
    scale = torch.nn.Parameter(torch.arange(1.0, 3.0) + 10 * dist.get_rank())
    seen: list[int] = []

    def run(x: Any, index: Any, weights: Any, *, most_rows: int) -> Any:
        seen.append(most_rows)
        factors = torch.cat([scale, torch.zeros(1)])[index]
        return x * (factors * weights).sum(1, keepdim=True)

    out = across_ranks.experts_across_ranks(x, index, weights, run, place)
    kept = weights.detach().clone()
    kept[4, 1] *= not left_out
    factors = torch.tensor([[1.0, 2.0]] * 4 + [[2.0, 1.0]])
    want = x.detach() * (kept * factors).sum(1, keepdim=True)
    out.sum().backward()
    return {"apart": float((out - want).abs().max()), "rows": seen, "gradient": scale.grad is not None}


def order_of_work() -> list[str]:
    """Return when exchanges start and are waited for, and experts run, in a forward and a backward in halves."""
    order: list[str] = []

    class Work:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            order.append("wait")
            self.work.wait()

    def start(link: Any, *args: Any) -> Any:
        rows = started(link, *args)
        order.append("start")
        link.work = Work(link.work)
        return rows

    def run(x: Any, index: Any, weights: Any, *, most_rows: int) -> Any:
        order.append("experts")
        out = x * weights.sum(1, keepdim=True)
        out.register_hook(lambda grad: order.append("gradients of experts"))
        return out

    started = exchange._Link.start
    place = across_ranks.ExpertRanks(dist.get_world_size(), dist.get_rank(), dist.group.WORLD, 2)
    x, weights = torch.randn(6, 8, requires_grad=True), torch.rand(6, 2)
    with mock.patch.object(exchange._Link, "start", start), mock.patch.object(across_ranks, "FEWEST_IN_HALVES", 0):
        out = across_ranks.experts_across_ranks(x, torch.zeros(6, 2, dtype=torch.int64), weights, run, place)
        order.append("backward")
        out.sum().backward()
    return order


def refused(family: str, experts: int) -> str:
    model = tiny_model(family, **{COUNTS[family]: experts})
    try:
        fastpack.shard_experts(model, mesh())
    except fastpack.PatchError as error:
        assert not any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
        return str(error)
    return ""
