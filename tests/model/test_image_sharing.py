"""Equal images of a batch go through the tower once, and others don't count as equal."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composite_cases import answers, off, results
from prefix_cases import sharing
from torch import nn

import fastpack
from fastpack.exactness.image_text import batch_of, build_image_text, other_pixels, samples
from fastpack.model.image_sharing import GET_IMAGE_FEATURES, different_images, image_features, is_known, repeated
from fastpack.utils.replacement import replaces

BOUND = 1e-5
GRADIENT_BOUND = 1e-4
TOWERS = ("visual", "vision_tower", "vision_model")


def patches_seen(model: Any) -> list[int]:
    """Record the patches or images that each call of the tower gets, from now on."""
    seen: list[int] = []
    tower = next(getattr(model.model, name) for name in TOWERS if hasattr(model.model, name))
    tower.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(len(args[0] if args else kwargs["pixel_values"])), with_kwargs=True
    )
    return seen


@pytest.mark.parametrize("model_type", ["qwen3_vl", "internvl", "smolvlm"])
def test_the_tower_sees_each_image_once(model_type: str) -> None:
    model = build_image_text(model_type).train()
    one = samples(model)[0]
    other = other_pixels(one)
    rows = [*answers(one, (3, 4), 0), *answers(other, (2,), 7), *answers(one, (5,), 9), *answers(other, (6,), 11)]
    alone = results(model, rows)
    fastpack.patch(model, share_prefixes="auto")
    seen = patches_seen(model)
    for _ in range(2):
        logits, grads = off(results(model, [batch_of(model, rows)]), alone)
        assert logits <= BOUND
        assert grads <= GRADIENT_BOUND
    assert seen == [2 * len(one["pixel_values"])] * 2
    assert (sharing(model).stats.images, sharing(model).stats.images_saved) == (10, 6)
    assert "6 of 10 images repeat others" in str(sharing(model).describe())
    results(model, [batch_of(model, [one, other])])
    assert seen[2:] == [2 * len(one["pixel_values"])]
    assert sharing(model).stats.images == 10, "nothing to repeat"


def test_the_method_is_restored_and_follows_a_copy() -> None:
    model = build_image_text("qwen3_vl")
    fastpack.patch(model)
    assert GET_IMAGE_FEATURES not in vars(model.model)
    fastpack.patch(model, share_prefixes="auto")
    assert replaces(vars(model.model)[GET_IMAGE_FEATURES], image_features)
    copied = copy.deepcopy(model)
    assert vars(copied.model)[GET_IMAGE_FEATURES].owner is copied.model
    row = samples(model)[0]
    images = {name: torch.cat([row[name]] * 2) for name in ("pixel_values", "image_grid_thw")}
    seen = patches_seen(model)
    model.get_image_features(**images)
    assert seen == [2 * len(row["pixel_values"])], "outside of a training forward all is stock"
    fastpack.unpatch(model)
    assert GET_IMAGE_FEATURES not in vars(model.model)


def grids(*sizes: tuple[int, int, int]) -> dict[str, torch.Tensor]:
    count = sum(t * h * w for t, h, w in sizes)
    return {"pixel_values": torch.ones(count, 3), "image_grid_thw": torch.tensor(sizes)}


def orders(arguments: dict[str, Any]) -> list[int] | None:
    found = different_images(arguments)
    return None if found is None else found.order


def test_what_makes_images_different() -> None:
    assert orders(grids((1, 2, 4), (1, 4, 2))) == [0, 1], "equal patches in another shape"
    found = different_images(grids((1, 2, 4), (1, 4, 2), (1, 2, 4)))
    assert found is not None
    assert found.order == [0, 1, 0]
    assert found.arguments["image_grid_thw"].tolist() == [[1, 2, 4], [1, 4, 2]]
    assert found.arguments["pixel_values"].shape == (16, 3)
    pixels = torch.ones(3, 2, 4, 4)
    assert orders({"pixel_values": pixels, "image_sizes": torch.tensor([[4, 4], [4, 2], [2, 4]])}) == [0, 1, 2]
    sized = different_images({"pixel_values": pixels, "image_sizes": torch.tensor([[4, 4], [4, 2], [4, 4]]), "n": None})
    assert sized is not None
    assert sized.order == [0, 1, 0]
    assert sized.arguments["n"] is None
    rows = torch.ones(3, 2, 3, 4, 4)
    assert orders({"pixel_values": rows}) == [0, 0, 0]
    rows[1, 1] = 0
    assert orders({"pixel_values": rows}) is None, "padding, which a model may leave out"
    pixels[2, 1, 3, 3] = 2
    assert orders({"pixel_values": pixels}) == [0, 0, 1]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"pixel_values": torch.ones(4, 3), "image_sizes": torch.ones(3)},
        {"pixel_values": torch.ones(4, 3), "image_token_pooling": torch.ones(4, 2)},
        {"pixel_values": torch.ones(4, 3), "image_grid_thw": torch.tensor([[1, 1, 1]] * 2)},
        {**grids((1, 1, 2), (1, 1, 2)), "image_sizes": torch.ones(2)},
    ],
)
def test_unknown_layouts_run_as_they_are(arguments: dict[str, Any]) -> None:
    assert different_images(arguments) is None


def test_features_of_every_layout_are_repeated() -> None:
    found = different_images(grids((1, 1, 2), (1, 1, 3), (1, 1, 2)))
    assert found is not None
    parts = (torch.ones(2, 5), 2 * torch.ones(3, 5))
    joined = torch.cat([parts[0], parts[1], parts[0]])
    split = repeated(SimpleNamespace(pooler_output=parts, deepstack_features=[torch.cat(parts), parts]), found)
    assert torch.equal(torch.cat(split.pooler_output), joined)
    assert torch.equal(split.deepstack_features[0], joined)
    assert torch.equal(torch.cat(split.deepstack_features[1]), joined)
    whole = torch.arange(12.0).view(2, 3, 2).requires_grad_()
    of_all = repeated(SimpleNamespace(pooler_output=whole), found).pooler_output
    assert torch.equal(of_all, whole[[0, 1, 0]])
    of_all.sum().backward()
    assert whole.grad is not None
    assert whole.grad[:, 0, 0].tolist() == [2, 1]
    strange = {"nothing": None, "tokens": torch.ones(5, 2), "too few": parts[:1], "images": torch.ones(3, 2, 2)}
    for features in strange.values():
        assert not is_known(SimpleNamespace(pooler_output=features), 2)
        with pytest.raises(fastpack.PatchError, match="otherwise than in an earlier batch"):
            repeated(SimpleNamespace(pooler_output=features), found)
    assert not is_known((parts,), 2)
    assert not is_known(SimpleNamespace(pooler_output=parts, deepstack_features=[(1, [*parts])]), 2), "not of images"
    assert not is_known(SimpleNamespace(pooler_output=parts, deepstack_features=[torch.ones(6, 2)]), 2)


def test_towers_that_draw_or_mix_run_on_every_image() -> None:
    def count(model: Any) -> int:
        rows = answers(samples(model)[0], (3, 4), 0)
        fastpack.patch(model, share_prefixes="auto")
        results(model, [batch_of(model, rows)])
        return sharing(model).stats.images

    drawn = build_image_text("internvl").train()
    drawn.model.vision_tower.encoder.layer[0].attention.attention_dropout = 0.5
    mixed = build_image_text("internvl").train()
    mixed.model.vision_tower.extra = nn.BatchNorm1d(3)
    assert (count(drawn), count(mixed), count(build_image_text("internvl").train())) == (0, 0, 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("model_type", ["qwen3_5", "lfm2_vl"])
def test_images_alone_are_shared_where_prefixes_cannot_be(model_type: str) -> None:
    model = build_image_text(model_type).train()
    rows = answers(samples(model)[0], (3, 4), 0)
    alone = results(model, rows)
    fastpack.patch(model, share_prefixes="auto")
    seen = patches_seen(model)
    logits, grads = off(results(model, [batch_of(model, rows)]), alone)
    assert logits <= BOUND
    assert grads <= GRADIENT_BOUND
    assert seen == [len(rows[0]["pixel_values"])]
    stats = sharing(model).stats
    assert (stats.images, stats.images_saved, stats.shared) == (2, 1, 0)
    assert "mix tokens too" in next(iter(stats.whole))
    with pytest.raises(fastpack.PatchError, match="can't be exact"):
        fastpack.patch(build_image_text(model_type).model.language_model, share_prefixes="auto")


def test_a_strange_layout_is_tried_once() -> None:
    model = build_image_text("internvl").train()
    rows = answers(samples(model)[0], (3, 4), 0)
    alone = results(model, rows)

    def flat(*args: Any, **kwargs: Any) -> Any:
        result = type(model.model).get_image_features(model.model, *args, **kwargs)
        result.pooler_output = result.pooler_output.flatten(0, 1)
        return result

    model.model.get_image_features = flat
    fastpack.patch(model, share_prefixes="auto")
    seen = patches_seen(model)
    for _ in range(2):
        assert max(off(results(model, [batch_of(model, rows)]), alone)) <= BOUND
    assert seen == [1, 2, 2]
