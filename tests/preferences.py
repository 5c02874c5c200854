"""Preference data of a small language of words, and settings of TRL's trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tiny import VOCAB
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

PAIRS, STEPS = 4, 3


def word_tokenizer() -> Any:
    """Return a tokenizer of the words ``w3`` to ``w96``, one token each."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def pairs(count: int = PAIRS * STEPS, seed: int = 0) -> Dataset:
    """Return prompts, each with a chosen and a rejected completion, all of random lengths."""
    generator = torch.Generator().manual_seed(seed)

    def text(shortest: int, longest: int) -> str:
        length = int(torch.randint(shortest, longest, (), generator=generator))
        return " ".join(f"w{i}" for i in torch.randint(3, VOCAB, (length,), generator=generator).tolist())

    return Dataset.from_list(
        [{"prompt": text(1, 12), "chosen": " " + text(1, 25), "rejected": " " + text(1, 25)} for _ in range(count)]
    )


def settings(folder: Path, **further: Any) -> dict[str, Any]:
    """Return the settings of every trainer's config in these tests."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": PAIRS,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": not torch.cuda.is_available(),
        **further,
    }


def alone(args: Any) -> Any:
    """Return the arguments for one device; otherwise one process would use all GPUs by nn.DataParallel."""
    if args.n_gpu > 1:
        args._n_gpu = 1
    return args


def logged(trainer: Any) -> list[dict[str, float]]:
    """Train, and return the log of each step."""
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def judged(count: int = PAIRS * STEPS, seed: int = 0) -> Dataset:
    """Return prompts with one completion each; half of the completions are good."""
    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs(count, seed)]
    return Dataset.from_list([{**row, "label": i % 2 == 0} for i, row in enumerate(rows)])
