"""``patch(model, loss="fused")``: the head's own loss and every gradient, without logits.

Heads of other kinds are in ``test_loss_heads.py``; when it runs, and trainers, in ``test_loss_choice.py``.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import pytest
import torch
from loss_cases import NAIVE_BOUND, TRAITS, Calls, check, grads_of, run_fused
from oracle import (
    FLOAT32_BOUND,
    GPU_FLOAT32_BOUND,
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
from tiny import EXPERTS, FAST, VOCAB, tiny_model
from torch import Tensor, nn

import fastpack
from fastpack.model import head as causal_lm
from fastpack.model import loss as module
from fastpack.ops.loss import linear_cross_entropy as op
from fastpack.packing.seqlens import PackedSeqLens

STACKS = ("gate_up_proj", "down_proj")


def alone_with_experts(model: Any, sequences: list[Tensor]) -> Result:
    """Run each sequence alone, with the load-balancing loss of all of them, which is no sum over sequences."""
    counted = run_alone(model, sequences, output_router_logits=False)
    model.zero_grad(set_to_none=True)
    routed = [model(input_ids=s[None], use_cache=False).router_logits for s in sequences]
    joined = tuple(torch.cat([r[layer] for r in routed]) for layer in range(len(routed[0])))
    balance = sys.modules[type(model).__module__].load_balancing_loss_func(
        joined, model.num_experts, model.num_experts_per_tok
    )
    (model.router_aux_loss_coef * balance).backward()
    loss = counted.loss + model.router_aux_loss_coef * balance.detach()
    both = {name: grad.clone() for name, grad in counted.grads.items()}
    for name, grad in grads_of(model).items():
        both[name] = both.get(name, torch.zeros_like(grad)) + grad
    return Result(counted.logits, loss, both)


@pytest.mark.parametrize("model_type", FAST)
def test_every_fast_family(model_type: str, op_calls: Calls) -> None:
    traits = TRAITS.get(model_type, {})
    model = tiny_model(model_type, **traits)
    sequences = make_sequences(VOCAB)
    alone = (alone_with_experts if "output_router_logits" in traits else run_alone)(model, sequences)
    fastpack.patch(model, loss="fused")
    report = fastpack.report(model)
    assert not report.skipped
    assert ("experts" in report.swapped) is (model_type in EXPERTS)
    check(model, alone, op_calls, kinds=INPUT_KINDS)


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_the_balance_of_experts_with_adapters(model_type: str, op_calls: Calls) -> None:
    """The routers train, too."""
    from peft import LoraConfig, get_peft_model

    model = tiny_model(model_type, **TRAITS[model_type])
    routers = [p for name, p in model.named_parameters() if "mlp.gate." in name or "mlp.router." in name]
    get_peft_model(model, LoraConfig(r=4, target_modules=[], target_parameters=[f"experts.{name}" for name in STACKS]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    for router in routers:
        router.requires_grad_()
    alone = alone_with_experts(model, make_sequences(VOCAB))
    assert sum("lora_" in name for name in alone.grads) == 2 * 2 * len(STACKS)
    assert len(alone.grads) == 2 * 2 * len(STACKS) + len(routers)
    fastpack.patch(model, loss="fused")
    report = fastpack.report(model)
    assert (report.swapped["experts"], report.skipped) == (2, ())
    check(model, alone, op_calls, kinds=INPUT_KINDS)


@pytest.mark.parametrize("model_type", [name for name in TRAITS if "output_router_logits" not in TRAITS[name]])
def test_what_a_head_does_beside_its_product_shows(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above: the same head fails without its scale or softcap."""
    model = tiny_model(model_type, **TRAITS[model_type])
    sequences = make_sequences(VOCAB)
    alone = run_alone(model, sequences)
    original = module.fused_head

    def plain(head: Any, spec: Any, *args: Any, **kwargs: Any) -> Any:
        return original(head, dataclasses.replace(spec, scale=None, divisor=None, softcap=None), *args, **kwargs)

    monkeypatch.setattr("fastpack.model.head.fused_head", plain)
    fastpack.patch(model, loss="fused")
    assert compare(run_fused(model, sequences, "padded left", alone), alone).worst > NAIVE_BOUND


