"""The work of each rank in ``test_expert_ranks.py``: experts spread over the ranks, against one process."""

from __future__ import annotations

import time
import weakref
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from expert_models import COUNTS, STACKS, expert_model, with_expert_lora
from op_checks import relative
from oracle import Result, make_sequences, run_batch, trained_tokens
from rank_work import Case, checkpoint, device, grads_of, off, step
from spread_work import mesh
from tiny import VOCAB, tiny_model
from torch.nn.parallel import DistributedDataParallel

import fastpack
from fastpack.layers import experts as layer
from fastpack.ops import exchange
from fastpack.ops.expert_operands import Gate
from fastpack.ops.experts import across_ranks
from fastpack.ops.experts import experts as expert_block
from fastpack.ops.experts.experts import experts
from fastpack.ops.experts.layer import ExpertLinear
from fastpack.ops.row_count import RowsOfRanks

LENGTHS = (7, 1, 19, 19, 33, 5)
EXPERTS = 4


def build(family: str, lora: str | None) -> Any:
    model = expert_model(family, **{COUNTS[family]: EXPERTS})
    if lora is not None:
        model = with_expert_lora(model, target_parameters=list(STACKS) if lora == "experts" else None)
    return model.to(device())


def spread_step(
    family: str, lora: str | None, *, checkpointing: str | None = None, halves: bool = False, uncounted: int = 8
) -> dict[str, Any]:
    """Return the errors of a step in DDP, the choices of experts here in each call, and how often ranks were asked.

    Each rank has sequences of its own. In the control no sums come back.
    """
    sequences = make_sequences(VOCAB, LENGTHS)
    expected = run_batch(build(family, lora), sequences, "padded right", num_items=trained_tokens(sequences))
    expected = Result([], expected.loss, expected.grads)
    case = Case("ddp", checkpointing=checkpointing)
    choices: list[int | None] = []
    asks = mock.Mock(wraps=across_ranks._ask)

    def once(sums: Any = exchange.Sums) -> float:
        model = build(family, lora)
        fastpack.shard_experts(model, mesh())
        names = [name for name, parameter in model.named_parameters() if hasattr(parameter, "device_mesh")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        fastpack.patch(model)
        checkpoint(model, checkpointing)
        outer = DistributedDataParallel(model, device_ids=[dist.get_rank()] if device().type == "cuda" else None)
        run = layer.experts

        def watched(x: Any, *args: Any, **kwargs: Any) -> Any:
            choices.append(kwargs["most_rows"])
            return run(x, *args, **kwargs)

        with (
            mock.patch.object(layer, "experts", watched),
            mock.patch.object(across_ranks, "_ask", asks),
            mock.patch.object(across_ranks, "UNCOUNTED", uncounted),
            mock.patch.object(across_ranks, "Sums", sums),
            mock.patch.object(across_ranks, "FEWEST_IN_PARTS", 0 if halves else 2**30),
        ):
            loss = step(outer, case, sequences)
        here = {int(p.to_local().shape[0]) for p in model.parameters() if hasattr(p, "device_mesh")}
        assert here == {EXPERTS // dist.get_world_size()}
        return off(Result([], loss, grads_of(model)), expected)

    error = once()
    seen = {"choices": list(choices), "asked": asks.call_count}

    class NoSums(exchange.Sums):
        def begin(self, y: Any) -> exchange.UnderWay:
            return super().begin(y * 0)

    return {"error": error, "control": once(NoSums), **seen}


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


def no_expert_here(tokens: tuple[int, int], halves: bool, part: int) -> dict[str, Any]:
    """Return the errors and the choices here if all tokens of all ranks choose the first rank's two experts.

    Args:
        tokens: how many the first and the second rank have. The last of a rank with several has a choice beyond all.
        halves: whether they are exchanged in parts, of which there are two at least.
        part: the number of tokens in a part between the first and the last.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)  # both ranks know all experts, so that each computes its truth
    place = across_ranks.ExpertRanks(ranks, rank, dist.group.WORLD, 2)
    count = tokens[rank]
    stacks = [torch.randn(2 * ranks, *sides, generator=generator) for sides in ((16, 8), (8, 8))]
    x = torch.randn(2, 9, 8, generator=generator)[rank, :count].clone().requires_grad_()
    weights = torch.rand(2, 9, 2, generator=generator)[rank, :count].clone().requires_grad_()
    index = torch.tensor([[0, 1]] * count, dtype=torch.int32).view(count, 2)
    if count > 1:
        index[-1, 1] = 2 * ranks  # adds nothing
    seen: list[int] = []

    def run(x: Any, index: Any, weights: Any, *, most_rows: Any, first: int = 2 * rank, few: int = 2) -> Any:
        seen.append(most_rows)
        inner, down = (ExpertLinear(stack[first : first + few]) for stack in stacks)
        return experts(x, index, weights, inner, down, Gate("silu"), most_rows=most_rows)

    fewest = 0 if halves else 2**30
    with mock.patch.object(across_ranks, "FEWEST_IN_PARTS", fewest), mock.patch.object(across_ranks, "PART", part):
        out = across_ranks.experts_across_ranks(x, index, weights, run, place)
    chosen = seen[:]
    want = run(x, index, weights, most_rows=2 * count, first=0, few=2 * ranks).finish()
    grads, truth = (torch.autograd.grad((y * y).sum(), (x, weights)) for y in (out, want))
    apart = [relative(a, b) if count else 0.0 for a, b in zip((out, *grads), (want, *truth), strict=True)]
    return {"apart": max(apart), "choices": sum(chosen), "calls": len(chosen)}


def watched_by_anomaly_detection() -> float:
    """Return the errors if torch looks for NaN in every gradient, and new memory holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with torch.autograd.detect_anomaly():
            return float(no_expert_here((5, 5), True, 99)["apart"])
    finally:
        torch.use_deterministic_algorithms(False)


def kept_by_a_checkpoint(*, keeps: bool) -> int:
    """Return how many of the tensors that came are alive after a checkpointed forward.

    Args:
        keeps: whether what is under way is kept after the wait, as torch's handle would.
    """
    came: list[Any] = []

    def finish(link: Any, **kwargs: Any) -> Any:
        under_way = link.under_way
        rows = finished(link, **kwargs)
        came.append(weakref.ref(under_way[0].untyped_storage()))
        if keeps:
            link.under_way = under_way
        return rows

    def run(x: Any, index: Any, weights: Any, *, most_rows: int | None) -> Any:
        stacks = (ExpertLinear(torch.ones(2, *sides)) for sides in ((16, 8), (8, 8)))
        return experts(x, index, weights, *stacks, Gate("silu"), most_rows=most_rows)

    def block(x: Any) -> Any:
        return across_ranks.experts_across_ranks(x, index, weights, run, place, RowsOfRanks(6, (6,) * place.ranks))

    finished = exchange._Link.finish
    place = across_ranks.ExpertRanks(dist.get_world_size(), dist.get_rank(), dist.group.WORLD, 2)
    x, weights = torch.randn(6, 8, requires_grad=True), torch.rand(6, 2)
    index = torch.tensor([[0, 2]] * 6)
    with mock.patch.object(exchange._Link, "finish", finish), mock.patch.object(across_ranks, "FEWEST_IN_PARTS", 0):
        out = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        until = time.monotonic() + 1  # gloo's thread lets go of its own references a little later
        while (alive := sum(storage() is not None for storage in came)) and time.monotonic() < until:
            time.sleep(0.01)
        assert len(came) == 6
        if not keeps:
            out.sum().backward()
    return alive


def order_of_work() -> list[str]:
    """Return when exchanges start and are waited for, and experts run, in a forward and a backward in halves."""
    order: list[str] = []

    def start(link: Any, x: Any, *, backward: bool = False) -> None:
        order.append("start sums" if link.sums != backward else "start")
        started(link, x, backward=backward)

    def finish(link: Any, **kwargs: Any) -> Any:
        order.append("wait")
        return finished(link, **kwargs)

    def run(x: Any, index: Any, weights: Any, *, most_rows: int | None) -> Any:
        order.append("experts")
        stacks = (ExpertLinear(torch.ones(2, *sides)) for sides in ((16, 8), (8, 8)))
        return experts(x, index, weights, *stacks, Gate("silu"), most_rows=most_rows)

    def backward(*args: Any) -> Any:
        order.append("gradients of experts")
        return gradients(*args)

    def finish_experts(inputs: Any) -> Any:
        order.append("last matmul")
        return last(inputs)

    started, finished = exchange._Link.start, exchange._Link.finish
    gradients, last = expert_block._Experts.backward, expert_block._LastInputs.finish
    place = across_ranks.ExpertRanks(dist.get_world_size(), dist.get_rank(), dist.group.WORLD, 2)
    x, weights = torch.randn(6, 8, requires_grad=True), torch.rand(6, 2, requires_grad=True)
    with (
        mock.patch.object(exchange._Link, "start", start),
        mock.patch.object(exchange._Link, "finish", finish),
        mock.patch.object(expert_block._Experts, "backward", backward),
        mock.patch.object(expert_block._LastInputs, "finish", finish_experts),
        mock.patch.object(across_ranks, "FEWEST_IN_PARTS", 0),
    ):
        index = torch.zeros(6, 2, dtype=torch.int64)
        out = across_ranks.experts_across_ranks(x, index, weights, run, place, RowsOfRanks(6, (6,) * place.ranks))
        order.append("backward")
        out.sum().backward()
    return order


def asks_in_fsdp2(*, spread: bool) -> int:
    """Return how often ranks are asked in a step with FSDP2 in bfloat16, which copies dataclasses on their way in.

    Args:
        spread: whether experts are spread; else FSDP2 shards them, and its shards look like spread ones before a layer.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = build("qwen3_moe", None)
    if spread:
        fastpack.shard_experts(model, mesh())
    stacks = {parameter for parameter in model.parameters() if hasattr(parameter, "device_mesh")}
    fastpack.patch(model)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh(), mp_policy=precision, ignored_params=stacks)
    with mock.patch.object(across_ranks, "_ask", wraps=across_ranks._ask) as ask:
        step(model, Case("fsdp2"), make_sequences(VOCAB, LENGTHS))
    return ask.call_count


def generated(family: str, *, spread: bool) -> list[list[int]]:
    """Return the ids of two sequences that this rank samples, as long as they get.

    Transformers runs another implementation of experts while it generates on a GPU; here on a CPU, too.
    """
    model = build(family, None).eval()
    model.generation_config.eos_token_id = 2
    if spread:
        fastpack.shard_experts(model, mesh())
    fastpack.patch(model)
    model.set_experts_implementation("batched_mm")
    torch.manual_seed(dist.get_rank())
    ids = (torch.arange(3, 15).view(2, 6) + dist.get_rank()).to(device())
    settings = {"do_sample": True, "max_new_tokens": 300, "pad_token_id": 0}
    result: list[list[int]] = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings).tolist()
    return result


def refused(family: str, experts: int) -> str:
    model = tiny_model(family, **{COUNTS[family]: experts})
    try:
        fastpack.shard_experts(model, mesh())
    except fastpack.PatchError as error:
        assert not any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
        return str(error)
    return ""
