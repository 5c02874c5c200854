"""``num_items_in_batch`` as transformers' ``Trainer`` counts it gives the loss of each sequence alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import (
    FLOAT32_BOUND,
    INPUT_KINDS,
    LENGTHS,
    Result,
    compare,
    flat,
    make_sequences,
    padded,
    relative,
    run_alone,
    trained_tokens,
)
from sft_cases import check_equal, losses, plain_config, rows
from tiny import VOCAB, tiny_model
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import Trainer

import fastpack
from fastpack import PackedSeqLens
from fastpack.model import labels as first_labels
from fastpack.model.labels import without_first_labels

SEQUENCES = make_sequences(VOCAB)
TRAINED = trained_tokens(SEQUENCES)
NAIVE_BOUND = 1e-2


def counted(labels: Tensor) -> Tensor:
    """Return the count of ``Trainer._get_num_items_in_batch``."""
    return labels[..., 1:].ne(-100).sum()


def run(model: Any, batch: dict[str, Any], num_items: int | Tensor, alone: Result) -> Result:
    """Return loss and gradients, without logits, since a fused loss has none."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch, num_items_in_batch=num_items).loss
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Result(alone.logits, loss.detach(), grads)


def as_it_came(num_items: Any, counted: Tensor, kept: Tensor) -> Any:
    """Negative control: nothing is scaled."""
    return num_items


