"""``fastpack grpo``: reinforcement learning with TRL's own GRPOTrainer, patched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trl.scripts.grpo import GRPOScriptArguments

from fastpack.cli import UsageError
from fastpack.cli.arguments import Command, ParsedArgs
from fastpack.cli.rewards import FORMS, check_columns, load_rewards
from fastpack.cli.training import run


def main(arguments: Sequence[str]) -> int:
    """Train, and print a summary."""
    return run(GRPO, arguments)


def _check(args: ParsedArgs) -> None:
    """Load the reward functions, before any data or model."""
    script = args.script
    if not script.reward_funcs and script.reward_model_name_or_path is None:
        raise UsageError(f"pass --reward_funcs ({FORMS}; several are added up), or --reward_model_name_or_path MODEL")
    args.loaded["rewards"] = load_rewards(script.reward_funcs or ())


def _check_data(args: ParsedArgs, columns: list[str]) -> None:
    check_columns(args.loaded["rewards"], columns, args.script.dataset_name or "the mixture of datasets")


def _models(source: Any, args: ParsedArgs) -> dict[str, Any]:
    """Return the reward model and functions, in the order of TRL's script."""
    model = args.script.reward_model_name_or_path
    return {"reward_funcs": [*([] if model is None else [model]), *args.loaded["rewards"]]}


GRPO = Command(
    name="grpo",
    trainer="GRPOTrainer",
    config="GRPOConfig",
    what="Train on rewards with TRL's GRPOTrainer, padding-free.",
    formats="prompt, as text or as messages, and the columns that the reward functions take",
    flags="--reward_funcs rewards.py:exact ",
    columns=lambda training: ({"prompt"},),
    models=_models,
    script=GRPOScriptArguments,
    check=_check,
    check_data=_check_data,
    metric="reward",
)
