"""``patch(trainer, loss="fused")``: TRL's ``SFTTrainer`` has the head's own loss, and logs what it always logs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import with_lora
from oracle import FLOAT32_BOUND
from preferences import alone
from sft_cases import FEEDS, STEPS, config, rows, tokenizer
from tiny import tiny_model
from torch import Tensor, nn
from trainer_cases import plain, reward
from trl import SFTConfig, SFTTrainer
from trl.trainer import utils as trl_utils

import fastpack
from fastpack.model import loss as module
from fastpack.trainers.fused_loss import fused_loss_of

pytestmark = pytest.mark.usefixtures("accelerate_afresh")
LOGGED = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")


class Losses:
    """The losses that ran: the number of rows that ours got, and the number of calls of TRL's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        self.of_trl = 0
        ours, output = module.linear_cross_entropy, trl_utils.FusedCausalLMOutput

        def counted(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self.rows.append(len(hidden))
            return ours(hidden, *args, **kwargs)

        def made(*args: Any, **kwargs: Any) -> Any:
            self.of_trl += 1
            return output(*args, **kwargs)

        monkeypatch.setattr(module, "linear_cross_entropy", counted)
        monkeypatch.setattr(trl_utils, "FusedCausalLMOutput", made)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Losses:
    return Losses(monkeypatch)


def trainer_of(folder: Path, model: nn.Module | None = None, *, cls: Any = SFTTrainer, **settings: Any) -> Any:
    model = tiny_model("llama", attn_implementation="sdpa") if model is None else model
    inputs = {"logging_steps": 1, **settings}
    arguments = config(folder, **inputs)
    data = {"train_dataset": rows(), "eval_dataset": rows(6, seed=1)}
    return cls(model, args=arguments, processing_class=tokenizer(), **data)


def logged(trainer: Any) -> list[dict[str, float]]:
    """Return the trainer's logs of each step."""
    trainer.train()
    history = trainer.state.log_history
    return [{name: entry[name] for name in LOGGED} for entry in history if "loss" in entry]


def check_same(result: list[dict[str, float]], expected: list[dict[str, float]], bound: float = FLOAT32_BOUND) -> None:
    assert len(result) == len(expected) > 1
    assert len({entry["loss"] for entry in result}) > len(result) // 2, "it trains"
    for step, (ours, theirs) in enumerate(zip(result, expected, strict=True), 1):
        for name in LOGGED:
            assert ours[name] == pytest.approx(theirs[name], rel=bound, abs=bound * 0.01), (step, name)


@pytest.mark.sample(2)
@pytest.mark.parametrize("before", [True, False], ids=["model and trainer", "trainer"])
@pytest.mark.parametrize("feed", FEEDS)
def test_same_steps_and_metrics(feed: str, before: bool, tmp_path: Path, ran: Losses) -> None:
    expected = logged(trainer_of(tmp_path, **FEEDS[feed]))
    assert any(entry["mean_token_accuracy"] > 0 for entry in expected)
    assert (len(ran.rows), ran.of_trl) == (0, STEPS)
    model = tiny_model("llama", attn_implementation="sdpa")
    if before:
        fastpack.patch(model, loss="fused")
    trainer = fastpack.patch(trainer_of(tmp_path, model, **FEEDS[feed]), loss="fused")
    check_same(logged(trainer), expected)
    assert (len(ran.rows), ran.of_trl) == (STEPS, STEPS), "ours in each step, TRL's in none"
    report = fastpack.report(trainer)
    assert "loss" not in dict(report.skipped)
    assert any(f"{STEPS} micro-batches" in note for note in report.notes)


SETTINGS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2, "max_steps": 4},
    "rare logs": {"logging_steps": 3},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "bf16": {"bf16": True, "learning_rate": 1e-4},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("what", SETTINGS)
