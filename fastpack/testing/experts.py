"""Mode ``experts``: LoRA on the stacks of experts, compared with stock PEFT on each sequence alone.

Everything but the stacks trains: the adapters, the routers, and the embedding, whose gradient is that of the inputs.
The control swaps the adapters of two experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fastpack
from fastpack.exactness.inputs import INPUT_KINDS
from fastpack.exactness.oracle import Oracle
from fastpack.exactness.rule import CONTROL
from fastpack.exactness.verification import Check, Verification
from fastpack.layers.read_projection import wraps_parameter
from fastpack.patching.experts import NAMED
from fastpack.testing.record import Row, Setting

EXPERTS = "experts"
BOUND = 2e-5
"""The largest error in float32: PEFT adds the updates to the stacks, which rounds otherwise."""
RANK = 4
NODE = "_ExpertsBackward"
"""The name in autograd's graph of a block of experts that ran fast."""
NO_STACKS = "it has no stacks of experts that PEFT can train"


def expert_rows(family: str, setting: Setting, backends: Sequence[str], routers: Sequence[str]) -> Iterator[Row]:
    """Yield a row for each backend: the error of the patched model, and why experts run stock if they do.

    Args:
        family: the family.
        setting: the device, dtype and head size.
        backends: the attention backends to patch with.
        routers: the names of the classes that choose experts.

    All errors of building, patching or running the model may be raised.
    """
    if not stacks_of(setting.build(family)):
        yield Row(family, EXPERTS, dtype=setting.dtype, left_out=NO_STACKS)
        return
    build = partial(with_adapters, setting, family)
    oracle = Oracle.of(build, getattr(torch, setting.dtype), routers)
    if oracle.dtype == torch.float32:
        oracle = replace(oracle, bound=max(oracle.bound, BOUND))
    setting = replace(setting, dtype=str(oracle.dtype).removeprefix("torch."))
    # blocks of experts have two stacks each, and those for images don't run on text
    expected = sum("lora_B" in name and bool(grad.any()) for name, grad in oracle.results[0].grads.items()) // 2
    for backend in backends:
        model = fastpack.patch(build(oracle.dtype), attention=backend)
        stock, ran = why_stock(model), fast_blocks(model, oracle.draws[0])
        verification = with_control(oracle, model, oracle.prove(model))
        row = Row.of(family, EXPERTS, setting, model, verification, left_out=stock)
        if stock is None and not 0 < expected <= ran:
            row = replace(
                row, problem=f"{ran} of {expected} blocks of experts ran fast, and the report doesn't say why"
            )
        yield row


def stacks_of(model: nn.Module) -> list[str]:
    """Return the names of a model's stacks of experts: the parameters ``[E, *, *]`` of modules of that name."""
    return [
        f"{name}.{parameter}" if name else parameter
        for name, module in model.named_modules()
        if type(module).__name__.endswith(NAMED)
        for parameter, value in module.named_parameters(recurse=False)
        if value.ndim == 3
    ]


def with_adapters(setting: Setting, family: str, dtype: torch.dtype) -> Any:
    """Return a family's model with LoRA on all stacks of experts; B is not zero, and everything but the stacks trains.

    Args:
        setting: the device and head size.
        family: the family.
        dtype: the dtype of the base model.
    """
    from peft import LoraConfig, get_peft_model

    model = setting.build(family, dtype)
    stacks = stacks_of(model)
    torch.manual_seed(0)
    wrapped = get_peft_model(model, LoraConfig(r=RANK, target_modules=[], target_parameters=stacks))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    frozen = {id(module._parameters[stack]) for module, stack in stacked(wrapped)}
    for parameter in wrapped.parameters():
        parameter.requires_grad_(id(parameter) not in frozen and parameter.is_floating_point())
    return wrapped.train()


def stacked(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield each stack of experts: its module, and its name there."""
    for name in stacks_of(model):
        place, _, stack = name.rpartition(".")
        yield model.get_submodule(place), stack


def why_stock(model: nn.Module) -> str | None:
    """Return why some experts of a patched model run stock, as its report says, or None."""
    notes = [f"{what}: {why}" for what, why in fastpack.report(model).skipped if what.endswith(NAMED)]
    return "; ".join(notes) or None


def fast_blocks(model: Any, sequences: Sequence[Tensor]) -> int:
    """Return how many times a block of experts ran fast in one forward of these sequences."""
    device = next(model.parameters()).device
    batch = next(iter(INPUT_KINDS.values()))(sequences)
    outputs = model(**{k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items() if k != "labels"})
    waiting, seen = [outputs.logits.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [function for function, _ in node.next_functions]
    return sum(node.name() == NODE for node in seen)


def with_control(oracle: Oracle, model: Any, verification: Verification) -> Verification:
    """Return a verification with one more control, which must be off: two experts have each other's adapters.

    The model's adapters stay swapped.
    """
    swap_adapters(model)
    error = oracle.error(model, next(iter(INPUT_KINDS.values()))).logits
    control = Check("control, adapters of two experts swapped", error, CONTROL * oracle.bound, at_least=True)
    return replace(verification, checks=(*verification.checks, control))


@torch.no_grad()
def swap_adapters(model: nn.Module) -> None:
    """Swap the adapters of the first and the last expert of every stack."""
    wrapper: Any
    for wrapper in filter(wraps_parameter, model.modules()):
        experts = wrapper.num_experts
        order = [experts - 1, *range(1, experts - 1), 0]
        (a,), (b,) = (parts.values() for parts in (wrapper.lora_A, wrapper.lora_B))
        by_expert = a.weight.view(experts, -1, a.weight.shape[1]), b.weight.view(len(b.weight), -1, experts)
        by_expert[0].copy_(by_expert[0][order])
        by_expert[1].copy_(by_expert[1][..., order])
