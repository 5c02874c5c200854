"""One family, in a process of its own: built tiny, verified, and trained for three steps with TRL, in every mode.

Run as ``python -m fastpack.smoke.train FAMILY MODES BACKENDS`` by :mod:`fastpack.smoke.__main__`, to which it speaks in
lines: ``ROW {...}`` for each mode and attention backend.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

ROW = "ROW "
STEPS, BATCH = 3, 4
LENGTHS = (5, 33, 12, 20, 9, 40, 3, 17, 28, 6, 11, 36)
LOSS_BOUND = {torch.float32: 1e-4, torch.bfloat16: 3e-2}

MAMBAS = ("mamba", "mamba2", "falcon_mamba", "falcon_h1")
NOT_FOR_LORA = ("out_proj", "conv1d")
"""What PEFT does not wrap in them, since their fused kernels read its weight."""


@dataclass
class Row:
    """What one family did in one mode, with one attention backend.

    Attributes:
        error: the worst of what :func:`fastpack.verify` compares, relative.
        loss: the largest difference of three losses from those of the stock model on padded batches, relative.
        speed: times the stock model's steps on padded batches, the first one left out.
        problem: why it failed, or None.
    """

    family: str
    mode: str
    rung: str = ""
    backend: str = ""
    error: float | None = None
    loss: float | None = None
    speed: float | None = None
    problem: str | None = None


def rows(family: str, modes: list[str], backends: str) -> Iterator[Row]:
    """Of every mode and backend."""
    import fastpack
    from fastpack.smoke.tiny import build_tiny

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for mode in modes:
        stock, stock_seconds = _train(_prepare(build_tiny(family), mode).to(device, dtype), packed=False)
        for backend in _backends(_prepare(build_tiny(family), mode).to(device, dtype), backends):
            model = _prepare(build_tiny(family), mode).to(device, dtype)
            fastpack.patch(model, attention=backend)
            report = fastpack.report(model)
            row = Row(family, mode, report.rung, report.backend or "none")
            try:
                row.error = fastpack.verify(model).worst
            except fastpack.ContaminationError as error:
                row.error = error.verification.worst
                row.problem = "not exact"
            losses, seconds = _train(model, packed=mode == "packed")
            row.loss = max(abs(a - b) / abs(b) for a, b in zip(losses, stock, strict=True))
            row.speed = stock_seconds / seconds
            if not row.loss <= LOSS_BOUND[dtype]:
                row.problem = row.problem or "other losses"
            yield row


def _backends(model: Any, which: str) -> list[str]:
    """Those that can serve, ``auto`` alone, or where nothing attends."""
    import fastpack

    with fastpack.patched(model):
        able = [name for name, why in fastpack.report(model).backends.items() if why is None]
    return ["auto"] if which == "auto" or not able else able


def _prepare(model: Any, mode: str) -> Any:
    if mode != "lora":
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    excluded = list(NOT_FOR_LORA) if model.config.model_type in MAMBAS else None
    config = LoraConfig(r=4, target_modules="all-linear", exclude_modules=excluded, lora_dropout=0.0)
    wrapped = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return wrapped


def _train(model: Any, *, packed: bool) -> tuple[list[float], float]:
    """The losses of three steps of TRL's ``SFTTrainer``, and the seconds of all but the first."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    from fastpack.bench.loops import tokenizer_of_ids

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 90, (length,), generator=generator).tolist() for length in LENGTHS]
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            learning_rate=1e-3,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            bf16=False,
            gradient_checkpointing=False,
            padding_free=packed,
            max_length=None,
            use_cpu=not torch.cuda.is_available(),
            train_sampling_strategy="sequential",
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        data = Dataset.from_dict({"input_ids": ids, "labels": ids})
        trainer = SFTTrainer(
            model, args=arguments, train_dataset=data, processing_class=tokenizer_of_ids(), callbacks=[Clock()]
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], ends[-1] - ends[0]


def main(arguments: list[str]) -> None:
    """Print the rows."""
    family, modes, backends = arguments
    warnings.simplefilter("ignore")
    for row in rows(family, modes.split(","), backends):
        print(ROW + json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
