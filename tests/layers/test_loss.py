"""``patch(model, loss="fused")``: the head's own loss and every gradient, without logits, in training only."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
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
    run_batch,
    to_device,
    trained_tokens,
)
from test_adapters import nf4, with_lora
from test_trainers import check_equal, config, losses, rows, tokenizer
from tiny import VOCAB, tiny_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainingArguments
from trl import SFTTrainer

import fastpack
from fastpack.errors import FastpackWarning
from fastpack.families import FAST_FAMILIES
from fastpack.layers import loss as module
from fastpack.ops import linear_cross_entropy as op
from fastpack.packing import PackedSeqLens

NAIVE_BOUND = 1e-2
TRAITS: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.4},
    "gemma2": {"final_logit_softcapping": 2.0},
    "gemma3_text": {"final_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 3.0},
    "mixtral": {"output_router_logits": True, "router_aux_loss_coef": 0.5},
    "qwen3_moe": {"output_router_logits": True, "router_aux_loss_coef": 0.5},
}
"""What a head does beside its product, set so that it shows."""
FAST = [family.model_type for family in FAST_FAMILIES]


class Calls:
    """The calls of the op: how many rows each saw, and how many labels it was told are kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        self.options: list[dict[str, Any]] = []
        original = module.linear_cross_entropy

        def counted(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self.rows.append(len(hidden))
            self.options.append(kwargs)
            return original(hidden, *args, **kwargs)

        monkeypatch.setattr(module, "linear_cross_entropy", counted)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.detach().clone().float() for n, p in model.named_parameters() if p.grad is not None}


def run_fused(model: nn.Module, sequences: list[Tensor], kind: str, reference: Result, **kwargs: Any) -> Result:
    """As :func:`oracle.run_batch`, but there are no logits to compare."""
    batch = to_device(INPUT_KINDS[kind](sequences), next(model.parameters()).device)
    model.zero_grad(set_to_none=True)
    out = model(**batch, **{"num_items_in_batch": trained_tokens(sequences), **kwargs})
    assert out.logits is None
    out.loss.backward()
    return Result(reference.logits, out.loss.detach(), grads_of(model))


def check(model: nn.Module, alone: Result, calls: Calls, bound: float = FLOAT32_BOUND) -> None:
    sequences = make_sequences(VOCAB)
    for kind in ("padded left", "TRL's keywords"):
        calls.rows.clear()
        error = compare(run_fused(model, sequences, kind, alone), alone)
        assert error.worst <= bound, f"{kind}: {error}"
        assert calls.rows == [sum(LENGTHS)], "the op ran once, on the real tokens alone"


def alone_with_experts(model: Any, sequences: list[Tensor]) -> Result:
    """Each sequence alone, with the load-balancing loss of all of them: it is no sum over sequences."""
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


# --- equal to the stock loss ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", FAST)
def test_every_fast_family(model_type: str, calls: Calls) -> None:
    traits = TRAITS.get(model_type, {})
    model = tiny_model(model_type, **traits)
    sequences = make_sequences(VOCAB)
    alone = (alone_with_experts if "output_router_logits" in traits else run_alone)(model, sequences)
    fastpack.patch(model, loss="fused")
    assert not fastpack.report(model).skipped
    for kind in INPUT_KINDS:
        calls.rows.clear()
        error = compare(run_fused(model, sequences, kind, alone), alone)
        assert error.worst <= FLOAT32_BOUND, f"{kind}: {error}"
        assert calls.rows == [sum(LENGTHS)], "the op ran once, on the real tokens alone"


