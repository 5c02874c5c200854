"""One contestant: trains a model, through TRL's unmodified ``SFTTrainer`` or a plain loop, and prints its figures.

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
    "stock padded": "padded batches, transformers' sdpa attention",
    "stock padding_free": "flattened batches, transformers' sdpa attention",
    "fastpack": "patched, fed the same padded batches",
    "fastpack packed": "patched, fed the same flattened batches",
}


LEARNING_RATE = 1e-4


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
    loop: str = "trl"
    max_length: int | None = None

    @property
    def packed(self) -> bool:
        """True where batches come flattened."""
        return self.contestant in ("stock padding_free", "fastpack packed")


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
    from transformers import AutoModelForCausalLM

    import fastpack

    on_gpu = torch.cuda.is_available()
    torch.manual_seed(settings.seed)
    config = make_config(settings.shape)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=_dtype(settings.dtype, on_gpu), attn_implementation="sdpa"
        )
    if settings.mode == "lora":
        model = _with_lora(model)
    backend = "sdpa"
    if settings.contestant.startswith("fastpack"):
        fastpack.patch(model, attention=settings.attention)
        backend = str(fastpack.report(model).backend)
    lengths = make_lengths(
        settings.rows * (settings.warmup + settings.steps), kind=settings.lengths, seed=settings.seed
    )
    if settings.max_length is not None:
        lengths = [min(length, settings.max_length) for length in lengths]
    clock = _Clock(settings.warmup)
    train = _plain_loop if settings.loop == "plain" else _sft_trainer
    losses = train(model, settings, _rows(lengths, config.vocab_size, settings.seed), clock)

    timed = lengths[settings.rows * settings.warmup :]
    batches = [timed[i : i + settings.rows] for i in range(0, len(timed), settings.rows)]
    tokens = sum(timed)
    return Figures(
        contestant=settings.contestant,
        step_median=statistics.median(clock.steps),
        tokens=tokens,
        slots=tokens if settings.packed else sum(max(batch) * len(batch) for batch in batches),
        tokens_per_second=tokens / sum(clock.steps),
        peak_memory=_peak_memory(on_gpu),
        losses=losses,
        backend=backend,
    )


def _sft_trainer(model: Any, settings: Settings, rows: Any, clock: _Clock) -> list[float]:
    """TRL's ``SFTTrainer``, as a user would call it. Returns the loss of each step."""
    from transformers import TrainerCallback
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    class Callback(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.end()

    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=settings.rows,
            max_steps=settings.warmup + settings.steps,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            padding_free=settings.packed,
            max_length=None,
            gradient_checkpointing=settings.checkpointing,
            bf16=False,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            train_sampling_strategy="sequential",
            dataset_kwargs={"skip_prepare_dataset": True},
            seed=settings.seed,
        )
        trainer = SFTTrainer(
            model, args=arguments, train_dataset=rows, processing_class=_tokenizer(), callbacks=[Callback()]
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _plain_loop(model: Any, settings: Settings, rows: Any, clock: _Clock) -> list[float]:
    """A user's own loop over ``model(..., labels=...)`` with AdamW. Returns the loss of each step."""
    model.train()
    device = next(model.parameters()).device
    if settings.checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    losses: list[float] = []
    for first in range(0, len(rows), settings.rows):
        ids = [torch.tensor(row) for row in rows[first : first + settings.rows]["input_ids"]]
        clock.begin()
        batch = {name: tensor.to(device) for name, tensor in _collate(ids, packed=settings.packed).items()}
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.end()
        losses.append(float(loss.detach()))
    return losses


def _collate(ids: list[torch.Tensor], *, packed: bool) -> dict[str, torch.Tensor]:
    """Padded right with a mask, or flattened with restarting positions and the first labels ignored."""
    if packed:
        positions = torch.cat([torch.arange(len(row)) for row in ids])[None]
        flat = torch.cat(ids)[None]
        return {"input_ids": flat, "position_ids": positions, "labels": flat.masked_fill(positions == 0, -100)}
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
    return {"input_ids": padded.clamp(min=0), "attention_mask": (padded != -100).long(), "labels": padded}


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
