"""The work of each rank in ``test_context_mesh.py``: a batch spread over the ranks, against this process alone."""

from __future__ import annotations

import contextlib
import copy
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from adapter_cases import NF4, loaded, with_lora
from composite_cases import off as composite_off
from composite_cases import results as composite_results
from oracle import INPUT_KINDS, Error, Result, compare, make_sequences, run_alone, run_batch, to_device, trained_tokens
from rank_work import Case, batch_of, device, grads_of, off, one_process, wrap
from rank_work import build as rank_build
from rope_types import ROPE
from tiny import VOCAB, tiny_model
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers.integrations import neftune

import fastpack
from fastpack import attention_dispatch
from fastpack.exactness.image_text import batch_of as batch_of_rows
from fastpack.exactness.image_text import build_image_text, flat_of, samples
from fastpack.exactness.tiny import build_tiny
from fastpack.layers import rope_tables
from fastpack.layers.mixers import shares
from fastpack.model import loss as loss_module
from fastpack.ops.exchange import all_rows
from fastpack.ops.exchange_heads import to_heads, to_tokens
from fastpack.packing.shards import TokenShards

LENGTHS = (7, 1, 19, 30, 18)
"""75 tokens: no number of ranks divides them, and every share ends within a sequence."""


def mixed_dtypes(first: torch.dtype, second: torch.dtype, size: int) -> None:
    """Exchange heads of two dtypes, which are promoted to one, and exchange them back."""
    rank, sizes = dist.get_rank(), [5] * dist.get_world_size()
    q, v = (torch.randn(5, heads, size).to(device(), dtype) for heads, dtype in ((4, first), (2, second)))
    leaves = [x.requires_grad_() for x in (q, v)]
    for x, heads in zip(leaves, to_heads(leaves, sizes, dist.group.WORLD), strict=True):
        back = to_tokens(heads, sizes, rank, dist.group.WORLD)
        assert back.dtype == torch.promote_types(first, second)
        assert torch.equal(back, x.to(back.dtype))
        back.sum().backward(retain_graph=True)
    for x in leaves:
        assert x.grad is not None
        assert x.grad.dtype == x.dtype
        assert bool((x.grad == 1).all())


def mesh() -> Any:
    return init_device_mesh(device().type, (dist.get_world_size(),))


def build(family: str, *, lora: bool = False) -> Any:
    model: Any = tiny_model(family)
    return (with_lora(model) if lora else model).to(device())


def averaged(result: Result) -> Result:
    """Return a result with the mean of all ranks' gradients, which an engine takes."""
    return result._replace(grads=averaged_grads(result.grads))


