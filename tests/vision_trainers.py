"""TRL's trainers on tiny image-text models, with a processor of words and images made of numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from preferences import alone, settings, word_tokenizer
from tiny import VOCAB
from torch import Tensor
from transformers import BatchFeature, ProcessorMixin
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from fastpack.exactness.image_text import batch_of, build_image_text, layout_of, row_of
from fastpack.model.unwrap import find_parts

Image = list[list[int]]
"""An image: a number for each of its tokens, in rows. The numbers decide its pixels."""
PLACEHOLDER = "<image>"
IMAGE = f"{PLACEHOLDER} w3"
"""An image in the chat template. As in real ones, a token separates it from the next image."""
FIRST_WORD, END_OF_WORDS = 3, 90
SPECIAL = list(range(END_OF_WORDS, VOCAB))
"""The ids that are no words; those of images are among them."""
ROWS, STEPS, EXAMPLES = 4, 3, 16
LEARNING_RATE = 1e-4
"""Adam makes whole steps of gradients that are 0 but for rounding, as those of key biases are."""


class OneTileEach:
    """The part of an image processor that TRL asks for the tiles of each image."""

    use_thumbnail = False

    def __call__(self, images: Sequence[Sequence[Image] | None], **_: Any) -> dict[str, Tensor]:
        count = sum(len(own or ()) for own in images)
        return dict.fromkeys(("image_rows", "image_cols"), torch.ones(count, dtype=torch.long))


class WordsAndImages(ProcessorMixin):
    """A processor whose batches have the layout of a model's own processor."""

    def __init__(self, model: Any) -> None:
        self.model = copy.deepcopy(model)
        self.tokenizer = word_tokenizer()
        self.image_processor = OneTileEach()
        self.chat_template = None

    def __call__(
        self,
        images: Sequence[Sequence[Image] | None] | None = None,
        text: Sequence[str] = (),
        padding: bool = False,
        padding_side: str | None = None,
        **_: Any,
    ) -> BatchFeature:
        rows = [
            self._row(line, own or ())
            for line, own in zip(text, [()] * len(text) if images is None else images, strict=True)
        ]
        batch: dict[str, Any] = batch_of(self.model, rows, padding_side or self.tokenizer.padding_side)
        if not padding:
            per_token = [name for name in batch if name.endswith("_ids") and name in rows[0]]
            batch |= {name: [row[name][0].tolist() for row in rows] for name in per_token if "position" not in name}
            batch["attention_mask"] = [[1] * len(row) for row in batch["input_ids"]]
        return BatchFeature(batch)

    def apply_chat_template(self, conversation: Any, tokenize: bool = False, **_: Any) -> Any:
        several = isinstance(conversation[0], list)
        conversations = conversation if several else [conversation]
        parts = [[part for turn in each for part in turn["content"]] for each in conversations]
        text = [" ".join(part["text"] if part["type"] == "text" else IMAGE for part in each) for each in parts]
        if tokenize:
            return self([[part["image"] for part in each if part["type"] == "image"] for each in parts], text)
        return text if several else text[0]

    def _row(self, line: str, images: Sequence[Image]) -> dict[str, Tensor]:
        pieces, waiting = line.split(PLACEHOLDER), iter(images)
        parts: list[Any] = [self._ids(pieces[0])]
        for piece in pieces[1:]:
            parts += [self._pixels(next(waiting)), self._ids(piece)]
        assert next(waiting, None) is None
        return row_of(self.model, parts)

    def _ids(self, words: str) -> Tensor:
        return torch.tensor([self.tokenizer(words)["input_ids"]], dtype=torch.long)

    def _pixels(self, image: Image) -> dict[str, Tensor]:
        numbers = [number for row in image for number in row]
        generator = torch.Generator().manual_seed(sum(n * 7**i for i, n in enumerate(numbers)) % 2**31)
        return layout_of(self.model).image(self.model.config, (len(image), len(image[0])), generator)


