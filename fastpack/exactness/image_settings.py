"""Settings of tiny image-text models: the tower's sizes, each family's own settings, and the layout of its images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastpack.exactness.family_settings import FFN, HIDDEN, ROPE
from fastpack.exactness.image_layouts import (
    Layout,
    any_size,
    grid,
    placed_patches,
    spatial_shapes,
    square,
    tile,
)

VISION: Mapping[str, Any] = {
    "image_size": 16,
    "patch_size": 4,
    "depth": 2,
    "embed_dim": HIDDEN,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 64,
    "num_patches": 16,
    "position_embedding_size": 64,
    "pooling_kernel_size": 2,
    "projection_dim": HIDDEN,
    "vision_use_head": False,
}
"""The small value of settings of image towers, for each tower that has the setting."""

MROPE: dict[str, Any] = {"rope_parameters": {**ROPE, "mrope_section": [4, 2, 2]}}
DEEPSTACK: dict[str, Any] = {"vision_config": {"deepstack_visual_indexes": [0, 1]}}
GLM_ROPE: dict[str, Any] = {"rope_parameters": {**MROPE["rope_parameters"], "partial_rotary_factor": 1.0}}
PARTIAL: dict[str, Any] = {
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
}
GLM4V: dict[str, Any] = {"text_config": GLM_ROPE, "vision_config": {"intermediate_size": FFN}}
QWEN2_5_TOWER: dict[str, Any] = {"vision_config": {"fullatt_block_indexes": [1], "window_size": 16}}
NEEDS: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma4": {"text_config": {"use_bidirectional_attention": "vision"}},
    "cosmos3_omni": {"text_config": MROPE, **DEEPSTACK},
    "exaone4_5": QWEN2_5_TOWER,
    "glm46v": GLM4V,
    "glm4v": GLM4V,
    "glm4v_moe": GLM4V,
    "glm_ocr": GLM4V,
    "hyperclovax_vision_v2": QWEN2_5_TOWER,
    "idefics3": {"scale_factor": 2},
    "internvl": {"vision_config": {"image_size": [16, 16], "patch_size": [4, 4]}},
    "lfm2_vl": {"projector_hidden_size": HIDDEN},
    "llava": {"vision_feature_layer": -1},
    "paligemma": {"projection_dim": HIDDEN, "hidden_size": HIDDEN},
    "qwen2_5_vl": {"text_config": MROPE, **QWEN2_5_TOWER},
    "qwen2_vl": {"text_config": MROPE},
    "qwen3_5": {"text_config": PARTIAL},
    "qwen3_5_moe": {"text_config": PARTIAL},
    "qwen3_vl": {"text_config": MROPE, **DEEPSTACK},
    "qwen3_vl_moe": {"text_config": MROPE, **DEEPSTACK},
    "smolvlm": {"scale_factor": 2},
}
"""Settings by model type that a tiny model needs beside :data:`VISION`."""

WITH: Mapping[str, tuple[str, ...]] = {"gemma4": ("vision_config",)}
"""Sub-configs by model type that the default config leaves out, image towers for example."""

SQUARE, GRID, SIZED, TILES = Layout(square), Layout(grid), Layout(any_size), Layout(tile, per_row=True)
LAYOUTS: Mapping[str, Layout] = {
    "aya_vision": SQUARE,
    "cohere2_vision": SQUARE,
    "cosmos3_omni": GRID,
    "exaone4_5": GRID,
    "gemma3": SQUARE,
    "gemma4": Layout(placed_patches, padding={"image_position_ids": -1}),
    "glm46v": GRID,
    "glm4v": GRID,
    "glm4v_moe": GRID,
    "glm_ocr": GRID,
    "got_ocr2": SQUARE,
    "hyperclovax_vision_v2": GRID,
    "idefics2": TILES,
    "idefics3": TILES,
    "internvl": SQUARE,
    "lfm2_vl": Layout(spatial_shapes),
    "lfm3_vl": GRID,
    "lighton_ocr": SIZED,
    "llava": SQUARE,
    "mistral3": SIZED,
    "paligemma": SQUARE,
    "qianfan_ocr": SQUARE,
    "qwen2_5_vl": GRID,
    "qwen2_vl": GRID,
    "qwen3_5": GRID,
    "qwen3_5_moe": GRID,
    "qwen3_vl": GRID,
    "qwen3_vl_moe": GRID,
    "qwen4_exp": GRID,
    "smolvlm": TILES,
    "video_llava": SQUARE,
}
"""The layout of each model type's images. Types without one can't be sampled yet."""

PREFIX_TYPES = frozenset({"paligemma"})
"""The types whose token types are 0 in the prefix, up to two tokens after the last image, and 1 in the answer."""

TIMM = "its image tower is timm's, which fastpack does not install"
NO_DECODER = "it is an encoder-decoder"
NOT_BUILT: Mapping[str, str] = {
    "fast_vlm": TIMM,
    "florence2": NO_DECODER,
    "gemma3n": TIMM,
    "perception_lm": TIMM,
    "pix2struct": NO_DECODER,
    "pp_formulanet": NO_DECODER,
    "t5gemma2": NO_DECODER,
    "udop": NO_DECODER,
    "vision-encoder-decoder": NO_DECODER,
}
"""The types that can't be built tiny, or are no decoders, and why."""
