"""The fast forward of blocks of experts, with LoRA on their stacked weights.

PEFT wraps the block once for each stack that LoRA trains (``target_parameters``). Its wrappers add dense updates to the
stacks before the block runs. So the fast forward takes the place of the outermost wrapper's, and reads the adapters.
A block whose stacks or adapters can't be read runs as it is.

Shape suffixes: T tokens, K experts of a token, H hidden size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fastpack.errors import PatchError
from fastpack.families.spec import ExpertsSpec
from fastpack.layers.expert_ranks import own_part, ranks_of
from fastpack.layers.read_projection import active_update, why_not_plain, wraps_parameter
from fastpack.layers.runtime import Runtime
from fastpack.ops.autograd import reshaped
from fastpack.ops.expert_operands import ExpertActivation, Gate
from fastpack.ops.experts.across_ranks import ExpertRanks, experts_across_ranks
from fastpack.ops.experts.experts import experts
from fastpack.ops.experts.layer import ExpertLinear
from fastpack.ops.glu import activation_kind
from fastpack.ops.linear.operands import Lora, product_dtype
from fastpack.ops.quantized_stack import QuantizedStack
from fastpack.utils.classes import is_upstreams, place_of, stock_class
from fastpack.utils.compile import constant
from fastpack.utils.hooks import carries_hooks, own_forward
from fastpack.utils.protocols import ConfigLike
from fastpack.utils.replacement import Replacement
from fastpack.utils.signatures import bind, parameters

DEFAULT = "grouped_mm"
"""The value of a config's ``_experts_implementation`` if nobody has chosen one. Chosen by name, it means the same."""
GATE_METHOD = "_apply_gate"
"""The method of a block that computes its gated unit."""


@dataclass(frozen=True, eq=False)
class ExpertOperands:
    """The operands of a block of experts: both layers, and the gated unit between them.

    If ``ranks`` share the experts, the layers are those of this rank's.
    """

    inner: ExpertLinear
    down: ExpertLinear
    gate: Gate
    ranks: ExpertRanks | None = None