@pytest.mark.parametrize("model_type", [name for name in TRAITS if "output_router_logits" not in TRAITS[name]])
def test_what_a_head_does_beside_its_product_shows(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above: the same head without its scale or softcap."""
    model = tiny_model(model_type, **TRAITS[model_type])
    sequences = make_sequences(VOCAB)
    alone = run_alone(model, sequences)
    original = module.fused_head

    def plain(head: Any, spec: Any, **kwargs: Any) -> Any:
        return original(head, dataclasses.replace(spec, scale=None, divisor=None, softcap=None), **kwargs)

    monkeypatch.setattr("fastpack.layers.causal_lm.fused_head", plain)
    fastpack.patch(model, loss="fused")
    assert compare(run_fused(model, sequences, "padded left", alone), alone).worst > NAIVE_BOUND


@pytest.mark.parametrize("what", ["not shifted", "first labels kept"])
@pytest.mark.parametrize("kind", ["padded left", "TRL's keywords"])
def test_negative_control(kind: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    sequences = make_sequences(VOCAB)
    alone = run_alone(model, sequences)
    if what == "not shifted":
        original = module.linear_cross_entropy
        monkeypatch.setattr(module, "linear_cross_entropy", lambda *a, **k: original(*a, **{**k, "shift": False}))
    else:
        monkeypatch.setattr(PackedSeqLens, "mask_first_labels", lambda self, labels: labels)
    fastpack.patch(model, loss="fused")
    error = compare(run_fused(model, sequences, kind, alone), alone)
    assert min(error.loss, error.grads) > NAIVE_BOUND


@pytest.mark.parametrize("settings", [{}, {"num_items_in_batch": torch.tensor(91)}, {"num_items_in_batch": None}])
def test_what_the_mean_divides_by(settings: dict[str, Any], calls: Calls) -> None:
    model = tiny_model("llama")
    sequences = make_sequences(VOCAB)
    alone = run_alone(model, sequences)
    count = settings.get("num_items_in_batch")
    factor = 1.0 if count is None else trained_tokens(sequences) / int(count)
    scaled = Result(alone.logits, alone.loss * factor, {n: g * factor for n, g in alone.grads.items()})
    fastpack.patch(model, loss="fused")
    for kind in ("padded right", "restarting positions"):
        assert compare(run_fused(model, sequences, kind, scaled, **settings), scaled).worst <= FLOAT32_BOUND


def test_ignored_labels_are_left_out(calls: Calls) -> None:
    """Completion-only training: four labels of five are ignored."""
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
    """The largest tensor of a step; a vocabulary so large that it would be the logits."""
    monkeypatch.setattr(op, "CHUNK_TRAINED", 16)
    vocab = 1500

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for made in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(made, Tensor) and len(made) != vocab if getattr(made, "ndim", 0) else False:
                    self.numel = max(self.numel, made.numel())
            return out

    model = fastpack.patch(tiny_model("llama", vocab_size=vocab), loss=fused)
    sequences = make_sequences(vocab, (30, 1, 50, 47))
    with Largest() as largest:
        model(**flat(sequences), packed_seq_lens=[30, 1, 50, 47]).loss.backward()
    if fused:
        assert largest.numel <= 128 * 1536, "a chunk; rows are laid out in whole vectors"
        assert largest.numel < 128 * vocab
    else:
        assert largest.numel >= 128 * vocab


@pytest.mark.parametrize("side", ["left", "both"])
def test_shift_labels_keep_their_meaning(side: str, calls: Calls) -> None:
    results = []
    for fused in (None, "fused"):
        model = fastpack.patch(tiny_model("llama"), loss=fused)
        batch = padded(make_sequences(VOCAB), side)
        shifted = torch.cat([batch["labels"][:, 1:], torch.full((len(batch["labels"]), 1), -100)], 1)
        loss = model(**batch, shift_labels=shifted.roll(1, 0)).loss
        loss.backward()
        results.append((loss.detach(), grads_of(model)["lm_head.weight"]))
    assert calls.options[0]["shift"] is False
    assert calls.rows == [batch["labels"].numel()], "labels that stand on padding count, as they do in the stock loss"
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
def test_everything_else_is_put_back(side: str) -> None:
    wanted: dict[str, Any] = {"output_hidden_states": True, "output_router_logits": True, "use_cache": False}
    batch = padded(make_sequences(VOCAB), side)
    stock = fastpack.patch(tiny_model("mixtral"))(**batch, **wanted)
    model = fastpack.patch(tiny_model("mixtral"), loss="fused")
    ours = model(**batch, **wanted)
    assert type(ours) is type(stock)
    assert ours.logits is None
    for key in ("loss", "aux_loss"):
        assert relative(ours[key], stock[key]) <= FLOAT32_BOUND
    for key in ("hidden_states", "router_logits"):
        for a, b in zip(ours[key], stock[key], strict=True):
            assert torch.equal(a, b)
    as_tuple = model(**batch, **wanted, return_dict=False)
    assert torch.equal(as_tuple[0], ours.loss)
    assert len(as_tuple) == len(ours.to_tuple())


def test_noise_on_embeddings(calls: Calls) -> None:
    """NEFTune's batch is not un-padded before the embedding; the loss runs on real tokens all the same."""
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
    assert calls.rows == [sum(LENGTHS)]
    assert relative(results[1], results[0]) <= FLOAT32_BOUND


# --- heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "cohere"])
def test_a_tied_head(model_type: str, calls: Calls) -> None:
    model = tiny_model(model_type, tie_word_embeddings=True, **TRAITS.get(model_type, {}))
    assert model.lm_head.weight is model.get_input_embeddings().weight
    alone = run_alone(model, make_sequences(VOCAB))
    check(fastpack.patch(model, loss="fused"), alone, calls)


@pytest.mark.parametrize("order", ["patched, then wrapped", "wrapped, then patched"])
@pytest.mark.parametrize("settings", [{}, {"use_rslora": True, "r": 3}])
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_lora_on_the_head(model_type: str, settings: dict[str, Any], order: str, calls: Calls) -> None:
    targets = {"target_modules": ["q_proj", "down_proj", "lm_head"], **settings}
    traits = {"tie_word_embeddings": False, **TRAITS.get(model_type, {})}
    alone = run_alone(with_lora(tiny_model(model_type, **traits), **targets), make_sequences(VOCAB))
    assert any("lm_head" in name for name in alone.grads)
    model = tiny_model(model_type, **traits)
    if order == "patched, then wrapped":
        wrapped = with_lora(fastpack.patch(model, loss="fused"), **targets)
    else:
        wrapped = fastpack.patch(with_lora(model, **targets), loss="fused")
    check(wrapped, alone, calls)
    wrapped.get_base_model().lm_head.scaling["default"] *= 2
    error = compare(run_fused(wrapped, make_sequences(VOCAB), "padded left", alone), alone)
    assert error.worst > NAIVE_BOUND, "the negative control: the adapter takes part"


def test_a_head_that_peft_keeps_a_copy_of(calls: Calls) -> None:
    targets = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}

    def build() -> Any:
        wrapped = with_lora(tiny_model("llama"), **targets)
        with torch.no_grad():
            wrapped.get_base_model().lm_head.modules_to_save["default"].weight.mul_(1.5)
        return wrapped

    wrapped = build()
    alone = run_alone(wrapped, make_sequences(VOCAB))
    assert any("lm_head" in name for name in alone.grads)
    check(fastpack.patch(wrapped, loss="fused"), alone, calls)
    with wrapped.disable_adapter():
        base = run_alone(tiny_model("llama"), make_sequences(VOCAB))
        loss = wrapped(**padded(make_sequences(VOCAB), "left")).loss
    assert relative(loss, base.loss) <= FLOAT32_BOUND
    assert calls.rows == [sum(LENGTHS)] * 2


