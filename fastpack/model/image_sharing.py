"""A composite's image features, computed once for equal images of a batch: GRPO's groups, or chosen and rejected rows.

Features are repeated behind the tower and the projector, so that the gradients of all copies are summed there.

Shape suffixes: I images, U different images.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fastpack.errors import PatchError
from fastpack.model.model_runtime import ModelRuntime
from fastpack.ops.shared_rows import Copies, copies_of, spread
from fastpack.packing.fingerprints import fingerprints, joined
from fastpack.packing.pixels import PIXEL_INPUTS
from fastpack.utils.replacement import Replacement
from fastpack.utils.signatures import parameters
from fastpack.utils.tensors import map_tensors, send

GET_IMAGE_FEATURES = "get_image_features"
_PIXELS, _GRID = "pixel_values", "image_grid_thw"
_ONE_IMAGE = 4
"""The dimensions of images ``[I, C, h, w]``; with one more, each entry is a row of images or tiles."""
_FEATURES, _LAYERS = "pooler_output", "deepstack_features"
"""The attributes of a result with features for the text model."""


@dataclass(frozen=True, eq=False)
class DifferentImages:
    """The different images of a batch.

    Attributes:
        arguments: the arguments of ``get_image_features`` for the U different images alone.
        copies: which of them each of the I images is a copy of.
        order: the same as ints.
    """

    arguments: dict[str, Any]
    copies: Copies
    order: list[int]

    @property
    def count(self) -> int:
        """U, the number of different images."""
        return len(self.copies.first)


def image_features(patched: Replacement[None, ModelRuntime], *args: Any, **kwargs: Any) -> Any:
    """Run a composite's ``get_image_features`` on each different image once, if the batch may share prefixes.

    The result has features of all images. Its other values, such as hidden states of the tower, are those of the
    different images. The host waits for the device once, to compare images.

    Args:
        patched: the replacement of the composite's method.
        *args: positional arguments of the method.
        **kwargs: its keywords.
    """
    composite, sharing, entered = patched.owner, patched.runtime.sharing, patched.runtime.handover.entered
    if sharing is None or entered is None or entered.packed is None or entered.ids is None:
        return patched.stock(*args, **kwargs)
    if torch.compiler.is_compiling() or not sharing.shares_images(composite) or _mixes_images(composite):
        return patched.stock(*args, **kwargs)
    names = parameters(getattr(type(composite), GET_IMAGE_FEATURES))
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    shown = patched.runtime.handover.images
    images = None if sharing.knows_features is False else different_images(arguments)
    if images is None or images.count == len(images.order):
        result = patched.stock(*args, **kwargs)
        shown.append(
            image_of_tokens_in_rows(result, arguments) if images is None else image_of_tokens(result, images.order)
        )
        return result
    result = patched.stock(**images.arguments)
    if sharing.knows_features is None:
        sharing.knows_features = is_known(result, images.count)
        if not sharing.knows_features:  # the only batch whose images go through the tower again
            shown.append(None)
            return patched.stock(*args, **kwargs)
    result = repeated(result, images)
    shown.append(image_of_tokens(result, images.order))
    sharing.stats.images += len(images.order)
    sharing.stats.images_saved += len(images.order) - images.count
    return result


def different_images(arguments: dict[str, Any]) -> DifferentImages | None:
    """Return the different images among these; None if it is unknown which values are of which image.

    Args:
        arguments: the arguments of ``get_image_features`` by name. Either tensors have an entry for each image (or
            each row of images), or patches of all images are behind each other, as many as ``image_grid_thw`` says.
    """
    tensors = _pixel_inputs(arguments)
    if tensors is None:
        return None
    pixels, grid = tensors[_PIXELS], tensors.get(_GRID)
    if grid is not None:
        if len(tensors) > 2:
            return None
        numbers = torch.cat([grid.flatten().long(), fingerprints(pixels).flatten()]).cpu()
        sizes, prints = numbers[: grid.numel()].view(grid.shape), numbers[grid.numel() :].view(-1, 2)
        counts = sizes.prod(-1).tolist()
        if sum(counts) != len(pixels):
            return None
        patches = [each.numpy().tobytes() for each in prints.split(counts)]
        keys = [(*size, own) for size, own in zip(sizes.tolist(), patches, strict=True)]
    else:
        if any(len(value) != len(pixels) for value in tensors.values()):
            return None
        if pixels.ndim > _ONE_IMAGE and not bool(_is_image(pixels).all()):
            return None  # rows padded with images of zeros, which some models leave out before the tower
        counts = [1] * len(pixels)
        keys = [(*each,) for each in joined([fingerprints(value) for value in tensors.values()]).tolist()]
    order = _numbered(keys)
    first = [order.index(each) for each in range(max(order) + 1)]
    starts = [*accumulate(counts, initial=0)]
    rows = torch.cat([torch.arange(starts[image], starts[image + 1]) for image in first])
    host = copies_of(torch.tensor(order), torch.tensor(first))
    copies = map_tensors(host, lambda x: send(x, pixels.device))
    kept = {name: value.index_select(0, copies.first) for name, value in tensors.items() if name != _PIXELS}
    kept[_PIXELS] = pixels.index_select(0, send(rows, pixels.device))
    return DifferentImages({**arguments, **kept}, copies, order)


def image_of_tokens_in_rows(result: Any, arguments: dict[str, Any]) -> list[int] | None:
    """Return what :func:`image_of_tokens` returns, for rows that are padded with images of zeros.

    Args:
        result: a result whose features are a tensor for each row, with as many tokens for each of its images.
        arguments: the arguments of ``get_image_features`` by name: ``pixel_values [B, N, C, h, w]`` and other inputs
            ``[B, N, ...]``.
    """
    tensors, features = _pixel_inputs(arguments), getattr(result, _FEATURES, None)
    if tensors is None or tensors[_PIXELS].ndim <= _ONE_IMAGE:
        return None
    pixels = tensors[_PIXELS]
    if features is None or isinstance(features, Tensor) or not _is_by_image(features, len(pixels)):
        return None
    if any(value.shape[:2] != pixels.shape[:2] for value in tensors.values()):
        return None
    is_image = _is_image(pixels)
    prints = joined([fingerprints(value.flatten(0, 1)) for value in tensors.values()])
    numbers = iter(_numbered((*each,) for each in prints[is_image.flatten()].tolist()))
    shown: list[int] = []
    for count, own in zip(is_image.sum(1).tolist(), features, strict=True):
        if len(own) % max(1, count):
            return None
        shown += [image for image in islice(numbers, count) for _ in range(len(own) // count)]
    return shown


def image_of_tokens(result: Any, order: list[int]) -> list[int] | None:
    """Return the number of the image that each token of a result shows; None if the layout of its features is unknown.

    Args:
        result: a result with features of all I images.
        order: the number of each image, equal for equal images.
    """
    features: Any = getattr(result, _FEATURES, None)
    if not _is_by_image(features, len(order)):
        return None
    return [number for number, each in zip(order, features, strict=True) for _ in range(len(each))]


def _pixel_inputs(arguments: dict[str, Any]) -> dict[str, Tensor] | None:
    """Return the tensors among these arguments; None without images, or if one may belong to something else."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor) and value.ndim}
    is_known = _PIXELS in tensors and len(tensors[_PIXELS]) and all(name in PIXEL_INPUTS for name in tensors)
    return tensors if is_known else None


