"""The work of each rank in this folder's tests: training steps of tiny wrapped models, against one process."""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from adapter_cases import with_lora
from expert_models import expert_model, outermost_of, with_expert_lora
from oracle import INPUT_KINDS, Result, compare, make_sequences, run_batch, to_device, trained_tokens
from prefix_cases import pairs, sharing
from tiny import VOCAB, tiny_model
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import fastpack
from fastpack.layers import attention, experts, mlp, project

LENGTHS = (7, 1, 19, 19, 33, 5)
"""Sequences dealt to the ranks in turn, which get 59 and 25 tokens: their losses are means over uneven numbers."""
LAYERS = 2


@dataclass(frozen=True)
class Case:
    """The settings of a step.

    Attributes:
        wrap: ``ddp``, ``fsdp2``, ``hybrid`` (FSDP2 on a mesh of two dimensions), ``accelerate`` (FSDP2 in the units
            that accelerate makes), ``fsdp1`` (its first version), ``flat`` (the same, whose modules have no weights but
            while they run), or ``none``, where each rank keeps its own gradient.
        checkpointing: ``non-reentrant``, ``reentrant``, ``wrapper`` (the one that accelerate puts around layers for
            FSDP) or None.
        feed: a kind of input, or ``naive``: sequences one after the other as if they were one.
        micro_batches: over which the gradient is accumulated before the ranks exchange it.
        units: of FSDP2: ``layers``, ``projections`` of them, or ``experts``: these and the layers.
        lengths: of the sequences, dealt to the ranks in turn.
        experts: whether it is a model with experts, and LoRA is on their stacks, too.
    """

    wrap: str
    lora: bool = False
    checkpointing: str | None = None
    feed: str = "padded left"
    micro_batches: int = 1
    family: str = "llama"
    patched: bool = True
    loss: Any = None
    half: bool = False
    share_prefixes: Any = None
    units: str = "layers"
    lengths: tuple[int, ...] = LENGTHS
    experts: bool = False


def device() -> torch.device:
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else torch.device("cpu")


def build(case: Case) -> Any:
    if case.experts:
        blocks = expert_model(case.family)
        return (with_expert_lora(blocks) if case.lora else blocks).to(device())
    settings = {"is_decoder": True} if case.family == "roformer" else {}
    attention = "sdpa" if case.family == "llama" else "eager"
    model: Any = tiny_model(case.family, attn_implementation=attention, **settings)
    return (with_lora(model) if case.lora else model).to(device())


def plain(model: Any) -> Any:
    """Return the model inside PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def checkpoint(model: Any, kind: str | None) -> None:
    if kind == "wrapper":
        layers = plain(model).model.layers
        for i, layer in enumerate(layers):
            layers[i] = checkpoint_wrapper(layer, preserve_rng_state=False)
    elif kind is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": kind == "reentrant"})


def units(model: Any, kind: str) -> list[nn.Module]:
    """Return the modules that FSDP2 shards besides the whole model."""
    if kind == "layers":
        lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
        return list(max(lists, key=lambda layers: len(list(layers.modules()))))
    if kind == "experts":
        return [*outermost_of(model), *units(model, "layers")]
    return [module for module in model.base_model.modules() if type(module) is nn.Linear]


def wrap(model: Any, case: Case) -> Any:
    """Return the wrapped module to call; the module inside keeps its parameters' names."""
    if case.wrap == "none":
        return model
    if case.wrap == "ddp":
        return DistributedDataParallel(model, device_ids=[dist.get_rank()] if device().type == "cuda" else None)
    if case.wrap in ("fsdp1", "flat"):
        layers = ModuleWrapPolicy({type(layer) for layer in units(plain(model), case.units)})
        as_they_are = case.wrap == "fsdp1"
        return FullyShardedDataParallel(model, auto_wrap_policy=layers, use_orig_params=as_they_are, device_id=device())
    settings: dict[str, Any] = {}
    if case.wrap == "hybrid":
        settings["mesh"] = init_device_mesh(device().type, (dist.get_world_size(), 1), mesh_dim_names=("copies", "in"))
    if case.half:
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    inside = plain(model)
    for module in units(inside, case.units):
        fully_shard(module, **settings)
    if case.wrap == "accelerate":
        fully_shard(inside.model.embed_tokens, **settings)
        fully_shard([inside.model.norm, inside.lm_head], **settings, reshard_after_forward=False)
    return fully_shard(model, **settings)


