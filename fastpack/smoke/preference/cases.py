"""What is trained: TRL's unmodified trainers on the same pairs, each in several ways."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import fastpack
from fastpack.smoke.preference.figures import Figures, Recorder

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
    """One trainer in one way: ``settings`` are its config's, ``lora`` and ``nf4`` the policy's."""

    trainer: str
    variant: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    lora: bool = False
    nf4: bool = False

    @property
    def starts_at_ln_2(self) -> bool:
        """Whether the first loss is -log sigmoid(0)."""
        plain = self.settings.keys() <= {*CHECKPOINTING, "precompute_ref_log_probs", "ld_alpha"}
        return self.trainer == "dpo" and (plain or self.settings == {"loss_type": ["sigmoid"]})

    @property
    def has_log_probs(self) -> bool:
        """Whether log-probabilities of completions are heard of its models."""
        return self.trainer in ("dpo", "kto")

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
        Case("dpo", "nf4 + lora", lora=True, nf4=True),
        Case("dpo", "nf4 + lora, checkpointing", CHECKPOINTING, lora=True, nf4=True),
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
        pairs, steps: of a batch, and how many batches.
    """

    rows: Sequence[Row]
    tokenizer: Any
    config: Any
    pairs: int
    steps: int
    max_length: int
    learning_rate: float
    seed: int

    def settings(self, folder: str, *, wider: bool) -> dict[str, Any]:
        """What the config of every trainer is given."""
        return {
            "output_dir": folder,
            "per_device_train_batch_size": self.pairs,
            "max_steps": self.steps,
            "learning_rate": self.learning_rate,
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
            "seed": self.seed,
            **({"pad_to_multiple_of": WIDER} if wider else {}),
        }


def run(case: Case, work: Work, *, patch: bool, wider: bool = False) -> Figures:
    """Build the case's trainer on new models of the same weights, train it, and give what it did.

    Args:
        patch: with fastpack; else stock.
        wider: pad batches to a multiple of :data:`WIDER`.
    """
    from transformers.trainer_callback import PrinterCallback

    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        policy = _policy(case, work, Path(folder) / "model")
        settings = {**work.settings(folder, wider=wider), **case.settings}
        reference = None if case.lora or settings.get("precompute_ref_log_probs") else copy.deepcopy(policy)
        if case.lora:
            policy = _with_lora(policy, work.seed)
        if settings.get("precompute_ref_log_probs"):  # which happens while the trainer is built
            if patch:
                fastpack.patch(policy)
            recorder.listen(policy)
        trainer = TRAINERS[case.trainer](policy, reference, settings, work)
        if case.nf4:  # TRL makes adapters bfloat16 there, in which nothing agrees to more than three digits
            for parameter in trainer.model.parameters():
                parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
        if patch:
            fastpack.patch(trainer)
            assert fastpack.is_patched(trainer.model)
        if not settings.get("precompute_ref_log_probs"):
            recorder.listen(trainer.model, getattr(trainer, "ref_model", None))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return recorder.figures(trainer)


def _policy(case: Case, work: Work, folder: Path) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig, set_seed

    set_seed(work.seed)
    config = copy.deepcopy(work.config)
    if case.trainer == "reward":
        config.num_labels = 1
        return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    if not case.nf4:
        return model
    model.save_pretrained(folder)
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    place = {"": 0 if torch.cuda.is_available() else "cpu"}
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=how, device_map=place, dtype=torch.float32, attn_implementation="sdpa"
    )


def _with_lora(model: Any, seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    return get_peft_model(
        model,
        LoraConfig(r=LORA_RANK, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


def _dpo(policy: Any, reference: Any, settings: dict[str, Any], work: Work) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer  # type: ignore[attr-defined]

    return DPOTrainer(
        policy,
        ref_model=reference,
        args=DPOConfig(**settings, max_length=work.max_length),
        train_dataset=Dataset.from_list(list(work.rows)),
        processing_class=work.tokenizer,
    )


def _kto(policy: Any, reference: Any, settings: dict[str, Any], work: Work) -> Any:
    """Every other pair's chosen completion, and the rejected one of the rest."""
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer  # type: ignore[attr-defined]

    rows = [
        {"prompt": row["prompt"], "completion": row["rejected" if at % 2 else "chosen"], "label": at % 2 == 0}
        for at, row in enumerate(work.rows)
    ]
    return KTOTrainer(
        policy,
        ref_model=reference,
        args=KTOConfig(**settings, max_length=work.max_length),
        train_dataset=Dataset.from_list(rows),
        processing_class=work.tokenizer,
    )


def _reward(policy: Any, reference: Any, settings: dict[str, Any], work: Work) -> Any:
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer  # type: ignore[attr-defined]

    return RewardTrainer(
        policy,
        args=RewardConfig(**settings, max_length=None),
        train_dataset=Dataset.from_list(_short(work, "chosen", "rejected")),
        processing_class=work.tokenizer,
    )


def _grpo(policy: Any, reference: Any, settings: dict[str, Any], work: Work) -> Any:
    """Completions are sampled, half a batch of prompts with two each; longer words are better."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[attr-defined]

    prompts = [{"prompt": row["prompt"]} for row in _short(work)]
    return GRPOTrainer(
        policy,
        reward_funcs=_letters,
        args=GRPOConfig(
            **{"beta": 0.0, **settings},
            num_generations=2,
            max_completion_length=COMPLETION,
            shuffle_dataset=False,
        ),
        train_dataset=Dataset.from_list(prompts),
        processing_class=work.tokenizer,
    )


def _short(work: Work, *completions: str) -> list[Row]:
    """The pairs with texts cut, for trainers that leave out or keep what is too long."""
    limit = 2 * work.max_length  # letters

    def cut(value: Any) -> Any:
        if isinstance(value, str):
            return value[:limit]
        return [{**message, "content": message["content"][:limit]} for message in value]

    return [{name: cut(row[name]) for name in ("prompt", *completions)} for row in work.rows]


def _letters(completions: Sequence[Any], **_: Any) -> list[float | None]:
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [len(text) / COMPLETION for text in texts]


TRAINERS: dict[str, Callable[[Any, Any, dict[str, Any], Work], Any]] = {
    "dpo": _dpo,
    "kto": _kto,
    "reward": _reward,
    "grpo": _grpo,
}
