"""Tiny models of any transformers family, from the family's own config class, with random weights.

One rule makes a config small (:func:`shrink`). Families share the names of their settings (``hidden_size``,
``d_model``, ``n_embd``), so each name has one small value, which every class that declares the name gets. Layers are
picked from the config's own pattern, two of each kind, in order. :mod:`fastpack.exactness.family_settings` holds the
settings that only single families need.

On a GPU heads should be as wide as real ones: ``head_dim=64`` makes every width four times as large.

Weights are drawn so that a leak from one sequence into another shows. They spread more than most families' initial
weights, so that attention is far from uniform, no gate starts shut, norms differ from 1, and a state outlives a dozen
tokens.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from fastpack.exactness.family_settings import (
    ACTIVE,
    BEYOND,
    EXPERTS,
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INDEX_HEADS,
    KV_HEADS,
    NEEDS,
    NOT_BUILT,
    POSITIONS,
    RANK,
    ROPE_DIM,
    STATE,
    TRAITS,
    VOCAB,
    WINDOW,
    Fixed,
)
from fastpack.layers.window_checks import EARLIER
from fastpack.utils.protocols import ConfigLike

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def _by_name(table: Iterable[tuple[Any, str]]) -> dict[str, Any]:
    return {name: value for value, names in table for name in names.split()}


_WIDTHS = (
    (HIDDEN, "hidden_size d_model n_embd embedding_dim emb_dim embedding_size input_embedding_size lru_width"),
    (HIDDEN, "output_embedding_size word_embed_proj_dim attention_hidden_size router_hidden_size dim_model_base"),
    (HIDDEN, "shape_embed_dim pronunciation_embed_dim hidden_size_global ple_embed_dim"),
    (HEAD_DIM, "head_dim d_head dim_head kv_channels attention_head_size attention_head_dim swa_head_dim"),
    (HEAD_DIM, "qk_nope_head_dim v_head_dim index_head_dim"),
    (HEAD_DIM, "linear_head_dim linear_key_head_dim linear_value_head_dim"),
    (ROPE_DIM, "qk_rope_head_dim rotary_dim"),
    (RANK, "q_lora_rank kv_lora_rank o_lora_rank hc_lowrank adapter_rank laurel_rank gated_norm_rank"),
    (RANK, "hidden_size_per_layer_input prompt_mid_dim"),
    (FFN, "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size feed_forward_size"),
    (FFN, "dense_intermediate_size intermediate_size_mlp d_inner dff dim_ff"),
    (HIDDEN, "moe_intermediate_size moe_shared_expert_intermediate_size expert_ffn_hidden_size"),
    (HIDDEN, "shared_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size"),
    (2 * HIDDEN, "mamba_d_ssm"),
    (HEAD_DIM, "mamba_d_head mamba_head_dim indexer_head_dim query_pre_attn_scalar"),
)
_COUNTS = (
    (VOCAB, "vocab_size decoder_vocab_size vocab_size_per_layer_input shape_vocab_size pronunciation_vocab_size"),
    (0, "pad_token_id"),
    (1, "bos_token_id"),
    (2, "eos_token_id"),
    (3, "sep_token_id"),
    (2, "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers num_blocks"),
    (2, "encoder_layers num_encoder_layers"),  # not built, but BART counts them when it makes a cache
    (HEADS, "num_attention_heads n_head n_heads num_heads attention_heads linear_num_heads"),
    (HEADS, "linear_num_value_heads swa_num_attention_heads decoder_attention_heads encoder_attention_heads"),
    (HEADS, "num_decoder_attention_heads num_encoder_attention_heads"),
    (KV_HEADS, "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads linear_num_key_heads"),
    (EXPERTS, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (ACTIVE, "num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k"),
    (1, "first_k_dense_replace num_dense_layers"),
    (WINDOW, "sliding_window sliding_window_size window_size attention_window_size attention_chunk_size"),
    (WINDOW, "keep_window_size local_attention_window_len index_topk"),
    (2 * WINDOW, "local_attention"),  # ModernBERT counts both sides
    (4, "floor_scale"),  # the divisor of positions in Llama 4's attention temperature
    (INDEX_HEADS, "index_n_heads"),
    (STATE, "state_size ssm_state_size mamba_d_state"),
    (2 * HIDDEN // HEAD_DIM, "mamba_n_heads mamba_num_heads n_mamba_heads"),
    (2, "n_groups mamba_n_groups mamba_ngroups"),
    (8, "time_step_rank mamba_dt_rank chunk_size mamba_chunk_size block_size"),
    (POSITIONS, "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length"),
    (POSITIONS, "max_target_positions max_source_positions"),
    (BEYOND, "original_max_position_embeddings"),
    (True, "is_decoder"),
)
SIZES: Mapping[str, Any] = _by_name((*_WIDTHS, *_COUNTS))
"""The small value of each shared name: vocabularies, sizes and ranks, none of which switches a trait on or off."""

WIDTHS = frozenset(_by_name(_WIDTHS)) | {
    *("swa_qk_nope_head_dim", "swa_v_head_dim", "swa_q_lora_rank", "swa_kv_lora_rank", "mlp_dim", "output_channels"),
    *("nemo_conv_channels", "ext_pw_out_channel", "mrope_section", "global_head_dim"),
    *("out_hidden_size", "embed_dim", "projection_dim", "projector_hidden_size"),
    *("adapter_in_dim", "adapter_out_dim", "adapter_input_size", "projection_hidden_dim", "projection_hidden_size"),
    *("base_channels", "codebook_dim", "downsample_channels", "latent_channels", "text_hidden_size"),
    *("vision_hidden_size",),
}
"""The names of settings that grow with ``head_dim``, including those that only a family's row sets."""

