"""Tiny image-text models of transformers' mapping, and rows of text and images for them.

A row is the arguments of the model for one sequence: ``input_ids [1, L]``, token types if the model takes them, and
pixel inputs as the family's processor makes them (:mod:`fastpack.exactness.image_layouts`). The number of tokens of an
image is what the model's own ``get_image_features`` returns for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from packaging.specifiers import SpecifierSet
from torch import Tensor
from torch.nn.functional import pad

from fastpack.exactness.family_settings import HEAD_DIM, TRAITS, VOCAB
from fastpack.exactness.image_layouts import Layout, Pixels
from fastpack.exactness.image_settings import LAYOUTS, NEEDS, NOT_BUILT, PACKAGES, PREFIX_TYPES, RELEASES, VISION, WITH
from fastpack.exactness.tiny import build, build_tiny, model_types, plain_tokens, small_copy
from fastpack.packing.pixels import join_pixels

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Row = dict[str, Tensor]
Piece = int | tuple[int, int]
ROWS: Sequence[Sequence[Piece]] = (
    (5, (2, 2), 3),
    ((1, 2), 4),
    (9,),
    (2, (2, 2), 1, (3, 1), 4),
    (3, (2, 1)),
    ((2, 2), 2, (1, 2)),
)
"""Rows of pieces: a number of text tokens, or the size of an image in tokens. There are rows with one image, with
several and with none, and images that are the first or the last of a row."""
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids", "image_embeds_position_mask")
PER_TOKEN = ("input_ids", *TOKEN_TYPES)
MASK = "attention_mask"
AFTER_IMAGES = 2
"""The text tokens of a prefix behind its last image."""


def image_text_types() -> list[str]:
    """Return the names in transformers' image-text mapping, in order, including those that can't be built."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return list(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def not_built(model_type: str) -> str | None:
    """Return why a type can't be built tiny or run in this release of transformers, or is no decoder; else None."""
    import transformers

    releases, release = RELEASES.get(model_type, ""), transformers.__version__
    if not SpecifierSet(releases).contains(release, prereleases=True):
        return f"its tiny model runs with transformers {releases}, not {release}"
    package = PACKAGES.get(model_type)
    if package is not None and find_spec(package) is None:
        return f"its image tower needs {package}, which is not installed (pip install {package})"
    return NOT_BUILT.get(model_type)


