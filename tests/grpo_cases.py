"""TRL's ``GRPOTrainer`` with each of its settings that reach the loss, on rollouts that are drawn and not generated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from adapter_cases import with_lora
from every_trainer import LAYERS, SETTINGS
from experimental_trainers import from_folder, prompts
from other_trainer_cases import share_of_low_words
from preferences import alone, settings, word_tokenizer
from prefix_cases import nodes
from tiny import VOCAB
from torch import Tensor
from trainer_cases import policy
from trl import GRPOConfig, GRPOTrainer

from fastpack.model.prefix_sharing import LEAST_SAVED
from fastpack.model.unwrap import find_parts, models_of

GROUP, COMPLETION, END = 4, 12, 2
LOSSES = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo")


@dataclass
class Rollouts:
    """A ``rollout_func`` of TRL that draws completions; each trainer draws the same ones.

    Attributes:
        ends: the share of completions that end by themselves, from 0 to 1.
        of_tools: whether a part of each completion comes from a tool, and is masked.
        log_probs: whether it tells log-probabilities of a sampler, as vLLM does.
        shortest: the least tokens of a completion.
    """

    ends: float = 0.6
    of_tools: bool = False
    log_probs: bool = False
    shortest: int = 1
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def __call__(self, texts: list[str], trainer: Any) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        completions = [self._completion() for _ in texts]
        drawn: dict[str, Any] = {"prompt_ids": tokenizer(texts)["input_ids"], "completion_ids": completions}
        drawn["logprobs"] = [self._log_probs(len(ids)) for ids in completions] if self.log_probs else None
        if self.of_tools:
            drawn["env_mask"] = [self._mask(len(ids)) for ids in completions]
        return drawn

    def _completion(self) -> list[int]:
        ends = float(torch.rand((), generator=self.generator)) < self.ends
        length = int(torch.randint(self.shortest, COMPLETION, (), generator=self.generator)) if ends else COMPLETION
        ids: list[int] = torch.randint(3, VOCAB, (length,), generator=self.generator).tolist()
        return [*ids[:-1], END] if ends else ids

    def _mask(self, length: int) -> list[int]:
        start, end = torch.randint(0, length + 1, (2,), generator=self.generator).sort().values.tolist()
        return [int(not start <= at < end) for at in range(length)]

    def _log_probs(self, length: int) -> list[float]:
        near: Tensor = torch.randn(length, generator=self.generator) * 0.3 - torch.tensor(float(VOCAB)).log()
        return near.tolist()


TWICE = {"num_iterations": 2, "max_steps": 4}
SEVERAL = {"steps_per_generation": 4, "max_steps": 4}
"""Two optimiser steps from each batch of rollouts, which are off-policy in the second one."""
TRUNCATED = {"mask_truncated_completions": True}
SEQUENCE = {"importance_sampling_level": "sequence"}
TOOLS = functools.partial(Rollouts, of_tools=True)
SAMPLER = functools.partial(Rollouts, log_probs=True)
VLLM = {"vllm_importance_sampling_clip_max": 2.0, "vllm_importance_sampling_clip_min": 0.5}


def corrected(mode: str, **further: Any) -> dict[str, Any]:
    return {"rollouts": SAMPLER, "vllm_importance_sampling_mode": mode, **VLLM, **further}


CASES: dict[str, dict[str, Any]] = {
    "iterations, reference": {**TWICE, "beta": 0.1},
    "tools, truncated, reference": {"rollouts": TOOLS, **TRUNCATED, **SEVERAL, "beta": 0.1},
    "gspo": {**SEQUENCE, **TWICE},
    "sampler, token_mask": corrected("token_mask", **TWICE),
    "entropy quantile": {"top_entropy_quantile": 0.4},
    **{loss: {"loss_type": loss} for loss in LOSSES},
    **{f"{loss}, reference": {"loss_type": loss, "beta": 0.1} for loss in LOSSES},
    **{f"{loss}, iterations": {"loss_type": loss, **TWICE} for loss in LOSSES},
    "steps per generation": {**SEVERAL},
    "steps per generation, reference": {**SEVERAL, "beta": 0.1, "use_bias_correction_kl": False},
    "reference in step": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1},
    "truncated": {**TRUNCATED},
    "truncated, reference": {**TRUNCATED, **SEVERAL, "beta": 0.1},
    "all truncated": {**TRUNCATED, "rollouts": functools.partial(Rollouts, ends=0.0), "beta": 0.1},
    "gspo, reference": {**SEQUENCE, **SEVERAL, "beta": 0.1},
    "luspo by sequence": {**SEQUENCE, **TWICE, "loss_type": "luspo"},
    "entropy quantile, tools": {"top_entropy_quantile": 0.4, "rollouts": TOOLS, "beta": 0.1},
    "entropy bonus": {"entropy_coef": 0.01},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_target": 4.4, "entropy_coef_delta": 0.01},
    "two-sided clipping": {"delta": 1.5, "epsilon": 0.01, "epsilon_high": 0.02, **TWICE},
    "off-policy mask": {"off_policy_mask_threshold": 1e-3, **TWICE},
    "tools": {"rollouts": TOOLS},
    "tools, gspo": {"rollouts": TOOLS, **SEQUENCE, **TWICE},
    "sampler, token_truncate": corrected("token_truncate"),
    "sampler, sequence_truncate": corrected("sequence_truncate", beta=0.1),
    "sampler, sequence_mask": corrected("sequence_mask", **SEVERAL),
    "sampler, vespo": corrected("token_truncate", loss_type="vespo"),
    "sampler, tools": corrected("token_mask", rollouts=functools.partial(Rollouts, log_probs=True, of_tools=True)),
}
"""By name: settings of ``GRPOConfig``, and ``rollouts``, a function that returns the :class:`Rollouts`.

