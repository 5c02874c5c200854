"""Settings of tiny image-text models: the tower's sizes, each family's own settings, and the layout of its images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastpack.exactness.family_settings import FFN, HIDDEN, ROPE, VOCAB, Fixed
from fastpack.exactness.image_layouts import (
    Layout,
    any_resolution,
    any_size,
    frames,
    grid,
    grid_of_squares,
    grid_of_two_axes,
    grid_with_sizes,
    numbered_patches,
    of_resolution,
    one_tile,
    patches_of_one_size,
    placed_patches,
    placed_tokens,
    pooled_crops,
    spatial_shapes,
    square,
    target_sizes,
    tile,
    token_blocks,
    token_squares,
    tokenized,
    tokenized_alike,
    two_resolutions,
    whole_tile,
    with_question,
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
GEMMA3: dict[str, Any] = {"mm_tokens_per_image": 4}
FOUR_AXES: dict[str, Any] = {"rope_parameters": {**ROPE, "mrope_section": [2, 2, 2, 2]}}
OMNI: dict[str, Any] = {"text_config": MROPE, "vision_start_token_id": VOCAB - 11, "vision_end_token_id": VOCAB - 12}
LLAMA4_TOWER: dict[str, Any] = {
    **dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), HIDDEN),
    "intermediate_size": 4 * HIDDEN,
}
MINICPM: dict[str, Any] = {
    "image_token_id": VOCAB - 1,
    "video_token_id": VOCAB - 2,
    "insert_layer_id": 0,
    "vision_config": {"insert_layer_id": 0},
}
DOTS3_ADAPTER: dict[str, Any] = {"adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN}
INKLING2: dict[str, Any] = {
    "vision_config": {"text_hidden_size": HIDDEN, "projection_hidden_dim": HIDDEN, "posemb_grid_size": 8}
}
MOLMO2: dict[str, Any] = {
    "image_patch_id": VOCAB - 1,
    "vision_config": {"image_size": [16, 16], "num_position_embeddings": 16},
    "adapter_config": {"vision_feature_layer": [1, 0], "text_hidden_size": HIDDEN},
}
MUSE: dict[str, Any] = {
    "projector_hidden_size": HIDDEN,
    "out_hidden_size": 4 * HIDDEN,
    "vision_config": {"layer_types": ["window_attention", "full_attention"]},
}
PINPOINTS: dict[str, Any] = {
    "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32], [16, 48], [48, 16]],
    "vision_feature_layer": -1,
}
GRANITE4: dict[str, Any] = {**PINPOINTS, "downsample_rate": "1/2", "deepstack_layer_map": [[0, 0], [-1, 1]]}
TIMM_TOWER: dict[str, Any] = {
    "architecture": "vit_pe_core_tiny_patch16_384",
    "image_size": 32,
    "model_args": {
        "img_size": [32, 32],
        "depth": 2,
        "embed_dim": HIDDEN,
        "num_heads": 4,
        "global_pool": "",
        "use_post_transformer_norm": False,
    },
}
SAM: dict[str, Any] = {
    "image_size": 128,
    "patch_size": 16,
    "global_attn_indexes": [1],
    "num_pos_feats": HIDDEN // 2,
    "mlp_dim": FFN,
    "output_channels": HIDDEN // 2,
    "downsample_channels": [HIDDEN // 2, HIDDEN],
}
HIGH_RES = {name: value for name, value in SAM.items() if name != "downsample_channels"}
QFORMER: dict[str, Any] = {"image_token_index": VOCAB - 1, "num_query_tokens": 4}
VQ: dict[str, Any] = {
    "base_channels": 32,
    "channel_multiplier": [1, 1],
    "num_res_blocks": 1,
    "embed_dim": 32,
    "latent_channels": 32,
    "attn_resolutions": [],
}
"""A small image tokenizer, which halves the sides of an image once."""
CODES = 8
CHAMELEON: dict[str, Any] = {
    "vq_config": {**VQ, "resolution": 8, "num_embeddings": CODES},
    "vocabulary_map": {"<image>": VOCAB - 1, **{f"IMGIMG{chr(65 + code)}Z": 40 + code for code in range(CODES)}},
}
EMU3: dict[str, Any] = {
    "vq_config": {
        **VQ,
        "latent_channels": 4,
        "embed_dim": 4,
        "codebook_size": CODES,
        "temporal_downsample_factor": 1,
        "hidden_size": 32,
    },
    "vocabulary_map": {
        "<image>": VOCAB - 1,
        "<|extra_200|>": 39,
        **{f"<|visual token {code:06d}|>": 40 + code for code in range(CODES)},
    },
}
APERTUS1P5: dict[str, Any] = {
    "vision_config": {**VQ, "codebook_size": CODES},
    "audio_config": {"codebook_dim": HIDDEN, "codebook_size": CODES},
    "image_token_offset": 40,
    "audio_token_offset": 40 + CODES,
}
NEEDS: Mapping[str, Mapping[str, Any]] = {
    "apertus1p5": APERTUS1P5,
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "blip-2": QFORMER,
    "chameleon": CHAMELEON,
    "cohere_compass": DEEPSTACK,
    "cosmos3_omni": {"text_config": MROPE, **DEEPSTACK},
    "deepseek_ocr2": {"vision_config": {"sam_config": SAM}},
    "deepseek_vl_hybrid": {"high_res_vision_config": HIGH_RES},
    "dots3_note": {
        "vision_config": {**DOTS3_ADAPTER, "mlp_layer_types": ["dense", "sparse"], "num_local_experts": 4},
        "audio_config": {"adapter_input_size": HIDDEN, "adapter_out_dim": HIDDEN},
    },
    "emu3": EMU3,
    "exaone4_5": QWEN2_5_TOWER,
    "fast_vlm": {"vision_config": {"architecture": "fastvit_t8", "image_size": 64, "hidden_size": Fixed(768)}},
    "fuyu": {"image_size": 16, "patch_size": 8},
    "gemma3": GEMMA3,
    "gemma3n": {
        "vision_config": {"architecture": "test_convnext", "image_size": 64, "hidden_size": Fixed(64)},
        "vision_soft_tokens_per_image": 4,
    },
    "gemma4": {"text_config": {"use_bidirectional_attention": "vision"}},
    "glm46v": GLM4V,
    "glm4v": GLM4V,
    "glm4v_moe": GLM4V,
    "glm5_next": {"vision_config": {"projection_intermediate_size": FFN}},
    "glm_ocr": GLM4V,
    "glmga": GLM4V,
    "granite4_vision": GRANITE4,
    "granite_docling": {"vision_config": {"scale_factor": 2, "deepstack_visual_indexes": [0, 1]}},
    "hunyuan_vl": {"text_config": FOUR_AXES, "vision_config": {"text_hidden_size": HIDDEN, "max_image_size": 64}},
    "hy_v4_vl": {"vision_config": {"max_image_size": 64}},
    "hyperclovax_vision_v2": QWEN2_5_TOWER,
    "idefics3": {"scale_factor": 2},
    "inkling2": INKLING2,
    "inkling2_loop": INKLING2,
    "instructblip": QFORMER,
    "instructblipvideo": {"video_token_index": VOCAB - 1, "num_query_tokens": 4},
    "internvl": {"vision_config": {"image_size": [16, 16], "patch_size": [4, 4]}},
    "kimi_k25": {"vision_config": {"pos_emb_height": 8, "pos_emb_width": 8}, "projection_hidden_size": HIDDEN},
    "kosmos-2": {"latent_query_num": 4},
    "kosmos-2.5": {"latent_query_num": 4, "vision_config": {"patch_embed_hidden_size": 12, "max_num_patches": 8}},
    "lfm2_vl": {"projector_hidden_size": HIDDEN},
    "llama4": {"vision_config": LLAMA4_TOWER},
    "llava": {"vision_feature_layer": -1},
    "llava_next": PINPOINTS,
    "llava_next_video": PINPOINTS,
    "llava_onevision": PINPOINTS,
    "minicpm_ocr": MINICPM,
    "minicpmv4_6": MINICPM,
    "minicpmv4_7": MINICPM,
    "molmo2": MOLMO2,
    "muse_glimmer": MUSE,
    "muse_spark": {**MUSE, "audio_config": {"num_hidden_layers": 4}},
    "nemotron_h_omni": {
        "vision_config": {"video_temporal_patch_size": 2, "max_img_size": 64, "patch_dim": 48, "video_patch_dim": 96},
        "vision_hidden_size": HIDDEN,
        "projector_hidden_size": HIDDEN,
        "image_token_id": VOCAB - 1,
    },
    "paddleocr_vl": {"text_config": MROPE},
    "paligemma": {"projection_dim": HIDDEN, "hidden_size": HIDDEN},
    "perception_lm": {"vision_config": TIMM_TOWER},
    "qwen2_5_omni_thinker": {**OMNI, **QWEN2_5_TOWER},
    "qwen2_5_vl": {"text_config": MROPE, **QWEN2_5_TOWER},
    "qwen2_vl": {"text_config": MROPE},
    "qwen3_5": {"text_config": PARTIAL},
    "qwen3_5_moe": {"text_config": PARTIAL},
    "qwen3_omni_moe_thinker": {**OMNI, **DEEPSTACK},
    "qwen3_vl": {"text_config": MROPE, **DEEPSTACK},
    "qwen3_vl_moe": {"text_config": MROPE, **DEEPSTACK},
    "shieldgemma2": GEMMA3,
    "smolvlm": {"scale_factor": 2},
    "unlimited_ocr": {"vision_config": {"sam_config": SAM, "encoder_config": {"image_size": 16, "patch_size": 8}}},
    "vipllava": {"vision_feature_layer": [-1, -2], "vision_feature_layers": [-1, -2]},
}
"""Settings by model type that a tiny model needs beside :data:`VISION`."""

WITH: Mapping[str, tuple[str, ...]] = {"gemma4": ("vision_config",), "gemma4_unified": ("vision_config",)}
"""Sub-configs by model type that the default config leaves out, image towers for example."""

SQUARE, GRID, SIZED, TILES = Layout(square), Layout(grid), Layout(any_size), Layout(tile, per_row=True)
BETWEEN = Layout(grid, around=("vision_start_token_id", "vision_end_token_id"), masked=True)
LINE = Layout(target_sizes, along={"pixel_values": 3})
PLACED = Layout(placed_patches)
LAYOUTS: Mapping[str, Layout] = {
    "apertus1p5": Layout(tokenized),
    "aria": SQUARE,
    "aya_vision": SQUARE,
    "blip-2": Layout(square, required=True),
    "chameleon": Layout(of_resolution),
    "cohere2_vision": SQUARE,
    "cohere_compass": GRID,
    "cosmos3_edge": GRID,
    "cosmos3_omni": GRID,
    "deepseek_ocr2": SQUARE,
    "deepseek_vl": SQUARE,
    "deepseek_vl_hybrid": Layout(two_resolutions),
    "dots3_note": GRID,
    "emu3": Layout(tokenized_alike),
    "ernie4_5_vl_moe": GRID,
    "exaone4_5": GRID,
    "fast_vlm": SQUARE,
    "fuyu": Layout(patches_of_one_size),
    "gemma3": SQUARE,
    "gemma3n": SQUARE,
    "gemma4": PLACED,
    "gemma4_unified": Layout(placed_tokens),
    "glm46v": GRID,
    "glm4v": GRID,
    "glm4v_moe": GRID,
    "glm5_next": GRID,
    "glm_ocr": GRID,
    "glmga": GRID,
    "got_ocr2": SQUARE,
    "granite4_vision": Layout(any_resolution),
    "granite_docling": Layout(whole_tile, per_row=True),
    "hunyuan_vl": GRID,
    "hy_v4_vl": GRID,
    "hyperclovax_vision_v2": GRID,
    "idefics2": TILES,
    "idefics3": TILES,
    "inkling2": Layout(token_squares),
    "inkling2_loop": Layout(token_squares),
    "inkling_mm_model": Layout(token_blocks),
    "instructblip": Layout(with_question, required=True),
    "instructblipvideo": Layout(frames, required=True),
    "internvl": SQUARE,
    "janus": SQUARE,
    "kimi_k25": Layout(grid_of_squares),
    "kosmos-2": Layout(square, required=True),
    "kosmos-2.5": Layout(numbered_patches),
    "lfm2_vl": Layout(spatial_shapes),
    "lfm3_vl": GRID,
    "lighton_ocr": SIZED,
    "llama4": SQUARE,
    "llava": SQUARE,
    "llava_next": Layout(any_resolution),
    "llava_next_video": Layout(any_resolution),
    "llava_onevision": Layout(any_resolution),
    "minicpm_ocr": LINE,
    "minicpmv4_6": LINE,
    "minicpmv4_7": LINE,
    "minimax_m3_vl": GRID,
    "mistral3": SIZED,
    "mistral_large4": SIZED,
    "molmo2": Layout(pooled_crops, typed=True, single=True, indices=("image_token_pooling",)),
    "muse_glimmer": GRID,
    "muse_spark": GRID,
    "nemotron_h_omni": Layout(grid_of_two_axes),
    "ovis2": SQUARE,
    "paddleocr_vl": Layout(grid_of_squares),
    "paligemma": Layout(square, typed=True),
    "perception_lm": Layout(one_tile),
    "pp_chart2table": SQUARE,
    "qianfan_ocr": SQUARE,
    "qwen2_5_omni_thinker": BETWEEN,
    "qwen2_5_vl": GRID,
    "qwen2_vl": GRID,
    "qwen3_5": GRID,
    "qwen3_5_moe": GRID,
    "qwen3_omni_moe_thinker": BETWEEN,
    "qwen3_vl": GRID,
    "qwen3_vl_moe": GRID,
    "qwen4_exp": GRID,
    "shieldgemma2": SQUARE,
    "smolvlm": TILES,
    "step3p7": SQUARE,
    "unlimited_ocr": SQUARE,
    "video_llama_3": Layout(grid_with_sizes),
    "video_llava": SQUARE,
    "vipllava": SQUARE,
}
"""The layout of each model type's images. Types without one can't be sampled yet."""

TEXT_ALONE = frozenset({"mistral4"})
"""The types whose class in the mapping takes no images."""

PREFIX_TYPES = frozenset({"paligemma"})
"""The types whose token types are 0 in the prefix, up to two tokens after the last image, and 1 in the answer."""

NO_DECODER = "it is an encoder-decoder"
NOT_BUILT: Mapping[str, str] = {
    "florence2": NO_DECODER,
    "pix2struct": NO_DECODER,
    "pp_formulanet": NO_DECODER,
    "t5gemma2": NO_DECODER,
    "udop": NO_DECODER,
    "vision-encoder-decoder": NO_DECODER,
}
"""The types that can't be built tiny, or are no decoders, and why."""

PACKAGES: Mapping[str, str] = {
    **dict.fromkeys(("fast_vlm", "gemma3n", "perception_lm"), "timm"),
    "inkling_mm_model": "scipy",
}
"""The packages that image towers are from, which fastpack does not install."""

RELEASES: Mapping[str, str] = {
    "fuyu": ">=5.18",  # other names of arguments before
    "granite4_vision": ">=5.18",  # another text model before
    "kosmos-2": ">=5.18",  # no function for the features of images before
    "kosmos-2.5": ">=5.18",
    "llama4": "<5.18",  # from 5.24 on its stock forward reads an attribute that its outputs lack
    "minicpmv4_6": ">=5.18",  # another layout before
    "video_llava": ">=5.18",  # other names of arguments before
}
"""The releases of transformers that run a type's tiny model, if not all."""
