"""A tiny Idefics3 with its own processor, saved as a checkpoint, and rows with images for it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Image, List, Value
from PIL.Image import fromarray
from transformers import AutoModelForImageTextToText, Idefics3Config, Idefics3Processor, set_seed
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from fastpack.cli.demo.data import Row, train_tokenizer

TILE, PATCH = 16, 4
IMAGE_TOKEN = "<image>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)


def save_checkpoint(rows: list[Row], folder: Path) -> Path:
    """Save a tiny model and its processor, with a tokenizer trained on the rows, and return where."""
    tokenizer = train_tokenizer(rows)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [IMAGE_TOKEN, "<fake_token_around_image>", "<global-img>"]}
    )
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": tokenizer.pad_token_id, "image_token_id": tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)}
    config = Idefics3Config(
        text_config={
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "num_hidden_layers": 2,
            **text,
            "pad_token_id": 0,
        },
        vision_config={**tower, "image_size": TILE, "patch_size": PATCH},
        scale_factor=2,
        **ids,
    )
    set_seed(0)
    model = folder / "model"
    AutoModelForImageTextToText.from_config(config).save_pretrained(model)
    sizes = {"size": {"longest_edge": 4 * TILE}, "max_image_size": {"longest_edge": TILE}}
    Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(**sizes),
        tokenizer=tokenizer,
        image_seq_len=(TILE // PATCH // 2) ** 2,
        chat_template=TEMPLATE,
    ).save_pretrained(model)
    return model


def write_rows(rows: list[Row], folder: Path, seed: int = 0) -> Path:
    """Write the rows, each with an image of its own size before its first question, into a Parquet file."""
    draw, pixels = random.Random(seed), np.random.default_rng(seed)
    written: list[dict[str, Any]] = []
    for row in rows:
        height, width = (draw.randint(8, 80) for _ in range(2))
        first, *others = ({**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in row["messages"])
        first["content"].insert(0, {"type": "image", "text": None})
        image = fromarray(pixels.integers(0, 256, (height, width, 3), dtype=np.uint8))
        written.append({"messages": [first, *others], "images": [image]})
    part = {"type": Value("string"), "text": Value("string")}
    features = Features({"messages": List({"role": Value("string"), "content": List(part)}), "images": List(Image())})
    path = folder / "rows.parquet"
    Dataset.from_list(written, features=features).to_parquet(path)
    return path
