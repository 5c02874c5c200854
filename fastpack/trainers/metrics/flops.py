"""Count a model's floating-point operations for a token, and for a pair of tokens, for MFU.

"Model FLOPs" are those of Chowdhery et al., "PaLM", arXiv:2204.02311, appendix B. Only matmuls count, with two
operations for a multiplication and its addition. Work that checkpointing or attention's backward repeats does not count
again. For each token, the forward of a linear layer costs 2 x inputs x outputs. The gradient of its input costs the
same, and so does the gradient of its weight if the weight trains. Attention costs 2 (D_k + D_v) for each head and each
pair of a token and a token that it sees; the backward costs twice as much. LoRA's A and B are linear layers. A token
counts the experts that it is routed to, with their LoRA, and every token counts the head. Modules that embed images or
sound are not counted.

Gradients of inputs are counted from the lowest layer on that has trained parameters, and for all of that layer. If no
embedding trains, this counts a few matmuls too many in that layer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import nn

from fastpack.errors import UnsupportedModelError
from fastpack.families.registry import family_of
from fastpack.model.unwrap import find_parts
from fastpack.utils.classes import stock_class
from fastpack.utils.modules import TOWERS, decoder_layers, experts_per_token
from fastpack.utils.protocols import AdapterLike, ConfigLike

_KNOWN_TIERS = ("fast", "varlen")
"""The tiers of families in which only attention mixes tokens."""


@dataclass(frozen=True)
class ModelFlops:
    """A model's floating-point operations, forward and backward.

    Attributes:
        per_token: the operations of all linear layers for one token.
        per_pair: for each window, the operations of attention for one pair of a token and a token that it sees, summed
            over the layers with that window. A window is the largest number of tokens that a query sees, itself
            included; None if it sees all tokens up to itself.
    """

    per_token: int
    per_pair: Mapping[int | None, int]

    def of(self, tokens: int, pairs: Sequence[int]) -> int:
        """Return the operations of ``tokens`` tokens, with ``pairs[i]`` pairs in the i-th window of ``per_pair``."""
        return self.per_token * tokens + sum(a * b for a, b in zip(self.per_pair.values(), pairs, strict=True))


def read_flops(model: nn.Module, *, recurrences: bool = True) -> ModelFlops:
    """Return the operations of a transformers model, plain or wrapped by PEFT.

    The operations depend on the parameters that train now and on the active adapters.

    Args:
        model: the model.
        recurrences: False to leave out recurrences and convolutions between tokens, for which there are no formulas;
            the result is then less than a model with some needs.

    Raises:
        UnsupportedModelError: the model is not one of transformers, or fastpack has no formula for a part of it.
    """
    parts = find_parts(model)
    backbone = parts.backbone
    family = family_of(backbone)
    if family is None or family.tier not in _KNOWN_TIERS or family.uncounted or (family.packs_mixers and recurrences):
        raise UnsupportedModelError(f"there is no formula for everything that a {type(backbone).__name__} computes.")
    config, layers = backbone.config.get_text_config(), decoder_layers(backbone)
    trains = _trains(backbone.get_input_embeddings())
    per_token = linear_flops(backbone, config, input_grad=trains, leave=layers)
    per_pair = Counter[int | None]()
    for at, layer in enumerate(layers):
        trains = trains or _trains(layer)
        per_token += linear_flops(layer, config, input_grad=trains)
        for module in layer.modules():
            if stock_class(module).__name__ in family.attention:
                per_pair[_window(module, config, at)] += _scores(module, config) * (3 if trains else 1)
    if parts.head is not None:
        per_token += linear_flops(parts.head, config, input_grad=trains, leave=[backbone])
    return ModelFlops(per_token, dict(per_pair))


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def linear_flops(block: nn.Module, config: ConfigLike, *, input_grad: bool, leave: Sequence[nn.Module] = ()) -> int:
    """Return a token's operations in the linear layers of a block.

    Args:
        block: the module that holds the layers.
        config: the config of the model.
        input_grad: whether the gradient of the input is computed.
        leave: the modules inside that are not counted.

    Raises:
        UnsupportedModelError: there is no formula for a parameter.
    """
    return sum(2 * size * (1 + input_grad + trains) for size, trains in _weights(block, config, {*map(id, leave)}))


def _weights(module: Any, config: ConfigLike, leave: Set[int] = frozenset()) -> Iterator[tuple[int, bool]]:
    """Yield inputs x outputs of each weight that multiplies a token, and whether the weight trains."""
    name = type(module).__name__
    if id(module) in leave or isinstance(module, nn.Embedding | nn.Conv1d) or "Norm" in name:
        return
    if hasattr(module, "original_module"):  # PEFT's wrapper, which also has copies that train
        copies = getattr(module, "modules_to_save", {})
        active = next((copies[adapter] for adapter in module.active_adapters if adapter in copies), None)
        yield from _weights(module.original_module if active is None else active, config, leave)
    elif hasattr(module, "base_layer"):
        yield from _weights(module.base_layer, config)
        yield from _lora_weights(module, config)
    elif hasattr(module, "in_features"):  # the logical sizes, also if the weight is quantised or sharded
        weight = getattr(module, "weight", None)
        yield module.in_features * module.out_features, getattr(weight, "requires_grad", False)
    else:
        experts = experts_per_token(config)
        for key, parameter in module.named_parameters(recurse=False):
            shape = getattr(parameter, "ds_shape", parameter.shape)
            if len(shape) == 2 and key == "weight":
                yield math.prod(shape), parameter.requires_grad
            elif len(shape) == 3 and experts is not None:
                yield math.prod(shape[1:]) * experts, parameter.requires_grad
            elif len(shape) > 1 and not key.endswith("bias"):
                raise UnsupportedModelError(f"there is no formula for {name}.{key}.")
        for key, child in module.named_children():
            if not any(word in key for word in TOWERS):
                yield from _weights(child, config, leave)


def _lora_weights(module: AdapterLike, config: ConfigLike) -> Iterator[tuple[int, bool]]:
    """Yield the same as :func:`_weights` for LoRA's A and B of the active adapters.

    On a stack of E experts, A is ``[E r, in]`` and B ``[out, r E]``. A token multiplies the parts of those experts that
    it is routed to.

    Raises:
        UnsupportedModelError: the adapter is not plain LoRA on a linear layer, a matrix or a stack of routed experts.
    """
    name, dora = type(module).__name__, getattr(module, "use_dora", {})
    stacked = getattr(module, "num_experts", 1)  # PEFT's wrapper of a parameter; 1 for a matrix
    routed = experts_per_token(config) if stacked > 1 else 1
    if not hasattr(module, "lora_A") or module.lora_embedding_A or any(dora.values()) or routed is None:
        raise UnsupportedModelError(f"there is no formula for PEFT's {type(module).__module__}.{name}.")
    for adapter in module.active_adapters:
        if adapter in module.lora_A and adapter not in module.merged_adapters:
            for part in (module.lora_A, module.lora_B):
                for size, trains in _weights(part[adapter], config):
                    yield size * routed // stacked, trains


def _scores(module: nn.Module, config: ConfigLike) -> int:
    """Return the operations of attention's forward for one pair of tokens."""
    heads = _first(module, "num_heads", "num_attention_heads", "n_heads", "n_head") or config.num_attention_heads
    size = _first(module, "qk_head_dim", "head_dim", "attention_head_size", "head_size") or config.hidden_size // heads
    return 2 * heads * (size + (_first(module, "v_head_dim") or size))


def _window(module: nn.Module, config: ConfigLike, index: int) -> int | None:
    """Return the most tokens that a query of this layer sees, or None for no limit."""
    kinds = getattr(config, "layer_types", None)
    if (kinds and kinds[index] == "full_attention") or getattr(config, "use_sliding_window", True) is False:
        return None
    return _first(module, "sliding_window") if hasattr(module, "sliding_window") else _first(config, "sliding_window")


def _first(source: object, *names: str) -> int | None:
    """Return the first of these attributes that is a positive int, or None."""
    values = (getattr(source, name, None) for name in names)
    return next((value for value in values if type(value) is int and value > 0), None)
