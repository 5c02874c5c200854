"""Videos go through the same towers as images, and audio through its own: rows with either are exact."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from oracle import FLOAT32_BOUND, relative
from torch import Tensor

import fastpack
from fastpack.exactness.family_settings import HIDDEN
from fastpack.exactness.image_text import build_image_text, positions_of
from fastpack.exactness.tiny import plain_tokens

VIDEOS = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen2_5_omni_thinker"]
"""Composites with videos of any size, whose positions count frames."""
BETWEEN_FRAMES = ("qwen3_vl", "qwen3_5")
"""Of these, those with text between two frames: a time, as their processors write it."""
Piece = int | tuple[int, int, int]
"""A number of text tokens, or the frames, height and width of a video in tokens."""
ROWS: Sequence[Sequence[Piece]] = ((4, (2, 1, 2), 3), ((3, 1, 1), 5), (7,), (2, (1, 2, 2), 1, (2, 1, 1)))


def video_row(model: Any, pieces: Sequence[Piece], seed: int) -> dict[str, Tensor]:
    """Return the arguments of a model for a row with videos."""
    config, generator = model.config, torch.Generator().manual_seed(seed)
    vision = config.vision_config
    merge = vision.spatial_merge_size
    values = 3 * vision.temporal_patch_size * vision.patch_size**2
    ids: list[Tensor] = []
    types: list[Tensor] = []
    pixels: list[Tensor] = []
    grids: list[list[int]] = []

    def add(piece: Tensor, kind: int) -> None:
        ids.append(piece)
        types.append(torch.full_like(piece, kind))

    for at, piece in enumerate(pieces):
        if isinstance(piece, int):
            add(plain_tokens(1, piece, seed=10 * seed + at), 0)
            continue
        frames, height, width = piece
        grids.append([frames, height * merge, width * merge])
        pixels.append(torch.randn(frames * height * width * merge**2, values, generator=generator))
        for frame in range(frames):
            if frame and config.model_type in BETWEEN_FRAMES:
                add(plain_tokens(1, 2, seed=100 + 10 * seed + frame), 0)
            add(torch.full((1, height * width), config.video_token_id), 2)
    row = {"input_ids": torch.cat(ids, 1), "mm_token_type_ids": torch.cat(types, 1)}
    if pixels:
        row |= {"pixel_values_videos": torch.cat(pixels), "video_grid_thw": torch.tensor(grids)}
    return row


def padded(rows: Sequence[dict[str, Tensor]], side: str) -> dict[str, Tensor]:
    longest = max(row["input_ids"].shape[1] for row in rows)

    def pad(x: Tensor) -> Tensor:
        free = longest - x.shape[1]
        return torch.nn.functional.pad(x, (free, 0) if side == "left" else (0, free))

    per_token = [name for name in ("input_ids", "mm_token_type_ids") if name in rows[0]]
    batch = {name: torch.cat([pad(row[name]) for row in rows]) for name in per_token}
    mask = torch.cat([pad(torch.ones_like(row["input_ids"])) for row in rows])
    return {**batch, "attention_mask": mask, **joined(rows)}


def joined(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = {name for row in rows for name in row} - {"input_ids", "mm_token_type_ids"}
    return {name: torch.cat([row[name] for row in rows if name in row]) for name in names}


def logits(model: Any, batch: dict[str, Any]) -> Tensor:
    """Return the logits of the real tokens of a batch. Arguments that the model doesn't take are left out."""
    taken = {"packed_seq_lens", *inspect.signature(type(model).forward).parameters}
    with torch.no_grad():
        out = model.train()(**{name: value for name, value in batch.items() if name in taken}).logits
    mask = batch.get("attention_mask")
    return out.flatten(0, 1) if mask is None else out[mask.bool()]


@pytest.mark.sample(3)
@pytest.mark.parametrize("model_type", VIDEOS)
def test_videos_are_exact(model_type: str) -> None:
    model = build_image_text(model_type)
    rows = [video_row(model, pieces, seed) for seed, pieces in enumerate(ROWS)]
    masked = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in rows]
    alone = torch.cat([logits(model, row) for row in masked])
    other = [{k: v.flip(-1) if k == "pixel_values_videos" else v for k, v in row.items()} for row in masked]
    assert relative(torch.cat([logits(model, row) for row in other]), alone) > 1e-2, "the check can fail"
    flat = {name: torch.cat([row[name] for row in rows], 1) for name in ("input_ids", "mm_token_type_ids")}
    flat |= {"position_ids": torch.cat([positions_of(model, row) for row in rows], -1), **joined(rows)}
    fastpack.patch(model)
    for side in ("right", "left"):
        assert relative(logits(model, padded(rows, side)), alone) <= FLOAT32_BOUND
    lengths = [row["input_ids"].shape[1] for row in rows]
    assert relative(logits(model, {**flat, "packed_seq_lens": lengths}), alone) <= FLOAT32_BOUND


THINKERS = ["qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"]
FRAMES = 40
"""The frames to which sounds are padded."""
AUDIO_ROWS = ((4, FRAMES, 3), (24, 5), (7,), (2, 16, 1))
"""Text tokens, or the frames of a sound: the numbers of at least 16."""


def audio_row(model: Any, pieces: Sequence[int], seed: int) -> dict[str, Tensor]:
    """Return the arguments of a model for a row with sounds."""
    bins, generator = model.config.audio_config.num_mel_bins, torch.Generator().manual_seed(seed)
    ids: list[Tensor] = []
    sounds: list[Tensor] = []
    masks: list[Tensor] = []
    for at, piece in enumerate(pieces):
        if piece < 16:
            ids.append(plain_tokens(1, piece, seed=10 * seed + at))
            continue
        sounds.append(torch.randn(1, bins, FRAMES, generator=generator))
        masks.append((torch.arange(FRAMES) < piece).long()[None])
        features = model.get_audio_features(sounds[-1], feature_attention_mask=masks[-1], return_dict=True)
        ids.append(torch.full((1, len(features.last_hidden_state)), model.config.audio_token_id))
    row = {"input_ids": torch.cat(ids, 1)}
    return row | ({"input_features": torch.cat(sounds), "feature_attention_mask": torch.cat(masks)} if sounds else {})


@pytest.mark.parametrize("model_type", THINKERS)
def test_audio_is_exact(model_type: str) -> None:
    model = build_image_text(model_type, audio_config={"output_dim": HIDDEN})
    rows = [audio_row(model, pieces, seed) for seed, pieces in enumerate(AUDIO_ROWS)]
    masked = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in rows]
    alone = torch.cat([logits(model, row) for row in masked])
    other = [{k: v.flip(1) if k == "input_features" else v for k, v in row.items()} for row in masked]
    assert relative(torch.cat([logits(model, row) for row in other]), alone) > 1e-2, "the check can fail"
    fastpack.patch(model)
    for side in ("right", "left"):
        assert relative(logits(model, padded(rows, side)), alone) <= FLOAT32_BOUND