def test_settings(what: str, tmp_path: Path, ran: Losses) -> None:
    results = []
    for fused in (None, "fused"):
        trainer = fastpack.patch(trainer_of(tmp_path, **SETTINGS[what]), loss=fused)
        results.append(logged(trainer))
    # TRL's tiles of logits are rounded to bfloat16, here products are: tests/model/test_loss_heads.py has the bounds
    check_same(results[1], results[0], 2e-2 if what == "bf16" else FLOAT32_BOUND)
    assert len(ran.rows) == ran.of_trl == STEPS


@pytest.mark.sample(1)
@pytest.mark.parametrize("what", ["num_items_in_batch", "labels"])
def test_negative_control(what: str, tmp_path: Path) -> None:
    """The comparison fails without the number of the step's labels, or with one label less."""
    expected = logged(trainer_of(tmp_path, gradient_accumulation_steps=2, max_steps=4))
    trainer = fastpack.patch(trainer_of(tmp_path, gradient_accumulation_steps=2, max_steps=4), loss="fused")

    def changed(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if what == "labels":
            kwargs["labels"] = kwargs["labels"].clone()
            kwargs["labels"][0, 1] = -100
        else:
            del kwargs[what]
        return args, kwargs

    trainer.model.register_forward_pre_hook(changed, with_kwargs=True)
    with pytest.raises(AssertionError):
        check_same(logged(trainer), expected)


BALANCED: dict[str, dict[str, Any]] = {
    "padded": {},
    "padding_free": FEEDS["padding_free"],
    "accumulation": {"gradient_accumulation_steps": 2, "max_steps": 4},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("what", BALANCED)
def test_auxiliary_loss_of_experts(what: str, model_type: str, tmp_path: Path, ran: Losses) -> None:
    """The trainer's factor counts, not the head's; the last run is the control. TRL raises for granitemoe."""
    logs, aux_losses = [], []
    for fused, factor in ((None, 2.0), ("fused", 2.0), ("fused", 1.9)):
        model = tiny_model(model_type, router_aux_loss_coef=0.1)
        trainer = trainer_of(tmp_path, model, router_aux_loss_coef=factor, **BALANCED[what])
        logs.append(logged(fastpack.patch(trainer, loss=fused)))
        aux_losses.append([entry["aux_loss"] for entry in trainer.state.log_history if "loss" in entry])
    check_same(logs[1], logs[0])
    assert aux_losses[1] == pytest.approx(aux_losses[0], rel=FLOAT32_BOUND)
    with pytest.raises(AssertionError):
        check_same(logs[2], logs[0])
    assert len(ran.rows) == 2 * ran.of_trl == 2 * STEPS


def test_auxiliary_loss_that_the_head_lacks(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.aux_loss_enabled = True
    fastpack.patch(trainer, loss="fused")
    assert "which its head doesn't have" in dict(fastpack.report(trainer).skipped)["loss"]


@pytest.mark.slow
def test_with_lora(tmp_path: Path, ran: Losses) -> None:
    results = []
    for fused in (None, "fused"):
        trainer = trainer_of(tmp_path, with_lora(tiny_model("llama")))
        results.append(logged(fastpack.patch(trainer, loss=fused)))
    check_same(results[1], results[0])
    assert len(ran.rows) == ran.of_trl == STEPS


def test_evaluation_is_trls(tmp_path: Path, ran: Losses) -> None:
    """TRL's loss runs in evaluation, and counts the tokens of training too."""
    results = []
    for fused in (None, "fused"):
        trainer = trainer_of(tmp_path, eval_strategy="steps", eval_steps=3, logging_steps=4)
        fastpack.patch(trainer, loss=fused)
        trainer.train()
        names = ("eval_loss", "eval_entropy", "eval_mean_token_accuracy", "eval_num_tokens")
        history = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
        results.append([[entry[name] for name in names] for entry in history])
    assert len(results[0]) > 1
    assert len(ran.rows) == STEPS
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert ours == pytest.approx(theirs, rel=FLOAT32_BOUND)


class OfTheUser(SFTTrainer):  # type: ignore[misc]
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


def a_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def with_loss_func(trainer: Any) -> Any:
    trainer.compute_loss_func = a_loss
    return trainer


def with_own_loss(trainer: Any) -> Any:
    trainer.compute_loss = functools.partial(type(trainer).compute_loss, trainer)
    return trainer


KEPT: dict[str, tuple[Any, str]] = {
    "dft": (lambda folder: trainer_of(folder, loss_type="dft"), "loss_type is 'dft'"),
    "smoothing": (lambda folder: trainer_of(folder, label_smoothing_factor=0.1), "smoothed"),
    "loss function": (lambda folder: with_loss_func(trainer_of(folder)), "a custom loss"),
    "class": (lambda folder: trainer_of(folder, cls=OfTheUser), "a custom loss"),
    "instance": (lambda folder: with_own_loss(trainer_of(folder)), "a custom loss"),
    "head": (lambda folder: trainer_of(folder, tiny_model("gpt2")), "was not proved with the fused loss"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("what", KEPT)
def test_what_keeps_its_own_loss(what: str, tmp_path: Path, ran: Losses) -> None:
    build, reason = KEPT[what]
    expected = logged(fastpack.patch(build(tmp_path)))
    trainer = fastpack.patch(build(tmp_path), loss="fused")
    assert reason in dict(fastpack.report(trainer).skipped)["loss"]
    check_same(logged(trainer), expected)
    assert not ran.rows


@pytest.mark.slow
def test_other_trainers(tmp_path: Path, ran: Losses) -> None:
    """A reward trainer has another loss; transformers' trainer uses the model's, which is the fused one."""
    trainer = fastpack.patch(reward(tmp_path), loss="fused")
    assert "RewardTrainer has its own loss" in dict(fastpack.report(trainer).skipped)["loss"]
    trainer.train()
    assert not ran.rows
    trainer = fastpack.patch(plain(tmp_path), loss="fused")
    assert fused_loss_of(trainer) is None
    trainer.train()
    assert ran.rows


def test_a_head_that_changed_since_has_trls(tmp_path: Path, ran: Losses) -> None:
    trainer = fastpack.patch(trainer_of(tmp_path), loss="fused")
    seen: list[int] = []
    trainer.model.lm_head.register_forward_hook(lambda *_: seen.append(1))
    trainer.train()
    assert not ran.rows
    assert ran.of_trl == STEPS
    state = fused_loss_of(trainer)
    assert state is not None
    assert state.stock == STEPS
    assert "hook" in dict(fastpack.report(trainer).skipped)["loss"]


def test_a_step_without_labels(tmp_path: Path, ran: Losses) -> None:
    """Its loss is zero, as TRL's, although the loss divides by the number of labels."""
    trainer = fastpack.patch(trainer_of(tmp_path), loss="fused")
    ids = torch.tensor([[5, 6, 7]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.full_like(ids, -100)}
    loss = trainer.compute_loss(trainer.model.train(), batch, num_items_in_batch=torch.tensor(0))
    loss.backward()
    assert len(ran.rows) == 1
    assert float(loss.detach()) == 0
    assert all(p.grad is None or not p.grad.any() for p in trainer.model.parameters())


# --- doing and undoing ------------------------------------------------------------------------------------------------


def test_unpatched_it_is_trls_again(tmp_path: Path, ran: Losses) -> None:
    trainer = trainer_of(tmp_path)
    before = dict(trainer.__dict__)
    fastpack.patch(trainer, loss="fused")
    assert trainer.compute_loss is not before.get("compute_loss")
    fastpack.unpatch(trainer)
    assert trainer.__dict__.keys() == before.keys()
    trainer.train()
    assert not ran.rows


def test_a_second_patch_and_another_one(tmp_path: Path, ran: Losses) -> None:
    trainer = fastpack.patch(trainer_of(tmp_path), loss="fused")
    ours = trainer.compute_loss
    assert fastpack.patch(trainer, loss="fused").compute_loss is ours
    with fastpack.patched(trainer):
        assert fused_loss_of(trainer) is None
    assert fused_loss_of(trainer) is not None
    fastpack.patch(trainer)
    assert fused_loss_of(trainer) is None
    trainer.train()
    assert not ran.rows


@pytest.mark.slow
@pytest.mark.parametrize("same_steps", [True, False])
def test_under_a_token_budget(same_steps: bool, tmp_path: Path, ran: Losses) -> None:
    """The two are set up in either order, and pieces of a micro-batch are fused too."""
    budget = fastpack.TokenBudget(60, same_steps=same_steps)
    expected = logged(fastpack.patch(trainer_of(tmp_path), max_tokens=budget))
    for first in ({"loss": "fused"}, {"max_tokens": budget}, {"loss": "fused", "max_tokens": budget}):
        ran.rows.clear()
        ran.of_trl = 0
        trainer = fastpack.patch(trainer_of(tmp_path), **first)
        fastpack.patch(trainer, loss="fused", max_tokens=budget)
        result = logged(trainer)
        assert len(ran.rows) >= STEPS
        assert not ran.of_trl
        for ours, theirs in zip(result, expected, strict=True):
            for name in ("loss", "grad_norm", "num_tokens"):
                assert ours[name] == pytest.approx(theirs[name], rel=FLOAT32_BOUND)
        fastpack.patch(trainer, max_tokens=budget)
        assert fused_loss_of(trainer) is None
        assert any("max_tokens" in note for note in fastpack.report(trainer).notes)
        fastpack.unpatch(trainer)
        assert "compute_loss" not in trainer.__dict__


@pytest.mark.gpu
def test_nothing_waits_for_the_device(tmp_path: Path, ran: Losses) -> None:
    """With lengths read in the collator, a step's loss is launched without reading from the device."""
    arguments = alone(SFTConfig(output_dir=str(tmp_path), max_steps=3, padding_free=True, max_length=None,
                                report_to="none", use_cpu=False, bf16=False, logging_nan_inf_filter=False,
                                accelerator_config={"non_blocking": True}))  # fmt: skip
    model = tiny_model("llama").cuda()
    trainer = SFTTrainer(model, args=arguments, train_dataset=rows(), processing_class=tokenizer())
    fastpack.patch(trainer, loss="fused")
    trainer.data_collator = fastpack.with_packed_seq_lens(trainer.data_collator)
    ours = trainer.compute_loss

    def watched(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return ours(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    trainer.compute_loss = watched
    trainer.train()
    assert len(ran.rows) == 3


# --- what changes after the patch -------------------------------------------------------------------------------------


def smoothed(trainer: Any) -> None:
    from transformers.trainer_pt_utils import LabelSmoother

    trainer.label_smoother = LabelSmoother(0.1)


def with_dft(trainer: Any) -> None:
    trainer.args.loss_type = "dft"


def with_function(trainer: Any) -> None:
    trainer.compute_loss_func = a_loss


CHANGES: dict[str, tuple[Any, str]] = {
    "loss type": (with_dft, "loss_type is 'dft'"),
    "smoother": (smoothed, "smoothed"),
    "function": (with_function, "a custom loss"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("what", CHANGES)
def test_settings_that_change_are_seen(what: str, tmp_path: Path, ran: Losses) -> None:
    change, reason = CHANGES[what]
    results = []
    for fused in (None, "fused"):
        trainer = fastpack.patch(trainer_of(tmp_path), loss=fused)
        change(trainer)
        results.append(logged(trainer))
    check_same(results[1], results[0])
    assert not ran.rows
    assert reason in dict(fastpack.report(trainer).skipped)["loss"]


@pytest.mark.slow
def test_a_head_that_balances_experts_of_its_own_accord(tmp_path: Path, ran: Losses) -> None:
    results = []
    for fused in (None, "fused"):
        trainer = trainer_of(tmp_path, tiny_model("mixtral"), router_aux_loss_coef=0.0)
        fastpack.patch(trainer, loss=fused)
        trainer.model.config.output_router_logits = True
        trainer.model.router_aux_loss_coef = 0.5
        results.append(logged(trainer))
    check_same(results[1], results[0])
    assert not ran.rows
    assert "experts" in dict(fastpack.report(trainer).skipped)["loss"]


def with_prefixes(model: Any) -> Any:
    from peft import PrefixTuningConfig, get_peft_model

    return get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def with_weights(model: Any) -> Any:
    model.config.output_attentions = True
    return model


@pytest.mark.sample(1)
@pytest.mark.parametrize("change", [with_prefixes, with_weights])
def test_a_head_that_runs_its_stock_forward_has_trls_loss(change: Any, tmp_path: Path, ran: Losses) -> None:
    """Nothing says so before the forward has run; the metrics are TRL's then, rather than none."""
    results = []
    for fused in (None, "fused"):
        torch.manual_seed(0)
        model = change(tiny_model("llama", attn_implementation="eager"))
        trainer = fastpack.patch(trainer_of(tmp_path, model), loss=fused)
        results.append(logged(trainer))
    check_same(results[1], results[0])
    assert not ran.rows
    assert "stock forward" in dict(fastpack.report(trainer).skipped)["loss"]


def test_a_model_out_of_a_pickle(tmp_path: Path, ran: Losses) -> None:
    import pickle

    expected = logged(trainer_of(tmp_path))
    first = fastpack.patch(trainer_of(tmp_path), loss="fused")
    model = pickle.loads(pickle.dumps(first.model))
    check_same(logged(fastpack.patch(trainer_of(tmp_path, model), loss="fused")), expected)
    assert len(ran.rows) == STEPS


@pytest.mark.slow
def test_sums_reach_the_trainer_whatever_casts_arguments(tmp_path: Path, ran: Losses) -> None:
    """FSDP's mixed precision casts every tensor that it finds in any argument."""
    from torch.distributed.utils import _apply_to_tensors

    expected = logged(trainer_of(tmp_path))
    trainer = fastpack.patch(trainer_of(tmp_path), loss="fused")

    def copied(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _apply_to_tensors(torch.clone, args), _apply_to_tensors(torch.clone, kwargs)

    trainer.model.register_forward_pre_hook(copied, with_kwargs=True)
    check_same(logged(trainer), expected)
    assert len(ran.rows) == STEPS


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["compute_loss", "log"])
def test_what_somebody_put_over_ours_stays(name: str, tmp_path: Path, ran: Losses) -> None:
    expected = logged(trainer_of(tmp_path))
    trainer = fastpack.patch(trainer_of(tmp_path), loss="fused")
    ours, seen = getattr(trainer, name), []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return ours(*args, **kwargs)

    setattr(trainer, name, theirs)
    fastpack.patch(trainer, loss="fused")
    assert getattr(trainer, name) is theirs
    check_same(logged(trainer), expected)
    assert len(ran.rows) == STEPS
    assert len(seen) >= STEPS
    fastpack.unpatch(trainer)
    assert getattr(trainer, name) is theirs
    trainer.train()
    assert len(ran.rows) == STEPS, "it calls TRL's"


@pytest.mark.slow
def test_a_model_that_was_patched_anew_without_it(tmp_path: Path, ran: Losses) -> None:
    trainer = fastpack.patch(trainer_of(tmp_path), loss="fused")
    fastpack.patch(trainer.model)
    assert "without loss='fused'" in dict(fastpack.report(trainer).skipped)["loss"]
    expected = logged(trainer_of(tmp_path))
    check_same(logged(trainer), expected)
    assert not ran.rows


@pytest.mark.slow
def test_after_a_run_in_half_precision(tmp_path: Path, ran: Losses) -> None:
    """accelerate leaves its wrapper on the model's forward, and the fused loss would bypass it."""
    trainer = fastpack.patch(trainer_of(tmp_path, bf16=True, learning_rate=1e-4, max_steps=2))
    trainer.train()
    fastpack.patch(trainer, loss="fused")
    assert "accelerate wrapped the forward" in dict(fastpack.report(trainer).skipped)["loss"]
    trainer.train()
    assert not ran.rows
