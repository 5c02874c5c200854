"""A collator for your own training loop on images: it joins rows of a processor in one row ``[1, T]``.

Shape suffixes: L tokens of an example, T tokens of the batch, A axes of positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.data.packed_collators import Example, TokenSequence, column_of, real_slice, supervised
from fastpack.errors import PackingError
from fastpack.packing.pixels import PIXEL_INPUTS, join_pixels
from fastpack.packing.seqlens import PackedSeqLens

_OF_TOKENS = ("input_ids", "labels", "completion_mask", "attention_mask")
_TOKEN_TYPES = ("token_type_ids", "image_embeds_position_mask")
"""The ends of the names of token types, such as ``mm_token_type_ids``, and of masks of the tokens of images."""


class PackedVisionCollator:
    """A collator that joins examples with images in one row, for supervised fine-tuning.

    An example is what the model's processor makes of one row of text and images: the columns of
    :class:`fastpack.PackedSFTCollator` and token types, of shape ``[L]`` or ``[1, L]``, and pixel inputs
    (``pixel_values``, ``image_grid_thw`` and so on). Examples without images have no pixel inputs.

    The batch holds, on the host:

    - ``input_ids``, ``labels`` and token types: int64 ``[1, T]``. The first label of each sequence is ignored. Pass
      ``labels`` if the tokens of images are not to be trained.
    - ``position_ids``: int64 ``[1, T]``, restarting in each sequence. For models with positions of several axes
      ``[1 + A, 1, T]``: these positions, then those of the model's own ``get_rope_index`` for each example.
    - the pixel inputs of all examples behind each other. Inputs of several sizes are padded to the largest.
    - ``packed_seq_lens``: a :class:`fastpack.PackedSeqLens`, so that a patched model need not read the lengths from the
      device.

    For batches of a token budget use :class:`fastpack.TokenBudgetSampler` with the length of each example's
    ``input_ids``, which the processor has filled with the tokens of its images.

    Args:
        model: the model that gets the batches, patched or not. The collator keeps its config, not its weights.

    Raises:
        PackingError: when called, as :class:`fastpack.PackedSFTCollator`; or a column has several rows; or an example
            has a column that processors may join otherwise than :data:`fastpack.packing.pixels.PIXEL_INPUTS`; or
            examples have different columns of token types; or positions can't be computed, since token types are
            missing or the tokens of images don't match the sizes of the images.

    Example:
        >>> collate = fastpack.PackedVisionCollator(model)  # doctest: +SKIP
        >>> batch = collate([processor(images=[image], text=[text], return_tensors="pt")])  # doctest: +SKIP
        >>> loss = model(**batch).loss  # doctest: +SKIP
    """

    def __init__(self, model: nn.Module) -> None:
        """Keep the function that computes the model's positions, without the model's weights."""
        positioned = next((module for module in model.modules() if hasattr(module, "get_rope_index")), None)
        self._positions: Any = None if positioned is None else _without_weights(positioned)

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        """Collate a list of examples."""
        if not examples:
            raise PackingError("there is no example to collate. Pass at least one.")
        rows = [_Row(example, f"example {i}") for i, example in enumerate(examples)]
        packed = PackedSeqLens.from_lengths([len(row.tokens.ids) for row in rows])
        batch = {
            "input_ids": torch.cat([row.tokens.ids for row in rows])[None],
            "labels": packed.mask_first_labels(torch.cat([row.tokens.labels for row in rows])[None]),
            "position_ids": packed.position_ids,
            "packed_seq_lens": packed.flattened(),
        }
        if self._positions is not None:
            axes = torch.cat([_positions(self._positions.get_rope_index, row) for row in rows], -1)
            batch["position_ids"] = torch.cat([packed.position_ids[None], axes])
        for name in dict.fromkeys(name for row in rows for name in row.types):
            if any(name not in row.types for row in rows):
                raise PackingError(f"some examples of the batch have {name}, and others don't. Pass it with each.")
            batch[name] = torch.cat([row.types[name] for row in rows])[None]
        names = dict.fromkeys(name for row in rows for name in row.pixels)
        for name in names:
            batch[name] = join_pixels([row.pixels[name] for row in rows if name in row.pixels], name)
        return batch


class _Row:
    """One example: its tokens without padding, its token types, int64 ``[L]`` each, and its pixel inputs."""

    def __init__(self, example: Example, name: str) -> None:
        """Read an example; ``name`` is what messages call it."""
        per_token = {key: _row(example[key], key, name) for key in example if _is_per_token(key)}
        self.name = name
        self.tokens: TokenSequence = supervised(per_token, name)
        ids = column_of(per_token, "input_ids", name)
        real = real_slice(per_token, "attention_mask", ids, name)
        types = {key: column_of(per_token, key, name) for key in per_token if key.endswith(_TOKEN_TYPES)}
        for key, values in types.items():
            if len(values) != len(ids):
                raise PackingError(f"{name} of the batch has {len(values)} entries in {key} and {len(ids)} ids.")
        self.types = {key: values[real] for key, values in types.items()}
        pixels = {key: value for key, value in example.items() if not _is_per_token(key) and value is not None}
        unknown = [key for key in pixels if key not in PIXEL_INPUTS]
        if unknown:
            raise PackingError(
                f"{name} of the batch has {', '.join(unknown)}, and it is unknown how a processor joins this for "
                "several rows. Leave it out if the model doesn't take it; else let the processor make a padded batch, "
                "which a patched model runs without padding."
            )
        self.pixels: dict[str, Tensor] = {key: torch.as_tensor(value) for key, value in pixels.items()}


def _is_per_token(column: str) -> bool:
    return column in _OF_TOKENS or column.endswith(_TOKEN_TYPES)


def _row(value: Any, column: str, name: str) -> Any:
    """Return a column of one example without the dimension of a batch."""
    if getattr(value, "ndim", 1) != 2 and not (isinstance(value, list) and value and isinstance(value[0], list)):
        return value
    if len(value) != 1:
        raise PackingError(
            f"{column} of {name} of the batch has {len(value)} rows. Let the processor make one row of each example."
        )
    return value[0]


def _positions(find: Callable[..., Any], row: _Row) -> Tensor:
    """Return the positions of an example by the model's own ``get_rope_index``: int64 ``[A, 1, L]``."""
    given = {"input_ids": row.tokens.ids, "attention_mask": torch.ones_like(row.tokens.ids), **row.types}
    columns = {key: value[None] for key, value in given.items()} | row.pixels
    parameters = inspect.signature(find).parameters
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    missing = [name for name in missing if name not in columns]
    if missing:
        raise PackingError(
            f"{row.name} of the batch has no {', '.join(missing)}, which the model's positions need. Call the "
            f"processor with return_{missing[0]}=True."
        )
    try:
        axes, _ = find(**{name: value for name, value in columns.items() if name in parameters})
    except (RuntimeError, StopIteration, IndexError, TypeError) as error:
        raise PackingError(
            f"the model's positions could not be computed from {row.name} of the batch ({error}): its tokens of images "
            "may not match the sizes of its images. Pass what the processor made, and don't cut it."
        ) from error
    return torch.as_tensor(axes)


def _without_weights(module: nn.Module) -> nn.Module:
    """Return an object of a module's class with its config and settings, but without weights and modules inside."""
    empty: nn.Module = object.__new__(type(module))
    nn.Module.__init__(empty)
    kept = (Mapping, bool, int, float, str, list, tuple)
    settings = {name: value for name, value in vars(module).items() if isinstance(value, kept) and name[0] != "_"}
    vars(empty).update(settings, config=module.config)
    return empty
