"""One contestant: trains a model through TRL's unmodified ``SFTTrainer`` and prints its figures as JSON.

Run as ``python -m fastpack.bench.contestant '{"contestant": ...}'`` by :mod:`fastpack.bench.runner`.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from fastpack.bench.lengths import make_lengths
from fastpack.bench.shapes import make_config

CONTESTANTS = {
    "stock padded": "TRL with padded batches, transformers' sdpa attention",
    "stock padding_free": "TRL's padding_free=True, transformers' sdpa attention",
    "fastpack": "fastpack.patch(model), fed the same padded batches",
    "fastpack packed": "fastpack.patch(model), fed by TRL's padding_free=True",
}


@dataclass(frozen=True)
class Settings:
    """What one run does."""

    contestant: str
    shape: str = "tiny"
    mode: str = "full"
    rows: int = 16
    steps: int = 20
    warmup: int = 3
    lengths: str = "alpaca"
    checkpointing: bool = False
    attention: str = "auto"
    seed: int = 0
    dtype: str = "auto"


@dataclass
class Figures:
    """What one run measured. Times in seconds, memory in GiB, ``tokens`` are real ones over the timed steps."""

    contestant: str
    step_median: float
    tokens: int
    slots: int
    tokens_per_second: float
    peak_memory: float
    losses: list[float] = field(default_factory=list)
    backend: str = ""


def run(settings: Settings) -> Figures:
    """Train ``warmup + steps`` steps, and measure the last ``steps``."""
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    import fastpack

    on_gpu = torch.cuda.is_available()
    dtype = _dtype(settings.dtype, on_gpu)
    torch.manual_seed(settings.seed)
    config = make_config(settings.shape)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    total = settings.warmup + settings.steps
    lengths = make_lengths(settings.rows * total, kind=settings.lengths, seed=settings.seed)
    packed = settings.contestant in ("stock padding_free", "fastpack packed")

    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=settings.rows,
            max_steps=total,
            learning_rate=1e-4,
            padding_free=packed,
            max_length=None,
            gradient_checkpointing=settings.checkpointing,
            bf16=False,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            shuffle_dataset=False,
            train_sampling_strategy="sequential",
            dataset_kwargs={"skip_prepare_dataset": True},
            seed=settings.seed,
        )
        clock = _Clock(settings.warmup)

        class Callback(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                clock.begin()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                clock.end()

        if settings.mode == "lora":
            model = _with_lora(model)
        trainer = SFTTrainer(
            model,
            args=arguments,
            train_dataset=_rows(lengths, config.vocab_size, settings.seed),
            processing_class=_tokenizer(),
            callbacks=[Callback()],
        )
        backend = "sdpa"
        if settings.contestant.startswith("fastpack"):
            fastpack.patch(trainer, attention=settings.attention)
            backend = str(fastpack.report(trainer).backend)
        trainer.train()

    timed = lengths[settings.rows * settings.warmup :]
    batches = [timed[i : i + settings.rows] for i in range(0, len(timed), settings.rows)]
    tokens = sum(timed)
    return Figures(
        contestant=settings.contestant,
        step_median=statistics.median(clock.steps),
        tokens=tokens,
        slots=tokens if packed else sum(max(batch) * len(batch) for batch in batches),
        tokens_per_second=tokens / sum(clock.steps),
        peak_memory=_peak_memory(on_gpu),
        losses=[entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        backend=backend,
    )


class _Clock:
    """Wall time of each optimiser step after the warm-up, the device waited for."""

    def __init__(self, warmup: int) -> None:
        self.steps: list[float] = []
        self._left = warmup
        self._began = 0.0

    def begin(self) -> None:
        _synchronize()
        self._began = time.perf_counter()

    def end(self) -> None:
        _synchronize()
        if self._left > 0:
            self._left -= 1
        else:
            self.steps.append(time.perf_counter() - self._began)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _peak_memory(on_gpu: bool) -> float:
    if on_gpu:
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _dtype(name: str, on_gpu: bool) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if on_gpu else torch.float32
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def _with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model, LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    )


def _rows(lengths: list[int], vocab_size: int, seed: int) -> Any:
    from datasets import Dataset

    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def _tokenizer() -> Any:
    """Trainers want one; rows are token ids already."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
    )


if __name__ == "__main__":
    print("FIGURES " + json.dumps(asdict(run(Settings(**json.loads(sys.argv[1]))))))