The first tokens of a group have equal entropies, but for rounding: a quantile of 0.5 would fall on such a tie here, and
rounding would choose among them, in stock too.
"""
OF_ADVANTAGES = 1e-6
"""The bound for a loss near zero: a mean of advantages of about 1 that cancel."""
OF_WEIGHTED_LOG_PROBS = 1e-5
"""The bound for a loss near zero that is a mean of advantages times log-probabilities, of up to 10."""


def bound_of_loss(trainer: Any) -> float:
    return OF_WEIGHTED_LOG_PROBS if trainer.loss_type in ("cispo", "vespo") else OF_ADVANTAGES


def grpo(folder: Path, *, lora: bool = False, rollouts: Callable[[], Rollouts] = Rollouts, **further: Any) -> Any:
    """Return a trainer with two micro-batches a step, whose rows are groups of :data:`GROUP` with a prompt in common.

    Its reference has other weights than its model.
    """
    sampling = {"num_generations": GROUP, "max_completion_length": COMPLETION, "beta": 0.0}
    sizes = {"per_device_train_batch_size": 2 * GROUP, "max_steps": 2}
    args = GRPOConfig(**settings(folder, **{**SETTINGS, **sizes, **sampling, **further}))
    named = args.beta > 0 and not lora  # TRL loads a reference by the name of the model
    trainer = GRPOTrainer(
        from_folder(folder) if named else with_lora(policy()) if lora else policy(),
        reward_funcs=share_of_low_words,
        args=alone(args),
        train_dataset=prompts(),
        processing_class=word_tokenizer(),
        rollout_func=rollouts(),
    )
    if named:
        trainer.ref_model.load_state_dict(policy(seed=1).state_dict())
    if "vllm_importance_sampling_mode" in further:
        trainer.use_vllm, trainer._last_loaded_step = True, -1
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    return trainer


class LayerTokens:
    """Counts the tokens that reach each decoder layer, and those of them that have to.

    Args:
        trainer: a trainer that is built.
        shared: whether each beginning that rows have in common has to be computed once.

    Attributes:
        seen: the tokens of each call of a layer.
        expected: the real tokens of each batch, or with ``shared`` its different beginnings, once for each layer.
        padding: the slots of padding in all batches.
        saved: the real tokens in all batches that repeat a beginning.
    """

    def __init__(self, trainer: Any, *, shared: bool) -> None:
        self.seen: list[int] = []
        self.expected: list[int] = []
        self.padding = self.saved = 0
        self._shared = shared
        for model in models_of(trainer):
            backbone: Any = find_parts(model).backbone
            backbone.register_forward_pre_hook(self._batch, with_kwargs=True)
            for layer in backbone.layers:
                layer.register_forward_pre_hook(self._layer, with_kwargs=True)

    def _batch(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        rows = [row[real.bool()] for row, real in zip(ids, kwargs["attention_mask"], strict=True)]
        real, different = sum(map(len, rows)), nodes(rows)
        self.padding += ids.numel() - real
        self.saved += real - different
        pays = real - different >= LEAST_SAVED * real
        self.expected += [different if self._shared and pays else real] * LAYERS

    def _layer(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        self.seen.append(hidden.shape[:-1].numel())
