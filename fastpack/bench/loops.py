"""The two ways in which a variant is trained: by TRL's unmodified trainers, and in a plain loop."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from transformers import DataCollatorWithFlattening, TrainerCallback

from fastpack.bench.lengths import make_rows
from fastpack.bench.measure import Clock
from fastpack.bench.models import apply_liger, patch
from fastpack.bench.preference import dpo_trainer
from fastpack.bench.settings import GATE_STEPS, LEARNING_RATE, Settings
from fastpack.data import with_packed_seq_lens
from fastpack.testing.id_tokenizer import tokenizer_of_ids

WITHOUT_WAITING: dict[str, Any] = {"logging_nan_inf_filter": False, "accelerator_config": {"non_blocking": True}}
"""By default transformers' trainer waits for the device twice a step: to look whether the loss is a number, and to
copy a batch. What it then does on the host, nothing hides."""

FLATTEN = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
"""Feeds packed variants: positions restart, and boundaries are sent along. TRL's own collator sends them from 1.16 on;
before it, every attention layer would work them out anew, and wait for the device each time."""

Found = tuple[list[float], list[float]]
"""Loss and norm of the gradients of the first steps."""


class StepCallback(TrainerCallback):
    """Tells the clock when a trainer's steps end, and has the first of them logged."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin the first step."""
        if state.global_step == 0:
            self.clock.mark()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End a step."""
        self.clock.mark()
        control.should_log |= state.global_step <= GATE_STEPS


def train_with_trl(model: Any, settings: Settings, clock: Clock) -> Found:
    """Train with TRL's ``SFTTrainer`` or ``DPOTrainer``, as a user would call it."""
    make_trainer = dpo_trainer if settings.trainer == "dpo" else sft_trainer
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(model, settings, trainer_arguments(settings, folder))
        trainer.add_callback(StepCallback(clock))
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry][:GATE_STEPS]
    return [entry["loss"] for entry in logged], [entry["grad_norm"] for entry in logged]


def sft_trainer(model: Any, settings: Settings, arguments: dict[str, Any]) -> Any:
    """Return the ``SFTTrainer`` of a variant, on rows of random tokens."""
    from datasets import Dataset
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    variant = settings.variant
    rows = make_rows(settings.row_lengths(), model.config.vocab_size, settings.seed)
    trainer = SFTTrainer(
        model,
        args=SFTConfig(
            **arguments,
            padding_free=variant.packed,
            use_liger_kernel=variant.liger,
            dataset_kwargs={"skip_prepare_dataset": True},
        ),
        train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
        processing_class=tokenizer_of_ids(),
    )
    if variant.fused:
        patch(trainer, settings)
    if variant.packed:
        trainer.data_collator = FLATTEN
    if variant.collated:
        trainer.data_collator = with_packed_seq_lens(trainer.data_collator)
    return trainer


def trainer_arguments(settings: Settings, folder: str) -> dict[str, Any]:
    """Return the arguments of the config of any of TRL's trainers."""
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


def train_plainly(model: Any, settings: Settings, clock: Clock) -> Found:
    """Train in a user's own loop over ``model(..., labels=...)`` with AdamW."""
    variant, device = settings.variant, next(model.parameters()).device
    if variant.liger:
        apply_liger(model)
    if settings.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    collator: Callable[[Any], dict[str, Any]] = FLATTEN if variant.packed else pad
    if variant.collated:
        collator = with_packed_seq_lens(collator)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=device.type == "cuda")
    rows = [{"input_ids": row} for row in make_rows(settings.row_lengths(), model.config.vocab_size, settings.seed)]
    losses: list[torch.Tensor] = []
    norms: list[float] = []
    clock.mark()
    for step in range(settings.total_steps):
        batch = collator(rows[step * settings.rows : (step + 1) * settings.rows])
        batch = {name: value.to(device) if hasattr(value, "to") else value for name, value in batch.items()}
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        if step < min(GATE_STEPS, settings.warmup):  # these are not timed
            norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])))
        optimizer.step()
        optimizer.zero_grad()
        clock.mark()
        losses.append(loss.detach())
    return torch.stack(losses[:GATE_STEPS]).tolist(), norms


def pad(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    """Return a batch padded on the right, with a mask."""
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
    return {"input_ids": padded.clamp(min=0), "attention_mask": (padded != -100).long(), "labels": padded}
