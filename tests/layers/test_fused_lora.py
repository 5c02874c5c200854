"""LoRA in the fused Functions: PEFT's settings, what falls back, and the report's notes on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import in_float32, lora_config, nf4, qlora, quantised, with_lora
from oracle import (
    FLOAT32_BOUND,
    INPUT_KINDS,
    Result,
    compare,
    flat,
    make_sequences,
    padded,
    positions,
    relative,
    run_alone,
    run_batch,
    trained_tokens,
)
from tiny import VOCAB, tiny_model

import fastpack

KIND = "TRL's keywords"


FUSED: dict[str, dict[str, Any]] = {
    "rsLoRA": {"use_rslora": True},
    "ranks and scales of their own": {"rank_pattern": {"q_proj": 3, "up_proj": 7}, "alpha_pattern": {"v_proj": 20}},
    "q and v alone": {"target_modules": ["q_proj", "v_proj"]},
}


@pytest.mark.parametrize("name", FUSED)
def test_settings_that_are_fused(name: str, calls: dict[str, int]) -> None:
    def build() -> Any:
        return with_lora(tiny_model("qwen2"), **FUSED[name])  # its q, k and v have a bias

    sequences = make_sequences(VOCAB)
    alone = run_alone(build(), sequences)
    model = fastpack.patch(build())
    error = compare(run_batch(model, sequences, KIND), alone)
    assert error.worst <= FLOAT32_BOUND, error
    assert calls == {"project": 4, "gated_mlp": 2, "add_updates": 0}
    assert not fastpack.report(model).as_modules


def test_dropout_draws_what_peft_draws(calls: dict[str, int]) -> None:
    """Masks are drawn in the same order, so one seed gives the same loss and gradients."""
    (sequence,) = make_sequences(VOCAB, [37])
    results = []
    for patched in (False, True):
        model = with_lora(tiny_model("llama"), lora_dropout=0.3)
        if patched:
            fastpack.patch(model)
        torch.manual_seed(11)
        results.append(run_batch(model, [sequence], "packed_seq_lens") if patched else run_alone(model, [sequence]))
    error = compare(results[1], results[0])
    assert error.worst <= FLOAT32_BOUND, error
    assert calls["gated_mlp"] == 2
    torch.manual_seed(12)
    other = run_batch(model, [sequence], "packed_seq_lens")
    assert compare(other, results[0]).worst > 1e-2, "another seed is another draw"


def test_no_dropout_in_evaluation() -> None:
    (sequence,) = make_sequences(VOCAB, [37])
    model = with_lora(tiny_model("llama"), lora_dropout=0.9)
    model.eval()
    with torch.no_grad():
        stock = model(input_ids=sequence[None]).logits
        fastpack.patch(model)
        assert relative(model(input_ids=sequence[None], packed_seq_lens=[37]).logits, stock) <= FLOAT32_BOUND


def variants() -> dict[str, Any]:
    def two_at_once() -> Any:
        model = with_lora(tiny_model("llama"))
        model.add_adapter("second", lora_config(r=2, init_lora_weights=False))
        model.base_model.set_adapter(["default", "second"])
        return model

    return {
        "2 adapters are active at once": two_at_once,
        "DoraLinearVariant": lambda: with_lora(tiny_model("llama"), use_dora=True),
        "two plain matrices": lambda: with_lora(tiny_model("llama"), lora_bias=True),
    }


@pytest.mark.parametrize("reason", variants())
def test_what_peft_computes_itself(reason: str, calls: dict[str, int]) -> None:
    """Such projections are exact, called as modules, and counted in the report with the reason."""
    sequences = make_sequences(VOCAB)
    alone = run_alone(variants()[reason](), sequences)
    model = fastpack.patch(variants()[reason]())
    assert compare(run_batch(model, sequences, KIND), alone).worst <= FLOAT32_BOUND
    assert calls == {"project": 0, "gated_mlp": 0, "add_updates": 0}
    result = fastpack.report(model).as_modules
    assert list(result.values()) == [14]
    assert reason in next(iter(result))


def test_a_disabled_adapter_is_the_base_fused(calls: dict[str, int]) -> None:
    sequences = make_sequences(VOCAB)
    base = run_alone(tiny_model("llama"), sequences)
    model = fastpack.patch(with_lora(tiny_model("llama")))
    with model.disable_adapter():
        off = model(input_ids=torch.cat(sequences)[None], packed_seq_lens=[len(s) for s in sequences]).logits[0]
    assert relative(off, torch.cat(base.logits)) <= FLOAT32_BOUND
    assert calls["gated_mlp"] == 2


def test_8_bit_keeps_its_own_product(tmp_path: Path, calls: dict[str, int]) -> None:
    """bitsandbytes computes LLM.int8's base matmul; one Function for each group adds the updates."""
    model = with_lora(quantised(tmp_path, load_in_8bit=True))
    sequence = make_sequences(VOCAB, [23])[0]
    stock = model(input_ids=sequence[None]).logits
    fastpack.patch(model)
    ours = model(input_ids=sequence[None], packed_seq_lens=[23]).logits
    assert relative(ours, stock) <= 1e-3, "int8 rounds what differs in the last digit"
    assert calls == {"project": 0, "gated_mlp": 0, "add_updates": 8}, "q, k, v; o; gate and up; down, of two layers"
    result = fastpack.report(model).as_modules
    assert list(result.values()) == [14]
    assert "LLM.int8" in next(iter(result))


