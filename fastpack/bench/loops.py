"""Train a variant in one of two ways: with TRL's unmodified trainers, or in a plain loop."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import DataCollatorForLanguageModeling, DataCollatorWithFlattening

from fastpack.bench.callbacks import LearnLater, StepCallback, experts_norm
from fastpack.bench.lengths import Pair, make_rows
from fastpack.bench.measure import StepTimer
from fastpack.bench.models import lora_config, patch
from fastpack.bench.rows import image_collator, training_rows
from fastpack.bench.settings import COMPARED_STEPS, LEARNING_RATE, RunSettings
from fastpack.bench.shapes import has_images
from fastpack.data import with_packed_seq_lens
from fastpack.testing.id_tokenizer import tokenizer_of_ids

WITHOUT_WAITING: dict[str, Any] = {"logging_nan_inf_filter": False, "accelerator_config": {"non_blocking": True}}
"""Settings that avoid waits. By default, transformers' trainer waits for the device twice a step: to check whether the
loss is a number, and to copy a batch. The host work after a wait doesn't overlap with the device's work."""

FLATTEN = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
"""The collator of packed variants. Positions restart at each sequence, and the sequence boundaries are passed on. TRL's
own collator passes boundaries on since 1.16. Without them, every attention layer computes them again, and waits for the
device each time."""


class FirstSteps(NamedTuple):
    """The losses, the gradient norms and the norms of the experts' gradients of the first steps, if experts train."""

    losses: list[float]
    norms: list[float]
    expert_norms: list[float]


def train_with_trl(model: Any, settings: RunSettings, timer: StepTimer) -> FirstSteps:
    """Train with one of TRL's trainers, as a user would call it."""
    make_trainer = {"sft": sft_trainer, "dpo": dpo_trainer, "grpo": _grpo_trainer, "distill": _distill_trainer}[
        settings.trainer
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(model, settings, trainer_arguments(settings, folder))
        steps = StepCallback(timer, experts=settings.trains_experts)
        trainer.add_callback(steps)
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry][:COMPARED_STEPS]
    return FirstSteps([entry["loss"] for entry in logged], [entry["grad_norm"] for entry in logged], steps.expert_norms)


def _grpo_trainer(*arguments: Any) -> Any:
    from fastpack.bench.grpo import grpo_trainer  # late, since it imports TRL

    return grpo_trainer(*arguments)


def _distill_trainer(*arguments: Any) -> Any:
    from fastpack.bench.distill import distill_trainer  # late, since it imports TRL

    return distill_trainer(*arguments)


def sft_trainer(model: Any, settings: RunSettings, arguments: dict[str, Any]) -> Any:
    """Return the ``SFTTrainer`` of a variant, on rows of random tokens."""
    from datasets import Dataset
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    variant = settings.spec
    images: dict[str, Any] = {"remove_unused_columns": False} if has_images(settings.shape) else {}
    padding: dict[str, Any] = {} if variant.unsloth else {"padding_free": variant.packed}
    trainer = SFTTrainer(
        model,
        args=SFTConfig(
            **arguments,
            **images,
            **padding,
            use_liger_kernel=variant.liger,
            liger_kernel_config=liger_options(settings) if variant.liger else None,
            dataset_kwargs={"skip_prepare_dataset": True},
        ),
        data_collator=image_collator(settings) if images else None,
        train_dataset=Dataset.from_list(training_rows(settings)),
        processing_class=tokenizer_of_ids(),
        callbacks=[LearnLater()] if images else [],
    )
    if variant.fused:
        patch(trainer, settings)
    if variant.packed:
        trainer.data_collator = FLATTEN
    if variant.collated:
        trainer.data_collator = with_packed_seq_lens(trainer.data_collator)
    return trainer


def liger_options(settings: RunSettings) -> dict[str, bool]:
    """Return the options of Liger: its experts replace those that PEFT wraps, and so exclude LoRA on experts."""
    return {"swiglu": False} if settings.lora_experts else {}


def dpo_trainer(model: Any, settings: RunSettings, arguments: dict[str, Any]) -> Any:
    """Return the ``DPOTrainer`` of a variant, as a user would call it.

    With LoRA, the reference is the policy with its adapters off; without LoRA, it is a copy. The first steps, which are
    compared, learn nothing: see :class:`LearnLater`.
    """
    from datasets import Dataset
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    lora = settings.mode != "full"
    trainer = DPOTrainer(
        model,
        ref_model=None if lora else copy.deepcopy(model),
        args=DPOConfig(**arguments),
        train_dataset=Dataset.from_list([{"prompt": "<s>", "chosen": "<s>", "rejected": "<s>"}]),
        processing_class=tokenizer_of_ids(),
        peft_config=lora_config(settings) if lora else None,
        callbacks=[LearnLater()],
    )
    # the trainer takes only texts, which it tokenizes; our pairs are token ids already
    pairs = make_pairs(settings.pair_lengths(), model.config.vocab_size, settings.seed)
    trainer.train_dataset = Dataset.from_list(pairs)
    if settings.spec.patched:
        patch(trainer, settings)
    return trainer


def make_pairs(lengths: list[Pair], vocabulary: int, seed: int) -> list[dict[str, list[int]]]:
    """Return pairs of random tokens, of these lengths, under the names that TRL's collator reads."""
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    rows = iter(make_rows([length for pair in lengths for length in pair], vocabulary, seed))
    return [{name: next(rows) for name in names} for _ in lengths]


def trainer_arguments(settings: RunSettings, folder: str) -> dict[str, Any]:
    """Return the config arguments that all of TRL's trainers share."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": settings.rows,
        "max_steps": settings.total_steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_length": None,
        "gradient_checkpointing": settings.checkpointing,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "seed": settings.seed,
        **({} if settings.trainer_waits else WITHOUT_WAITING),
    }


def train_plainly(model: Any, settings: RunSettings, timer: StepTimer) -> FirstSteps:
    """Train in a user's own loop over ``model(..., labels=...)`` with AdamW."""
    variant = settings.spec
    device = next(model.parameters()).device
    if variant.liger:  # apply Liger with its fused loss, as TRL's trainer does by itself
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        plain = model.get_base_model() if hasattr(model, "get_base_model") else model
        _apply_liger_kernel_to_instance(model=plain, **liger_options(settings))
    if settings.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    pad: Any = DataCollatorForLanguageModeling(tokenizer_of_ids(), mlm=False)
    pad = image_collator(settings) if has_images(settings.shape) else pad
    collator: Callable[[Any], dict[str, Any]] = FLATTEN if variant.packed else pad
    if variant.collated:
        collator = with_packed_seq_lens(collator)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=device.type == "cuda")
    rows = training_rows(settings)
    if not has_images(settings.shape):
        rows = [{"input_ids": row["input_ids"]} for row in rows]  # the collators make labels, and can't pad any
    losses: list[torch.Tensor] = []
    norms: list[float] = []
    expert_norms: list[float] = []
    timer.mark()
    for step in range(settings.total_steps):
        batch = collator(rows[step * settings.rows : (step + 1) * settings.rows])
        batch = {name: value.to(device) if hasattr(value, "to") else value for name, value in batch.items()}
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        if step < min(COMPARED_STEPS, settings.warmup):  # warm-up steps are not timed
            norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])))
            expert_norms += [experts_norm(model)] if settings.trains_experts else []
        optimizer.step()
        optimizer.zero_grad()
        timer.mark()
        losses.append(loss.detach())
    return FirstSteps(torch.stack(losses[:COMPARED_STEPS]).tolist(), norms, expert_norms)
