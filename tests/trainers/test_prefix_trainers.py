"""TRL's unmodified trainers on a model that shares prefixes: losses and gradient norms equal stock's, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapter_cases import with_lora
from datasets import Dataset
from dpo_cases import BETA, check_equal, dpo
from other_trainer_cases import BOUND, CASES, check_step
from preferences import PAIRS, STEPS, logged, pairs, settings, word_tokenizer
from prefix_cases import sharing
from tiny import tiny_model
from trainer_cases import sft, texts
from trl import DPOConfig, DPOTrainer

import fastpack

DPO: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "ipo": {"loss_type": ["ipo"]},
    "lora": {"lora": True},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "precomputed": {"precompute_ref_log_probs": True},
    "accumulated": {"gradient_accumulation_steps": 2},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", DPO)
def test_dpo(name: str, tmp_path: Path) -> None:
    stock = logged(dpo(tmp_path, patch=None, **DPO[name]))
    trainer = fastpack.patch(dpo(tmp_path, patch=None, **DPO[name]), share_prefixes="auto")
    seen: list[int] = []
    kept: list[int] = []
    inner = trainer.model.get_base_model() if DPO[name].get("lora") else trainer.model
    inner.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    collate = trainer.data_collator

    def counted(examples: Any) -> Any:
        batch = collate(examples)
        real = int(batch["attention_mask"].sum())
        kept.append(real - sum(len(example["prompt_ids"]) for example in examples))
        return batch

    trainer.data_collator = counted
    check_equal(logged(trainer), stock)
    stats = sharing(inner).stats
    assert stats.shared == stats.batches >= STEPS, stats
    assert stats.saved > 0.1 * stats.tokens
    # completions may begin alike too: then a few tokens more are saved
    assert all(any(0 <= most - tokens <= PAIRS for most in kept) for tokens in seen)


def test_the_reference_shares_too(tmp_path: Path) -> None:
    trainer = fastpack.patch(dpo(tmp_path, patch=None), share_prefixes="auto")
    trainer.train()
    assert sharing(trainer.ref_model).stats.shared == sharing(trainer.model).stats.shared == STEPS
    note = next(note for note in fastpack.report(trainer).notes if note.startswith("prefixes:"))
    assert note.startswith(f"prefixes: shared in {STEPS} of {STEPS} batches, ")


def test_a_wrong_prefix_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one shared token too many in one pair, the comparison fails."""
    from fastpack.packing import reading
    from fastpack.packing.prefixes import Prefixes, SharedTokens

    find = reading.find_prefixes

    def too_many(lengths: Any, *further: Any) -> Prefixes:
        result = find(lengths, *further)
        here = max(range(1, len(lengths)), key=result.shared.__getitem__)
        room = min(lengths[result.order[here]], lengths[result.order[here - 1]])
        longer = [n + (i == here and n < room) for i, n in enumerate(result.shared)]
        return Prefixes(result.order, tuple(longer))

    stock = logged(dpo(tmp_path, patch=None))
    monkeypatch.setattr(reading, "find_prefixes", too_many)
    monkeypatch.setattr(SharedTokens, "keep_ids", lambda self, ids: ids.index_select(1, self.copies.first))
    ours = logged(fastpack.patch(dpo(tmp_path, patch=None), share_prefixes="auto"))
    with pytest.raises(AssertionError):
        check_equal(ours, stock)


def test_dropout_is_not_shared(tmp_path: Path) -> None:
    """LoRA's own dropout rules out sharing, also in the reference: without the adapter, it is in training mode too."""
    trainer = DPOTrainer(
        with_lora(tiny_model("llama", attn_implementation="sdpa"), lora_dropout=0.1),
        args=DPOConfig(**settings(tmp_path, beta=BETA, max_length=None, disable_dropout=False)),
        train_dataset=pairs(),
        processing_class=word_tokenizer(),
    )
    fastpack.patch(trainer, share_prefixes="auto").train()
    stats = sharing(trainer.model).stats
    assert stats.shared == 0
    assert "Dropout.p=0.1 is random" in next(iter(stats.whole))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["reward", "grpo", "rloo"])
def test_others(name: str, tmp_path: Path) -> None:
    """Pairs of rows share a prompt, and so do groups of completions."""
    build, further = CASES[name]
    stock = logged(build(tmp_path, **further))
    trainer = fastpack.patch(build(tmp_path, **further), share_prefixes="auto")
    ours = logged(trainer)
    assert sharing(trainer.model).stats.shared >= STEPS
    assert len(ours) == len(stock) == STEPS
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine.keys() == theirs.keys()
        assert check_step(mine, theirs) == 4, "loss, norm, and margin and mean reward or entropy and reward"


@pytest.mark.sample(1)
@pytest.mark.parametrize("padding_free", [False, True], ids=["padded", "padding-free"])
def test_sft_of_chats_with_one_system_prompt(padding_free: bool, tmp_path: Path) -> None:
    system = next(iter(texts(1)))["text"]
    data = Dataset.from_list([{"text": f"{system} {row['text']}"} for row in texts(seed=1)])
    stock = logged(sft(tmp_path, data))
    trainer = fastpack.patch(sft(tmp_path, data, padding_free=padding_free), share_prefixes="auto")
    ours = logged(trainer)
    assert len(ours) == len(stock) == STEPS
    for mine, theirs in zip(ours, stock, strict=True):
        for what in ("loss", "grad_norm"):
            assert abs(mine[what] - theirs[what]) <= BOUND * theirs[what], (what, mine, theirs)
    stats = sharing(trainer.model).stats
    assert stats.shared == stats.batches >= STEPS, stats
    assert stats.saved > 0.2 * stats.tokens
