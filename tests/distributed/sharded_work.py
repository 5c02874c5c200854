"""What a rank does for ``test_sharded_bases.py``."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
import vision_trainers
from adapter_cases import NF4, loaded, with_lora
from rank_trainers import DDP, as_launched
from rank_work import device
from tiny import tiny_model
from trainer_cases import Gradients, grpo, whole_on_cpu
from vllm_stand_in import base_weights, standing_in

import fastpack


def generated_over(*, sharded: bool, vllm: bool = False) -> dict[str, Any]:
    """Run steps of GRPO on adapters; return this rank's completions, the gradients, and the weights that vLLM got.

    Args:
        sharded: whether the base is; else each rank has it whole.
        vllm: whether completions come from a stand-in for vLLM.
    """
    completions: list[list[int]] = []

    def recorded(completion_ids: list[list[int]], **_: Any) -> list[float]:
        completions.extend(completion_ids)
        return [float(sum(ids) % 7) for ids in completion_ids]

    plain_model = tiny_model("llama", attn_implementation="sdpa")
    steps = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "max_completion_length": 300}
    engine = {"use_vllm": True, "vllm_mode": "colocate", "max_completion_length": 12} if vllm else {}
    with as_launched(), standing_in(plain_model) as stand_in:
        model: Any = with_lora(copy.deepcopy(plain_model))
        trainer = fastpack.patch(grpo(Path(tempfile.mkdtemp()), model=model, **{**DDP, **steps, **engine}))
        trainer.reward_funcs = [recorded]
        if sharded:
            for _ in range(2):  # again, before training begins, is as once
                fastpack.shard_base(trainer)
        gradients = Gradients(trainer)
        trainer.train()
    before = plain_model.state_dict()
    drifted = sum(not torch.equal(whole_on_cpu(weight), before[name]) for name, weight in base_weights(model).items())
    return {
        "completions": completions,
        "gradients": gradients.steps,
        "syncs": stand_in.syncs,
        "sharded": count_sharded(model),
        "drifted": drifted,
    }


def shards_for_generation(what: str, checkpoint: Path | None = None) -> str:
    """Return what :func:`fastpack.shard_base` says to a trainer that generates, or the report's line on its syncs.

    Args:
        what: how it does: by continuous ``batching``, or by vLLM with ``own`` code, in ``4 bits`` or ``as trl does``.
        checkpoint: a model's folder, for 4 bits.
    """
    plain_model = tiny_model("llama", attn_implementation="sdpa").bfloat16()
    inputs: dict[str, Any] = {"use_vllm": True, "vllm_mode": "colocate"}
    if what == "batching":
        inputs = {"use_transformers_continuous_batching": True}
    with as_launched(), standing_in(plain_model):
        model = plain_model if checkpoint is None else loaded(checkpoint, device=str(device()), **NF4)
        adapted = with_lora(model, target_modules=["q_proj", "embed_tokens"])
        trainer = fastpack.patch(grpo(Path(tempfile.mkdtemp()), model=adapted, **DDP, **inputs))
        if what == "own":
            del trainer.vllm_generation
        try:
            fastpack.shard_base(trainer)
        except fastpack.PatchError as error:
            return str(error)
        return next(note for note in fastpack.report(trainer).notes if note.startswith("weight sync"))


def images_over(kind: str, model_type: str, *, sharded: bool) -> dict[str, Any]:
    """Train adapters of an image-text model; return the logs, the gradients, and how many weights are sharded."""
    with as_launched():
        model: Any = with_lora(vision_trainers.policy(model_type))
        settings = {"per_device_train_batch_size": 2, "max_steps": 2, **DDP, "ddp_find_unused_parameters": True}
        trainer = fastpack.patch(vision_trainers.trainer_of(kind, model, Path(tempfile.mkdtemp()), **settings))
        if sharded:
            fastpack.shard_base(trainer)
        gradients = Gradients(trainer)
        trainer.train()
    logged = [[entry.get(name, 0.0) for name in ("loss", "aux_loss")] for entry in trainer.state.log_history]
    return {"logged": logged, "gradients": gradients.steps, "sharded": count_sharded(model)}


def step_over(model_type: str, *, sharded: bool) -> dict[str, Any]:
    """Return the gradients of adapters for one batch on every rank, and how many weights are sharded."""
    place = device() if sharded else torch.device("cpu")
    model: Any = with_lora(tiny_model(model_type)).to(place)
    outer = fastpack.shard_base(fastpack.patch(model)) if sharded else model
    ids = torch.arange(3, 15, device=place)[None]
    outer(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    return {"gradients": gradients, "sharded": count_sharded(model)}


def count_sharded(model: torch.nn.Module) -> int:
    return sum(hasattr(parameter, "device_mesh") for parameter in model.parameters())
