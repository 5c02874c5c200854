"""The families that no tier takes, each with the reason."""

_BY_ROW = "layers of its text model attend to the images of a row, and packed tokens have no rows"
REFUSED: dict[str, str] = {
    "blip": _BY_ROW,
    "diffusion_gemma": "it denoises a block of tokens at a time, which see each other and the states of an encoder",
    "evolla": "layers of its text model attend to the proteins of a row, and packed tokens have no rows",
    "gemma4_assistant": "it drafts for another model, and continues from that model's hidden states, keys and values",
    "gemma4_unified_assistant": "it drafts for another model, and continues from that model's hidden states, keys and "
    "values",
    "idefics": _BY_ROW,
    "pi0": "it predicts actions, not tokens, from the cache of a vision-language model",
    "prophetnet": "it predicts several tokens at once, in streams that follow each other in a row",
    "reformer": "in training the length of its rows must be a multiple of its chunks, and it sorts tokens into buckets "
    "at random",
}

REFUSED_IMAGES: dict[str, str] = {
    "git": "its images stand before the text of each row, and packed tokens have no rows",
    "mllama": _BY_ROW,
}
"""The families that train on text alone when patched, each with the reason."""