def test_a_frozen_head_gets_no_gradient(calls: Calls) -> None:
    model = fastpack.patch(with_lora(tiny_model("llama")), loss="fused")
    model(**padded(make_sequences(VOCAB), "left")).loss.backward()
    assert calls.rows == [sum(LENGTHS)]
    assert model.get_base_model().lm_head.weight.grad is None


@pytest.mark.parametrize("adapter", [False, True])
def test_an_nf4_head(adapter: bool, tmp_path: Path, calls: Calls) -> None:
    def build() -> Any:
        from bitsandbytes.nn import Linear4bit

        model: Any = nf4(tmp_path)
        head = Linear4bit(64, VOCAB, bias=False, compute_dtype=torch.float32, quant_type="nf4")
        head.weight = type(head.weight)(model.lm_head.weight.data.clone(), requires_grad=False, quant_type="nf4")
        model.lm_head = head.to("cpu").train()
        return with_lora(model, target_modules=["q_proj", *(["lm_head"] if adapter else [])])

    alone = run_alone(build(), make_sequences(VOCAB))
    model = fastpack.patch(build(), loss="fused")
    assert not [why for what, why in fastpack.report(model).skipped if what == "loss"]
    check(model, alone, calls)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant: bool, calls: Calls) -> None:
    model = tiny_model("gemma2", **TRAITS["gemma2"])
    alone = run_alone(model, make_sequences(VOCAB))
    fastpack.patch(model, loss="fused")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    check(model, alone, calls)


