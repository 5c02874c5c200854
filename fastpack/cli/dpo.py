"""``fastpack dpo``: preference training with TRL's own DPOTrainer, policy and reference patched."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from trl import get_quantization_config  # type: ignore[attr-defined]
from trl.trainer.utils import create_model_from_path

import fastpack
from fastpack.cli.arguments import Command, ParsedArgs
from fastpack.cli.loading import shards
from fastpack.cli.training import run


def main(arguments: Sequence[str]) -> int:
    """Train, and print a summary."""
    return run(DPO, arguments)


def _models(source: Any, args: ParsedArgs) -> dict[str, Any]:
    """Return the policy or the reference for the trainer, if TRL itself would not build it right.

    TRL loads the reference from the policy's checkpoint. Random weights have no checkpoint, so a copy of the model is
    passed. With adapters, the reference is the policy without adapters. With precomputed log-probabilities, the trainer
    needs no reference; they are computed while it is built, so the policy has to be patched before.
    """
    training = args.training
    if training.precompute_ref_log_probs and args.ours.patch:
        policy = _loaded(source, args) if isinstance(source, str) else source
        fastpack.patch(policy, **args.ours.patch_keywords())
        return {"model": policy, "quantization_config": None}
    if args.model.use_peft or training.precompute_ref_log_probs:
        return {}
    if args.ours.patch and shards(training):
        reference = _loaded(source, args) if isinstance(source, str) else copy.deepcopy(source)
        return {"ref_model": fastpack.patch(reference, **args.ours.patch_keywords())}
    return {} if isinstance(source, str) else {"ref_model": copy.deepcopy(source)}


def _loaded(source: str, args: ParsedArgs) -> Any:
    """Load the policy as TRL does."""
    loading = dict(args.training.model_init_kwargs)
    quantization = get_quantization_config(args.model)
    if quantization is not None:
        loading["quantization_config"] = quantization
    if args.training.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        loading["device_map"] = None
    return create_model_from_path(source, **loading)


DPO = Command(
    name="dpo",
    trainer="DPOTrainer",
    config="DPOConfig",
    what="Train on preferences with TRL's DPOTrainer, padding-free.",
    formats="prompt, chosen and rejected, as texts or as messages; the prompt may also be the start of both answers",
    flags="[--loss_type sigmoid] ",
    columns=lambda training: ({"chosen", "rejected"},),
    models=_models,
)
