"""Rotary types whose frequencies depend on the length of a sequence: a family and settings of its tiny model."""

from __future__ import annotations

from typing import Any

LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": 16,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 16,
    },
}
ROPE: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("phi3", {"max_position_embeddings": 64, **LONGROPE}),
    "dynamic": (
        "llama",
        {
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
}
ROPE["dynamic, interleaved"] = ("cohere", ROPE["dynamic"][1])
ROPE["longrope, by the batch's length"] = (
    "phimoe",
    {
        **ROPE["longrope"][1],
        "num_local_experts": 4,
        "rope_parameters": {**ROPE["longrope"][1]["rope_parameters"], "short_mscale": 1.1, "long_mscale": 1.4},
    },
)
ROPE["dynamic, pairs side by side"] = ("cohere2", ROPE["dynamic"][1])