def batch_of(sequences: list[Tensor], feed: str) -> dict[str, Any]:
    """Return the labels with first ones ignored, as in the count of a whole step; ``naive`` doesn't ignore them."""
    if feed == "naive":
        ids = torch.cat(sequences)[None]
        return {"input_ids": ids, "labels": ids.clone()}
    batch = INPUT_KINDS[feed](sequences)
    mask = batch.get("attention_mask")
    real = torch.ones_like(batch["labels"], dtype=torch.bool) if mask is None else mask.bool()
    firsts = torch.tensor([0, *map(len, sequences)]).cumsum(0)[:-1]
    batch["labels"].view(-1)[real.view(-1).nonzero()[firsts, 0]] = -100
    return batch


@contextlib.contextmanager
def exchanging(outer: Any, last: bool) -> Iterator[None]:
    """Keep gradients on their rank, except for the last micro-batch."""
    if isinstance(outer, DistributedDataParallel) and not last:
        with outer.no_sync():
            yield
        return
    if hasattr(outer, "set_requires_gradient_sync"):
        outer.set_requires_gradient_sync(last)
    yield


def step(outer: Any, case: Case, sequences: list[Tensor]) -> Tensor:
    """Run forward and backward over this rank's share, and return the loss of all ranks."""
    mine = sequences[dist.get_rank() :: dist.get_world_size()]
    count = trained_tokens(sequences)
    micro = [mine[i :: case.micro_batches] for i in range(case.micro_batches)]
    total = torch.zeros((), device=device())
    for i, part in enumerate(micro):
        with exchanging(outer, i == len(micro) - 1):
            out = outer(**to_device(batch_of(part, case.feed), device()), num_items_in_batch=count, use_cache=False)
            # DDP and FSDP take the mean over ranks
            (out.loss * (1 if case.wrap == "none" else dist.get_world_size())).backward()
        total += out.loss.detach()
    dist.all_reduce(total)
    return total


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return gradients by their names in the stock model."""
    return {re.sub(r"_(checkpoint|fsdp)_wrapped_module\.", "", name): p for name, p in model.named_parameters()}


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    if isinstance(model, FullyShardedDataParallel):
        with model.summon_full_params(model, with_grads=True):  # of frozen ones too, which are zero
            trained = {name: p for name, p in weights_of(model).items() if p.requires_grad}
            return {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
    return {name: whole(p.grad).clone().float() for name, p in weights_of(model).items() if p.grad is not None}


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of each fused Function of the layers, and of the dispatch of attention."""
    result: Counter[str] = Counter()

    def count(name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        result[name] += 1
        return function(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        functions = (project, "project"), (mlp, "gated_mlp"), (attention, "attend"), (experts, "experts")
        for module, name in functions:
            counting = functools.partial(count, name, getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, counting))
        yield result


def prepare(case: Case) -> tuple[Any, Any]:
    """Return the patched model and its wrapper."""
    model = build(case)
    if case.patched:
        fastpack.patch(model, loss=case.loss, share_prefixes=case.share_prefixes)
    checkpoint(model, case.checkpointing)
    return model, wrap(model, case)


def one_process(case: Case, sequences: list[Tensor]) -> Result:
    """Run the stock model in this process alone, on one big batch."""
    result = run_batch(build(case), sequences, "padded right", num_items=trained_tokens(sequences))
    return Result([], result.loss, result.grads)


def one_step(case: Case) -> dict[str, Any]:
    """Return the errors of loss and gradients against :func:`one_process`, and the fused Functions that ran."""
    sequences = make_sequences(VOCAB, case.lengths)
    expected = one_process(case, sequences)
    model, outer = prepare(case)
    with counted() as calls:
        loss = step(outer, case, sequences)
    grads = grads_of(outer if case.wrap == "fsdp1" else model)
    return {"error": off(Result([], loss, grads), expected), "calls": dict(calls)}


def flat_step(case: Case) -> dict[str, Any]:
    """The loss of a step whose gradients nobody can take apart; reports before it and after, and verify's refusal."""
    sequences = make_sequences(VOCAB, case.lengths)
    expected = one_process(case, sequences)
    _, outer = prepare(case)
    before = fastpack.report(outer).to_dict()
    error = abs(float(step(outer, case, sequences) / expected.loss) - 1)
    result = {"error": error, "reports": [before, fastpack.report(outer).to_dict()], "refused": ""}
    try:
        fastpack.verify(outer)
    except fastpack.PatchError as refused:
        result["refused"] = str(refused)
    return result


def step_with_prefixes(case: Case) -> dict[str, Any]:
    """Run the same with chosen and rejected sequences, and count shared tokens; each rank has both of its pairs."""
    expected = one_process(case, pairs())
    model, outer = prepare(replace(case, share_prefixes="auto"))
    loss = step(outer, case, pairs())
    return {"error": off(Result([], loss, grads_of(model)), expected), "saved": sharing(model).stats.saved}


def off(result: Result, expected: Result) -> float:
    nothing = [torch.ones(1)]
    error = compare(Result(nothing, result.loss, result.grads), Result(nothing, expected.loss, expected.grads))
    return error.worst


def several_steps(case: Case, count: int) -> dict[str, Any]:
    """Return losses of ``count`` steps of AdamW here and in one process, and the final difference of the weights."""

    def optimizer_of(model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-4)

    alone = build(case)
    model, outer = prepare(case)
    one, two = optimizer_of(alone), optimizer_of(model)
    losses: tuple[list[float], list[float]] = ([], [])
    for i in range(count):
        sequences = make_sequences(VOCAB, LENGTHS, seed=i)
        result = run_batch(alone, sequences, "padded right", num_items=trained_tokens(sequences))
        losses[0].append(float(result.loss))
        losses[1].append(float(step(outer, case, sequences)))
        one.step()
        two.step()
        two.zero_grad()
    weights = weights_of(alone)
    apart = max(
        float((whole(p.detach()) - weights[name]).abs().max() / weights[name].abs().max())
        for name, p in weights_of(model).items()
    )
    return {"alone": losses[0], "ranks": losses[1], "apart": apart}


def exchanges(case: Case) -> dict[str, int]:
    """Count the ranks' exchanges by kind, in a step after the first."""
    _, outer = prepare(case)
    sequences = make_sequences(VOCAB, LENGTHS)
    step(outer, case, sequences)
    with CommDebugMode() as watched:
        step(outer, case, sequences)
    return {str(operation): count for operation, count in watched.get_comm_counts().items()}


def told(case: Case) -> dict[str, Any]:
    """Return the report of a wrapped model, its errors, and what is left after ``unpatch``."""
    sequences = make_sequences(VOCAB, LENGTHS)
    model, outer = prepare(case)
    before = fastpack.report(model).to_dict() if case.wrap == "ddp" else fastpack.report(prepare(case)[0]).to_dict()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        loss = step(outer, case, sequences)
    result: dict[str, Any] = {
        "report": fastpack.report(outer).to_dict() | {"notes": ()},
        "before": before | {"notes": ()},
        "patched": fastpack.is_patched(outer),
        "text": str(fastpack.report(outer)),
        "warnings": [str(warning.message) for warning in warned],
        "names": sorted(whole_weights(model)) == sorted(build(case).state_dict()),
    }
    fastpack.unpatch(outer)
    result["left"] = [name for name, module in model.named_modules() if "forward" in module.__dict__]
    result["tier after"] = fastpack.report(outer).tier
    again = step(outer, replace(case, feed="padded right"), sequences)
    result["stock again"] = abs(float(again - loss)) / float(loss)
    try:
        fastpack.patch(outer)
    except fastpack.PatchError as error:
        result["refused"] = str(error)
    result["still stock"] = not any("forward" in module.__dict__ for module in model.modules())
    return result


def whole_weights(model: Any) -> dict[str, Tensor]:
    """Return the state dict of the whole model, as it is saved."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def half_precision(case: Case) -> dict[str, float]:
    """Return the errors of patched and stock against float32 in one process, both with bfloat16 weights."""
    sequences = make_sequences(VOCAB, LENGTHS)
    expected = one_process(case, sequences)
    result = {}
    for patched in (False, True):
        model, outer = prepare(replace(case, patched=patched, half=True, feed="padded right"))
        loss = step(outer, case if patched else replace(case, feed="padded right"), sequences)
        result["patched" if patched else "stock"] = off(Result([], loss, grads_of(model)), expected)
    return result


def nothing_on_one_rank(case: Case) -> float:
    """Give the second rank only padding; return the step's error against that of the first rank's share."""
    sequences = make_sequences(VOCAB, LENGTHS)[::2]
    count = trained_tokens(sequences)
    model, outer = prepare(case)
    batch = INPUT_KINDS["padded left"](sequences)
    if dist.get_rank():
        batch["attention_mask"].zero_()
        batch["labels"].fill_(-100)
    out = outer(**to_device(batch, device()), num_items_in_batch=count, use_cache=False)
    (out.loss * dist.get_world_size()).backward()
    loss = out.loss.detach().clone()
    dist.all_reduce(loss)
    return off(Result([], loss, grads_of(model)), one_process(case, sequences))


def fail_on_the_second(message: str) -> None:
    """Raise on the second rank while the first waits for it."""
    if dist.get_rank() == 1:
        raise ValueError(message)
    dist.barrier()
