"""TRL's asynchronous trainers without their servers: rollouts are drawn beforehand, and weights go nowhere."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from experimental_trainers import TeacherClient, chat_tokenizer, from_folder, prompts
from preferences import PAIRS, settings
from tiny import VOCAB
from trl.experimental.async_distillation import AsyncDistillationConfig, AsyncDistillationTrainer
from trl.experimental.async_distillation.async_rollout_worker import RolloutSample
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

TOP = 4
MICRO_BATCHES = 24
"""More than any test trains on: some are fetched ahead."""


class Rollouts:
    """A worker whose rollouts are all in its queue from the start."""

    def __init__(self, samples: list[Any]) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        for sample in samples:
            self.rollout_buffer.put(sample)

    def start(self) -> None:
        """Do nothing: there is no process."""

    stop = start

    def update_model_version(self, model_version: int) -> None:
        """Ignore the version: the rollouts are drawn already."""

    def check_health(self, stale_after_s: float) -> None:
        """Accept."""


class NoTransfer:
    """A weight transfer to no server."""

    def init_weight_transfer(self) -> None:
        """Do nothing, as every method here."""

    pause = resume = destroy = init_weight_transfer

    def send_weights(self, iterator: Any) -> None:
        """Read the weights."""
        for _ in iterator:
            pass


def scored() -> list[RolloutSample]:
    """Return random completions, each token scored by a teacher."""
    generator = torch.Generator().manual_seed(0)
    teacher = TeacherClient()
    return [_scored(teacher, generator, i) for i in range(PAIRS * MICRO_BATCHES)]


def _scored(teacher: TeacherClient, generator: torch.Generator, number: int) -> RolloutSample:
    prompt, completion = (int(torch.randint(2, 12, (), generator=generator)) for _ in range(2))
    ids = torch.randint(3, VOCAB, (prompt + completion,), generator=generator)
    answer = teacher.get_sequence_logprobs([ids.tolist()], [prompt], TOP, 1.0)

    def whole(rows: Any, fill: float, dtype: Any) -> Any:
        filled = np.full((len(ids), TOP + 1), fill, dtype=dtype)
        filled[prompt:, :TOP] = rows
        return filled

    return RolloutSample(
        prompt=[],
        completion=[],
        input_ids=ids.numpy(),
        completion_mask=(np.arange(len(ids)) >= prompt).astype(np.int64),
        teacher_topk_ids=whole(answer["logprob_token_ids"][0], -1, np.int64),
        teacher_topk_logprobs=whole(answer["logprobs"][0], -np.inf, np.float32),
        model_version=0,
        metrics={},
        teacher_id="default",
        prompt_id=number,
    )


def async_distillation(folder: Path, peft_config: Any = None, **further: Any) -> Any:
    from_folder(folder)
    init = {"model_init_kwargs": {"attn_implementation": "sdpa"}}
    args = AsyncDistillationConfig(**settings(folder, token_budget=-1, max_staleness=100, **init, **further))
    return _built(AsyncDistillationTrainer, folder, scored(), args=args, peft_config=peft_config)


def async_grpo(folder: Path, **further: Any) -> Any:
    from_folder(folder)
    args = AsyncGRPOConfig(**settings(folder, token_budget=-1, **further))
    return _built(AsyncGRPOTrainer, folder, [], args=args, reward_funcs=[])


def _built(trainer: Any, folder: Path, samples: list[Any], **further: Any) -> Any:
    module = trainer.__module__
    flops = mock.patch(f"{module}.get_peak_flops_per_device", return_value=None)  # it asks for a GPU's name
    with flops, mock.patch(f"{module}.VLLMClient"):
        return trainer(
            str(folder / "model-0"),
            train_dataset=prompts(),
            processing_class=chat_tokenizer(),
            rollout_worker=Rollouts(samples),
            weight_transfer=NoTransfer(),
            **further,
        )
