"""``patch(trainer, loss="fused")`` with trainers that compute their loss from log-probabilities: the same steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import with_lora
from other_trainer_cases import share_of_low_words
from preferences import judged, logged, pairs, settings, word_tokenizer
from tiny import tiny_model
from torch import Tensor
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, RLOOConfig, RLOOTrainer

import fastpack
from fastpack.model import log_probs as module

pytestmark = pytest.mark.usefixtures("accelerate_afresh")
STEPS = 3
EPSILON = 1e-3
"""AdamW's, so that it does not divide gradients that are all rounding by their own size."""
BOUND = 1e-5
DIFFERENCES = ("kl", "reward", "margin", "logratios", "logits")
"""Parts of names of metrics that are differences or sums of log-probabilities: up to 100, and rounded as such."""
UNCOMPARED = ("time", "runtime", "memory", "tokens_per_second")


def policy(lora: bool = False, **further: Any) -> Any:
    model = tiny_model("llama", attn_implementation="sdpa", **further)
    return with_lora(model) if lora else model


def generating(trainer: Any, config: Any) -> Callable[..., Any]:
    def build(folder: Path, *, lora: bool = False, **further: Any) -> Any:
        sampling = {"num_generations": 2, "max_completion_length": 12, "temperature": 0.9, "beta": 0.0}
        return trainer(
            policy(lora),
            reward_funcs=share_of_low_words,
            args=config(**settings(folder, **{"max_steps": STEPS, "adam_epsilon": EPSILON, **sampling, **further})),
            train_dataset=pairs(24).remove_columns(["chosen", "rejected"]),
            processing_class=word_tokenizer(),
        )

    return build


def preference(trainer: Any, config: Any, data: Callable[..., Any]) -> Callable[..., Any]:
    def build(folder: Path, *, lora: bool = False, **further: Any) -> Any:
        return trainer(
            policy(lora),
            ref_model=None if lora else policy(seed=1),
            args=config(**settings(folder, max_length=None, adam_epsilon=EPSILON, **{"max_steps": STEPS, **further})),
            train_dataset=data(24),
            processing_class=word_tokenizer(),
        )

    return build


grpo, rloo = generating(GRPOTrainer, GRPOConfig), generating(RLOOTrainer, RLOOConfig)
dpo, kto = preference(DPOTrainer, DPOConfig, pairs), preference(KTOTrainer, KTOConfig, judged)
GRPO_LOSSES = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo")

CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    **{f"grpo, {loss}": (grpo, {"loss_type": loss}) for loss in GRPO_LOSSES},
    "grpo, lora and reference": (grpo, {"lora": True, "beta": 0.1}),
    "grpo, iterations": (grpo, {"num_iterations": 2, "gradient_accumulation_steps": 2, "max_steps": 4}),
    "grpo, truncated": (grpo, {"mask_truncated_completions": True, "max_completion_length": 40}),
    "gspo": (grpo, {"importance_sampling_level": "sequence", "num_iterations": 2, "lora": True, "beta": 0.05}),
    "grpo, entropy bonus": (grpo, {"entropy_coef": 0.01}),
    "grpo, entropy bonus, lora": (grpo, {"entropy_coef": 0.01, "lora": True}),
    "grpo, entropy mask": (grpo, {"top_entropy_quantile": 0.5}),
    "rloo": (rloo, {}),
    "rloo, lora and reference": (rloo, {"lora": True, "beta": 0.1}),
    "dpo": (dpo, {}),
    "dpo, lora": (dpo, {"lora": True}),
    "dpo, weighted": (dpo, {"use_weighting": True}),
    "kto": (kto, {}),
    "kto, lora": (kto, {"lora": True}),
}


