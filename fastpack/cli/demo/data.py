"""The demo's instruction data, tokenizer and model, all made in code: nothing is downloaded."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

Row = dict[str, list[dict[str, str]]]
"""Chats by name, in TRL's format: ``{"messages": [{"role": ..., "content": ...}, ...]}``; a pair has three chats."""

ANIMALS = ("fox", "otter", "heron", "badger", "owl", "hare", "mole", "swan", "goat", "wren")
PLACES = ("river", "mill", "orchard", "harbour", "meadow", "tower", "market", "quarry", "garden", "bridge")
MOODS = ("small", "patient", "curious", "sleepy", "clever", "proud", "gentle", "stubborn", "cheerful", "shy")
VERBS = ("found", "carried", "painted", "hid", "mended", "counted", "borrowed", "watched", "polished", "sold")
THINGS = ("lantern", "basket", "key", "drum", "kettle", "map", "ladder", "mirror", "rope", "bell")
FOODS = ("carrots", "lentils", "apples", "barley", "onions", "pears", "beans", "walnuts", "leeks", "plums")
DISHES = ("soup", "pie", "salad", "stew", "bread", "porridge")
ACTS = ("Wash", "Chop", "Weigh", "Roast", "Stir in", "Set aside", "Mash", "Simmer")

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>")


def _sum(draw: random.Random) -> tuple[str, str]:
    a, b = draw.randint(2, 99), draw.randint(2, 99)
    return f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."


def _spell(draw: random.Random) -> tuple[str, str]:
    word = draw.choice((*ANIMALS, *PLACES, *THINGS))
    return f"Spell the word {word}.", f"{'-'.join(word)}."


def _count(draw: random.Random) -> tuple[str, str]:
    first, step = draw.randint(1, 40), draw.randint(1, 5)
    last = first + step * draw.randint(3, 30)
    numbers = range(first, last + 1, step)
    return f"Count from {first} to {last} in steps of {step}.", ", ".join(map(str, numbers)) + "."


def _list(draw: random.Random) -> tuple[str, str]:
    kind, words = draw.choice((("animals", ANIMALS), ("foods", FOODS), ("things", THINGS), ("places", PLACES)))
    chosen = draw.sample(words, draw.randint(2, 8))
    lines = [f"{n}. {draw.choice(MOODS)} {word}" for n, word in enumerate(chosen, 1)]
    return f"Name {len(chosen)} {kind}.", "\n".join(lines)


def _recipe(draw: random.Random) -> tuple[str, str]:
    dish, steps = draw.choice(DISHES), _long(draw, 3)
    lines = [
        f"{n}. {draw.choice(ACTS)} the {draw.choice(FOODS)} for {draw.randint(2, 40)} minutes."
        for n in range(1, steps + 1)
    ]
    return f"How do I make a {dish} in {steps} steps?", "\n".join([f"To make the {dish}:", *lines])


def _story(draw: random.Random) -> tuple[str, str]:
    mood, animal, sentences = draw.choice(MOODS), draw.choice(ANIMALS), _long(draw, 3)
    lines = [
        f"At the {draw.choice(PLACES)} the {mood} {animal} {draw.choice(VERBS)} a {draw.choice(MOODS)} "
        f"{draw.choice(THINGS)}."
        for _ in range(sentences)
    ]
    return f"Write a story of {sentences} sentences about a {mood} {animal}.", " ".join(lines)


def _long(draw: random.Random, least: int) -> int:
    """Draw a length, mostly short and seldom long, as in instruction data."""
    return least + min(9, int(draw.lognormvariate(1.2, 0.6)))


KINDS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (_sum, _spell, _count, _list, _recipe, _story)
WEIGHTS = (2, 1, 2, 3, 3, 3)


def make_rows(count: int, seed: int = 0) -> list[Row]:
    """Return chats of one to three questions and answers, of widely different lengths; the same for the same seed."""
    draw = random.Random(seed)
    rows: list[Row] = []
    for _ in range(count):
        chat = []
        for kind in draw.choices(KINDS, WEIGHTS, k=draw.choice((1, 2, 2, 3))):
            question, answer = kind(draw)
            chat += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"messages": chat})
    return rows


def make_pairs(count: int, seed: int = 0) -> list[Row]:
    """Return preferences in TRL's format: a prompt, its answer, and an answer to another question of the same kind."""
    draw = random.Random(seed)
    rows: list[Row] = []
    for _ in range(count):
        (kind,) = draw.choices(KINDS, WEIGHTS)
        question, answer = kind(draw)
        _, other = kind(draw)
        completions = {"chosen": answer, "rejected": other}
        rows.append(
            {
                "prompt": [{"role": "user", "content": question}],
                **{name: [{"role": "assistant", "content": text}] for name, text in completions.items()},
            }
        )
    return rows


def write_rows(rows: Sequence[Row], folder: Path) -> Path:
    """Write the rows as JSON lines into ``rows.jsonl`` of the folder; return its path."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def train_tokenizer(rows: Sequence[Row], vocab_size: int = 768) -> Any:
    """Train a byte-level BPE tokenizer of at most ``vocab_size`` ids on the rows, with a ChatML template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (f"{message['role']}\n{message['content']}" for row in rows for chat in row.values() for message in chat)
    bpe.train_from_iterator(texts, trainer)
    pad, _, end = SPECIAL_TOKENS
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=pad, eos_token=end)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_llama(tokenizer: Any, **sizes: Any) -> Any:
    """Return the config of a Llama of 4 small layers for this tokenizer's ids; ``sizes`` override its sizes."""
    defaults = {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    }
    return LlamaConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        **{**defaults, **sizes},
    )
