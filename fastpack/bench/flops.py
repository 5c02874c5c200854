"""Count the floating-point operations of the matmuls that a run's timed steps need, for the floor under their time.

These are the model's operations (:mod:`fastpack.trainers.metrics.flops` counts them), with two exceptions:

- the head is only needed for tokens that predict another token: all but the last of each sequence, and with DPO only
  those that predict a token of a completion;
- with gradient checkpointing each layer's forward is computed once more (Chen et al., "Training Deep Nets with
  Sublinear Memory Cost", arXiv:1604.06174), except for matmuls that only its output needs: the last matmul of a gated
  MLP, and with LoRA the matmul with its B.

DPO's reference adds a forward, without adapters. A prompt that a pair's sequences share is counted twice.
"""

from __future__ import annotations

import torch

from fastpack.bench.models import LORA_RANK, make_config, with_lora
from fastpack.bench.settings import RunSettings
from fastpack.trainers.metrics.flops import read_flops


def needed_flops(settings: RunSettings) -> int:
    """Count the operations that the timed steps need, for a dense decoder with gated MLPs."""
    from transformers import AutoModelForCausalLM

    config = make_config(settings.shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    lengths = [length for batch in settings.timed_batches() for length in batch]
    tokens = sum(lengths)
    pairs = [sum(length * (length + 1) // 2 for length in lengths)]
    reference = read_flops(model.requires_grad_(False)).of(tokens, pairs)
    model = model.requires_grad_(True) if settings.mode == "full" else with_lora(model)
    needed = read_flops(model).of(tokens, pairs)
    forward = read_flops(model.requires_grad_(False)).of(tokens, pairs)
    head = 2 * config.hidden_size * config.vocab_size
    predicted = tokens - len(lengths)
    if settings.trainer == "dpo":
        timed = settings.pair_lengths()[settings.warmup * settings.rows :]
        predicted = sum(chosen + rejected for _, chosen, rejected in timed)
        needed += reference - head * (tokens - predicted)
    if settings.checkpointing:
        last = config.intermediate_size if settings.mode == "full" else config.intermediate_size + LORA_RANK
        needed += forward - tokens * (head + config.num_hidden_layers * 2 * config.hidden_size * last)
    # the head's forward, the gradient of its input, and the gradient of its weight if the weight trains
    return needed - head * (3 if settings.mode == "full" else 2) * (tokens - predicted)