def _is_image(pixels: Tensor) -> Tensor:
    """Return which images of rows ``[B, N, C, h, w]`` are none of the zeros that pad a row, bool ``[B, N]``."""
    return pixels.flatten(2).any(2)


def _numbered(keys: Iterable[Hashable]) -> list[int]:
    """Return a number for each key, from 0 on in the order of first appearance, equal for equal keys."""
    number: dict[Hashable, int] = {}
    return [number.setdefault(key, len(number)) for key in keys]


def is_known(result: Any, count: int) -> bool:
    """Return whether the features of a result for ``count`` images are laid out so that they can be repeated."""
    features, layers = getattr(result, _FEATURES, None), getattr(result, _LAYERS, None)
    return _is_by_image(features, count) and all(
        _is_by_image(layer, count) or _lengths(features, layer) is not None for layer in layers or ()
    )


def repeated(result: Any, images: DifferentImages) -> Any:
    """Return a result for different images with features of all images.

    Raises:
        PatchError: the features are laid out otherwise than in an earlier batch.
    """
    features, layers = getattr(result, _FEATURES, None), getattr(result, _LAYERS, None)
    if not is_known(result, images.count):
        raise PatchError(
            f"features of {images.count} images came as {type(features).__name__}, otherwise than in an earlier batch, "
            "and can't be repeated for equal images. Leave share_prefixes out."
        )
    if layers is not None:
        setattr(result, _LAYERS, [_repeated_layer(layer, features, images) for layer in layers])
    setattr(result, _FEATURES, _repeated(features, images))
    return result


def _is_by_image(features: Any, count: int) -> bool:
    """Return whether features are one tensor ``[U, L, H]``, or a list with a tensor of each image."""
    if isinstance(features, Tensor):
        return features.ndim > 2 and len(features) == count
    by_image = isinstance(features, list | tuple) and len(features) == count
    return by_image and all(isinstance(each, Tensor) for each in features)


def _lengths(features: Any, layer: Any) -> list[int] | None:
    """Return the tokens of each image in one tensor of all images' tokens, or None."""
    lengths = [len(each) for each in features] if isinstance(features, list | tuple) else []
    return lengths if isinstance(layer, Tensor) and sum(lengths) == len(layer) else None


def _repeated(features: Any, images: DifferentImages) -> Any:
    if isinstance(features, Tensor):
        return spread(features, images.copies)
    return type(features)(features[at] for at in images.order)


def _repeated_layer(layer: Any, features: Any, images: DifferentImages) -> Any:
    lengths = _lengths(features, layer)
    return _repeated(layer, images) if lengths is None else torch.cat(_repeated(layer.split(lengths), images))


def _mixes_images(composite: nn.Module) -> bool:
    """Return whether a module normalises images by others of the batch, so that a copy counts."""
    return any(isinstance(module, _BatchNorm) and module.training for module in composite.modules())