@pytest.mark.parametrize("prepared", [False, True])
def test_8_bit_gradients_are_those_of_peft(prepared: bool, tmp_path: Path, calls: dict[str, int]) -> None:
    from peft import prepare_model_for_kbit_training

    sequence = make_sequences(VOCAB, [23])[0]

    def gradients(*, patched: bool) -> dict[str, torch.Tensor]:
        model = quantised(tmp_path, load_in_8bit=True)
        if prepared:
            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        model = with_lora(model).train()
        if patched:
            fastpack.patch(model)
        packing = {"packed_seq_lens": [23]} if patched else {}
        model(input_ids=sequence[None], labels=sequence[None], **packing).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    stock, ours = gradients(patched=False), gradients(patched=True)
    assert calls["add_updates"] == 8
    assert ours.keys() == stock.keys()
    assert len(ours) == 28, "A and B of 14 projections"
    for name, gradient in ours.items():
        assert relative(gradient, stock[name]) <= 1e-3, f"{name}: int8 rounds what differs in the last digit"
    assert any(relative(gradient, stock[name].roll(1)) > 0.1 for name, gradient in ours.items())


@pytest.mark.sample(4)
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
@pytest.mark.parametrize(
    ("dtype", "compute_dtype", "reentrant", "prepared"),
    [
        (torch.bfloat16, torch.bfloat16, None, True),
        (torch.float16, torch.float16, None, True),
        (torch.bfloat16, torch.bfloat16, False, True),
        (torch.float16, torch.float16, True, True),
        (torch.bfloat16, torch.bfloat16, None, False),
        (torch.bfloat16, torch.float32, None, True),
        (torch.bfloat16, torch.float32, None, False),
        (torch.float16, torch.bfloat16, None, True),
    ],
)
def test_4_bit_with_float32_norms_under_autocast(
    model_type: str,
    dtype: torch.dtype,
    compute_dtype: torch.dtype,
    reentrant: bool | None,
    prepared: bool,
    tmp_path: Path,
    calls: dict[str, int],
) -> None:
    """QLoRA as PEFT prepares it, trained with bf16=True or fp16=True.

    The Functions cast what autocast would cast, and the result has autocast's dtype, as bitsandbytes' result has.

    Embeddings in half precision are tested too: the first float32 norm then makes the residual stream float32.
    """
    sequences = make_sequences(VOCAB, (23, 11, 5, 40, 17, 1, 31))

    def build() -> Any:
        settings = {"prepared": prepared, "reentrant": reentrant, "model_type": model_type}
        return qlora(tmp_path, dtype, compute_dtype, **settings)

    true = run_alone(in_float32(build()), sequences)
    stock, model = build(), fastpack.patch(build())
    with torch.autocast("cpu", dtype):
        alone, result = run_alone(stock, sequences), run_batch(model, sequences, KIND)
        times = 1 if reentrant is None else 2
        assert calls == {"project": 4 * times, "gated_mlp": 2 * times, "add_updates": 0}
        batch = {"input_ids": sequences[0][None], "output_hidden_states": True}
        ours = model(**batch, packed_seq_lens=[23]).hidden_states
        assert [x.dtype for x in ours] == [x.dtype for x in stock(**batch).hidden_states]
    assert any("norm" in name for name in alone.grads)
    assert any("embed_tokens" in name for name in alone.grads)
    error, allowed = compare(result, true, half=True), compare(alone, true, half=True)
    assert 1e-4 < error.grads <= 1.5 * allowed.grads, (error, allowed)
    assert error.logits <= 1.5 * allowed.logits


