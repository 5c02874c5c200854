"""The families that no tier takes, each with the reason."""

REFUSED: dict[str, str] = {
    "gemma4_assistant": "it drafts for another model, and continues from that model's hidden states, keys and values",
    "gemma4_unified_assistant": "it drafts for another model, and continues from that model's hidden states, keys and "
    "values",
    "prophetnet": "it predicts several tokens at once, in streams that follow each other in a row",
    "reformer": "in training the length of its rows must be a multiple of its chunks, and it sorts tokens into buckets "
    "at random",
}
