"""Types of the objects of transformers, PEFT and TRL that fastpack passes around.

Each type lists the attributes that fastpack reads. Attributes that only some objects have are read with ``getattr``. A
protocol can't say that something is a module, so models and layers are classes here. These classes have no instances.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class ConfigLike(Protocol):
    """The config of a model of transformers."""

    model_type: str
    hidden_size: int
    num_attention_heads: int
    is_decoder: bool
    output_router_logits: bool
    pad_token_id: int | None

    def get_text_config(self, decoder: bool | None = None) -> ConfigLike:
        """Return the config of a composite's text model, else this config."""

    def to_dict(self) -> dict[str, Any]:
        """Return all settings."""


class ModelLike(nn.Module):
    """A model of transformers: a head, or a backbone."""

    config: ConfigLike
    dtype: torch.dtype
    get_input_embeddings: Callable[[], nn.Module]
    gradient_checkpointing_enable: Callable[[dict[str, Any]], None]
    enable_input_require_grads: Callable[[], None]


class HeadLike(ModelLike):
    """A head around a backbone."""

    base_model: ModelLike
    lm_head: nn.Module
    loss_function: Callable[..., Tensor]
    router_aux_loss_coef: float


class LayerLike(nn.Module):
    """A decoder layer."""

    self_attn: AttentionLike


class AttentionLike(nn.Module):
    """An attention module; each kind of attention has some of these attributes."""

    config: ConfigLike
    layer_type: str
    head_dim: int
    num_key_value_groups: int
    scaling: float
    v_norm: nn.Module


class AdapterLike(nn.Module):
    """A layer of PEFT around another layer."""

    active_adapter: str | list[str]
    active_adapters: list[str]
    merged_adapters: list[str]
    lora_A: nn.ModuleDict
    lora_B: nn.ModuleDict
    scaling: Mapping[str, float]


class ArgumentsLike(Protocol):
    """The arguments of a trainer."""

    device: torch.device
    seed: int
    data_seed: int | None
    max_steps: int
    num_train_epochs: float
    gradient_accumulation_steps: int
    dataloader_drop_last: bool
    average_tokens_across_devices: bool
    loss_type: str
    sync_ref_model: bool


class TrainerLike(Protocol):
    """A trainer of transformers or TRL; each of TRL's trainers has some of the last group."""

    model: HeadLike
    args: ArgumentsLike
    accelerator: Any
    data_collator: Callable[[Any], Any]
    train_dataset: Any
    compute_loss_func: Callable[..., Tensor] | None
    label_smoother: Callable[..., Tensor] | None
    model_accepts_loss_kwargs: bool
    current_gradient_accumulation_steps: int
    add_callback: Callable[[object], None]
    remove_callback: Callable[[object], None]
    compute_loss: Callable[..., Any]
    _get_train_sampler: Callable[..., Any]

    ref_model: nn.Module | None
    aux_loss_enabled: bool
    router_aux_loss_coef: float
    loss_type: str
    loss_types: list[str]
    loss_weights: list[Any]
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool
    _metrics: dict[str, Any]
    _total_train_tokens: int
