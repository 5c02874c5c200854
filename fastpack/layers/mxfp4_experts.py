"""The forward of routers and experts whose stacks transformers has packed as MXFP4.

Transformers loads gpt-oss as it is shipped for Triton kernels that can't be differentiated: they return no gradient of
the tokens. So the forward of the module that holds router and experts is replaced whole. It calls the router, and runs
the experts as any other block. The patch has put the bytes into the specification's order, if the kernels have another
(:mod:`fastpack.patching.mxfp4_order`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.errors import PatchError
from fastpack.families.spec import ExpertsSpec, Family
from fastpack.layers.experts import ExpertOperands, read_gate, run_experts
from fastpack.layers.runtime import Runtime
from fastpack.ops.experts.layer import ExpertLinear
from fastpack.ops.stack_formats import Mxfp4Format
from fastpack.utils.classes import stock_class
from fastpack.utils.replacement import Replacement

PACKAGE = "transformers.integrations.mxfp4"
ROUTER, EXPERTS = "router", "experts"
"""The names of both parts in the module that holds them."""


def mxfp4_forward(
    patched: Replacement[ExpertsSpec, Runtime], hidden_states: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Run router and experts on ``[..., H]``.

    Returns:
        The result ``[..., H]``, and the router's logits ``[T, E]``, as the stock forward does.

    Raises:
        PatchError: the stacks can't be read any more.
    """
    if torch.compiler.is_compiling():
        from fastpack.utils.outside import run_quantized_experts  # it imports the compiler

        outside: tuple[Tensor, Tensor] = run_quantized_experts(mxfp4_forward, patched, hidden_states)
        return outside
    holder = patched.owner
    operands = read_mxfp4(holder.experts, patched.spec)
    if isinstance(operands, str):
        raise PatchError(f"experts in MXFP4 can't be read any more: {operands}. Load the model anew, and patch that.")
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    logits, weights, index = holder.router(tokens)
    return run_experts(patched, operands, hidden_states, index, weights, tokens.dtype), logits


def read_mxfp4(block: nn.Module, spec: ExpertsSpec) -> ExpertOperands | str:
    """Return the operands of a block of transformers' experts in MXFP4, or why they can't be read."""
    if getattr(block, "_is_hooked", False):
        return "its experts are spread over processes (expert parallelism)"
    gate = read_gate(block, spec)
    inner, down = _read_layer(block, spec.inner), _read_layer(block, spec.down)
    for part in (gate, inner, down):
        if isinstance(part, str):
            return part
    return ExpertOperands(inner, down, gate)  # type: ignore[arg-type]


def _read_layer(block: Any, name: str) -> ExpertLinear | str:
    stack: Any = getattr(block, name, None)
    precision: Any = getattr(block, f"{name}_precision_config", None)
    try:
        bytes_of, scales_of = stack.storage, precision.weight_scale.storage
        packed, scales = bytes_of.data, scales_of.data
        stack_format = Mxfp4Format(
            scales, torch.Size(stack.shape), True, layout=bytes_of.layout, scale_layout=scales_of.layout
        )
    except AttributeError as error:
        return f"its {name} has no bytes and scales in the layouts of Triton's kernels ({error})"
    return ExpertLinear(packed, block._parameters.get(f"{name}_bias"), format=stack_format)


def mxfp4_experts(backbone: nn.Module, family: Family) -> Iterator[tuple[nn.Module, str, ExpertsSpec]]:
    """Yield each module that holds a router and experts in MXFP4, the name of their dense class, and its spec."""
    specs = {spec.mxfp4: (name, spec) for name, spec in family.fast.items() if isinstance(spec, ExpertsSpec)}
    specs.pop(None, None)
    for module in backbone.modules() if specs else ():
        block = module._modules.get(EXPERTS)
        cls = None if block is None else stock_class(block)
        if cls is not None and cls.__name__ in specs and cls.__module__ == PACKAGE:
            yield module, *specs[cls.__name__]