@pytest.mark.parametrize(
    ("what", "kind"),
    [("not shifted", "padded left"), ("not shifted", "TRL's keywords"), ("first labels kept", "TRL's keywords")],
)
def test_negative_control(kind: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    sequences = make_sequences(VOCAB)
    alone = run_alone(model, sequences)
    if what == "not shifted":
        for reader in (module, causal_lm):
            monkeypatch.setattr(reader, "targets_of", lambda packed, labels, _: packed.unpad(labels))
    else:
        monkeypatch.setattr(PackedSeqLens, "mask_first_labels", lambda self, labels, *_: labels)
    fastpack.patch(model, loss="fused")
    error = compare(run_fused(model, sequences, kind, alone), alone)
    assert min(error.loss, error.grads) > NAIVE_BOUND


@pytest.mark.parametrize("settings", [{}, {"num_items_in_batch": torch.tensor(91)}, {"num_items_in_batch": None}])
def test_what_the_mean_divides_by(settings: dict[str, Any], op_calls: Calls) -> None:
    model = tiny_model("llama")
    sequences = make_sequences(VOCAB)
    alone = run_alone(model, sequences)
    count = settings.get("num_items_in_batch")
    fastpack.patch(model, loss="fused")
    # the number may include the first labels of a packed row's sequences, except the row's first
    for kind, in_batch in (("padded right", trained_tokens(sequences)), ("restarting positions", sum(LENGTHS) - 1)):
        factor = 1.0 if count is None else in_batch / int(count)
        scaled = Result(alone.logits, alone.loss * factor, {n: g * factor for n, g in alone.grads.items()})
        assert compare(run_fused(model, sequences, kind, scaled, **settings), scaled).worst <= FLOAT32_BOUND


def test_ignored_labels_are_left_out(op_calls: Calls) -> None:
    """Completion-only training ignores four labels of five."""
    results = []
    for fused in (None, "fused"):
        model = fastpack.patch(tiny_model("llama"), loss=fused)
        batch = padded(make_sequences(VOCAB), "both")
        keep = torch.arange(batch["labels"].shape[1]) % 5 == 0
        labels = batch["labels"].masked_fill(~keep, -100)
        loss = model(**{**batch, "labels": labels}).loss
        loss.backward()
        results.append(Result([], loss.detach(), grads_of(model)))
    assert relative(results[1].loss, results[0].loss) <= FLOAT32_BOUND
    for name, grad in results[0].grads.items():
        assert relative(results[1].grads[name], grad) <= FLOAT32_BOUND, name


@pytest.mark.parametrize("fused", [None, "fused"])
def test_no_logits_are_made(fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With such a large vocabulary, the largest tensor of a step would be the logits."""
    monkeypatch.setattr(op, "CHUNK_TRAINED", 16)
    vocab = 1500

    model = fastpack.patch(tiny_model("llama", vocab_size=vocab), loss=fused)
    sequences = make_sequences(vocab, (30, 1, 50, 47))
    with torch.profiler.profile(record_shapes=True) as profiled:
        model(**flat(sequences), packed_seq_lens=[30, 1, 50, 47]).loss.backward()
    shapes = [shape for event in profiled.events() for shape in event.input_shapes if shape and shape[0] != vocab]
    largest = max(math.prod(shape) for shape in shapes if all(isinstance(size, int) for size in shape))
    if fused:
        assert largest <= 128 * 1536, "a chunk; rows are laid out in whole vectors"
        assert largest < 128 * vocab
    else:
        assert largest >= 128 * vocab


@pytest.mark.parametrize("side", ["left", "both"])
def test_shift_labels_keep_their_meaning(side: str, op_calls: Calls) -> None:
    results = []
    for fused in (None, "fused"):
        model = fastpack.patch(tiny_model("llama"), loss=fused)
        batch = padded(make_sequences(VOCAB), side)
        shifted = torch.cat([batch["labels"][:, 1:], torch.full((len(batch["labels"]), 1), -100)], 1)
        loss = model(**batch, shift_labels=shifted.roll(1, 0)).loss
        loss.backward()
        results.append((loss.detach(), grads_of(model)["lm_head.weight"]))
    assert op_calls.rows == [batch["labels"].numel()], (
        "labels that stand on padding count, as they do in the stock loss"
    )
    assert relative(results[1][0], results[0][0]) <= FLOAT32_BOUND
    assert relative(results[1][1], results[0][1]) <= FLOAT32_BOUND


def test_a_batch_of_padding_alone() -> None:
    model = fastpack.patch(tiny_model("llama"), loss="fused")
    batch = padded(make_sequences(VOCAB), "right")
    nothing = {**batch, "attention_mask": torch.zeros_like(batch["input_ids"])}
    out = model(**nothing, num_items_in_batch=7)
    out.loss.backward()
    assert out.logits is None
    assert not out.loss
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("side", ["right", "left"])
def test_every_other_output_is_repadded(side: str) -> None:
    expected: dict[str, Any] = {"output_hidden_states": True, "output_router_logits": True, "use_cache": False}
    batch = padded(make_sequences(VOCAB), side)
    stock = fastpack.patch(tiny_model("mixtral"))(**batch, **expected)
    model = fastpack.patch(tiny_model("mixtral"), loss="fused")
    ours = model(**batch, **expected)
    assert type(ours) is type(stock)
    assert ours.logits is None
    for key in ("loss", "aux_loss"):
        assert relative(ours[key], stock[key]) <= FLOAT32_BOUND
    for key in ("hidden_states", "router_logits"):
        for a, b in zip(ours[key], stock[key], strict=True):
            assert torch.equal(a, b)
    as_tuple = model(**batch, **expected, return_dict=False)
    assert torch.equal(as_tuple[0], ours.loss)
    assert len(as_tuple) == len(ours.to_tuple())


def test_noise_on_embeddings(op_calls: Calls) -> None:
    """With NEFTune a batch is not un-padded before the embedding, and the loss still runs on real tokens."""
    results = []
    for fused in (None, "fused"):
        model = fastpack.patch(tiny_model("llama"), loss=fused)
        embedding = model.get_input_embeddings()
        embedding.neftune_noise_alpha = 5.0

        def add_noise(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            generator = torch.Generator().manual_seed(0)
            return output + torch.rand(output.shape, generator=generator) * output.shape[1] / 100

        embedding.register_forward_hook(add_noise)
        results.append(model(**padded(make_sequences(VOCAB), "left")).loss)
    assert op_calls.rows == [sum(LENGTHS)]
    assert relative(results[1], results[0]) <= FLOAT32_BOUND


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "cohere", "mixtral"])
def test_on_a_gpu(model_type: str, op_calls: Calls) -> None:
    traits = {} if model_type == "mixtral" else TRAITS.get(model_type, {})
    model = tiny_model(model_type, **traits).cuda()
    alone = run_alone(model, make_sequences(VOCAB))
    fastpack.patch(model, loss="fused")
    check(model, alone, op_calls, GPU_FLOAT32_BOUND)
    assert op_calls.options[-1]["num_kept"] == trained_tokens(make_sequences(VOCAB)), "counted without waiting"
