"""What is trained: TRL's unmodified trainers on the same pairs, each in several ways."""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import fastpack
from fastpack.testing.preference.judge import Steps

LOSSES = (
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
    "sigmoid_norm",
)
"""Every ``loss_type`` of TRL's ``DPOConfig``."""
SMOOTHING = {"exo_pair": 0.1, "robust": 0.1}
"""These two want some."""
DISCOPOP_TAU = 0.05
"""TRL's default; what its loss divides margins by."""
LORA_RANK, COMPLETION = 4, 32
WIDER = 80
"""What batches are padded to a multiple of to see how far float32 rounds."""
CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One trainer in one way: ``settings`` are its config's, ``lora`` is the policy's."""

    trainer: str
    variant: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    lora: bool = False

    @property
    def starts_at_ln_2(self) -> bool:
        """Whether the first loss is -log sigmoid(0)."""
        plain = self.settings.keys() <= {*CHECKPOINTING, "precompute_ref_log_probs", "ld_alpha"}
        return self.trainer == "dpo" and (plain or self.settings == {"loss_type": ["sigmoid"]})

    @property
    def steepness(self) -> float:
        """By how much the loss changes with a margin, at most, roughly."""
        return 1 / DISCOPOP_TAU if "discopop" in self.settings.get("loss_type", ()) else 1.0


def all_cases(losses: Sequence[str] = LOSSES) -> list[Case]:
    """Every trainer and variant; DPO plain with each of these losses."""
    found = []
    for loss in losses:
        smoothing = {"label_smoothing": SMOOTHING[loss]} if loss in SMOOTHING else {}
        found.append(Case("dpo", loss, {"loss_type": [loss], **smoothing}))
    found += [
        Case("dpo", "lora", lora=True),
        Case("dpo", "lora, checkpointing", CHECKPOINTING, lora=True),
        Case("dpo", "checkpointing", CHECKPOINTING),
        Case("dpo", "checkpointing, reentrant", REENTRANT),
        Case("dpo", "reference precomputed", {"precompute_ref_log_probs": True}),
        Case("dpo", "lora, reference precomputed", {"precompute_ref_log_probs": True}, lora=True),
        Case("dpo", "weighted", {"use_weighting": True}),
        Case("dpo", "length-desensitised", {"ld_alpha": 0.5}),
        Case("dpo", "sigmoid and sft", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
        Case("kto", "plain"),
        Case("kto", "lora", lora=True),
        Case("kto", "apo_zero_unpaired", {"loss_type": "apo_zero_unpaired"}),
        Case("reward", "plain"),
        Case("reward", "checkpointing", CHECKPOINTING),
        Case("grpo", "plain"),
        Case("grpo", "lora", {"beta": 0.1}, lora=True),
    ]
    return found


@dataclass(frozen=True)
class Work:
    """What all cases have in common.

    Attributes:
        rows: prompt, chosen and rejected, in a format of TRL's; as many as all steps take.
        config: of the models.
        given: the flags.
    """

    rows: Sequence[Row]
    tokenizer: Any
    config: Any
    given: argparse.Namespace


def run(case: Case, work: Work, *, patch: bool, wider: bool = False) -> tuple[Steps, float]:
    """Build the case's trainer on new models of the same weights, and train it.

    Args:
        patch: with fastpack; else stock.
        wider: pad batches to a multiple of :data:`WIDER`.

    Returns:
        What it logged of each step, and beta, by which log-probabilities are multiplied to become rewards.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, set_seed
    from transformers.trainer_callback import PrinterCallback

    set_seed(work.given.seed)
    config: Any = copy.deepcopy(work.config)
    auto: Any = AutoModelForCausalLM
    if case.trainer == "reward":
        config.num_labels, auto = 1, AutoModelForSequenceClassification
    policy = auto.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    with tempfile.TemporaryDirectory() as folder:
        settings = {**_settings(work.given, folder, wider=wider), **case.settings}
        precomputed = settings.get("precompute_ref_log_probs")
        reference = None if case.lora or precomputed else copy.deepcopy(policy)
        if case.lora:
            policy = _with_lora(policy, work.given.seed)
        if precomputed and patch:  # which happens while the trainer is built
            fastpack.patch(policy)
        trainer = _trainer(case, policy, reference, settings, work)
        if patch:
            fastpack.patch(trainer)
            assert fastpack.is_patched(trainer.model)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return steps, getattr(trainer.args, "beta", None) or 1.0


def _settings(given: argparse.Namespace, folder: str, *, wider: bool) -> dict[str, Any]:
    """Return what the config of every trainer is given."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": given.pairs,
        "max_steps": given.steps,
        "learning_rate": given.learning_rate,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": not torch.cuda.is_available(),
        "dataloader_pin_memory": torch.cuda.is_available(),
        "seed": given.seed,
        **({"pad_to_multiple_of": WIDER} if wider else {}),
    }


def _with_lora(model: Any, seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    return get_peft_model(
        model,
        LoraConfig(r=LORA_RANK, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


TRAINERS = {"dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO"}
"""What TRL calls them."""


def _trainer(case: Case, policy: Any, reference: Any, settings: dict[str, Any], work: Work) -> Any:
    """Return TRL's own trainer. KTO gets every other pair's chosen completion, and the rejected one of the rest;
    GRPO's are sampled, half a batch of prompts with two each, and longer words are better."""
    import trl
    from datasets import Dataset

    rows, given, own = list(work.rows), {"ref_model": reference}, {"max_length": work.given.max_length}
    if case.trainer == "kto":
        rows = [
            {"prompt": row["prompt"], "completion": row["rejected" if at % 2 else "chosen"], "label": at % 2 == 0}
            for at, row in enumerate(work.rows)
        ]
    elif case.trainer == "reward":
        given = {}  # it leaves out what is too long
    elif case.trainer == "grpo":
        rows, given = [{"prompt": row["prompt"]} for row in work.rows], {"reward_funcs": _letters}
        own = {"beta": 0.0, "num_generations": 2, "max_completion_length": COMPLETION, "shuffle_dataset": False}
    name = TRAINERS[case.trainer]
    return getattr(trl, f"{name}Trainer")(
        policy,
        args=getattr(trl, f"{name}Config")(**{**own, **settings}),
        train_dataset=Dataset.from_list(rows),
        processing_class=work.tokenizer,
        **given,
    )


def _letters(completions: Sequence[Any], **_: Any) -> list[float | None]:
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [len(text) / COMPLETION for text in texts]