@pytest.mark.parametrize("kind", INPUT_KINDS)
@pytest.mark.parametrize("loss", [None, "fused"])
def test_the_trainers_count_gives_the_mean_over_what_is_kept(
    kind: str, loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    alone = run_alone(model, SEQUENCES)
    fastpack.patch(model, loss=loss)
    batch = INPUT_KINDS[kind](SEQUENCES)
    count = counted(batch["labels"])
    assert (count == TRAINED) == (kind == "padded right"), "else it takes first labels in"
    for num_items in (count, int(count), count[None]):
        assert compare(run(model, batch, num_items, alone), alone).worst <= FLOAT32_BOUND
    assert compare(run(model, batch, TRAINED, alone), alone).worst <= FLOAT32_BOUND, "somebody's own count"
    monkeypatch.setattr(first_labels, "_share_of", as_it_came)
    if kind != "padded right":
        assert compare(run(model, batch, count, alone), alone).worst > NAIVE_BOUND


@pytest.mark.parametrize("loss", [None, "fused"])
def test_each_micro_batch_is_corrected_by_its_own_share(loss: Any) -> None:
    model = fastpack.patch(tiny_model("llama"), loss=loss)
    parts = [padded(SEQUENCES[:3], "left"), padded(SEQUENCES[3:], "left")]
    counts = [counted(part["labels"]) for part in parts]
    kept = [trained_tokens(SEQUENCES[:3]), trained_tokens(SEQUENCES[3:])]
    for part, count, mine in zip(parts, counts, kept, strict=True):
        whole = model(**part, num_items_in_batch=sum(counts)).loss
        expected = model(**part).loss * mine / (sum(counts) * mine / count)
        assert relative(whole, expected) <= FLOAT32_BOUND


@pytest.mark.parametrize("loss", [None, "fused"])
def test_a_batch_with_nothing_to_train_is_zero(loss: Any) -> None:
    """The batch has only first labels, of two sequences padded left, or no label at all."""
    model = fastpack.patch(tiny_model("llama"), loss=loss)
    batch = padded(SEQUENCES[:2], "left")
    for labels in (batch["labels"].clone(), torch.full_like(batch["labels"], -100)):
        labels[:, -6:] = -100
        assert counted(labels) == labels.ne(-100).any(), "one first label, or none"
        out = model(**{**batch, "labels": labels}, num_items_in_batch=torch.tensor(7))
        assert out.loss == 0


def test_nothing_is_counted_where_every_sequence_begins_its_row_and_nothing_is_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("counted")

    monkeypatch.setattr(first_labels, "_share_of", refuse)
    model = fastpack.patch(tiny_model("llama"))
    ids = SEQUENCES[2][None]
    for batch in (
        {"input_ids": ids, "labels": ids},
        {"input_ids": ids, "labels": ids, "packed_seq_lens": PackedSeqLens.from_lengths([19])},
        {**padded(SEQUENCES, "left"), "shift_labels": padded(SEQUENCES, "left")["labels"]},
    ):
        model(**batch, num_items_in_batch=70)
        model(**{**padded(SEQUENCES, "left"), "num_items_in_batch": None})
    with pytest.raises(AssertionError, match="counted"):
        model(**padded(SEQUENCES, "left"), num_items_in_batch=70)


@pytest.mark.slow
@pytest.mark.usefixtures("compile_anew")
@pytest.mark.parametrize("loss", [None, "fused"])
def test_compiled_as_one_graph(loss: Any) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    alone = run_alone(model, SEQUENCES)
    fastpack.patch(model, loss=loss)
    compiler = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    batch = {**flat(SEQUENCES), "packed_seq_lens": PackedSeqLens.from_lengths(LENGTHS)}
    count = counted(batch["labels"])
    assert count > TRAINED
    for step, num_items in enumerate((count, count, int(count))):
        model.zero_grad(set_to_none=True)
        result = compiled(**batch, num_items_in_batch=num_items).loss
        result.backward()
        assert relative(result, alone.loss) <= FLOAT32_BOUND
        for name, parameter in model.named_parameters():
            assert relative(parameter.grad, alone.grads[name]) <= FLOAT32_BOUND, name
        assert compiler.frame_count == (1 if step < 2 else 2)


def collate(examples: list[dict[str, Any]], side: str) -> dict[str, Tensor]:
    result = padded([torch.tensor(e["input_ids"]) for e in examples], side)
    return {name: values[:-1] for name, values in result.items()}  # without the row of padding


@pytest.mark.sample(1)
@pytest.mark.usefixtures("accelerate_afresh")
@pytest.mark.parametrize("loss", [None, "fused"])
@pytest.mark.parametrize(
    ("model_type", "control"),
    [("llama", ("_share_of", as_it_came)), ("gpt2", ("_column_0_counts", lambda head: False))],
)
def test_transformers_trainer_padded_left_trains_as_padded_right(
    model_type: str, control: tuple[str, Any], loss: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On either side, patched losses equal those of the stock model padded right.

    Of Llama's labels the ``Trainer`` leaves out those that are first in such rows, of GPT-2's none, on either side.
    """
    arguments = plain_config(tmp_path)

    def trained(side: str, patched: bool) -> list[float]:
        model = tiny_model(model_type, attn_implementation="sdpa")
        if patched:
            fastpack.patch(model, loss=loss)
        collator = lambda examples: collate(examples, side)  # noqa: E731
        return losses(Trainer(model, arguments, data_collator=collator, train_dataset=rows()))

    target = trained("right", False)
    check_equal(trained("right", True), target)
    check_equal(trained("left", True), target)
    monkeypatch.setattr(first_labels, *control)
    assert abs(trained("left", True)[0] / target[0] - 1) > NAIVE_BOUND


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu() -> None:
    head, packed = tiny_model("llama"), PackedSeqLens.from_lengths(LENGTHS, device="cuda")
    labels = flat(SEQUENCES)["labels"].cuda()
    count = counted(labels)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = [
            without_first_labels(head, {"packed_seq_lens": packed, "labels": labels, "num_items_in_batch": num_items})
            for num_items in (count, 500)
        ]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    kept, share = (each["num_items_in_batch"] for each in result)
    assert kept == TRAINED
    assert relative(share, 500 * kept / count) <= FLOAT32_BOUND


def test_a_head_that_does_not_shift_labels() -> None:
    """TrOCR's own loss compares each token's logits with the label in the same place: the first one counts."""
    plain, model = tiny_model("trocr").eval(), fastpack.patch(tiny_model("trocr").eval())
    alone = [plain(input_ids=ids[None], labels=ids[None]).loss * len(ids) for ids in SEQUENCES]
    want = torch.stack(alone).sum() / sum(map(len, SEQUENCES))
    ids = torch.cat(SEQUENCES)[None]
    packed = {"input_ids": ids, "labels": ids, "packed_seq_lens": list(LENGTHS)}
    for batch in (padded(SEQUENCES, "right"), padded(SEQUENCES, "left"), packed):
        assert relative(model(**batch).loss, want) <= FLOAT32_BOUND
        assert relative(plain(**padded(SEQUENCES, "right")).loss, want) <= FLOAT32_BOUND
