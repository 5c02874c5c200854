"""The pixel inputs whose entries are those of one image, patch, row of images or video after the other."""

PIXEL_INPUTS = (
    "pixel_values",
    "pixel_values_videos",
    "high_res_pixel_values",
    "flattened_patches",
    "pixel_attention_mask",
    "image_grid_thw",
    "image_grid_hw",
    "image_merge_sizes",
    "image_position_ids",
    "image_sizes",
    "spatial_shapes",
    "video_grid_thw",
    "second_per_grid_ts",
    "qformer_input_ids",
    "qformer_attention_mask",
)
"""The pixel inputs that processors join along the first dimension, for all rows of a batch."""
PIXEL_PADDING = {"image_position_ids": -1}
"""The values that pad pixel inputs of several sizes, if not 0."""
