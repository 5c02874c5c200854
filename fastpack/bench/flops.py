"""Count the floating-point operations of the matmuls that a run's timed steps need, for the floor under their time.

These are the model's operations (:mod:`fastpack.trainers.metrics.flops` counts them), with two exceptions:

- the head is only needed for tokens that predict another token: all but the last of each sequence, and with DPO only
  those that predict a token of a completion;
- with gradient checkpointing each layer's forward is computed once more (Chen et al., "Training Deep Nets with
  Sublinear Memory Cost", arXiv:1604.06174), except for matmuls that only its output needs: the last matmul of a gated
  MLP or of its experts, and with LoRA on it the matmul with its B. Experts are weighted behind that matmul; a weight's
  gradient is the product of the matmul's input and of that input's gradient, which the backward computes anyway.

Recurrences and convolutions between tokens are not counted.

For rows with images, the image tower is counted too, where each patch of an image sees all of its patches.

DPO's reference adds a forward, without adapters, and distillation's teacher adds its own; both heads are needed for
completions only. A prompt that several sequences share is counted for each, and so are
its images.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from fastpack.bench.images import Grid
from fastpack.bench.models import lora_config, with_lora
from fastpack.bench.settings import RunSettings
from fastpack.bench.shapes import TOWER, auto_class, has_experts, make_config
from fastpack.bench.variants import ROLLOUTS
from fastpack.model.unwrap import find_parts
from fastpack.packing.pairs import count_pairs
from fastpack.trainers.metrics.flops import ModelFlops, linear_flops, read_flops


def tower_flops(model: Any, grids: Sequence[Grid]) -> int:
    """Count the operations of a composite's image tower, forward and backward, with what trains now.

    Args:
        model: the composite's head, plain or wrapped by PEFT.
        grids: the grid of every image; none for a model without a tower.
    """
    if not grids:
        return 0
    tower = getattr(find_parts(model).composite, TOWER)
    vision, patches = tower.config, [prod(grid) for grid in grids]
    trains = any(parameter.requires_grad for parameter in tower.parameters())
    embedding = sum(p.numel() * 2 * (1 + p.requires_grad) for p in tower.patch_embed.parameters() if p.ndim > 1)
    blocks = linear_flops(tower.blocks, vision, input_grad=trains)
    mergers = [tower.merger, *tower.deepstack_merger_list]
    merged = sum(linear_flops(merger, vision, input_grad=trains) for merger in mergers)
    scores = 4 * vision.hidden_size * vision.depth * (3 if trains else 1)
    total = sum(patches)
    tokens = total // vision.spatial_merge_size**2
    return total * (embedding + blocks) + tokens * merged + scores * sum(count**2 for count in patches)


def flops_of(model: ModelFlops, lengths: Sequence[int]) -> int:
    """Return a model's operations on sequences of these lengths."""
    return model.of(sum(lengths), [count_pairs(lengths, window) for window in model.per_pair])


def last_inputs(settings: RunSettings) -> int:
    """Return the number of inputs of an MLP's last matmuls, for each of a layer's outputs of a token.

    These are the sizes inside the experts that a token is routed to, or inside a dense MLP, and with LoRA its ranks.
    """
    config = make_config(settings.shape).get_text_config()
    inner = getattr(config, "moe_intermediate_size", config.intermediate_size)
    adapted = settings.lora_experts if has_experts(settings.shape) else settings.mode != "full"
    inputs = int(inner) + (settings.rank if adapted else 0)
    return inputs * config.num_experts_per_tok if has_experts(settings.shape) else inputs


def teacher_flops(shape: str, lengths: Sequence[int], predicted: int) -> int:
    """Return the operations of a teacher's forward on sequences of these lengths, with its head on predicted tokens."""
    config = make_config(shape).get_text_config()
    with torch.device("meta"):
        model: Any = auto_class(shape).from_config(config).requires_grad_(False)
    head = 2 * config.hidden_size * config.vocab_size
    return flops_of(read_flops(model, recurrences=False), lengths) - head * (sum(lengths) - predicted)


def needed_flops(settings: RunSettings) -> int:
    """Count the operations that the timed steps need, for a decoder with gated MLPs or experts in every layer."""
    composite = make_config(settings.shape)
    config = composite.get_text_config()
    with torch.device("meta"):
        model: Any = auto_class(settings.shape).from_config(composite)
    lengths = [length for batch in settings.timed_batches() for length in batch]
    tokens = sum(lengths)
    reference = flops_of(read_flops(model.requires_grad_(False), recurrences=False), lengths)
    model = model.requires_grad_(True) if settings.mode == "full" else with_lora(model, lora_config(settings))
    timed = slice(settings.warmup * settings.rows, None)
    grids = settings.grids()[timed]
    grids = [grid for grid in grids for _ in range(settings.branches)]
    needed = flops_of(read_flops(model, recurrences=False), lengths) + tower_flops(model, grids)
    forward = flops_of(read_flops(model.requires_grad_(False), recurrences=False), lengths)
    head = 2 * config.hidden_size * config.vocab_size
    predicted = sum(settings.text_lengths()[timed]) if grids else tokens - len(lengths)
    if settings.trainer in ROLLOUTS:
        predicted = sum(settings.completion_lengths()[timed.start * settings.branches :])
    if settings.teacher is not None:
        needed += teacher_flops(settings.teacher, lengths, predicted)
    if settings.trainer == "dpo":
        predicted = sum(chosen + rejected for _, chosen, rejected in settings.pair_lengths()[timed])
        needed += reference - head * (tokens - predicted)
    if settings.checkpointing:
        last = 2 * config.hidden_size * last_inputs(settings)
        needed += forward - tokens * (head + config.num_hidden_layers * last)
        if grids and settings.mode == "full":  # a frozen tower is computed once
            vision = composite.vision_config
            last = 2 * vision.intermediate_size * vision.hidden_size * vision.depth
            needed += tower_flops(model, grids) - sum(map(prod, grids)) * last
    # the head's forward, the gradient of its input, and the gradient of its weight if the weight trains
    return needed - head * (3 if settings.mode == "full" else 2) * (tokens - predicted)