CAPS: Mapping[str, int] = _by_name(
    (
        (2, "n_group num_kv_shared_layers num_mem_blocks zero_expert_num top_k_experts"),
        (1, "topk_group num_global_key_value_heads"),
    )
)
"""The largest value of settings that may also be smaller, or None."""

OPTIONAL = frozenset({"sliding_window", "window_size", "local_attention_window_len", "q_lora_rank"})
"""The names of settings that stay None if the config's value is None: no window, or queries without a latent."""

KEYS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads")
COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks")
RANDOM = ("drop", "jitter", "noise")
SPREAD = 0.15
"""Standard deviation of a redrawn matrix: over 64 inputs of size 1 its outputs are of size 1.2."""
MEMORY = -2.0
"""Added to each ``A_log``: a state then decays by exp(-dt e^-2), not by exp(-dt), and outlives a dozen tokens."""
FIRST_PLAIN, AFTER_PLAIN = 4, 80


def model_types() -> list[str]:
    """Return the names in transformers' causal-LM mapping, in order, including those of :data:`NOT_BUILT`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def model_class(model_type: str) -> Any:
    """Return the class that the mapping names for this family; raise KeyError if the mapping has no such family."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    if model_type not in model_types():
        raise KeyError(f"{model_type} is not in the causal-LM mapping of this transformers")
    return MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]


def tiny_config(model_type: str, *, head_dim: int = HEAD_DIM, **overrides: Any) -> PreTrainedConfig:
    """Return a small config of the class that this family's model is built from, with the family's traits.

    ``head_dim`` is 8 or a multiple of 16. Heads have this width if the family's own rules allow it, and every other
    width grows with it.

    If the mapping names a text-only model for a composite config (Llama 4), the result is the text config. For a family
    that is not in the mapping (T5), it is the family's own config. Overrides win over everything; a dict overrides
    settings of a sub-config. If the number of layers or one of the lists of layers is overridden, the rest follows the
    config's own pattern.

    Raises: KeyError for a name that transformers doesn't have; ValueError, with the reason, for one of
    :data:`NOT_BUILT` or for another ``head_dim``; and what the config class raises for settings that contradict each
    other.
    """
    from transformers import CONFIG_MAPPING

    if model_type in NOT_BUILT:
        raise ValueError(f"{model_type} can't be built: {NOT_BUILT[model_type]}")
    config_class = model_class(model_type).config_class if model_type in model_types() else CONFIG_MAPPING[model_type]
    return small_copy(config_class(), TRAITS.get(model_type, {}), overrides, head_dim)


def shrink(config: PreTrainedConfig, *, head_dim: int = HEAD_DIM, **overrides: Any) -> PreTrainedConfig:
    """Return a config of the same class and with the same traits, small enough to build and run fast.

    Widths, counts and the vocabulary are small. There are two layers of each kind, in the config's own order. Windows
    are 8 tokens, and RoPE that is scaled beyond some length is scaled beyond 16, so that a few dozen tokens cross every
    threshold. Heads share keys and values as before: all, some or none. Dropout, jitter and noise are 0. All other
    settings are the config's own. Arguments and errors are those of :func:`tiny_config`.
    """
    return _shrink(config, {}, overrides, head_dim, traits=True)


def small_copy(config: Any, row: Mapping[str, Any], overrides: dict[str, Any], head_dim: int) -> Any:
    """Return a config as :func:`tiny_config` does, from this config and these settings of its family."""
    return _shrink(config, row, overrides, head_dim, traits=False)