def image_text_class(model_type: str) -> Any:
    """Return the class that the mapping names for this type; raise KeyError if it has no such type."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    if model_type not in image_text_types():
        raise KeyError(f"{model_type} is not in the image-text mapping of this transformers")
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[CONFIG_MAPPING[model_type]]


def image_text_config(model_type: str, *, head_dim: int = HEAD_DIM, **overrides: Any) -> PreTrainedConfig:
    """Return a small config of an image-text model, with a small image tower.

    Arguments are those of :func:`fastpack.exactness.tiny.tiny_config`.

    Raises:
        KeyError: transformers' mapping has no such type.
        ValueError: the type can't be built, or is no decoder; the message says why.
    """
    config_class = image_text_class(model_type).config_class
    if (why := not_built(model_type)) is not None:
        raise ValueError(f"{model_type} can't be built: {why}")
    config = config_class(**{name: {} for name in WITH.get(model_type, ())})
    row = _merged(_settings_of_parts(config), _merged(TRAITS.get(model_type, {}), NEEDS.get(model_type, {})))
    return small_copy(config, row, overrides, head_dim)


def build_image_text(
    model_type: str,
    seed: int = 0,
    *,
    head_dim: int = HEAD_DIM,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> PreTrainedModel:
    """Build a small image-text model on the CPU, in eval mode, without dropout, with weights that show a leak.

    Arguments and errors are those of :func:`image_text_config` and of :func:`fastpack.exactness.tiny.build`.
    """
    config = image_text_config(model_type, head_dim=head_dim, **overrides)
    return build(image_text_class(model_type)._from_config, config, seed, head_dim=head_dim, dtype=dtype)


def build_named(model_type: str, **settings: Any) -> PreTrainedModel:
    """Build the small model of a name in the causal-LM mapping, or else in the image-text mapping.

    Keywords and errors are those of :func:`build_image_text` and :func:`fastpack.exactness.tiny.build_tiny`.
    """
    only_images = model_type not in model_types() and model_type in image_text_types()
    return (build_image_text if only_images else build_tiny)(model_type, **settings)


def layout_of(model: Any) -> Layout:
    """Return the layout of a model's images; raise ValueError if its type has none."""
    name = model.config.model_type
    if name not in LAYOUTS:
        raise ValueError(f"{name} has no layout of images; those that have one are {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def samples(model: Any, seed: int = 0, rows: Sequence[Sequence[Piece]] = ROWS) -> list[Row]:
    """Return rows of text and images for a stock or patched model: the arguments of the model for each row alone.

    Args:
        model: A model of :func:`build_image_text`.
        seed: The seed of ids and pixels.
        rows: The pieces of each row. Rows without images are left out if the model needs them.

    Raises:
        ValueError: the model's type has no layout of images.
    """
    layout, generator = layout_of(model), torch.Generator().manual_seed(seed)

    def part(piece: Piece, seed: int) -> Tensor | Pixels:
        if isinstance(piece, int):
            return plain_tokens(1, piece, seed=seed)
        return layout.image(model.config, piece, generator)

    rows = [_allowed(layout, row) for row in rows]
    rows = [row for row in rows if not layout.required or any(isinstance(piece, tuple) for piece in row)]
    first = seed * len(rows)
    return [
        row_of(model, [part(piece, len(pieces) * (first + at) + i) for i, piece in enumerate(pieces)])
        for at, pieces in enumerate(rows)
    ]


def _allowed(layout: Layout, row: Sequence[Piece]) -> Sequence[Piece]:
    """Return a row's pieces with as many images as the layout allows."""
    first = next((at for at, piece in enumerate(row) if isinstance(piece, tuple)), 0)
    return [piece for at, piece in enumerate(row) if at == first or not layout.single or isinstance(piece, int)]


def row_of(model: Any, parts: Sequence[Tensor | Pixels]) -> Row:
    """Return the arguments of a model for one row.

    Args:
        model: A model of :func:`build_image_text`.
        parts: The row's ids, int64 ``[1, n]``, and its images, as the layout makes them, in their order.
    """
    layout = layout_of(model)
    images = [part for part in parts if not isinstance(part, Tensor)]
    before, after = ([getattr(model.config, name)] if name else [] for name in layout.around)

    def ids_of(image: Pixels) -> Tensor:
        return torch.tensor([[*before, *[_image_token(model.config)] * _tokens_of(model, image), *after]])

    ids = [part if isinstance(part, Tensor) else ids_of(part) for part in parts]
    row = {"input_ids": torch.cat(ids, dim=1)}
    types = _token_types(model.config, row["input_ids"])
    row |= _named(type(model).forward, dict.fromkeys(TOKEN_TYPES, types))
    if layout.masked:
        row[MASK] = torch.ones_like(row["input_ids"])
    return row | _joined(layout, images, dim=1 if layout.per_row else 0)


def other_pixels(row: Row) -> Row:
    """Return a row with the same tokens and other pixels: the values in reverse order."""
    return {name: value.flip(-1) if name == "pixel_values" else value for name, value in row.items()}


def batch_of(model: Any, rows: Sequence[Row], side: str = "right") -> dict[str, Tensor]:
    """Return rows as one padded batch, with ``attention_mask [B, S]``, as the family's processor would.

    ``side`` is ``right`` or ``left``. Ids and token types are padded with 0.
    """
    width = max(row["input_ids"].shape[1] for row in rows)

    def padded(value: Tensor) -> Tensor:
        free = width - value.shape[1]
        return pad(value, (free, 0) if side == "left" else (0, free))

    batch = {name: torch.cat([padded(row[name]) for row in rows]) for name in PER_TOKEN if name in rows[0]}
    mask = torch.cat([padded(torch.ones_like(row["input_ids"])) for row in rows])
    return {**batch, MASK: mask, **_pixels_of(layout_of(model), rows, dim=0)}


def flat_of(model: Any, rows: Sequence[Row]) -> dict[str, Any]:
    """Return rows as one sequence ``[1, T]`` with ``packed_seq_lens`` and positions that restart in each row.

    A model with positions of several axes gets ``[1 + axes, 1, T]``: text positions, then those of its own
    ``get_rope_index``.
    """
    layout = layout_of(model)
    flat: dict[str, Any] = {
        name: torch.cat([row[name] for row in rows], dim=1) for name in PER_TOKEN if name in rows[0]
    }
    flat["position_ids"] = torch.cat([positions_of(model, row) for row in rows], dim=-1)
    flat["packed_seq_lens"] = [row["input_ids"].shape[1] for row in rows]
    return {**flat, **_pixels_of(layout, rows, dim=1 if layout.per_row else 0)}


def positions_of(model: Any, row: Row) -> Tensor:
    """Return a row's positions ``[1, L]``, or ``[1 + axes, 1, L]`` with text positions first, int64."""
    text = torch.arange(row["input_ids"].shape[1])[None]
    find = getattr(model.base_model, "get_rope_index", None)
    if find is None:
        return text
    axes, _ = find(**_named(find, {MASK: torch.ones_like(row["input_ids"]), **row}))
    return torch.cat([text[None], axes])


def _token_types(config: Any, ids: Tensor) -> Tensor:
    """Return ``[1, L]`` token types: 1 for image tokens; for a model with a prefix, 1 behind the prefix."""
    is_image = ids == _image_token(config)
    if config.model_type not in PREFIX_TYPES:
        return is_image.long()
    places = torch.arange(ids.shape[1])
    last = int(places[is_image[0]].max()) if is_image.any() else 0
    return (places > last + AFTER_IMAGES).long()[None]


def _image_token(config: Any) -> int:
    names = ("image_token_id", "image_token_index", "video_token_index", "image_patch_id")
    named = next((getattr(config, name) for name in names if hasattr(config, name)), None)
    mapped = getattr(config, "vocabulary_map", {"<image>": VOCAB - 1})  # some models take any id
    return int(mapped["<image>"] if named is None else named)


def _tokens_of(model: Any, image: Pixels) -> int:
    """Return how many tokens an image has."""
    device = next(model.parameters()).device
    image = {name: value.to(device) for name, value in image.items()}
    # some heads lack the method, or some of its arguments
    methods = ("get_image_features", "get_video_features")
    found = [getattr(m, name) for name in methods for m in (model, model.base_model) if hasattr(m, name)]
    embed = next((each for each in found if _named(each, image).keys() == image.keys()), found[0])
    with torch.no_grad():
        features = embed(**image, **_features(model, embed), return_dict=True)
    pooled = features.last_hidden_state if features.pooler_output is None else features.pooler_output
    if pooled is None:  # features of several layers, each with the layer's index
        pooled = features.deepstack_features[0][1]
    return sum(each.numel() // each.shape[-1] for each in (pooled if isinstance(pooled, (list, tuple)) else [pooled]))


def _features(model: Any, embed: Callable[..., Any]) -> dict[str, Any]:
    """Return which features of the tower a model takes, as its forward hands them to ``get_image_features``."""
    names = ("vision_feature_layer", "vision_feature_select_strategy")
    configs = (model.config, getattr(model.config, "vision_config", None))
    given = {name: getattr(config, name) for config in reversed(configs) for name in names if hasattr(config, name)}
    return _named(embed, given)


def _pixels_of(layout: Layout, rows: Sequence[Row], dim: int) -> Pixels:
    """Return the pixel inputs of rows, joined along a dimension; none if no row has an image."""
    parts = [{name: value for name, value in row.items() if name not in (*PER_TOKEN, MASK)} for row in rows]
    having = next((part for part in parts if part), {})
    if layout.per_row and dim == 0:  # a row without images still has its place
        parts = [part or {name: value[:, :0] for name, value in having.items()} for part in parts]
    return _joined(layout, [part for part in parts if part], dim)


def _joined(layout: Layout, parts: Sequence[Pixels], dim: int) -> Pixels:
    """Return pixel inputs joined along a dimension, all others padded to the longest."""
    if not parts:
        return {}
    counts = [next(iter(part.values())).flatten(0, -2).shape[0] for part in parts]
    starts = list(accumulate(counts, initial=0))
    shifted = [
        {name: value + start if name in layout.indices else value for name, value in part.items()}
        for part, start in zip(parts, starts, strict=False)
    ]
    dims = layout.along or {}
    return {name: join_pixels([part[name] for part in shifted], name, dims.get(name, dim)) for name in parts[0]}


def _settings_of_parts(config: Any) -> dict[str, Any]:
    """Return the settings of each sub-config: the text model's traits, and the small settings of towers."""
    text = config.get_text_config()
    subs = {name: sub for name in config.sub_configs if (sub := getattr(config, name)) is not None}
    return {
        name: TRAITS.get(sub.model_type, {}) if sub is text else {k: v for k, v in VISION.items() if hasattr(sub, k)}
        for name, sub in subs.items()
    }


def _named(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function declares by name."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}


def _merged(settings: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings overridden by more settings, also inside of sub-configs."""
    both = {name: {**settings[name], **more[name]} for name in settings.keys() & more.keys()}
    nested = {name: value for name, value in both.items() if isinstance(more[name], Mapping)}
    return {**settings, **more, **nested}