def test_autocast(calls: Calls) -> None:
    """bf16 over float32 weights: no farther from float32 than the stock loss is."""
    sequences = make_sequences(VOCAB)
    results = []
    exact = run_alone(tiny_model("llama"), sequences)
    for fused in (None, "fused"):
        model = fastpack.patch(tiny_model("llama"), loss=fused)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**padded(sequences, "left"), num_items_in_batch=trained_tokens(sequences)).loss
        loss.backward()
        results.append(compare(Result(exact.logits, loss.detach(), grads_of(model)), exact))
    stock, ours = results
    assert calls.rows == [sum(LENGTHS)]
    assert 1e-4 < ours.grads <= 1.5 * stock.grads


# --- when it runs, and when not ---------------------------------------------------------------------------------------


def test_in_training_only(calls: Calls) -> None:
    model = fastpack.patch(tiny_model("llama"), loss="fused")
    batch = padded(make_sequences(VOCAB), "left")
    trained = model(**batch)
    assert trained.logits is None
    with torch.no_grad():
        assert model(**batch).logits is None, "still in training"
    assert calls.rows == [sum(LENGTHS)] * 2
    without = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    with pytest.raises(ValueError, match="batch_size"):  # the stock loss's, which gets fewer logits than labels
        model(**batch, logits_to_keep=3)
    model.eval()
    evaluated = model(**batch)
    assert calls.rows == [sum(LENGTHS)] * 2
    assert without.logits.shape == (*batch["input_ids"].shape, VOCAB)
    assert relative(evaluated.logits, without.logits) <= FLOAT32_BOUND
    assert relative(trained.loss, evaluated.loss) <= FLOAT32_BOUND


def test_unpatched_it_is_stock_again(calls: Calls) -> None:
    model = tiny_model("llama")
    sequences = make_sequences(VOCAB)
    before = run_batch(model, sequences, "padded right")
    fastpack.unpatch(fastpack.patch(model, loss="fused"))
    after = run_batch(model, sequences, "padded right")
    assert not calls.rows
    assert torch.equal(after.loss, before.loss)
    fastpack.patch(model)
    assert model(**padded(sequences, "right")).logits is not None, "by choice only"


def replaced(model: Any) -> Any:
    original = model.forward
    model.forward = lambda *args, **kwargs: original(*args, **kwargs)
    return model


def with_loss(model: Any) -> Any:
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()
    return model


def with_hook(model: Any) -> Any:
    model.lm_head.register_forward_hook(lambda module, args, output: output * 2)
    return model


def with_dropout(model: Any) -> Any:
    return with_lora(model, target_modules=["lm_head"], lora_dropout=0.1)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: replaced(tiny_model("llama")), "already replaced"),
        (lambda: with_loss(tiny_model("llama")), "loss_function"),
        (lambda: with_hook(tiny_model("llama")), "hooks"),
        (lambda: with_dropout(tiny_model("llama")), "dropout"),
        (lambda: tiny_model("gpt_oss"), "not one that the fused loss was proved on"),
    ],
)
def test_a_head_that_keeps_its_stock_loss(build: Callable[[], Any], reason: str, calls: Calls) -> None:
    model = fastpack.patch(build(), loss="fused")
    (found,) = [why for what, why in fastpack.report(model).skipped if what == "loss"]
    assert reason in found
    out = model(**padded(make_sequences(VOCAB), "left"))
    assert out.logits is not None
    assert out.loss is not None
    assert not calls.rows


def test_a_classifier_keeps_its_stock_loss() -> None:
    from transformers import AutoModelForSequenceClassification

    model = fastpack.patch(tiny_model("llama", auto=AutoModelForSequenceClassification, num_labels=3), loss="fused")
    (found,) = [why for what, why in fastpack.report(model).skipped if what == "loss"]
    assert "no causal LM" in found


