"""The sizes of a decoder from its config alone: the model is built on the meta device, without weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastpack.errors import UnsupportedModelError
from fastpack.families.registry import family_of
from fastpack.families.spec import AttentionSpec, DecoderSpec, Family, MlpSpec, NormSpec
from fastpack.model.unwrap import find_parts
from fastpack.utils.classes import stock_class
from fastpack.utils.modules import decoder_layers


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a decoder whose layers are alike.

    Attributes:
        name: the name of its class.
        layers: the number of layers.
        hidden: H, the hidden size.
        intermediate: I, the size inside an MLP.
        queries: Q, the size of all query heads together.
        keys: K, the size of all key heads together; the values' size is the same.
        heads: the number of query heads.
        rotary: R, the width of a position table.
        vocabulary: V, the number of token ids.
        tied: whether the head's weight is the embedding.
        head_norms: whether queries and keys are normalised, so that a layer keeps them as they were before.
        linear: the shape ``(out, in)`` of each linear layer except the head, by its name in the model.
        other: the number of all other parameters: embedding, head, norms and biases.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    queries: int
    keys: int
    heads: int
    rotary: int
    vocabulary: int
    tied: bool
    head_norms: bool
    linear: dict[str, tuple[int, int]]
    other: int

    @property
    def linear_parameters(self) -> int:
        """The number of weights of all linear layers except the head."""
        return sum(out * inputs for out, inputs in self.linear.values())

    @property
    def parameters(self) -> int:
        """The number of all parameters."""
        return self.linear_parameters + self.other

    @property
    def head(self) -> int:
        """The number of the head's weights, V x H."""
        return self.vocabulary * self.hidden

    def lora_parameters(self, rank: int) -> int:
        """Return the number of A's and B's parameters, with LoRA on every linear layer except the head."""
        return rank * sum(out + inputs for out, inputs in self.linear.values())


def read_sizes(config: Any) -> ModelSizes:
    """Return the sizes of a causal LM.

    Args:
        config: its config of transformers.

    Raises:
        UnsupportedModelError: transformers builds no causal LM from this config, or the memory of one of its parts was
            not worked out: only attention with separate projections, gated MLPs, and layers whose norms stand before
            both are counted.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise UnsupportedModelError(
            f"transformers builds no causal LM from a config of {config.model_type!r}. Pass the config of a decoder."
        ) from error
    parts = find_parts(model)
    layers: Any = decoder_layers(parts.backbone)
    _require_counted(model, family_of(parts.backbone), layers)
    backbone: Any = parts.backbone
    attention, mlp = layers[0].self_attn, layers[0].mlp
    linear = {
        name: (module.out_features, module.in_features)
        for name, module in backbone.named_modules()
        if isinstance(module, nn.Linear)
    }
    embedding, head = backbone.get_input_embeddings(), model.get_output_embeddings()
    tables = backbone.rotary_emb.inv_freq
    return ModelSizes(
        name=type(model).__name__,
        layers=len(layers),
        hidden=embedding.weight.shape[1],
        intermediate=mlp.down_proj.in_features,
        queries=attention.q_proj.out_features,
        keys=attention.k_proj.out_features,
        heads=attention.q_proj.out_features // attention.head_dim,
        rotary=2 * len(tables),
        vocabulary=head.weight.shape[0],
        tied=head.weight is embedding.weight,
        head_norms=hasattr(attention, "q_norm"),
        linear=linear,
        other=sum(p.numel() for p in model.parameters()) - sum(out * inputs for out, inputs in linear.values()),
    )


def _require_counted(model: nn.Module, family: Family | None, layers: list[Any]) -> None:
    """Raise unless every part of the layers is one that is counted."""
    specs = {} if family is None else family.fast
    for layer in layers:
        for module in (layer, *layer.children()):
            spec = specs.get(stock_class(module).__name__)
            if not _is_counted(spec):
                raise UnsupportedModelError(
                    f"the memory of {type(model).__name__} was not worked out: {type(module).__name__} is not counted. "
                    "Pass a dense decoder like Llama, Mistral, Qwen2 or Qwen3."
                )


def _is_counted(spec: object) -> bool:
    if isinstance(spec, DecoderSpec):
        plain = DecoderSpec()
        return (spec.pre_attention, spec.pre_mlp, spec.mlp) == (plain.pre_attention, plain.pre_mlp, plain.mlp) and not (
            spec.post_attention or spec.post_mlp or spec.residual_scale or spec.dropouts
        )
    if isinstance(spec, AttentionSpec):
        special = spec.qkv or spec.gated or spec.gate or spec.sinks or spec.scales_by_position or spec.key_scale
        return not special and spec.out == "o_proj" and spec.qk_norm in (None, "head") and spec.rope_tables == "whole"
    if isinstance(spec, MlpSpec):
        return spec.gate_up == MlpSpec().gate_up and spec.down == "down_proj"
    return isinstance(spec, NormSpec) and spec.kind == "rms"
