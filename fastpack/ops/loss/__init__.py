"""Losses of a language model that don't hold all logits in memory at once."""

IGNORE_INDEX = -100
"""The label of tokens that the loss leaves out, as in torch and transformers."""
