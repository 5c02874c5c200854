"""TRL's distillation trainer and its experimental trainers, on a small language."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset
from other_trainer_cases import share_of_low_words
from preferences import alone, pairs, settings, word_tokenizer
from tiny import tiny_model
from trainer_cases import policy
from transformers import AutoModelForCausalLM
from trl import DistillationConfig, DistillationTrainer
from trl.experimental.a2po import A2POConfig, A2POTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.experimental.tpo import TPOConfig, TPOTrainer

COMPLETION = 12


def prompts() -> Dataset:
    return pairs().remove_columns(["chosen", "rejected"])


def conversations() -> Dataset:
    return Dataset.from_list(
        [
            {
                "messages": [
                    {"role": "user", "content": row["prompt"]},
                    {"role": "assistant", "content": row["chosen"].strip()},
                ]
            }
            for row in pairs()
        ]
    )


def chat_tokenizer() -> Any:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
    return tokenizer


def from_folder(folder: Path, seed: int = 0) -> Any:
    """Return a model with a name that its trainer loads its tokenizer by."""
    name = str(folder / f"model-{seed}")
    tiny_model("llama", seed=seed).save_pretrained(name)
    word_tokenizer().save_pretrained(name)
    return AutoModelForCausalLM.from_pretrained(name, attn_implementation="sdpa")


def orpo(folder: Path, **further: Any) -> Any:
    args = alone(ORPOConfig(**settings(folder, max_length=None, **further)))
    return ORPOTrainer(policy(), args=args, train_dataset=pairs(), processing_class=word_tokenizer())


def cpo(folder: Path, **further: Any) -> Any:
    args = alone(CPOConfig(**settings(folder, max_length=None, **further)))
    return CPOTrainer(policy(), args=args, train_dataset=pairs(), processing_class=word_tokenizer())


def tpo(folder: Path, **further: Any) -> Any:
    data = pairs()
    data = data.add_column("reference", [row["chosen"] + " w5" for row in data])
    args = alone(TPOConfig(**settings(folder, **further)))
    return TPOTrainer(policy(), args=args, train_dataset=data, processing_class=word_tokenizer())


def online_dpo(folder: Path, **further: Any) -> Any:
    args = alone(OnlineDPOConfig(**settings(folder, max_length=64, max_new_tokens=COMPLETION, **further)))
    models = {"model": policy(), "ref_model": policy(seed=1), "reward_funcs": share_of_low_words}
    return OnlineDPOTrainer(**models, args=args, train_dataset=prompts(), processing_class=chat_tokenizer())


def gkd(folder: Path, **further: Any) -> Any:
    args = alone(GKDConfig(**settings(folder, max_length=64, max_new_tokens=COMPLETION, **further)))
    data, tokenizer = conversations(), chat_tokenizer()
    return GKDTrainer(policy(), teacher_model=policy(seed=1), args=args, train_dataset=data, processing_class=tokenizer)


def distillation(folder: Path, **further: Any) -> Any:
    args = alone(DistillationConfig(**settings(folder, max_completion_length=COMPLETION, **further)))
    data, tokenizer = prompts(), word_tokenizer()
    return DistillationTrainer(
        policy(), teacher_model=policy(seed=1), args=args, train_dataset=data, processing_class=tokenizer
    )


def iw_opd(folder: Path, **further: Any) -> Any:
    args = alone(IWOPDConfig(**settings(folder, max_length=64, max_completion_length=COMPLETION, **further)))
    student, teacher = (from_folder(folder, seed) for seed in (0, 1))
    data, tokenizer = conversations(), chat_tokenizer()
    return IWOPDTrainer(student, teacher_model=teacher, args=args, train_dataset=data, processing_class=tokenizer)


def gmpo(folder: Path, **further: Any) -> Any:
    sampling = {"num_generations": 2, "max_completion_length": COMPLETION, "beta": 0.0}
    args = alone(GMPOConfig(**settings(folder, **sampling, **further)))
    data, tokenizer = prompts(), word_tokenizer()
    return GMPOTrainer(
        policy(), reward_funcs=share_of_low_words, args=args, train_dataset=data, processing_class=tokenizer
    )


def a2po(folder: Path, **further: Any) -> Any:
    args = alone(A2POConfig(**settings(folder, max_completion_length=COMPLETION, **further)))
    data, tokenizer = prompts(), word_tokenizer()
    return A2POTrainer(
        policy(), reward_funcs=share_of_low_words, args=args, train_dataset=data, processing_class=tokenizer
    )


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "ORPO": (orpo, {}),
    "CPO": (cpo, {}),
    "SimPO": (cpo, {"loss_type": "simpo", "cpo_alpha": 0.0}),
    "TPO": (tpo, {}),
    "OnlineDPO": (online_dpo, {}),
    "GKD": (gkd, {}),
    "GKD on the data": (gkd, {"lmbda": 0.0}),
    "Distillation": (distillation, {}),
    "IW-OPD": (iw_opd, {}),
    "GMPO": (gmpo, {}),
    "A2PO": (a2po, {}),
}
"""By name: a trainer's function, and further settings."""
