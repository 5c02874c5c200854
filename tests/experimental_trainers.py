"""TRL's distillation trainer and its experimental trainers, on a small language."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from datasets import Dataset
from other_trainer_cases import share_of_low_words
from preferences import alone, pairs, settings, word_tokenizer
from tiny import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from trainer_cases import policy
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DistillationConfig, DistillationTrainer, DPOConfig
from trl.experimental.a2po import A2POConfig, A2POTrainer
from trl.experimental.bema_for_ref_model import BEMACallback
from trl.experimental.bema_for_ref_model import DPOTrainer as BEMADPOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.experimental.gold import GOLDConfig, GOLDTrainer
from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.experimental.sdft import SDFTConfig, SDFTTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer
from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer
from trl.experimental.tpo import TPOConfig, TPOTrainer

COMPLETION = 12
TEMPLATE = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"


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
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def byte_tokenizer() -> Any:
    """Return a byte-level tokenizer of the same words, one token a character, as GOLD needs it."""
    letters = ["<pad>", "<s>", "</s>", "w", *"0123456789", "\u0120"]
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special)
    fast.chat_template = TEMPLATE
    return fast


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


def gold(folder: Path, **further: Any) -> Any:
    args = alone(GOLDConfig(**settings(folder, max_length=256, max_completion_length=COMPLETION, **further)))
    data, tokenizer = conversations(), byte_tokenizer()
    return GOLDTrainer(
        policy(), teacher_model=policy(seed=1), args=args, train_dataset=data, processing_class=tokenizer
    )


SELF_DISTILLATION = {"max_completion_length": COMPLETION, "num_generations": 2, "distillation_topk": 20}


def sdft(folder: Path, **further: Any) -> Any:
    data = Dataset.from_list([{"prompt": row["prompt"], "privileged_context": row["chosen"]} for row in pairs()])
    args = alone(SDFTConfig(**settings(folder, **SELF_DISTILLATION, **further)))
    return SDFTTrainer(from_folder(folder), args=args, train_dataset=data, processing_class=word_tokenizer())


def sdpo(folder: Path, **further: Any) -> Any:
    """Return a trainer whose rollouts often succeed: without success in a group, SDPO's loss is zero."""
    args = alone(SDPOConfig(**settings(folder, success_reward_threshold=0.3, **SELF_DISTILLATION, **further)))
    models = {"model": from_folder(folder), "reward_funcs": share_of_low_words}
    return SDPOTrainer(**models, args=args, train_dataset=prompts(), processing_class=word_tokenizer())


def bema_dpo(folder: Path, **further: Any) -> Any:
    """Return DPO whose reference follows the policy: every step, from the first."""
    args = alone(DPOConfig(**settings(folder, max_length=None, **further)))
    average = BEMACallback(update_freq=1, update_ref_model=True, ref_model_update_freq=1)
    policies = {"model": policy(), "ref_model": policy(seed=1)}
    data, tokenizer = pairs(), word_tokenizer()
    return BEMADPOTrainer(**policies, args=args, train_dataset=data, processing_class=tokenizer, callbacks=[average])


class TeacherClient:
    """A stand-in for TRL's client of a vLLM server: a stock teacher in this process, each sequence alone."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.teacher = policy(seed=1).eval()

    @torch.no_grad()
    def get_sequence_logprobs(
        self, sequences: list[list[int]], prompt_lengths: list[int], top_logprobs: int, temperature: float
    ) -> dict[str, list[Any]]:
        rows = list(zip(sequences, prompt_lengths, strict=True))
        answers = [self._answer(ids, length, top_logprobs, temperature) for ids, length in rows]
        names = ("logprobs", "logprob_token_ids", "actual_logprobs")
        return {name: [answer[i].tolist() for answer in answers] for i, name in enumerate(names)}

    def _answer(self, ids: list[int], prompt: int, top: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        tokens = torch.tensor([ids])
        log_probs = (self.teacher(input_ids=tokens).logits[0, prompt - 1 : -1] / temperature).log_softmax(-1)
        best = log_probs.topk(top, dim=-1)
        return best.values, best.indices, log_probs.gather(-1, tokens[0, prompt:, None])


def server_distillation(folder: Path, **further: Any) -> Any:
    url = {"teacher_model_server_url": "http://localhost:1"}
    args = ServerDistillationConfig(**settings(folder, max_completion_length=COMPLETION, **url, **further))
    with mock.patch("trl.generation.vllm_client.VLLMClient", TeacherClient):
        return ServerDistillationTrainer(
            policy(), args=alone(args), train_dataset=prompts(), processing_class=word_tokenizer()
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
    "GOLD": (gold, {}),
    "SDFT": (sdft, {}),
    "SDFT, live teacher": (sdft, {"teacher_model_kind": "live"}),
    "SDPO": (sdpo, {}),
    "BEMA DPO": (bema_dpo, {}),
    "Server distillation": (server_distillation, {}),
    "Server distillation, forward KL": (server_distillation, {"beta": 0.0, "loss_top_k": 4}),
}
"""By name: a trainer's function, and further settings."""
