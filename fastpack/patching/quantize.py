"""Quantise the stacked weights of experts, which ``load_in_4bit`` leaves as they are.

Experts that transformers has loaded in MXFP4 for its kernels become the family's own blocks, with stacks in MXFP4.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from fastpack.errors import PatchError, UnsupportedModelError
from fastpack.families.registry import family_of
from fastpack.families.spec import ExpertsSpec
from fastpack.layers.mxfp4_experts import mxfp4_experts
from fastpack.layers.read_projection import why_not_plain
from fastpack.model.unwrap import find_parts
from fastpack.ops.mxfp4 import BLOCK as BLOCK_MXFP4
from fastpack.ops.mxfp4 import quantize_mxfp4
from fastpack.ops.quantized_stack import QuantizedStack, save_by_hooks
from fastpack.ops.stack_formats import FourBitFormat, Mxfp4Format, StackFormat
from fastpack.patching.mxfp4_blocks import make_own, places_in_mxfp4
from fastpack.patching.recognise import own_class

QuantType = Literal["nf4", "fp4", "mxfp4"]
ModelT = TypeVar("ModelT", bound=nn.Module)
BLOCK = 64
"""The number of weights that share a scale, as in ``load_in_4bit``."""
LARGEST = 2**31
"""bitsandbytes counts weights in 32 bits."""


@dataclass(frozen=True, eq=False)
class Stack:
    """A stack of weights, and its place.

    Attributes:
        block: the block of experts.
        name: the name of the parameter.
        weight: the stack ``[E, ., .]``, or None if there is no such parameter.
        spec: the block's spec.
    """

    block: nn.Module
    name: str
    weight: Tensor | None
    spec: ExpertsSpec


def quantize_experts(
    model: ModelT,
    *,
    quant_type: QuantType = "nf4",
    double_quant: bool = True,
    compute_dtype: torch.dtype | None = None,
) -> ModelT:
    """Quantise the stacked weights of a model's experts to 4 bits, in place.

    Transformers stacks the weights of all experts of a layer in two parameters. ``load_in_4bit=True`` quantises only
    linear layers, and so leaves most of such a model dense, without a word.

    A quantised stack is a frozen parameter under the same name, with the shape of the dense stack. It moves with the
    model, and is copied and pickled with it. In a patched model (:func:`fastpack.patch`, before or after this) one
    stack at a time is dense, in the forward and again in the backward. Unpatched, the stock forward runs on dense
    copies, which autograd keeps until the backward. ``torch.compile`` takes only patched models, with a graph break for
    each block of experts.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B")  # doctest: +SKIP
        >>> fastpack.quantize_experts(model).to("cuda")  # doctest: +SKIP
        >>> stacks = ["experts.gate_up_proj", "experts.down_proj"]  # doctest: +SKIP
        >>> model = get_peft_model(model, LoraConfig(target_parameters=stacks))  # doctest: +SKIP
        >>> fastpack.patch(model)  # doctest: +SKIP

    **PEFT.** Quantise first, then add adapters. An adapter that is there already stays as it is, and trains on. Its
    files are PEFT's own, and load over a dense or a quantised model. Merging an adapter into quantised stacks raises:
    merge it into the dense model.

    **Several GPUs.** DDP takes the model as it is. FSDP2 would make the stacks dense, and shard those; it leaves them
    alone, whole on each GPU, with ``fully_shard(layer, ignored_params={p for p in layer.parameters() if isinstance(p,
    fastpack.QuantizedStack)})``.

    **Save and load.** The state dict has bytes and scales as plain tensors, named as bitsandbytes names them, and so
    have the files of ``model.save_pretrained(folder, save_original_format=False)``; without that option transformers
    tries to split the stacks, and may fail. To load, quantise a model of the same config, then fill it. On the meta
    device that takes no memory::

        with accelerate.init_empty_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        fastpack.quantize_experts(model).load_state_dict(tensors, assign=True)

    ``from_pretrained`` can't load such a folder: it expects dense stacks, and raises.

    **MXFP4.** The state dict of stacks in MXFP4 has gpt-oss's own names, so that its checkpoint can be filled in just
    as above, after ``quantize_experts(model, quant_type="mxfp4")``; transformers itself needs the package ``kernels``
    to load it, or makes it dense. A model that transformers has loaded so trains LoRA on attention once it is patched.
    For LoRA on its experts, call this function first, with any ``quant_type``: PEFT finds no parameters in the blocks
    of transformers, and this puts the family's own blocks in their place, with the same values.

    Args:
        model: a model of transformers with stacked experts, on any device, with or without adapters. Stacks that are
            quantised already stay as they are.
        quant_type: the code of the 4 bits: ``nf4`` or ``fp4`` of bitsandbytes, or ``mxfp4``.
        double_quant: whether bitsandbytes quantises the scales, too: 4.13 instead of 4.5 bits a weight.
        compute_dtype: the dtype of dense copies, and so of the matmuls outside of autocast; by default that of the
            dense stack.

    Returns:
        The same model.

    Raises:
        UnsupportedModelError: fastpack knows no stacked experts in this model.
        PatchError: bitsandbytes is missing, a stack is sharded, offloaded or too large, or the model is patched and has
            blocks in MXFP4 of transformers. Nothing was changed.
        ValueError: another ``quant_type``, or a ``compute_dtype`` that is not a float dtype.
    """
    if quant_type not in get_args(QuantType):
        raise ValueError(f"quant_type={quant_type!r}: choose one of {', '.join(map(repr, get_args(QuantType)))}.")
    if compute_dtype is not None and not compute_dtype.is_floating_point:
        raise ValueError(f"compute_dtype={compute_dtype} is not a float dtype: pass torch.bfloat16, or leave it out.")
    backbone = find_parts(model).backbone
    in_mxfp4 = places_in_mxfp4(backbone)
    stacks = list(stacks_of(backbone))
    if not (stacks or in_mxfp4):
        raise UnsupportedModelError(
            f"{type(backbone).__name__} has no experts with stacked weights that fastpack knows. To quantise linear "
            "layers, load it with quantization_config=BitsAndBytesConfig(load_in_4bit=True). Nothing was changed."
        )
    stacks = [stack for stack in stacks if not isinstance(stack.weight, QuantizedStack)]
    for stack in stacks:
        _check(stack, quant_type)
    if stacks and quant_type != "mxfp4" and importlib.util.find_spec("bitsandbytes") is None:
        raise PatchError("quantising experts needs bitsandbytes: pip install bitsandbytes. Nothing was changed.")
    for place in in_mxfp4:
        make_own(backbone, place, compute_dtype)
    while stacks:  # so that each dense stack is freed at once
        _quantize(stacks.pop(), quant_type, double_quant, compute_dtype)
    return model


def stacks_of(backbone: nn.Module) -> Iterator[Stack]:
    """Yield both stacks of each block of experts whose class has a spec."""
    family = family_of(backbone)
    for module in backbone.modules() if family is not None else ():
        spec = family.fast.get(own_class(module, family) or "") if family is not None else None
        if isinstance(spec, ExpertsSpec):
            for name in (spec.inner, spec.down):
                yield Stack(module, name, module._parameters.get(name), spec)


def notes_on_stacks(backbone: nn.Module, *, four_bits: bool) -> tuple[str, ...]:
    """Return notes for the report: on quantised stacks, and on dense ones although linear layers have 4 bits."""
    weights = [stack.weight for stack in stacks_of(backbone)]
    formats = Counter(weight.stack_format.name for weight in weights if isinstance(weight, QuantizedStack))
    family = family_of(backbone)
    formats["MXFP4"] += 0 if family is None else 2 * sum(1 for _ in mxfp4_experts(backbone, family))
    dense = [weight for weight in weights if weight is not None and not isinstance(weight, QuantizedStack)]
    notes = [
        f"experts: {count} stacks in {name}, of which one at a time is dense"
        for name, count in formats.items()
        if count
    ]
    if four_bits and dense:
        size = sum(weight.nbytes for weight in dense) / 2**30
        notes.append(
            f"experts: {len(dense)} stacks are not quantised ({size:.2f} GiB), since load_in_4bit quantises linear "
            "layers alone: fastpack.quantize_experts(model) quantises them, too"
        )
    return tuple(notes)


def _check(stack: Stack, quant_type: QuantType) -> None:
    """Raise a PatchError if a stack can't be quantised."""
    weight, what = stack.weight, f"{stack.name} of a {type(stack.block).__name__}"
    if weight is None:
        raise PatchError(f"{what} is not a plain parameter: other code has replaced it. Nothing was changed.")
    reason = why_not_plain(weight)
    if weight.is_meta and not hasattr(stack.block, "_hf_hook"):
        reason = None  # not offloaded, but to be filled
    if reason is not None or not weight.is_floating_point():
        raise PatchError(
            f"{what} can't be quantised: {reason or f'it has {weight.dtype} weights'}. Quantise a model whose weights "
            "are whole and dense, before it is sharded or offloaded. Nothing was changed."
        )
    if quant_type == "mxfp4" and weight.shape[_inner_dimension(stack)] % BLOCK_MXFP4:
        raise PatchError(
            f"{what} has an inner dimension of {weight.shape[_inner_dimension(stack)]}, and MXFP4 needs a multiple of "
            f"{BLOCK_MXFP4}: pass quant_type='nf4'. Nothing was changed."
        )
    if quant_type != "mxfp4" and weight.numel() >= LARGEST:
        raise PatchError(
            f"{what} has {weight.numel():,} weights, and bitsandbytes can't quantise {LARGEST:,} or more at once. "
            "Train this model dense, or sharded. Nothing was changed."
        )


def _quantize(stack: Stack, quant_type: QuantType, double_quant: bool, compute_dtype: torch.dtype | None) -> None:
    """Quantise one stack in place."""
    assert stack.weight is not None
    dense, dtype = stack.weight.detach(), compute_dtype or stack.weight.dtype
    stack_format: StackFormat
    if quant_type == "mxfp4":
        transposed = stack.spec.transposed
        packed, scales = quantize_mxfp4(dense.mT if transposed else dense)
        stack_format = Mxfp4Format.of(scales, transposed=transposed, dtype=dtype)
    else:
        from bitsandbytes.functional import quantize_4bit

        packed, state = quantize_4bit(
            dense.contiguous(), blocksize=BLOCK, quant_type=quant_type, compress_statistics=double_quant
        )
        stack_format = FourBitFormat(state, dtype)
    stack.block._parameters[stack.name] = QuantizedStack(packed, stack_format)
    save_by_hooks(stack.block)


def _inner_dimension(stack: Stack) -> int:
    return 1 if stack.spec.transposed else 2
