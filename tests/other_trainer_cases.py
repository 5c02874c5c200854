"""TRL's KTO, reward, GRPO and RLOO trainers on a small language."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from adapter_cases import with_lora
from preferences import judged, pairs, settings, word_tokenizer
from tiny import tiny_model
from transformers import AutoModelForSequenceClassification
from trl import GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, RLOOConfig, RLOOTrainer

COMPARED = ("loss", "grad_norm", "margin", "mean_reward", "entropy", "reward")


DIFFERENCES = ("kl", "rewards/chosen", "rewards/rejected")
"""Differences of log-probabilities, which are sums of up to 100; they are off by float32's rounding of those sums."""


BOUND, OF_DIFFERENCES = 1e-5, 3e-5


OF_MARGINS = 1e-6
"""The bound for margins: differences of two rewards of about 1, whose rounding is a larger share of a small margin."""


ABOUT_ONE = 0.5, 2.0


def check_step(mine: dict[str, float], theirs: dict[str, float]) -> int:
    """Check that :data:`COMPARED` and :data:`DIFFERENCES` in two trainers' logs of a step are equal but for rounding.

    Returns:
        The number of :data:`COMPARED` metrics that stock logged; the others are skipped.
    """
    compared = [what for what in COMPARED if what in theirs]
    if "margin" in compared:
        largest = max(abs(theirs["min_reward"]), abs(theirs["max_reward"]))
        assert ABOUT_ONE[0] <= largest <= ABOUT_ONE[1], "OF_MARGINS is for these"
    for what in compared:
        bound = BOUND * max(abs(theirs[what]), 1e-2)
        bound = max(bound, OF_MARGINS) if what == "margin" else bound
        assert abs(mine[what] - theirs[what]) <= bound, (what, mine, theirs)
    for what in DIFFERENCES:
        assert abs(mine.get(what, 0.0) - theirs.get(what, 0.0)) <= OF_DIFFERENCES, (what, mine, theirs)
    return len(compared)


def policy(lora: bool = False, **further: Any) -> Any:
    model = tiny_model("llama", attn_implementation="sdpa", **further)
    return with_lora(model) if lora else model


def kto(folder: Path, **further: Any) -> Any:
    lora = further.pop("lora", False)
    return KTOTrainer(
        policy(lora),
        ref_model=None if lora else policy(seed=1),
        args=KTOConfig(**settings(folder, max_length=None, **further)),
        train_dataset=judged(),
        processing_class=word_tokenizer(),
    )


def reward(folder: Path, **further: Any) -> Any:
    return RewardTrainer(
        policy(auto=AutoModelForSequenceClassification, num_labels=1),
        args=RewardConfig(**settings(folder, max_length=None, **further)),
        train_dataset=pairs(),
        processing_class=word_tokenizer(),
    )


def share_of_low_words(completions: list[str], **_: Any) -> list[float]:
    words = [text.split() for text in completions]
    return [sum(word < "w5" for word in row) / max(len(row), 1) for row in words]


def generating(trainer: Any, config: Any) -> Callable[..., Any]:
    def build(folder: Path, **further: Any) -> Any:
        lora = further.pop("lora", False)
        # a reference of its own would be loaded by the name of the model, which has none here
        sampling = {"num_generations": 2, "max_completion_length": 12, "beta": 0.1 if lora else 0.0}
        return trainer(
            policy(lora),
            reward_funcs=share_of_low_words,
            args=config(**settings(folder, **sampling, **further)),
            train_dataset=pairs().remove_columns(["chosen", "rejected"]),
            processing_class=word_tokenizer(),
        )

    return build


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "kto": (kto, {}),
    "kto, lora": (kto, {"lora": True}),
    "kto, apo": (kto, {"loss_type": "apo_zero_unpaired"}),
    "reward": (reward, {}),
    "reward, checkpointing": (
        reward,
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    ),
    "grpo": (generating(GRPOTrainer, GRPOConfig), {}),
    "grpo, lora": (generating(GRPOTrainer, GRPOConfig), {"lora": True}),
    "rloo": (generating(RLOOTrainer, RLOOConfig), {}),
}
