"""Packed and padded inputs give the logits, the loss and every gradient of each sequence alone, in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from backbone_calls import Calls
from oracle import (
    FLOAT32_BOUND,
    INPUT_KINDS,
    LENGTHS,
    check_repadded,
    compare,
    flat,
    make_sequences,
    padded,
    positions,
    relative,
    run_alone,
    run_batch,
)
from rope_types import ROPE
from tiny import FAST, VOCAB, tiny_model
from torch import Tensor, nn

import fastpack
from fastpack.attention_dispatch import BACKENDS

NAIVE_BOUND = 1e-2


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def layers(model: nn.Module) -> int:
    return int(model.config.num_hidden_layers)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("model_type", FAST)
@pytest.mark.parametrize("kind", INPUT_KINDS)
def test_every_kind_of_input(model_type: str, kind: str, calls: Calls) -> None:
    model = tiny_model(model_type)
    sequences = make_sequences(VOCAB)
    alone = run_alone(model, sequences)
    fastpack.patch(model, strict=True)
    packed = run_batch(model, sequences, kind)
    error = compare(packed, alone)
    assert error.worst <= FLOAT32_BOUND, error
    assert calls.all == [sum(LENGTHS)] * layers(model), "each attention layer ran once, on the real tokens alone"


@pytest.mark.parametrize("model_type", FAST)
def test_negative_control(model_type: str) -> None:
    """The same check fails on naive concatenation, so that it can tell a leak from rounding."""
    model = tiny_model(model_type)
    sequences = make_sequences(VOCAB)
    alone = run_alone(model, sequences)
    ids = torch.cat(sequences)[None]
    naive = model(input_ids=ids, position_ids=positions(sequences), attention_mask=torch.ones_like(ids))
    assert relative(naive.logits[0], torch.cat(alone.logits)) > NAIVE_BOUND


@pytest.mark.parametrize("model_type", FAST)
def test_perturbing_one_sequence_moves_no_other(model_type: str) -> None:
    model = fastpack.patch(tiny_model(model_type))
    sequences = make_sequences(VOCAB)
    batch = {**flat(sequences), "packed_seq_lens": [len(s) for s in sequences]}
    before = model(**batch).logits[0]
    changed = [sequences[0], sequences[1], sequences[2].flip(0), *sequences[3:]]
    after = model(**{**batch, "input_ids": torch.cat(changed)[None]}).logits[0]
    start = len(sequences[0]) + len(sequences[1])
    inside = torch.zeros(len(before), dtype=torch.bool)
    inside[start : start + len(sequences[2])] = True
    assert relative(after[inside], before[inside]) > NAIVE_BOUND
    if getattr(model.config, "num_experts_per_tok", None) is None:
        assert torch.equal(after[~inside], before[~inside])
    else:  # experts see another number of tokens, so their matmuls round differently
        assert relative(after[~inside], before[~inside]) <= FLOAT32_BOUND


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("model_type", FAST)
def test_gradient_checkpointing(model_type: str, use_reentrant: bool, calls: Calls) -> None:
    model = tiny_model(model_type)
    sequences = make_sequences(VOCAB)
    alone = run_alone(model, sequences)
    fastpack.patch(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    for kind in ("padded left", "TRL's keywords"):
        assert compare(run_batch(model, sequences, kind), alone).worst <= FLOAT32_BOUND
    assert len(calls.all) == 4 * layers(model), "each layer ran forward, and again in the backward pass"


@pytest.mark.parametrize("attention", [name for name in BACKENDS if name in ("segments", "reference")])
def test_a_backend_by_name(attention: str, calls: Calls) -> None:
    model = tiny_model("llama")
    sequences = make_sequences(VOCAB)
    alone = run_alone(model, sequences)
    fastpack.patch(model, attention=attention)
    assert compare(run_batch(model, sequences, "padded right"), alone).worst <= FLOAT32_BOUND
    assert len(calls.tokens[attention]) == layers(model) == len(calls.all)


def fresh_alone(build: Callable[[], nn.Module], sequences: list[Tensor]) -> list[Tensor]:
    """Run each sequence in a model of its own: the stock dynamic modules remember the longest one."""
    return [build()(input_ids=s[None], use_cache=False).logits[0].detach() for s in sequences]


@pytest.mark.parametrize("kind", ["padded right", "restarting positions", "several packed rows"])
@pytest.mark.parametrize("rope", ROPE)
def test_frequencies_follow_each_sequence_length(rope: str, kind: str) -> None:
    model_type, overrides = ROPE[rope]

    def build() -> nn.Module:
        return tiny_model(model_type, **overrides).eval()  # Phi-MoE's routing is random in training

    sequences = make_sequences(VOCAB)
    expected = fresh_alone(build, sequences)
    model = build()
    padded_stock = run_batch(model, sequences, "padded right").logits
    assert max(map(relative, padded_stock, expected)) > 1e-3, "stock padded takes the longest's frequencies"
    model = fastpack.patch(build())
    got = run_batch(model, sequences, kind).logits
    assert max(map(relative, got, expected)) <= FLOAT32_BOUND
    assert any("own length" in note for note in fastpack.report(model).notes)


def test_more_tokens_than_max_position_embeddings() -> None:
    model = tiny_model("llama", max_position_embeddings=40)
    sequences = make_sequences(VOCAB)
    assert sum(LENGTHS) > 40 > max(LENGTHS)
    alone = run_alone(model, sequences)
    fastpack.patch(model)
    assert compare(run_batch(model, sequences, "packed_seq_lens"), alone).worst <= FLOAT32_BOUND


def test_rows_and_batches_of_padding_alone() -> None:
    model = fastpack.patch(tiny_model("llama"))
    batch = padded(make_sequences(VOCAB), "right")
    hidden = model.model(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    assert torch.equal(hidden[batch["attention_mask"] == 0], torch.zeros_like(hidden[batch["attention_mask"] == 0]))
    empty = model(batch["input_ids"], attention_mask=torch.zeros_like(batch["input_ids"]), labels=batch["labels"])
    empty.logits.sum().backward()
    assert not empty.logits.any()
    assert all(p.grad is not None and not p.grad.any() for p in model.model.parameters())


def test_every_output_per_token_is_repadded() -> None:
    model = tiny_model("mixtral")
    batch = padded(make_sequences(VOCAB), "left")
    real = batch["attention_mask"].bool()
    target: dict[str, Any] = {"output_hidden_states": True, "output_router_logits": True, "use_cache": False}
    stock = model(**batch, **target)
    fastpack.patch(model)
    assert fastpack.report(model).swapped["experts"] == layers(model)
    ours = model(**batch, **target)
    assert relative(ours.aux_loss, stock.aux_loss) <= FLOAT32_BOUND
    assert len(ours.hidden_states) == len(stock.hidden_states) == layers(model) + 1
    check_repadded(ours, stock, real)


def test_inputs_embeds_like_input_ids() -> None:
    model = fastpack.patch(tiny_model("llama"))
    batch = padded(make_sequences(VOCAB), "both")
    embeds = model.get_input_embeddings()(batch["input_ids"])
    by_ids = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    by_embeds = model(inputs_embeds=embeds, attention_mask=batch["attention_mask"]).logits
    assert torch.equal(by_ids, by_embeds)


def test_integer_segment_mask() -> None:
    model = tiny_model("llama")
    sequences = make_sequences(VOCAB, (4, 9, 6))
    alone = run_alone(model, sequences)
    fastpack.patch(model)
    ids = torch.cat([*sequences, torch.zeros(3, dtype=torch.long)])[None]
    mask = torch.tensor([1] * 4 + [2] * 9 + [3] * 6 + [0] * 3)[None]
    out = model(input_ids=ids, attention_mask=mask)
    assert relative(out.logits[0, :19], torch.cat(alone.logits)) <= FLOAT32_BOUND


def test_tuple_output() -> None:
    model = fastpack.patch(tiny_model("llama"))
    batch = padded(make_sequences(VOCAB), "right")
    named = model(**batch)
    as_tuple = model(**batch, return_dict=False)
    assert torch.equal(as_tuple[0], named.loss)
    assert torch.equal(as_tuple[1], named.logits)
    bare = model.model(batch["input_ids"], attention_mask=batch["attention_mask"], return_dict=False)
    assert bare[0].shape[:2] == batch["input_ids"].shape


def test_a_stock_loss_over_a_padded_batch_runs_on_real_tokens() -> None:
    model = fastpack.patch(tiny_model("llama"))
    batch = padded(make_sequences(VOCAB), "left")
    seen: list[tuple[int, ...]] = []
    model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape[:2])))
    out = model(**batch)
    assert out.logits.shape[:2] == batch["input_ids"].shape
    assert not out.logits[batch["attention_mask"] == 0].any()
    without = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    shifted = model(**{**batch, "labels": None}, logits_to_keep=3)
    assert shifted.logits.shape[1] == 3
    assert relative(out.logits, without.logits) <= FLOAT32_BOUND
    assert seen[:2] == [(1, sum(LENGTHS)), tuple(batch["input_ids"].shape)]
