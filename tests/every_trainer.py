"""Every trainer of the table on a tiny model, plain or with LoRA, with two micro-batches an optimiser step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import experimental_trainers
import pytest
import trainer_cases
from adapter_cases import lora_config, with_lora
from async_trainers import async_distillation
from experimental_trainers import COMPLETION, from_folder, prompts
from oracle import FLOAT32_BOUND
from preferences import alone, judged, settings, word_tokenizer
from torch import Tensor
from trainer_cases import policy
from trl.experimental.distillation import DistillationConfig as OldDistillationConfig
from trl.experimental.distillation import DistillationTrainer as OldDistillationTrainer
from trl.experimental.kto import KTOConfig as OldKTOConfig
from trl.experimental.kto import KTOTrainer as OldKTOTrainer

from fastpack.model.unwrap import find_parts, models_of

LAYERS = 2
SETTINGS = {"gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.05, "logging_steps": 1}
"""Plain descent, since Adam would scale the rounding of small gradients up to whole steps."""
OF_SUMS = 3e-5
"""The bound for metrics that are differences of sums of log-probabilities, relative to 1."""
TIMES = ("time", "perf/", "runtime", "epoch", "per_second")


def old_kto(folder: Path, **further: Any) -> Any:
    args = alone(OldKTOConfig(**settings(folder, max_length=None, **further)))
    models = {"model": experimental_trainers.policy(), "ref_model": policy(seed=1)}
    return OldKTOTrainer(**models, args=args, train_dataset=judged(), processing_class=word_tokenizer())


def old_distillation(folder: Path, **further: Any) -> Any:
    args = alone(OldDistillationConfig(**settings(folder, max_completion_length=COMPLETION, **further)))
    models = {"model": experimental_trainers.policy(), "teacher_model": policy(seed=1)}
    return OldDistillationTrainer(**models, args=args, train_dataset=prompts(), processing_class=word_tokenizer())


BUILD: dict[str, Callable[..., Any]] = {
    "trl.SFTTrainer": trainer_cases.sft,
    "trl.DPOTrainer": trainer_cases.dpo,
    "trl.KTOTrainer": trainer_cases.kto,
    "trl.RewardTrainer": trainer_cases.reward,
    "trl.GRPOTrainer": trainer_cases.grpo,
    "trl.RLOOTrainer": trainer_cases.rloo,
    "trl.DistillationTrainer": experimental_trainers.distillation,
    "trl.experimental.a2po.A2POTrainer": experimental_trainers.a2po,
    "trl.experimental.async_distillation.AsyncDistillationTrainer": async_distillation,
    "trl.experimental.bema_for_ref_model.DPOTrainer": experimental_trainers.bema_dpo,
    "trl.experimental.cpo.CPOTrainer": experimental_trainers.cpo,
    "trl.experimental.distillation.DistillationTrainer": old_distillation,
    "trl.experimental.gkd.GKDTrainer": experimental_trainers.gkd,
    "trl.experimental.gmpo.GMPOTrainer": experimental_trainers.gmpo,
    "trl.experimental.gold.GOLDTrainer": experimental_trainers.gold,
    "trl.experimental.iw_opd.IWOPDTrainer": experimental_trainers.iw_opd,
    "trl.experimental.kto.KTOTrainer": old_kto,
    "trl.experimental.online_dpo.OnlineDPOTrainer": experimental_trainers.online_dpo,
    "trl.experimental.orpo.ORPOTrainer": experimental_trainers.orpo,
    "trl.experimental.sdft.SDFTTrainer": experimental_trainers.sdft,
    "trl.experimental.sdpo.SDPOTrainer": experimental_trainers.sdpo,
    "trl.experimental.server_distillation.ServerDistillationTrainer": experimental_trainers.server_distillation,
    "trl.experimental.tpo.TPOTrainer": experimental_trainers.tpo,
}
"""By the name of a row of the table: a function that builds that trainer."""


def with_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let these builders wrap the model that trains, the one with seed 0, with LoRA."""

    def adapted(seed: int = 0, **further: Any) -> Any:
        model = policy(seed=seed, **further)
        kind = {"task_type": "SEQ_CLS"} if "num_labels" in further else {}
        return with_lora(model, **kind) if seed == 0 else model

    for module in (experimental_trainers, trainer_cases):
        monkeypatch.setattr(module, "policy", adapted)
    asynchronous = functools.partial(async_distillation, peft_config=lora_config())
    monkeypatch.setitem(BUILD, "trl.experimental.async_distillation.AsyncDistillationTrainer", asynchronous)
    monkeypatch.setattr(
        experimental_trainers,
        "from_folder",
        lambda folder, seed=0: with_lora(from_folder(folder)) if seed == 0 else from_folder(folder, seed),
    )


def check_logs(
    mine: Sequence[dict[str, Any]],
    theirs: Sequence[dict[str, Any]],
    left_out: Collection[str] = (),
    of_loss: float = 1e-2 * FLOAT32_BOUND,
) -> None:
    """Check that the logs of two trainers are equal step by step, but for times and what is left out.

    ``of_loss`` is the bound for losses near zero; a metric that is not a number is None, in both.
    """
    assert len(mine) == len(theirs)
    for step, expected in zip(mine, theirs, strict=True):
        assert step.keys() == expected.keys()
        for what, value in expected.items():
            if what in left_out or any(word in what for word in TIMES):
                continue
            bound = OF_SUMS if "/" in what or what == "kl" else 1e-2 * FLOAT32_BOUND
            bound = of_loss if what in ("loss", "policy_loss") else bound
            close = value if value is None else pytest.approx(value, rel=FLOAT32_BOUND, abs=bound)
            assert step[what] == close, (what, step, expected)


def check_weights(ours: Any, stock: Any) -> None:
    """Check that all weights that train are equal in two trainers."""
    after, weights = weights_of(ours), weights_of(stock)
    assert after.keys() == weights.keys()
    for weight, value in weights.items():
        error = (after[weight] - value).abs().max() / value.abs().max().clamp(min=1e-3)
        assert error <= FLOAT32_BOUND, weight


def weights_of(trainer: Any) -> dict[str, Tensor]:
    """Return copies of all weights that train."""
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


class RealTokens:
    """Counts the real tokens of each batch that reaches a backbone without a cache, once for each layer."""

    def __init__(self, trainer: Any) -> None:
        self.expected: list[int] = []
        self.padding = 0
        self.seen = dict.fromkeys(range(len(models_of(trainer))), 0)
        for number, model in enumerate(models_of(trainer)):
            backbone: Any = find_parts(model).backbone
            backbone.register_forward_pre_hook(self._hook(number), with_kwargs=True)

    def _hook(self, number: int) -> Callable[..., None]:
        def count(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if kwargs.get("past_key_values") is not None or kwargs.get("use_cache"):
                return
            ids, mask = kwargs.get("input_ids", args[0] if args else None), kwargs.get("attention_mask")
            real = ids.numel() if mask is None else int((mask != 0).sum())
            self.padding += ids.numel() - real
            self.expected += [real] * LAYERS
            self.seen[number] += 1

        return count