def _shrink(config: Any, row: Mapping[str, Any], overrides: dict[str, Any], head_dim: int, *, traits: bool) -> Any:
    if head_dim % HEAD_DIM and head_dim != HEAD_DIM // 2:
        raise ValueError(f"head_dim must be {HEAD_DIM // 2} or a multiple of {HEAD_DIM}, not {head_dim}")
    factor = head_dim / HEAD_DIM
    if (
        overrides.get("num_hidden_layers", count := row.get("num_hidden_layers")) != count
    ):  # the row's lists for its own number of layers don't fit
        row = {name: value for name, value in row.items() if not (isinstance(value, list) and len(value) == count)}
    row = _widened(row, factor)
    nested = {name: {**row.get(name, {}), **overrides[name]} for name in config.sub_configs.keys() & overrides.keys()}
    return _small(config, {**row, **overrides, **nested}, factor, traits=traits)


def build_tiny(
    model_type: str,
    seed: int = 0,
    *,
    head_dim: int = HEAD_DIM,
    dtype: torch.dtype = torch.float32,
    auto: Any = None,
    **overrides: Any,
) -> PreTrainedModel:
    """Build a small model of this family on the CPU, in eval mode, without dropout.

    Args:
        model_type: A name in the causal-LM mapping, or another that transformers has.
        seed: The seed of the weights.
        head_dim: The width of heads.
        dtype: The dtype of the weights.
        auto: Another of transformers' auto classes, to find the model's class; None takes the causal-LM mapping.
        **overrides: Settings of the config.

    Gradients need training mode: in eval mode RWKV writes a state in place, and Reformer refuses to run. Errors are
    those of :func:`tiny_config`.
    """
    config = tiny_config(model_type, head_dim=head_dim, **overrides)
    of_config = model_class(model_type)._from_config if auto is None else auto.from_config
    return build(of_config, config, seed, head_dim=head_dim, dtype=dtype)