def averaged_grads(grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    means = {name: grad.clone() for name, grad in grads.items()}
    for grad in means.values():
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    return means


def error_of(model: Any, alone: Result, kind: str, lengths: tuple[int, ...] = LENGTHS) -> Error:
    return compare(averaged(run_batch(model, make_sequences(VOCAB, lengths), kind)), alone)


def exactness(
    family: str,
    kinds: tuple[str, ...],
    *,
    lora: bool = False,
    checkpointing: bool = False,
    in_4bit: Path | None = None,
) -> dict[str, Any]:
    """Return the errors by kind of input and without the other ranks' tokens, and the tokens of each exchange.

    Args:
        in_4bit: a folder with the model, which bitsandbytes then quantises; by default a tiny one of the family.
    """
    if in_4bit is None:
        model = build(family, lora=lora)
    else:
        model = with_lora(loaded(in_4bit, device=str(device()), **NF4, bnb_4bit_compute_dtype=torch.float32))
    alone = run_alone(model, make_sequences(VOCAB, LENGTHS))
    fastpack.patch(model, context_mesh=mesh())
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens: list[int] = []

    def watched(tensors: Sequence[Tensor], sizes: Sequence[int], group: Any) -> list[Tensor]:
        tokens.append(len(tensors[0]))
        return to_heads(tensors, sizes, group)

    with exchanging(watched):
        errors = {kind: error_of(model, alone, kind).worst for kind in kinds}
    with exchanging(without_others):
        control = error_of(model, alone, kinds[0]).worst
    return {"errors": errors, "control": control, "tokens": {*tokens}}


def convolved(family: str, lengths: tuple[int, ...]) -> dict[str, float]:
    """Return the errors of a model with convolutions, and of one whose ranks don't see the tokens before theirs."""
    model = build(family)
    alone = run_alone(model, make_sequences(VOCAB, lengths))
    fastpack.patch(model, context_mesh=mesh())
    error = error_of(model, alone, "packed_seq_lens", lengths).worst

    def zeros(x: Tensor, sizes: Sequence[int], group: Any) -> Tensor:
        return 0 * all_rows(x, sizes, group)

    with mock.patch.object(shares, "all_rows", zeros):
        control = error_of(model, alone, "packed_seq_lens", lengths).worst
    return {"error": error, "control": control}


def by_length(rope: str, kinds: tuple[str, ...], *, checkpointing: bool = False) -> dict[str, Any]:
    """Return the errors of a rotary type whose frequencies depend on each sequence's length, by kind of input.

    The patched model in this process alone is what they are compared with; stock ones remember the longest sequence.
    """
    model_type, overrides = ROPE[rope]
    model: Any = tiny_model(model_type, **overrides).to(device())
    alone = run_alone(fastpack.patch(model), make_sequences(VOCAB, LENGTHS))
    fastpack.patch(model, context_mesh=mesh())
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    errors = {kind: error_of(model, alone, kind).worst for kind in kinds}
    with mock.patch.object(rope_tables, "_lengths", torch.ones_like):
        control = error_of(model, alone, kinds[0]).worst
    return {"errors": errors, "control": control}


def exact_or_refused(family: str) -> str | float:
    """Return the error of a family's tiny model, or why it is refused."""
    model: Any = build_tiny(family).train()
    sequences = make_sequences(model.config.get_text_config().vocab_size, LENGTHS)
    if family == "reformer":
        return "its stock forward takes lengths of whole chunks"
    alone = run_alone(model, sequences)
    try:
        fastpack.patch(model, context_mesh=mesh())
    except fastpack.FastpackError as error:
        assert not fastpack.is_patched(model)
        return str(error)
    return compare(averaged(run_batch(model, sequences, "padded right")), alone).worst


def images_or_refused(model_type: str) -> str | dict[str, float]:
    """Return the errors of a tiny model on rows with images, by form of the batch; or why it is refused."""
    model = build_image_text(model_type).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not name.endswith("k_proj.bias")  # its gradient is rounding alone
    model, rows = model.to(device()), [to_device(row, device()) for row in samples(model)]
    alone = composite_results(model, rows)
    batches = {"padded": batch_of_rows(model, rows), "flat": flat_of(model, rows)}
    try:
        fastpack.patch(model, context_mesh=mesh())
    except fastpack.FastpackError as error:
        assert not fastpack.is_patched(model)
        return str(error)
    errors: dict[str, float] = {}
    for form, batch in batches.items():
        try:
            logits, grads = composite_results(model, [batch])
        except fastpack.PackingError as error:
            return str(error)
        errors[form] = max(composite_off((logits, averaged_grads(grads)), alone))
    with exchanging(without_others):
        logits, grads = composite_results(model, [batches["padded"]])
    return errors | {"control": max(composite_off((logits, averaged_grads(grads)), alone))}


def images_in_the_backbone(*, on_all: bool) -> str:
    """Return what a backbone that puts images in place of tokens says, with the fused loss.

    ``on_all``: whether all ranks have them, or the first alone.
    """
    model: Any = build_image_text("chameleon").train().to(device())
    fastpack.patch(model, loss="fused", context_mesh=mesh())
    row = max(samples(model), key=len)
    batch = row if on_all or dist.get_rank() == 0 else {"input_ids": row["input_ids"]}
    batch = {**batch, "labels": row["input_ids"]}
    try:
        model(**to_device(batch, device()))
    except fastpack.PackingError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def exchanging(how: Callable[..., list[Tensor]]) -> Iterator[None]:
    """Replace the exchange of heads, in attention and in mixers."""
    with mock.patch.object(attention_dispatch, "to_heads", how), mock.patch.object(shares, "to_heads", how):
        yield


def without_others(tensors: Sequence[Tensor], sizes: Sequence[int], group: Any) -> list[Tensor]:
    """Return zeros for the tokens of the other ranks."""
    rank = dist.get_rank(group)
    own = torch.arange(sum(sizes), device=tensors[0].device) - sum(sizes[:rank])
    outside = (own < 0) | (own >= sizes[rank])
    return [x.masked_fill(outside[:, None, None], 0.0) for x in to_heads(tensors, sizes, group)]


def fused_loss(family: str, *, prompt: int = 0, lora: bool = False) -> dict[str, Any]:
    """Return the errors of the loss without logits, and the tokens whose loss this rank computed.

    Args:
        family: the model.
        prompt: the first tokens of the batch have no labels.
        lora: whether only adapters train.
    """
    batch = INPUT_KINDS["packed_seq_lens"](make_sequences(VOCAB, LENGTHS))
    batch["labels"][:, :prompt] = -100

    def run(spread: Any) -> tuple[Result, int]:
        model = build(family, lora=lora)
        fastpack.patch(model, loss="fused", context_mesh=spread)
        with mock.patch.object(loss_module, "linear_cross_entropy", wraps=loss_module.linear_cross_entropy) as op:
            outputs = model(**to_device(batch, device()))
        outputs.loss.backward()
        assert outputs.logits is None
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return Result([outputs.loss[None].detach()], outputs.loss.detach(), grads), len(op.call_args.args[2])

    (whole, _), (spread, tokens) = run(None), run(mesh())
    with mock.patch.object(TokenShards, "sum", lambda shards, x: x):
        control = compare(averaged(run(mesh())[0]), whole).loss
    return {"error": compare(averaged(spread), whole).worst, "tokens": tokens, "control": control}


def wrapped(how: str, *, lora: bool) -> dict[str, Any]:
    """Return the error of a step in an engine, and of the losses: pairs of ranks share a batch, and see two of them.

    With two ranks there is one batch.
    """
    case = Case(how, lora=lora)
    two_d = init_device_mesh(device().type, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "cp"))
    replicas, replica = two_d["dp"].size(), two_d["dp"].get_local_rank()
    sequences = make_sequences(VOCAB, LENGTHS * 2)
    expected = one_process(case, sequences[: 5 * replicas])
    model = fastpack.patch(rank_build(case), loss="fused", context_mesh=two_d["cp"])
    outer = wrap(model, case)
    own = sequences[5 * replica : 5 * replica + 5]
    batch = to_device(batch_of(own, "padded left"), device())
    loss = outer(**batch, num_items_in_batch=trained_tokens(sequences[: 5 * replicas]), use_cache=False).loss
    (loss * replicas).backward()  # the engine takes the mean over replicas, too
    total = loss.detach().clone()
    dist.all_reduce(total)
    return {"error": off(Result([], total / 2, grads_of(model)), expected)}