@pytest.mark.parametrize(
    ("dtype", "compute_dtype", "remedy"),
    [
        (torch.bfloat16, torch.float32, "set bf16=True, or load it with bnb_4bit_compute_dtype=torch.bfloat16"),
        (torch.float32, torch.bfloat16, "set bf16=True"),
        (torch.float32, torch.float16, "set fp16=True"),
        (torch.bfloat16, torch.bfloat16, None),
        (torch.float32, torch.float32, None),
    ],
)
def test_a_compute_dtype_that_is_not_the_input_s(
    dtype: torch.dtype, compute_dtype: torch.dtype, remedy: str | None, tmp_path: Path, calls: dict[str, int]
) -> None:
    """Outside autocast modules are called, and the report names the setting to change. Under autocast they fuse."""
    half = torch.float16 if compute_dtype == torch.float16 else torch.bfloat16
    model = fastpack.patch(with_lora(nf4(tmp_path, compute_dtype, dtype=dtype)))
    sequences = make_sequences(VOCAB)
    run_batch(model, sequences, KIND)
    fused = {"project": 4, "gated_mlp": 2, "add_updates": 0}
    assert calls == (fused if remedy is None else {"project": 0, "gated_mlp": 0, "add_updates": 8})
    result = fastpack.report(model).as_modules
    assert sum(result.values()) == (0 if remedy is None else 14)
    for reason in result:
        message = f"outside autocast its 4-bit weight computes in {compute_dtype}, and its input is {dtype}: {remedy}"
        assert reason == message.replace("torch.", "", 2)
    calls.update(dict.fromkeys(calls, 0))
    with torch.autocast("cpu", half):
        run_batch(model, sequences, KIND)
        assert calls == fused
        assert not fastpack.report(model).as_modules


def test_fp16_autocast_with_a_gradient_scaler(calls: dict[str, int]) -> None:
    """Scaled losses do not overflow, and unscaled gradients are as close to float32's as PEFT's."""
    sequences = make_sequences(VOCAB, (23, 11, 5, 40, 17, 1, 31))

    def gradients(patched: bool, scale: float = 2.0**10) -> tuple[Result, bool]:
        """Return the gradients, and whether the optimiser stepped, which it doesn't after an overflow."""
        model = with_lora(tiny_model("llama"))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        before = [parameter.detach().clone() for parameter in trained]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        if patched:
            fastpack.patch(model)
        batch = INPUT_KINDS[KIND](sequences) if patched else None
        with torch.autocast("cpu", torch.float16):
            if batch is not None:
                loss = model(**batch, num_items_in_batch=trained_tokens(sequences)).loss
            else:
                alone = [model(input_ids=s[None], use_cache=False).logits[0, :-1].float() for s in sequences]
                targets = torch.cat([s[1:] for s in sequences])
                loss = torch.nn.functional.cross_entropy(torch.cat(alone), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        result = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        scaler.step(optimizer)
        moved = any(not torch.equal(a, b) for a, b in zip(before, trained, strict=True))
        return Result([loss.detach()], loss.detach(), result), moved

    exact = run_alone(with_lora(tiny_model("llama")), sequences)
    true = Result([exact.loss], exact.loss, exact.grads)
    stock, stepped = gradients(patched=False)
    assert stepped
    assert calls["project"] == 0
    result, stepped = gradients(patched=True)
    assert stepped
    assert calls == {"project": 4, "gated_mlp": 2, "add_updates": 0}
    error, allowed = compare(result, true, half=True), compare(stock, true, half=True)
    assert 1e-5 < error.grads <= 1.5 * allowed.grads, (error, allowed)
    overflown, stepped = gradients(patched=True, scale=2.0**40)
    assert not stepped, "the negative control: infinite gradients are seen, and no step is taken"
    assert compare(overflown, true, half=True).grads == float("inf")


def by_rows() -> dict[str, Any]:
    """Return the adapters that read a batch's rows, each as the function that adds it to a model."""
    from peft import LilyConfig, PolyConfig

    targets = ["q_proj", "v_proj", "down_proj"]
    return {
        "Lily": lambda: LilyConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", init_weights=False),
        "Poly": lambda: PolyConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", n_tasks=2),
        "aLoRA": lambda: lora_config(alora_invocation_tokens=[5, 6], target_modules=targets),
    }


@pytest.mark.parametrize("name", ["Lily", "Poly", "aLoRA"])
def test_adapters_that_read_rows_are_refused(name: str) -> None:
    """The patch refuses them before any change. Added later, the report and each run refuse them until disabled."""
    from peft import get_peft_model

    model = get_peft_model(tiny_model("llama"), by_rows()[name]())
    with pytest.raises(fastpack.PatchError, match=f"{name} can't run on a patched model: .* unpatched"):
        fastpack.patch(model)
    assert not fastpack.is_patched(model)
    assert not any("forward" in module.__dict__ for module in model.modules())

    later = get_peft_model(fastpack.patch(tiny_model("llama")), by_rows()[name]())
    ((why, count),) = fastpack.report(later).as_modules.items()
    assert why.startswith(f"not isolated, and refused when it runs: {name}, ")
    assert count == 6
    batch = {"input_ids": torch.cat(make_sequences(VOCAB))[None], "packed_seq_lens": [7, 1, 19, 19, 33]}
    with pytest.raises(fastpack.PatchError, match=f"{name} can't run"):
        later(**batch)
    with later.disable_adapter():
        off = later(**batch).logits[0]
        assert fastpack.is_patched(fastpack.patch(later))
    assert relative(off, torch.cat(run_alone(tiny_model("llama"), make_sequences(VOCAB)).logits)) <= FLOAT32_BOUND


def of_the_head() -> dict[str, Any]:
    """Return adapters on modules that are not called projection by projection."""
    from peft import LilyConfig, PolyConfig, ShadowConfig

    head: dict[str, Any] = {"target_modules": ["lm_head"], "task_type": "CAUSAL_LM"}
    return {
        "Lily": lambda: LilyConfig(r=4, init_weights=False, **head),
        "Poly": lambda: PolyConfig(r=4, n_tasks=2, **head),
        "aLoRA": lambda: lora_config(alora_invocation_tokens=[5, 6], target_modules=["lm_head"]),
        "Shadow": lambda: ShadowConfig(task_type="CAUSAL_LM", init_weights=False),
    }


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("name", ["Lily", "Poly", "aLoRA", "Shadow"])
def test_adapters_that_read_rows_are_refused_wherever_they_lie(name: str, labels: bool) -> None:
    from peft import get_peft_model

    later: Any = get_peft_model(fastpack.patch(tiny_model("llama")), of_the_head()[name]()).eval()
    sequences = make_sequences(VOCAB)
    for batch in (padded(sequences, "right"), {**flat(sequences), "position_ids": positions(sequences)}):
        if not labels:
            batch.pop("labels", None)
        tasks = {"task_ids": torch.zeros(len(batch["input_ids"]), dtype=torch.long)} if name == "Poly" else {}
        with pytest.raises(fastpack.PatchError, match=f"{name} can't run on a patched model"):
            later(**batch, **tasks)
    fastpack.unpatch(later)
    with pytest.raises(fastpack.PatchError, match=f"{name} can't run on a patched model"):
        fastpack.patch(later)


def test_an_adapter_for_each_row_of_the_head_is_refused() -> None:
    model = with_lora(tiny_model("llama"), target_modules=["lm_head"]).eval()
    fastpack.patch(model)
    ids = torch.stack(make_sequences(VOCAB, [19, 19]))
    names = {"adapter_names": ["default", "__base__"]}
    with pytest.raises(fastpack.PatchError, match="adapter_names can't run on a patched model"):
        model(input_ids=ids, attention_mask=torch.ones_like(ids), **names)
    built = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, **names)
    assert built.shape == (2, 21), "generation runs the stock forward, which has rows"


