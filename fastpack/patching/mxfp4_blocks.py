"""Put a family's own blocks of experts in the place of those that transformers makes for its kernels of MXFP4.

PEFT finds no parameters in transformers' blocks. The family's own hold the same values as quantised stacks.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastpack.errors import PatchError
from fastpack.families.registry import family_of
from fastpack.families.spec import ExpertsSpec
from fastpack.layers.experts import ExpertOperands
from fastpack.layers.mxfp4_experts import EXPERTS, ROUTER, mxfp4_experts, read_mxfp4
from fastpack.ops.quantized_stack import QuantizedStack, save_by_hooks
from fastpack.ops.stack_formats import Mxfp4Format
from fastpack.patching.state import state_of
from fastpack.utils.classes import stock_class


@dataclass(frozen=True, eq=False)
class Mxfp4Place:
    """The place of a router and its experts in MXFP4.

    Attributes:
        name: the dotted name in the backbone of the module that holds both.
        cls: the family's own class of this module.
        spec: the spec of the family's own experts.
    """

    name: str
    cls: type[nn.Module]
    spec: ExpertsSpec


def places_in_mxfp4(backbone: nn.Module) -> list[Mxfp4Place]:
    """Return the places of transformers' blocks in MXFP4.

    Raises:
        PatchError: one of them can't be replaced.
    """
    family = family_of(backbone)
    if family is None:
        return []
    names = {id(module): name for name, module in backbone.named_modules()}
    places: list[Mxfp4Place] = []
    for holder, _, spec in mxfp4_experts(backbone, family):
        operands = read_mxfp4(holder.get_submodule(EXPERTS), spec)
        reason = None
        if isinstance(operands, str):
            reason = f"{operands}: load the model with quantization_config=Mxfp4Config(dequantize=True)"
        elif hasattr(holder, "_hf_hook"):
            reason = "accelerate moves its weights: load the model on one device"
        elif state_of(backbone) is not None:
            reason = "the model is patched: call fastpack.unpatch(model) first"
        if reason is not None:
            raise PatchError(
                f"a {type(holder).__name__} of this model can't be replaced: {reason}. Nothing was changed."
            )
        own = stock_class(holder).__name__.removeprefix("Mxfp4")
        places.append(Mxfp4Place(names[id(holder)], getattr(sys.modules[family.module], own), spec))
    return places


def make_own(backbone: Any, place: Mxfp4Place, dtype: torch.dtype | None) -> None:
    """Replace a block in place; ``dtype`` is that of dense copies, by default the router's."""
    theirs, spec = backbone.get_submodule(place.name), place.spec
    router, operands = theirs.get_submodule(ROUTER), read_mxfp4(theirs.get_submodule(EXPERTS), spec)
    assert isinstance(operands, ExpertOperands)
    of_router = next(router.parameters()).dtype
    with torch.device("meta"):
        ours = place.cls(backbone.config)
    ours.add_module(ROUTER, router)
    block = ours.get_submodule(EXPERTS)
    for name, layer in ((spec.inner, operands.inner), (spec.down, operands.down)):
        assert isinstance(layer.format, Mxfp4Format)
        packed, scales = layer.format.plain(layer.weight)
        stack_format = Mxfp4Format.of(scales, transposed=spec.transposed, dtype=dtype or of_router)
        block._parameters[name] = QuantizedStack(packed, stack_format)
        if layer.bias is not None:
            block._parameters[f"{name}_bias"] = nn.Parameter(layer.bias.detach().to(of_router), requires_grad=False)
    save_by_hooks(block)
    backbone.set_submodule(place.name, ours.train(theirs.training))
