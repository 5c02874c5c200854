"""Packing that is read in the collator: the same results, and no look at the device's tensors."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import FLOAT32_BOUND, INPUT_KINDS, Result, compare, make_sequences, run_batch, to_device
from preferences import word_tokenizer
from tiny import VOCAB, tiny_model
from torch import Tensor
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

import fastpack
from fastpack import PackedSeqLens, PackingError
from fastpack.cuda_graphs.recorder import no_synchronisation
from fastpack.packing import reading
from fastpack.packing.inputs import read_packing


def collated(kind: str) -> dict[str, Any]:
    batch = INPUT_KINDS[kind](make_sequences(VOCAB))
    result: dict[str, Any] = fastpack.with_packed_seq_lens(lambda examples: dict(batch))(None)
    return result


def run(model: Any, batch: dict[str, Any]) -> Result:
    model.zero_grad(set_to_none=True)
    out = model(**batch)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Result([out.logits.detach()], out.loss.detach(), grads)


@pytest.mark.parametrize("kind", INPUT_KINDS)
def test_same_results(kind: str) -> None:
    model = fastpack.patch(tiny_model("llama"))
    want = run(model, INPUT_KINDS[kind](make_sequences(VOCAB)))
    batch = collated(kind)
    assert isinstance(batch["packed_seq_lens"], PackedSeqLens)
    assert compare(run(model, batch), want).worst <= FLOAT32_BOUND


def test_nothing_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the collator the lengths are read in the forward."""
    model = fastpack.patch(tiny_model("llama"))
    batch = collated("TRL's keywords")

    def read(*_: Any) -> Any:
        raise AssertionError("the batch was read again")

    monkeypatch.setattr(reading, "_to_host", read)
    run(model, batch)
    with pytest.raises(AssertionError, match="read again"):
        run_batch(model, make_sequences(VOCAB), "TRL's keywords")


def test_a_batch_that_was_cut_is_refused() -> None:
    """As where accelerate hands each process its rows of one batch."""
    model = fastpack.patch(tiny_model("llama"))
    batch = {
        name: value[:1] if isinstance(value, Tensor) else value for name, value in collated("padded right").items()
    }
    with pytest.raises(PackingError, match="packed_seq_lens sum to"):
        model(**batch)


def test_contradictions_are_found_in_the_collator() -> None:
    ids = torch.ones(1, 6, dtype=torch.long)
    batch = {"input_ids": ids, "cu_seq_lens_q": torch.tensor([0, 4]), "labels": ids}
    with pytest.raises(PackingError, match="ends at 4"):
        fastpack.with_packed_seq_lens(lambda examples: batch)(None)
    with pytest.raises(PackingError, match="chosen, without a tensor of input_ids"):
        fastpack.with_packed_seq_lens(lambda examples: {"chosen": ids})(None)
    with pytest.raises(PackingError, match=r"the collator made a list.*Don't wrap the collator of GRPO and RLOO"):
        fastpack.with_packed_seq_lens(lambda examples: examples)([{"prompt": "a"}])
    nothing: Any = None
    with pytest.raises(TypeError, match=r"takes a collator, such as trainer\.data_collator, not NoneType"):
        fastpack.with_packed_seq_lens(nothing)


def test_what_a_trainer_reads_from_its_collator(tmp_path: Path) -> None:
    """transformers' Trainer saves the tokenizer of its collator, where it was given none."""
    collator = DataCollatorForSeq2Seq(word_tokenizer())
    wrapped: Any = fastpack.with_packed_seq_lens(collator)
    for built in (wrapped, copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert built.label_pad_token_id == -100
        assert not hasattr(built, "no_such")
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    Trainer(tiny_model("llama"), args=arguments, data_collator=wrapped).save_model()
    assert (tmp_path / "tokenizer_config.json").exists()


def test_workers_can_be_handed_it() -> None:
    collator = pickle.loads(pickle.dumps(fastpack.with_packed_seq_lens(torch.utils.data.default_collate)))
    batch = collator([{"input_ids": torch.arange(3)}, {"input_ids": torch.arange(3)}])
    assert batch["packed_seq_lens"].lengths == (3, 3)
    assert batch["packed_seq_lens"].padding.batch_shape == (2, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["padded left", "TRL's keywords"])
@pytest.mark.parametrize("graphs", [None, "auto"])
def test_no_synchronisation(kind: str, graphs: Any) -> None:
    """Through torch's own data loader and pinned memory; reading the same batch on the device would raise."""
    model = fastpack.patch(tiny_model("llama", head_dim=16).to("cuda", torch.bfloat16), graphs=graphs)
    loader: Any = torch.utils.data.DataLoader([collated(kind)], batch_size=None, pin_memory=True)
    batches = [{name: move(value) for name, value in batch.items()} for batch in loader]
    batches[0].pop("labels")

    def step(batch: dict[str, Any]) -> None:
        model.model(**{k: v for k, v in batch.items() if k != "labels"}).last_hidden_state.float().sum().backward()

    step(batches[0])
    with no_synchronisation():
        step(batches[0])
        with pytest.raises(RuntimeError, match="synchroniz"):
            step(to_device(INPUT_KINDS[kind](make_sequences(VOCAB)), torch.device("cuda")))


def move(value: Any) -> Any:
    return value.to("cuda", non_blocking=True) if hasattr(value, "to") else value


def test_pinned_and_moved() -> None:
    packed = read_packing((2, 3), torch.device("cpu"), attention_mask=torch.tensor([[1, 1, 0], [1, 0, 0]]))
    if not torch.cuda.is_available():
        assert packed.to("cpu") is packed
        return
    pinned = packed.pin_memory()
    assert pinned.cu_seqlens.is_pinned()
    assert pinned.lengths == packed.lengths
    assert pinned.to("cuda", non_blocking=True).padding.indices.tolist() == [0, 1, 3]
