"""The two ways in which a contestant is trained: TRL's unmodified ``SFTTrainer``, and a plain loop."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from fastpack.bench.clock import Clock
from fastpack.bench.models import apply_liger, patch
from fastpack.bench.settings import Settings
from fastpack.bench.variants import CONTESTANTS
from fastpack.data import with_packed_seq_lens
from fastpack.testing.id_tokenizer import tokenizer_of_ids

LEARNING_RATE = 1e-4
GATE_STEPS = 5
"""How many steps the contestants are compared on, and whose losses and norms are read."""

WITHOUT_WAITING: dict[str, Any] = {"logging_nan_inf_filter": False, "accelerator_config": {"non_blocking": True}}
"""By default transformers' trainer waits for the device twice a step: to look whether the loss is a number, and to
copy a batch. What it then does on the host, nothing hides."""

Row = list[int]


def train_with_trl(model: Any, settings: Settings, rows: list[Row], clock: Clock) -> tuple[list[float], list[float]]:
    """TRL's ``SFTTrainer``, as a user would call it. Returns loss and norm of the gradients of the first steps."""
    from datasets import Dataset
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    contestant = CONTESTANTS[settings.contestant]
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            **trainer_arguments(settings, folder),
            padding_free=contestant.packed,
            use_liger_kernel=contestant.liger,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        trainer = SFTTrainer(
            model,
            args=arguments,
            train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
            processing_class=tokenizer_of_ids(),
            callbacks=[clock_callback(clock)],
        )
        if contestant.fused:
            patch(trainer, settings)
        if contestant.packed:
            trainer.data_collator = with_boundaries(trainer.data_collator)
        if contestant.collated:
            trainer.data_collator = with_packed_seq_lens(trainer.data_collator)
        trainer.train()
    return logged_of_first_steps(trainer)


def trainer_arguments(settings: Settings, folder: str) -> dict[str, Any]:
    """What the config of any of TRL's trainers is given."""
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


def clock_callback(clock: Clock) -> Any:
    """What tells the clock when a trainer's steps begin and end, and has the first of them logged."""
    from transformers import TrainerCallback

    class Callback(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.end()
            control.should_log |= state.global_step <= GATE_STEPS

    return Callback()


def logged_of_first_steps(trainer: Any) -> tuple[list[float], list[float]]:
    """Loss and norm of the gradients, as the trainer logged them."""
    logged = [entry for entry in trainer.state.log_history if "loss" in entry][:GATE_STEPS]
    return [entry["loss"] for entry in logged], [entry["grad_norm"] for entry in logged]


def train_plainly(model: Any, settings: Settings, rows: list[Row], clock: Clock) -> tuple[list[float], list[float]]:
    """A user's own loop over ``model(..., labels=...)`` with AdamW. Returns as :func:`train_with_trl`."""
    contestant = CONTESTANTS[settings.contestant]
    if contestant.liger:
        apply_liger(model)
    device = next(model.parameters()).device
    if settings.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    collator: Callable[[Any], dict[str, Any]] = functools.partial(collate, packed=contestant.packed)
    if contestant.collated:
        collator = with_packed_seq_lens(collator)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=device.type == "cuda")
    losses: list[torch.Tensor] = []
    norms: list[float] = []
    for step in range(settings.total_steps):
        ids = [torch.tensor(row) for row in rows[step * settings.rows : (step + 1) * settings.rows]]
        clock.begin()
        batch = {name: value.to(device) if hasattr(value, "to") else value for name, value in collator(ids).items()}
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        if step < min(GATE_STEPS, settings.warmup):  # these are not timed
            norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])))
        optimizer.step()
        optimizer.zero_grad()
        clock.end()
        losses.append(loss.detach())
    return torch.stack(losses[:GATE_STEPS]).tolist(), norms


def collate(ids: list[torch.Tensor], *, packed: bool) -> dict[str, Any]:
    """Padded right with a mask, or flattened with restarting positions and the first labels ignored."""
    if packed:
        positions = torch.cat([torch.arange(len(row)) for row in ids])[None]
        flat = torch.cat(ids)[None]
        labels = flat.masked_fill(positions == 0, -100)
        return add_boundaries({"input_ids": flat, "position_ids": positions, "labels": labels})
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
    return {"input_ids": padded.clamp(min=0), "attention_mask": (padded != -100).long(), "labels": padded}


def with_boundaries(collator: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """A collator that sends what TRL's own sends from 1.16 on; before it, every attention layer would work the
    boundaries out anew, and wait for the device each time."""

    def collator_with_boundaries(examples: Any) -> dict[str, Any]:
        return add_boundaries(collator(examples))

    return collator_with_boundaries


def add_boundaries(batch: dict[str, Any]) -> dict[str, Any]:
    """``cu_seq_lens_q``, ``max_length_q`` and those of keys, from positions that restart, where they are missing."""
    if "cu_seq_lens_q" not in batch:
        positions = batch["position_ids"][0]
        starts = (positions == 0).nonzero().flatten()
        ends = torch.cat([starts, torch.tensor([len(positions)])]).to(torch.int32)
        longest = int(ends.diff().max())
        batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    return batch
