"""Preference losses on packed pairs against TRL's own ``DPOTrainer`` on the padded batch, with stock models.

Rewards are differences of log-probabilities, and agree to 1e-6 beta times the largest of those.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from datasets import Dataset
from oracle import FLOAT32_BOUND, Result, compare, relative
from packing_cases import filled_up
from preference_losses import BETA, CASES, Case, loss_of
from sft_cases import tokenizer
from tiny import VOCAB, tiny_model
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from trl import DPOConfig, DPOTrainer

import fastpack
from fastpack import PackedSeqLens
from fastpack.data.packed_collators import PackedPreferenceCollator
from fastpack.trainers.preference_losses import PairLogProbs, pair_log_probs, pair_log_probs_of_logits

LOG_PROB_BOUND = 1e-6
TEXTS = [(1, 1, 1), (4, 9, 2), (12, 3, 25), (2, 7, 7), (9, 30, 1)]
"""The numbers of words of prompt, chosen and rejected; TRL adds an end token to each completion."""


def model_of(shift: float = 0.0) -> Any:
    """Build a model with the same weights each time; ``shift`` changes them."""
    model = tiny_model("llama", attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += shift * torch.randn(parameter.shape, generator=generator)
    return model


def trainer_of(case: Case, *, shift: float = 0.05) -> Any:
    """Build TRL's trainer, with another model as the reference."""
    generator = torch.Generator().manual_seed(0)
    words = [
        [" ".join(f"w{i}" for i in torch.randint(3, VOCAB, (n,), generator=generator).tolist()) for n in lengths]
        for lengths in TEXTS
    ]
    rows = [{"prompt": p, "chosen": f" {c}", "rejected": f" {r}"} for p, c, r in words]
    by_words = tokenizer()
    by_words.backend_tokenizer.pre_tokenizer = Whitespace()
    with tempfile.TemporaryDirectory() as folder:
        return DPOTrainer(
            model_of(),
            model_of(shift),
            args=DPOConfig(
                output_dir=folder,
                beta=BETA,
                loss_type=[case.loss_type],
                label_smoothing=case.label_smoothing,
                use_weighting=case.use_weighting,
                ld_alpha=case.ld_alpha,
                report_to="none",
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=by_words,
        )


@dataclass
class Step:
    """One pass over all pairs: log-probabilities ``[4, P]`` of both models, rewards ``[2, P]``, loss and gradients."""

    log_probs: Tensor
    rewards: Tensor
    loss: Tensor
    grads: dict[str, Tensor]


def grads_of(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def padded(trainer: Any) -> Step:
    """Run TRL's loss."""
    examples = list(trainer.train_dataset)
    batch = trainer.data_collator(examples)
    assert not batch["attention_mask"].all(), "there is padding"
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    both = [torch.stack(trainer.compute_ref_log_probs(m, batch)) for m in (trainer.model, trainer.ref_model)]
    rewards = BETA * (both[0] - both[1])
    metrics = trainer._metrics["train"]
    assert metrics["rewards/margins"][0] == pytest.approx(float((rewards[0] - rewards[1]).mean()), rel=1e-5)
    assert metrics["rewards/chosen"][0] == pytest.approx(float(rewards[0].mean()), rel=1e-5)
    return Step(torch.cat(both).detach(), rewards.detach(), loss.detach(), grads_of(trainer.model))


def log_probs(model: Any, batch: dict[str, Any], case: Case, *, head: str, **changes: Any) -> PairLogProbs:
    """Run our loss on a patched model; ``changes`` change the arguments of the loss, not the model."""
    rest = {key: value for key, value in batch.items() if key != "labels"}
    labels, packed = (changes.get(key, batch[key]) for key in ("labels", "packed_seq_lens"))
    options: dict[str, Any] = {"ld_alpha": case.ld_alpha, "wpo": case.use_weighting}
    if head == "logits":
        return pair_log_probs_of_logits(model(**rest).logits, labels, packed, **options)
    hidden = model.model(**rest).last_hidden_state
    return pair_log_probs(hidden, model.lm_head.weight, labels, packed, chunk=16, **options)


def packed(
    trainer: Any, case: Case, *, head: str = "hidden", beta: float = BETA, size: int | None = None, **changes: Any
) -> Step:
    """Run our loss on the columns that TRL computed."""
    batch = PackedPreferenceCollator()(list(trainer.train_dataset))
    batch = filled_up(batch, size) if size else batch
    model, other = fastpack.patch(model_of()), fastpack.patch(model_of(0.05))
    policy = log_probs(model, batch, case, head=head, **changes)
    with torch.no_grad():
        reference = log_probs(other, batch, case, head=head, **changes)
    result = loss_of(policy, reference, case, beta)
    result.loss.backward()
    both = torch.stack([policy.chosen, policy.rejected, reference.chosen, reference.rejected])
    assert not result.chosen_rewards.requires_grad
    assert torch.equal(result.margins, result.chosen_rewards - result.rejected_rewards)
    assert result.losses.shape == result.accuracies.shape == (len(TEXTS),)
    rewards = torch.stack([result.chosen_rewards, result.rejected_rewards])
    return Step(both.detach(), rewards, result.loss.detach(), grads_of(model))


def errors(result: Step, want: Step) -> dict[str, float]:
    """Return each difference relative to its bound; 1 is just allowed."""
    grads = compare(Result([want.loss], want.loss, result.grads), Result([want.loss], want.loss, want.grads)).grads
    scale = 1e-6 * BETA * float(want.log_probs.abs().max())
    margins = (result.rewards[0] - result.rewards[1]) - (want.rewards[0] - want.rewards[1])
    return {
        "log_probs": relative(result.log_probs, want.log_probs) / LOG_PROB_BOUND,
        "loss": relative(result.loss, want.loss) / FLOAT32_BOUND,
        "grads": grads / FLOAT32_BOUND,
        "rewards": float((result.rewards - want.rewards).abs().max()) / scale,
        "margins": float(margins.abs().max()) / scale,
    }


@pytest.mark.parametrize("name", CASES)
def test_as_trl_on_the_padded_batch(name: str) -> None:
    case = CASES[name]
    trainer = trainer_of(case)
    want = padded(trainer)
    for head in ("hidden", "logits"):
        for size in (None, 320):
            result = errors(packed(trainer, case, head=head, size=size), want)
            assert max(result.values()) <= 1, (head, size, result)


def test_the_cases_are_different_losses() -> None:
    """A control of the cases: each of TRL's settings has an effect, and a wrong beta is detected."""
    trainer = trainer_of(Case())
    steps = {name: packed(trainer, case) for name, case in CASES.items()}
    steps["a wrong beta"] = packed(trainer, Case(), beta=1.001 * BETA)
    want = steps.pop("sigmoid")
    for name, step in steps.items():
        result = errors(step, want)
        assert min(result["loss"], result["grads"]) > 10, (name, result)
    assert errors(steps["a wrong beta"], want)["rewards"] > 10
    assert errors(steps["a wrong beta"], want)["log_probs"] == 0


@pytest.mark.parametrize("name", ["sigmoid", "ipo", "wpo, ld, robust"])
def test_wrong_segments_are_seen(name: str) -> None:
    """A control: lengths in another order, boundaries off by one, chosen and rejected swapped."""
    case = CASES[name]
    trainer = trainer_of(case)
    batch = PackedPreferenceCollator()(list(trainer.train_dataset))
    lengths = list(batch["packed_seq_lens"].lengths)
    assert max(errors(packed(trainer, case), padded(trainer)).values()) <= 1
    want = packed(trainer, case)
    shuffled = [*lengths[1:], lengths[0]]
    off_by_one = [lengths[0] - 1, lengths[1] + 1, *lengths[2:]]
    for wrong in (shuffled, off_by_one):
        kwargs = PackedSeqLens.from_lengths(wrong)
        result = errors(packed(trainer, case, packed_seq_lens=kwargs), want)
        assert result["log_probs"] > 1e3, wrong
        assert result["loss"] > 10, wrong
    swapped = [{**e, "chosen_ids": e["rejected_ids"], "rejected_ids": e["chosen_ids"]} for e in trainer.train_dataset]
    trainer.train_dataset = Dataset.from_list(swapped)
    assert errors(packed(trainer, case), want)["loss"] > 10


def test_the_first_loss_is_ln_2() -> None:
    """The reference's log-probabilities come from the same packed batch, or from TRL's padded batches as columns."""
    trainer = trainer_of(Case(), shift=0.0)
    examples = list(trainer.train_dataset)
    theirs = trainer.compute_ref_log_probs(trainer.ref_model, trainer.data_collator(examples))
    for number, example in enumerate(examples):
        example |= {"ref_chosen_logps": float(theirs[0][number]), "ref_rejected_logps": float(theirs[1][number])}
    batch = PackedPreferenceCollator()(examples)
    columns = {key: batch.pop(key) for key in ("ref_chosen_logps", "ref_rejected_logps")}
    model = fastpack.patch(model_of())
    for name in ("sigmoid", "robust"):
        case = CASES[name]
        policy = log_probs(model, batch, case, head="hidden")
        own = loss_of(policy, policy, case)
        assert abs(own.loss.item() - math.log(2)) <= 1e-6
        assert not own.margins.any()
        padded_ones = PairLogProbs(*columns.values(), policy.chosen_tokens, policy.rejected_tokens)
        assert abs(loss_of(policy, padded_ones, case).loss.item() - math.log(2)) <= 1e-6
        other = log_probs(fastpack.patch(model_of(0.05)), batch, case, head="hidden")
        assert abs(loss_of(policy, other, case).loss.item() - math.log(2)) > 1e-3, "the control: another reference"


def test_training_step_by_step() -> None:
    """Ten steps of AdamW agree on TRL's loss and on ours."""
    trainer, case = trainer_of(Case()), Case()
    ours, other = fastpack.patch(model_of()), fastpack.patch(model_of(0.05))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (trainer.model, ours)]
    rows = list(trainer.train_dataset)
    seen = []
    for step in range(10):
        examples = [rows[step % 5], rows[(step + 2) % 5], rows[(step + 3) % 5]]
        batch = filled_up(PackedPreferenceCollator()(examples), 256)
        with torch.no_grad():
            reference = log_probs(other, batch, case, head="hidden")
        mine = loss_of(log_probs(ours, batch, case, head="hidden"), reference, case).loss
        theirs = trainer.compute_loss(trainer.model, trainer.data_collator(examples))
        for loss, optimizer in zip((theirs, mine), optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert relative(mine.detach(), theirs.detach()) <= FLOAT32_BOUND, step
        seen.append(float(mine.detach()))
    assert len(set(seen)) == 10, "it trains"