class Run:
    """A training run: logs, weights, and how often TRL's op and modules of the head ran."""

    def __init__(self, trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from trl.trainer import utils

        self.of_trl, self.rows = 0, 0
        self.trainer = trainer
        theirs, ours = utils._ChunkedLogProbFunction, module.linear_log_probs
        run = self

        class Counted:
            @staticmethod
            def apply(*args: Any) -> Any:
                run.of_trl += 1
                return theirs.apply(*args)

        def counted(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            run.rows += len(hidden)
            return ours(hidden, *args, **kwargs)

        torch.manual_seed(0)
        with monkeypatch.context() as patched:
            patched.setattr(utils, "_ChunkedLogProbFunction", Counted)
            patched.setattr(module, "linear_log_probs", counted)
            self.logs = logged(trainer)
        self.weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def check_same(ours: Run, stock: Run) -> None:
    assert len(ours.logs) == len(stock.logs) > 1
    for mine, theirs in zip(ours.logs, stock.logs, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            if value is None:
                assert mine[name] is None
                continue
            if any(part in name for part in UNCOMPARED) or (math.isnan(value) and math.isnan(mine[name])):
                continue
            floor = 3.0 if any(part in name for part in DIFFERENCES) else 1e-1
            assert abs(mine[name] - value) <= BOUND * max(abs(value), floor), (name, mine[name], value)
    for name, value in stock.weights.items():
        assert float((ours.weights[name] - value).abs().max()) <= BOUND * max(float(value.abs().max()), 1e-1), name


@pytest.mark.sample(4)
@pytest.mark.parametrize("what", CASES)
def test_same_steps(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build, further = CASES[what]
    stock = Run(build(tmp_path, **further), monkeypatch)
    assert stock.of_trl
    trainer = build(tmp_path, **further)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    ours = Run(fastpack.patch(trainer, loss="fused"), monkeypatch)
    check_same(ours, stock)
    assert any((ours.weights[name] != value).any() for name, value in before.items()), "it trains"
    assert ours.rows > 0
    assert ours.of_trl == 0
    report = fastpack.report(trainer)
    assert "loss" not in dict(report.skipped)
    assert any(f"{ours.rows:,} tokens" in note for note in report.notes if note.startswith("loss: log-prob"))


def test_negative_control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails at another temperature."""
    stock = Run(grpo(tmp_path), monkeypatch)
    op = module.linear_log_probs
    monkeypatch.setattr(module, "linear_log_probs", lambda *args, **kw: op(*args, **{**kw, "temperature": 0.91}))
    ours = Run(fastpack.patch(grpo(tmp_path), loss="fused"), monkeypatch)
    with pytest.raises(AssertionError):
        check_same(ours, stock)


@pytest.mark.parametrize("before", [True, False], ids=["model first", "trainer"])
def test_unpatched_it_is_trls_again(before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = dpo(tmp_path)
    if before:
        fastpack.patch(trainer.model)  # TRL's forward goes under ours; a trainer of a patched model has it over ours
    states = [(head, head.__dict__.get("forward")) for head in (trainer.model, trainer.ref_model)]
    keys = trainer.__dict__.keys() - {"_fastpack_loss"}
    fastpack.patch(trainer, loss="fused")
    forwards = [head.forward for head, _ in states]
    fastpack.patch(trainer, loss="fused")
    assert [head.forward for head, _ in states] == forwards, "a second patch changes nothing"
    with fastpack.patched(trainer):
        assert all(module.log_probs_on(head) is None for head, _ in states)
    assert all(module.log_probs_on(head) is not None for head, _ in states)
    fastpack.patch(trainer, loss="fused", attention="segments")
    assert all(module.log_probs_on(head) is not None for head, _ in states)
    fastpack.unpatch(trainer)
    assert trainer.__dict__.keys() == keys
    for head, forward in states:
        now = head.__dict__["forward"]
        assert module.why_not_trl(now) is None
        assert before or now is forward
    run = Run(trainer, monkeypatch)
    assert run.of_trl
    assert not run.rows


def test_a_patched_model_in_a_new_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL puts its forward over that of a model patched before, which stays there after the patch is undone."""
    model = fastpack.patch(policy(), loss="fused")
    arguments = DPOConfig(**settings(tmp_path, max_length=None, max_steps=STEPS, adam_epsilon=EPSILON))
    data = {"train_dataset": pairs(24), "processing_class": word_tokenizer()}
    trainer = DPOTrainer(model, ref_model=policy(seed=1), args=arguments, **data)
    fastpack.patch(trainer, loss="fused")
    stock = Run(dpo(tmp_path), monkeypatch)
    ours = Run(trainer, monkeypatch)
    check_same(ours, stock)
    assert ours.of_trl == 0
    fastpack.unpatch(trainer.model)
    fastpack.unpatch(trainer)
    assert module.why_not_trl(trainer.model.__dict__["forward"]) is None


def test_a_forward_put_over_it_is_reported(tmp_path: Path) -> None:
    from trl.trainer.utils import add_fused_lm_head

    trainer = fastpack.patch(dpo(tmp_path), loss="fused")
    add_fused_lm_head(trainer.model)
    assert "replaced after the patch" in dict(fastpack.report(trainer).skipped)["loss"]
    fastpack.patch(trainer, loss="fused")
    assert "loss" not in dict(fastpack.report(trainer).skipped)


def test_a_quantised_head_has_trls_op() -> None:
    calls = module.LogProbCalls()
    seen: list[Any] = []

    class Theirs:
        @staticmethod
        def apply(*args: Any) -> tuple[None, ...]:
            seen.append(args)
            return (None,) * 5

    op = module._LogProbs(Theirs, calls, "auto")
    op.apply(torch.randn(2, 4), torch.zeros(8, 4, dtype=torch.uint8), None, torch.zeros(2).long(), 1.0, 8)
    assert len(seen) == calls.stock == 1
    assert "quantised" in calls.why_stock


def test_no_labels(tmp_path: Path) -> None:
    trainer = fastpack.patch(dpo(tmp_path), loss="fused")
    ids = torch.tensor([[5, 6, 7]])
    outputs = trainer.model(
        input_ids=ids, attention_mask=ids > 0, labels=ids.new_full((1, 3), -100), fused_lm_head=True
    )
    outputs.log_probs.sum().backward()
    assert type(outputs).__module__ == "trl.trainer.utils"
    assert outputs.log_probs.tolist() == [[0.0, 0.0]]