def words(generator: torch.Generator, least: int, end: int) -> str:
    count = int(torch.randint(least, end, (), generator=generator))
    return " ".join(f"w{i}" for i in torch.randint(FIRST_WORD, END_OF_WORDS, (count,), generator=generator).tolist())


def image(generator: torch.Generator) -> Image:
    height, width = torch.randint(1, 4, (2,), generator=generator).tolist()
    width += 1  # Mistral 3 fails on images of one token
    return [torch.randint(256, (width,), generator=generator).tolist() for _ in range(height)]


def examples(kind: str, *, images: Sequence[int] = (1, 0, 2, 1), seed: int = 0, pixels: int = 0) -> Dataset:
    """Return conversations of a trainer's kind, with these numbers of images in turn; ``pixels`` seeds the images."""
    text, picture = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(100 + pixels)

    def turn(role: str, least: int, end: int) -> list[dict[str, str]]:
        return [{"role": role, "content": words(text, least, end)}]

    rows = []
    for at in range(EXAMPLES):
        row: dict[str, Any] = {"prompt": turn("user", 1, 12)}
        row["images"] = [image(picture) for _ in range(images[at % len(images)])]
        if kind == "dpo":
            row |= {"chosen": turn("assistant", 1, 20), "rejected": turn("assistant", 1, 20)}
        elif kind in ("sft", "kto"):
            row["completion"] = turn("assistant", 1, 20)
        if kind == "kto":
            row["label"] = at % 2 == 0
        rows.append(row)
    return Dataset.from_list(rows)


def number_of_low_words(completions: list[Any], **_: Any) -> list[float]:
    return [sum(word < "w5" for word in turns[0]["content"].split()) / 8 for turns in completions]


def policy(model_type: str, seed: int = 0) -> Any:
    model = build_image_text(model_type, seed).train()
    model.generation_config.eos_token_id = 2
    return model


SETTINGS: dict[str, Any] = {"per_device_train_batch_size": ROWS, "learning_rate": LEARNING_RATE}
GENERATE: dict[str, Any] = {
    "num_generations": 2,
    "max_completion_length": 10,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "max_steps": 2,
    "generation_kwargs": {"suppress_tokens": SPECIAL},
}
TRAINERS: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "sft": (SFTTrainer, SFTConfig, {"max_length": None}),
    "dpo": (DPOTrainer, DPOConfig, {"max_length": None}),
    "kto": (KTOTrainer, KTOConfig, {"max_length": None, "loss_type": "apo_zero_unpaired"}),
    "grpo": (GRPOTrainer, GRPOConfig, GENERATE),
    "rloo": (RLOOTrainer, RLOOConfig, GENERATE | {"beta": 0.0}),
}


def trainer_of(kind: str, model: Any, folder: Path, data: Dataset | None = None, **further: Any) -> Any:
    """Return TRL's own trainer of this kind for a model, patched or stock."""
    make, config, own = TRAINERS[kind]
    more: dict[str, Any] = {"reward_funcs": number_of_low_words} if kind in ("grpo", "rloo") else {}
    more["peft_config"] = further.pop("peft_config", None)
    if kind in ("dpo", "kto") and more["peft_config"] is None:
        more["ref_model"] = policy(model.config.model_type, seed=1)
    return make(
        model,
        args=alone(config(**settings(folder, **SETTINGS | own | further))),
        train_dataset=examples(kind) if data is None else data,
        processing_class=WordsAndImages(policy(model.config.model_type)),
        **more,
    )


@contextmanager
def counted_tokens(model: Any) -> Iterator[list[tuple[int, int]]]:
    """Record for each forward with gradients the slots that the text model's first layer sees, and the real tokens."""
    counts: list[tuple[int, int]] = []
    real: list[int] = []
    layer = find_parts(model).backbone.layers[0]

    def outside(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        real[:] = [int(kwargs["attention_mask"].sum())]

    def inside(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        if torch.is_grad_enabled():
            counts.append((x.shape[0] * x.shape[1], real[0]))

    with (
        model.register_forward_pre_hook(outside, with_kwargs=True),
        layer.register_forward_pre_hook(inside, with_kwargs=True),
    ):
        yield counts
