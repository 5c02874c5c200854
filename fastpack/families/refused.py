"""Families that no tier takes, and why."""

REFUSED: dict[str, str] = {
    "gemma4_assistant": "it drafts for another model, from whose hidden states, keys and values it goes on",
    "gemma4_unified_assistant": "it drafts for another model, from whose hidden states, keys and values it goes on",
    "prophetnet": "it predicts several tokens at once, in streams that stand one after the other in a row",
    "reformer": "in training it takes rows only whose length is a multiple of its chunks, and it sorts tokens into "
    "buckets at random",
}
