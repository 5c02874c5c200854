"""A tokenizer for trainers whose rows are token ids already."""

from __future__ import annotations

from typing import Any


def tokenizer_of_ids() -> Any:
    """Return a tokenizer for trainers that require one, although their rows are token ids already."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="<pad>")),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
    )