def test_an_unknown_source_keeps_its_stock_loss(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    from fastpack.families import FAMILIES

    family = FAMILIES["llama"]
    monkeypatch.setitem(family.proved, "LlamaForCausalLM", ("another",))
    model = fastpack.patch(tiny_model("llama"), loss="fused")
    assert "loss" in dict(fastpack.report(model).skipped)
    assert model(**padded(make_sequences(VOCAB), "left")).logits is not None
    assert not calls.rows


@pytest.mark.parametrize("change", [with_loss, with_hook])
def test_a_head_that_changed_since_warns(change: Callable[[Any], Any], calls: Calls) -> None:
    batch = padded(make_sequences(VOCAB), "left")
    stock = fastpack.patch(change(tiny_model("llama")))(**batch)
    model = change(fastpack.patch(tiny_model("llama"), loss="fused"))
    with pytest.warns(FastpackWarning, match="can't serve this batch"):
        out = model(**batch)
    assert torch.equal(out.loss, stock.loss)
    assert not calls.rows


# --- trainers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerate_afresh() -> Iterator[None]:
    """A trainer leaves its precision in a state that the next one, or the next test, would find."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def collate(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    width = max(len(e["input_ids"]) for e in examples)
    ids = torch.tensor([e["input_ids"] + [0] * (width - len(e["input_ids"])) for e in examples])
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.usefixtures("accelerate_afresh")
@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}])
def test_transformers_trainer(settings: dict[str, Any], tmp_path: Path, calls: Calls) -> None:
    """Loss by loss, with ``num_items_in_batch`` over accumulated batches; evaluation still gets its logits."""
    steps = 8 // settings.get("gradient_accumulation_steps", 1)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        max_steps=steps,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        **settings,
    )
    found, evaluated = [], []
    for fused in (None, "fused"):
        model = tiny_model("llama", attn_implementation="sdpa")
        if fused:
            fastpack.patch(model, loss="fused")
        trainer = Trainer(model, arguments, data_collator=collate, train_dataset=rows(), eval_dataset=rows(6, seed=1))
        found.append(losses(trainer))
        prediction = trainer.predict(trainer.eval_dataset)
        evaluated.append(prediction.metrics["test_loss"])
        assert prediction.predictions.shape[-1] == VOCAB
    assert len(calls.rows) == 8
    bound = 2e-2 if settings.get("bf16") else FLOAT32_BOUND
    assert len(found[0]) == steps
    assert len(set(found[1])) > steps // 2
    for a, b in zip(found[1], found[0], strict=True):
        assert abs(a - b) <= bound * abs(b)
    assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-4 if bound < 1e-2 else 2e-2)


@pytest.mark.usefixtures("accelerate_afresh")
@pytest.mark.parametrize("target", ["model", "trainer"])
def test_a_trainer_that_brings_its_own_loss_keeps_it(target: str, tmp_path: Path, calls: Calls) -> None:
    """TRL replaces the head's forward; patched before or after, that one is in force."""
    results = []
    for fused in (None, "fused"):
        model = tiny_model("llama", attn_implementation="sdpa")
        if fused and target == "model":
            fastpack.patch(model, loss="fused")
        trainer = SFTTrainer(model, args=config(tmp_path), train_dataset=rows(), processing_class=tokenizer())
        if fused and target == "trainer":
            fastpack.patch(trainer, loss="fused")
            assert "already replaced" in dict(fastpack.report(trainer).skipped)["loss"]
        results.append(losses(trainer))
    check_equal(results[1], results[0])
    assert not calls.rows


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "cohere", "mixtral"])
def test_on_a_gpu(model_type: str, calls: Calls) -> None:
    traits = {} if model_type == "mixtral" else TRAITS.get(model_type, {})
    model = tiny_model(model_type, **traits).cuda()
    alone = run_alone(model, make_sequences(VOCAB))
    fastpack.patch(model, loss="fused")
    check(model, alone, calls, GPU_FLOAT32_BOUND)
    assert calls.options[-1]["num_kept"] == trained_tokens(make_sequences(VOCAB)), "counted without waiting"
