"""Losses over the logits of a language model, without holding the logits."""

IGNORE_INDEX = -100
"""The label of tokens that count for nothing, as in torch and transformers."""