def experts_forward(
    patched: Replacement[ExpertsSpec, Runtime], hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Run a block of experts on ``[..., H]``, or the stock forward if its weights can't be read.

    Under autocast the matmuls run in its dtype, as those of linear layers do. (Transformers' ``grouped_mm`` is not an
    operation of autocast, and stays in the weights' dtype.)

    Args:
        patched: the replacement of the outermost forward: the block's own, or that of a wrapper of PEFT.
        hidden_states: the tokens.
        *args: the chosen experts ``[T, K]`` and their weights ``[T, K]``.
        **kwargs: the same, by the block's own names.
    """
    if torch.compiler.is_compiling():
        if _is_quantized(patched.owner):
            from fastpack.utils.outside import run_quantized_experts  # it imports the compiler

            return run_quantized_experts(experts_forward, patched, hidden_states, *args, **kwargs)
        return patched.stock(hidden_states, *args, **kwargs)
    operands = read_experts(patched.owner, patched.spec)
    if isinstance(operands, str):
        return patched.stock(hidden_states, *args, **kwargs)
    cls = stock_class(innermost(patched.owner))
    arguments = bind(cls, (hidden_states, *args), kwargs)
    _, index, weights = (arguments[name] for name in parameters(cls.forward)[:3])
    return run_experts(patched, operands, hidden_states, index, weights, operands.inner.dtype)


def run_experts(
    patched: Replacement[ExpertsSpec, Runtime],
    operands: ExpertOperands,
    hidden_states: Tensor,
    index: Tensor,
    weights: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Run the op of experts on ``[..., H]``.

    Args:
        patched: the replacement that runs.
        operands: the operands of its block.
        hidden_states: the tokens.
        index: the chosen experts ``[T, K]``.
        weights: their weights ``[T, K]``.
        dtype: the dtype of the matmuls outside autocast.

    Raises:
        PatchError: experts are spread over ranks, and the block calls them on other rows than the layer's.
    """
    count = patched.runtime.rows.count
    if count is not None and count.tokens != len(index):
        count = None  # a block that calls its experts on other rows than the layer's
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    run = functools.partial(
        experts,
        inner=operands.inner,
        down=operands.down,
        gate=operands.gate,
        transposed=patched.spec.transposed,
        dtype=product_dtype(hidden_states, dtype),
        implementation=patched.runtime.kernels,
    )
    if operands.ranks is None:
        result = run(x, index, weights, row_count=count).finish()
    else:
        of_ranks = patched.runtime.rows.of_ranks
        if of_ranks is not None and of_ranks.own != len(index):
            raise PatchError(
                f"{type(innermost(patched.owner)).__name__} runs its experts on {len(index)} of the layer's "
                f"{of_ranks.own} tokens, which fastpack can't spread over ranks: train it without shard_experts."
            )
        result = experts_across_ranks(x, index, weights, run, operands.ranks, of_ranks)
    return result if result.shape == hidden_states.shape else reshaped(result, tuple(hidden_states.shape))


@constant
def _is_quantized(module: nn.Module) -> bool:
    """Return whether a block of experts, maybe in PEFT's wrappers, has quantised stacks."""
    return any(isinstance(parameter, QuantizedStack) for parameter in innermost(module)._parameters.values())


def innermost(module: nn.Module) -> nn.Module:
    """Return the module inside PEFT's wrappers around parameters."""
    while wraps_parameter(module):
        module = module.base_layer  # type: ignore[assignment]
    return module


def read_experts(module: nn.Module, spec: ExpertsSpec, *, at_rest: bool = False) -> ExpertOperands | str:
    """Return the operands of a block of experts, or why it must run as it is.

    Args:
        module: the block, or the outermost wrapper of PEFT around it.
        spec: the block's spec.
        at_rest: as for :func:`fastpack.layers.read_projection.read_projection`.
    """
    loras: dict[str, Any] = {}
    outermost = module
    while wraps_parameter(module):
        wrapper: Any = module
        if wrapper is not outermost and carries_hooks(wrapper):
            return "a wrapper of PEFT carries hooks"
        update = active_update(wrapper, at_rest)
        if isinstance(update, str):
            return update
        if update is not None:
            # PEFT 0.18 never swaps the sizes of a stack's sides, 0.19 swaps them for other stacks than 0.21 does
            if getattr(wrapper, "_did_swap_in_out_features", False) == spec.transposed:
                return "this release of PEFT gives A the stack's other side: upgrade PEFT to 0.21"
            loras[wrapper.parameter_name] = update
        module = wrapper.base_layer
    if module is not outermost and carries_hooks(module):
        return "it carries hooks, or a forward of its own (offloading does this)"
    ranks = None if at_rest else ranks_of(module._parameters.get(spec.inner))
    # spread over ranks only this forward can run them, and on a GPU generate chooses another by name for a while
    chosen = chosen_by_name(getattr(module, "config", None)) if ranks is None else None
    if chosen is not None:
        return f"experts_implementation={chosen!r} was chosen by name"
    replaced = _replaced_gate(module)
    if replaced is not None:
        return f"its gated unit is {replaced}"
    gate = read_gate(module, spec)
    if isinstance(gate, str):
        return gate
    inner = _read_layer(module, spec.inner, spec, loras.pop(spec.inner, None), at_rest, ranks)
    down = _read_layer(module, spec.down, spec, loras.pop(spec.down, None), at_rest, ranks)
    if isinstance(inner, str) or isinstance(down, str):
        return inner if isinstance(inner, str) else str(down)
    if loras:
        return f"LoRA trains its {min(loras)}"
    return ExpertOperands(inner, down, gate, ranks)


def _read_layer(
    module: nn.Module, name: str, spec: ExpertsSpec, lora: Lora | None, at_rest: bool, ranks: ExpertRanks | None
) -> ExpertLinear | str:
    """Return one layer of a block of experts, or why the block must run as it is."""
    weight: Tensor | None
    bias: Tensor | None
    weight, bias = (module._parameters.get(each) for each in (name, f"{name}_bias"))
    if weight is None or (spec.bias and bias is None):
        return f"its {name} is not a plain parameter"
    if ranks is not None:
        if getattr(weight, "device_mesh", None) is None:
            return f"its {name} is whole, and other weights of it are spread over ranks"
        weight, bias = own_part(weight, ranks), None if bias is None else own_part(bias, ranks)
        lora = None if lora is None else ranks.lora(lora)
    stack = weight if isinstance(weight, QuantizedStack) else None
    plain = weight if stack is None else stack.packed
    reason = why_not_plain(plain, at_rest) or (why_not_plain(bias, at_rest) if bias is not None else None)
    if reason is not None:
        return reason
    if not weight.is_floating_point():
        return f"its {name} has {weight.dtype} weights"
    return ExpertLinear(plain, bias, lora, None if stack is None else stack.stack_format)


def read_gate(module: Any, spec: ExpertsSpec) -> Gate | str:
    """Return the gated unit of a block of experts, or why no kernel computes it."""
    activation: Any = F.silu if spec.activation is None else getattr(module, spec.activation)
    kind: ExpertActivation | None = activation_kind(activation)
    if kind is None and type(activation).__name__ == "ReLUSquaredActivation" and not carries_hooks(activation):
        kind = "relu2"
    if kind is None:
        return f"its activation is a {type(activation).__name__}"
    alpha, limit = (None if name is None else getattr(module, name) for name in (spec.alpha, spec.limit))
    return Gate(
        kind,
        spec.columns,
        alpha=1.0 if alpha is None else float(alpha),
        limit=math.inf if limit is None else float(limit),
        offset=spec.offset,
        clamps_after=spec.clamps_after,
    )


def _replaced_gate(module: nn.Module) -> str | None:
    """Return the place of the method that other code has put in place of a block's gated unit, or None.

    The block's own forward may not call the method, but transformers' other implementations do.
    """
    method = module.__dict__.get(GATE_METHOD, getattr(stock_class(module), GATE_METHOD, None))
    function = getattr(method, "__func__", method)
    return None if function is None or is_upstreams(function) else place_of(function)


def chosen_by_name(config: ConfigLike | None) -> str | None:
    """Return the implementation of experts that the user has chosen, or None.

    It is chosen by its name, or by another function under the default's name in transformers' table.
    """
    name = getattr(config, "_experts_implementation", None)
    if name not in (None, DEFAULT):
        return str(name)
    entry = ALL_EXPERTS_FUNCTIONS.get(DEFAULT)
    return None if entry is None or is_upstreams(entry) else f"{DEFAULT} ({place_of(entry)})"


@dataclass(frozen=True, eq=False)
class ExpertsPlace:
    """The place of a block of experts in the module that calls it; PEFT's wrappers may come into this place, or go.

    Attributes:
        parent: the module that calls the block.
        name: the block's name there.
        replacement: the replacement of the outermost forward in this place.
    """

    parent: nn.Module
    name: str
    replacement: Replacement[ExpertsSpec, Runtime]

    @property
    def may_be_spread(self) -> bool:
        """True if the block's experts are spread over ranks, or look so before FSDP2 gathers them."""
        return ranks_of(innermost(self.replacement.owner)._parameters.get(self.replacement.spec.inner)) is not None

    def follow(self) -> None:
        """Move the replacement to the module that is outermost now."""
        outermost, ours = self.parent._modules.get(self.name), self.replacement
        if outermost is None or outermost is ours.owner or innermost(outermost) is not innermost(ours.owner):
            return
        if own_forward(outermost) is not None:
            return  # of other code, which calls the block inside
        ours.undo()
        ours.owner = outermost
        ours.install()


def places_of(backbone: nn.Module, blocks: Container[int]) -> Iterator[tuple[nn.Module, str, nn.Module, nn.Module]]:
    """Yield the parent of each of these blocks of experts, the name there, the outermost wrapper, and the block.

    Args:
        backbone: the backbone that holds them.
        blocks: the ids of the blocks.
    """
    for parent in backbone.modules():
        if not wraps_parameter(parent):
            for name, child in parent._modules.items():
                if child is not None and id(block := innermost(child)) in blocks:
                    yield parent, name, child, block