def build(
    of_config: Callable[..., Any], config: Any, seed: int = 0, *, head_dim: int = HEAD_DIM, dtype: torch.dtype
) -> Any:
    """Build a model of a small config, with weights drawn anew: the same seed gives the same weights.

    The global random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs' generators as well
        model = of_config(config, dtype=dtype)
    _redraw(model, torch.Generator().manual_seed(seed), SPREAD * min(1.0, (HEAD_DIM / head_dim) ** 0.5))
    return model.eval()


def plain_tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Return random ids ``[rows, length]``, int64, without special tokens (padding, a separator, an image)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_PLAIN, AFTER_PLAIN, (rows, length), generator=generator)


def _widened(settings: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Return the settings with every width ``factor`` times as large, also in sub-configs."""

    def grown(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return _widened(value, factor)
        if isinstance(value, Fixed):
            return int(value)
        if name in WIDTHS and isinstance(value, list):
            return [int(factor * width) for width in value]
        return int(factor * value) if name in WIDTHS and value is not None else value

    return {name: grown(name, value) for name, value in settings.items()}


def _small(config: Any, overrides: Mapping[str, Any], factor: float, *, traits: bool) -> Any:
    """Return a small config: the rule's values, widened, then the picked layers, then the overrides.

    Args:
        config: The config to shrink.
        overrides: Settings that win over the rule's.
        factor: The factor of every width.
        traits: Whether to keep settings in which the config differs from its class's defaults.
    """
    config_class = type(config)
    names = {field.name for field in dataclasses.fields(config_class)}
    other_names = config_class.attribute_map
    overrides = {**_widened(NEEDS.get(config.model_type, {}), factor), **overrides}
    # Each setting under one name; else n_embd and hidden_size could both be set.
    overrides = {name if name in names else other_names.get(name, name): value for name, value in overrides.items()}
    values = {name: vars(config).get(other_names.get(name, name)) for name in names}
    overrides = {name: _in_the_words_of(values.get(name), value) for name, value in overrides.items()}
    settings = {name: SIZES[name] for name in names & SIZES.keys() if name not in OPTIONAL or values[name] is not None}
    settings |= {name: min(values[name], CAPS[name]) for name in names & CAPS.keys() if values[name] is not None}
    numbers = {name: value for name, value in values.items() if type(value) in (int, float)}
    settings |= {name: type(n)(0) for name, n in numbers.items() if any(word in name for word in RANDOM)}
    settings |= _special_tokens(values)
    if "kv_lora_rank" in names:  # latent attention: as many key heads as query heads; head_dim is the rotated part
        settings |= {"num_key_value_heads": HEADS, "head_dim": ROPE_DIM}
    settings = _widened(settings, factor)
    picked = _picked_layers(config, values)
    if traits:
        settings = _with_traits(config, {n: v for n, v in values.items() if n not in picked}, settings, factor)
    if not picked.keys() & overrides.keys():
        settings |= picked
    settings = {name: value for name, value in settings.items() if name in names}
    for name, value in values.items():
        if name in config_class.sub_configs and value is not None:
            settings[name] = _small(value, overrides.get(name) or {}, factor, traits=traits)
    settings |= {name: value for name, value in overrides.items() if name not in config_class.sub_configs}
    # A copy: configs fill in and correct the lists and dicts that they get.
    return config_class(**copy.deepcopy(settings))


def _in_the_words_of(own: Any, value: Any) -> Any:
    """Return a list of layer kinds in the config's own words; any other value is returned unchanged."""
    if not isinstance(own, list) or not isinstance(value, list) or not any(kind in own for kind in EARLIER):
        return value
    words = {now: earlier for earlier, now in EARLIER.items()}
    return [words.get(kind, kind) for kind in value]


def _with_traits(config: Any, values: Mapping[str, Any], settings: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Return the settings with the config's own traits, and no count larger than the config's."""
    config_class, own = type(config), vars(config)
    default, small_config = vars(config_class()), dict(settings)
    heads = own.get(config_class.attribute_map.get("num_attention_heads", "num_attention_heads"))
    for name, value in values.items():
        usual, small = default.get(config_class.attribute_map.get(name, name)), settings.get(name)
        if name in KEYS and value in (None, heads):
            small_config[name] = HEADS
        elif name not in settings or (not value and value != usual):  # a rank or window that this config switches off
            if name not in (*config_class.sub_configs, "per_layer_config") and value != usual:
                small_config[name] = value
        elif type(value) is type(small) is int and name not in WIDTHS:
            small_config[name] = min(value, small)
    ropes = values.get("rope_parameters") or {}
    if ropes and heads:
        head = own.get("head_dim") or config.hidden_size // heads
        small_config["rope_parameters"] = _small_rope(ropes, settings.get("head_dim", HEAD_DIM * factor) / head)
        if "dynamic" in (ropes.get("rope_type"), *(r.get("rope_type") for r in ropes.values() if isinstance(r, dict))):
            small_config["max_position_embeddings"] = BEYOND  # dynamic RoPE scales from there on
    return small_config


def _small_rope(rope: Mapping[str, Any], narrower: float) -> dict[str, Any]:
    """Return RoPE's parameters for heads narrower by this factor. A config may hold some for each kind of layer."""
    small = dict(rope)
    for name, value in rope.items():
        if isinstance(value, dict):
            small[name] = _small_rope(value, narrower)
        elif name == "original_max_position_embeddings":
            small[name] = BEYOND
        elif name in ("long_factor", "short_factor"):  # one factor per frequency
            count = round(len(value) * narrower)
            small[name] = [value[i * len(value) // count] for i in range(count)]
        elif name == "mrope_section":  # the number of frequencies of each axis
            ends = [round(sum(value[:i]) * narrower) for i in range(len(value) + 1)]
            small[name] = [end - start for start, end in itertools.pairwise(ends)]
    return small


def _special_tokens(values: Mapping[str, Any]) -> dict[str, int]:
    """Return ids of images, audio and the like, from the vocabulary's end, all different."""
    names = [name for name in sorted(values) if name.endswith(("_token_id", "_token_index")) and name not in SIZES]
    return {name: VOCAB - 1 - i for i, name in enumerate(names) if isinstance(values[name], int)}


def _picked_layers(config: ConfigLike, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with two layers of each kind, picked from the config's pattern in order.

    They include every list with one entry per layer, and every list of layer indices.
    """
    count = getattr(config, "num_hidden_layers", 0)
    listed = {name: value for name, value in values.items() if isinstance(value, (list, tuple)) and value}
    lists = {name: value for name, value in listed.items() if len(value) == count and len(set(value)) < count}
    named = {name: value for name, value in listed.items() if "layer" in name and {*value} < {*range(count)}}
    named = {name: value for name, value in named.items() if name not in lists}
    kinds = [tuple([v[i] for v in lists.values()] + [i in v for v in named.values()]) for i in range(count)]
    picked = [i for i, kind in enumerate(kinds) if kinds[:i].count(kind) < 2]
    if not lists and not named:
        return {}
    chosen: dict[str, Any] = {n: [value[i] for i in picked] for n, value in lists.items() if n not in SIZES}
    chosen |= {name: [at for at, i in enumerate(picked) if i in value] for name, value in named.items()}
    return chosen | {name: len(picked) for name in COUNTS}


def _redraw(model: torch.nn.Module, generator: torch.Generator, narrow: float) -> None:
    """Redraw matrices that spread less than ``narrow``, and move every vector a little, in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            spread = parameter.std().item() if parameter.numel() > 1 else 0.0
            # Matrices of one value other than 0 are norms with a weight for each head.
            drawn = spread > 0.0 or not parameter.any()
            if parameter.ndim < 2 or not drawn:
                parameter.add_(0.1 * noise)
            elif spread < narrow:
                parameter.copy_(narrow * noise)
            if name.endswith("A_log"):
                parameter.add_(MEMORY)