def test_hooks_of_a_projection_see_one_row() -> None:
    model = fastpack.patch(tiny_model("llama"))
    seen = []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    model(**padded(make_sequences(VOCAB), "right"))
    ((kwargs, out),) = seen
    assert kwargs.shape[:2] == out.shape[:2] == (1, 7 + 1 + 19 + 19 + 33)


def test_an_adapter_for_each_row_is_refused() -> None:
    """PEFT gives each row its own adapter through hooks, which exist during one forward."""
    model = with_lora(tiny_model("llama")).eval()
    fastpack.patch(model)
    ids = torch.stack(make_sequences(VOCAB, [19, 19]))
    with pytest.raises(fastpack.PatchError, match="adapter_names can't run on a patched model"):
        model(input_ids=ids, attention_mask=torch.ones_like(ids), adapter_names=["default", "__base__"])


def test_merged_and_disabled_under_checkpointing() -> None:
    """The layer's first run unmerges the adapter; the recomputation must compute the same as that run."""
    ids = torch.cat(make_sequences(VOCAB))[None]
    losses = []
    for patched in (False, True):
        model = with_lora(tiny_model("llama"))
        model.base_model.model.model.norm.weight.requires_grad_()
        model.base_model.model.model.layers[0].input_layernorm.weight.requires_grad_()
        if patched:
            fastpack.patch(model)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.merge_adapter()
        model.base_model.disable_adapter_layers()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append((loss.detach(), model.base_model.model.model.norm.weight.grad))
    for stock, ours in zip(*losses, strict=True):
        assert relative(ours, stock) <= FLOAT32_BOUND