def refused(family: str, **options: Any) -> str:
    """Return what a patch over all ranks says."""
    model = build(family)
    if family == "opt":
        model.model.decoder.layerdrop = 0.1
    try:
        fastpack.patch(model, context_mesh=mesh(), **options)
    except fastpack.FastpackError as error:
        assert not fastpack.is_patched(model)
        return str(error)
    return ""


def batches_refused(what: str) -> str:
    """Return what every rank says about a batch that can't be spread."""
    model = fastpack.patch(build("llama"), loss="fused", context_mesh=mesh())
    lengths, seed, others = LENGTHS, 0, dist.get_rank()
    if what == "other ids":
        seed = others
    elif what == "other lengths":
        lengths = LENGTHS[:-1] if others else LENGTHS
    elif what == "an empty share":
        lengths = (dist.get_world_size() - 1,)
    batch = to_device(INPUT_KINDS["packed_seq_lens"](make_sequences(VOCAB, lengths, seed=seed)), device())
    if what == "other labels":
        batch["labels"][0, 10] = others
    if what == "other embeddings":
        batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids")).detach() + others
    try:
        model(**batch, use_cache=False)
    except fastpack.PackingError as error:
        return str(error)
    return ""


def noise() -> list[float]:
    """Return the largest noise of NEFTune in a packed row, without and with a mesh."""
    found = []
    for spread in (None, mesh()):
        model = build("llama")
        embedding = model.get_input_embeddings()
        embedding.neftune_noise_alpha = 5.0
        embedding.register_forward_hook(neftune.neftune_post_forward_hook)
        fastpack.patch(model, context_mesh=spread)
        seen: list[Tensor] = []
        hook = model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))  # noqa: B023
        ids = torch.full((1, 64), 5, device=device())
        model(input_ids=ids, packed_seq_lens=[40, 24])
        hook.remove()
        plain = embedding.weight[5].detach()
        found.append(float((seen[0] - plain).abs().max()))
    return found


def verify_refused(*, with_the_patch: bool) -> tuple[str, str]:
    """Return what is said to a verification with or after the patch, and the model's tier."""
    model = build("llama")
    try:
        fastpack.patch(model, context_mesh=mesh(), verify=with_the_patch)
        fastpack.verify(model)
    except fastpack.PatchError as error:
        return str(error), fastpack.report(model).tier
    return "", ""


def left_alone(limit_s: float) -> tuple[str, float]:
    """Return what a rank gets, and when, if the last rank of its group never runs the model."""
    group = dist.new_group(timeout=timedelta(seconds=limit_s))
    model = fastpack.patch(build("llama"), context_mesh=DeviceMesh.from_group(group, device().type))
    began = time.monotonic()
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(2 * limit_s)
        return "", 0.0
    try:
        run_batch(model, make_sequences(VOCAB, LENGTHS), "packed_seq_lens")
    except RuntimeError as error:
        return type(error).__name__, time.monotonic() - began
    return "", time.monotonic() - began


def copies() -> dict[str, Any]:
    """Return the error of a deep copy, and what an unpickled model says before and after it is patched again."""
    model = build("llama")
    alone = run_alone(model, make_sequences(VOCAB, LENGTHS))
    fastpack.patch(model, context_mesh=mesh())
    copied = error_of(copy.deepcopy(model), alone, "padded left").worst
    unpickled = pickle.loads(pickle.dumps(model))
    said = ""
    try:
        run_batch(unpickled, make_sequences(VOCAB, LENGTHS), "padded left")
    except fastpack.PatchError as error:
        said = str(error)
    fastpack.patch(unpickled, context_mesh=mesh())
    report = [line for line in fastpack.report(model).notes if "context" in line]
    again = error_of(unpickled, alone, "padded left").worst
    fastpack.unpatch(model)
    restored = compare(run_alone(model, make_sequences(VOCAB, LENGTHS)), alone).worst
    return {"copied": copied, "said": said, "again": again, "report": report, "restored": restored}
