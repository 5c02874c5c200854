"""Wrappers that other code puts over our forwards: unpatch, another patch and verify leave them in place."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from backbone_calls import Calls
from oracle import FLOAT32_BOUND, compare, make_sequences, padded, run_alone, run_batch
from patch_checks import CountingHook, check_exact, fingerprint
from sft_cases import check_equal, config, losses, rows, tokenizer
from tiny import VOCAB, tiny_model
from torch import nn
from transformers import AutoModelForSequenceClassification, TrainerCallback
from trl import SFTTrainer

import fastpack
from fastpack.errors import PatchError
from fastpack.patching.options import PatchOptions
from fastpack.patching.state import options_of
from fastpack.utils.replacement import PreHook, Replacement

SHORT = (5, 3, 7)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def ours_in(model: nn.Module) -> list[str]:
    """Names of the modules on which a forward or a hook of fastpack's still does something."""

    def does_something(result: Any) -> bool:
        return isinstance(result, (Replacement, PreHook)) and result.enabled

    return [
        name
        for name, module in model.named_modules()
        for result in (*module._forward_pre_hooks.values(), *map(module.__dict__.get, ("forward", "_old_forward")))
        if does_something(result)
    ]


ACTIONS: dict[str, Callable[[Any], object]] = {
    "verify": lambda trainer: fastpack.verify(trainer, lengths=SHORT),
    "patch anew": lambda trainer: fastpack.patch(trainer, kernels="torch"),
    "unpatch": fastpack.unpatch,
    "unpatch and patch": lambda trainer: fastpack.patch(fastpack.unpatch(trainer)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("first", ["model", "trainer"])
@pytest.mark.parametrize("action", ACTIONS)
def test_trls_fused_head_stays(action: str, first: str, tmp_path: Path, calls: Calls) -> None:
    """It is over our head where the model was patched first, and under it where the trainer was."""
    stock = SFTTrainer(tiny_model("llama"), args=config(tmp_path), train_dataset=rows(), processing_class=tokenizer())
    want = losses(stock)
    model = tiny_model("llama")
    if first == "model":
        fastpack.patch(model)
    trainer = SFTTrainer(model, args=config(tmp_path), train_dataset=rows(), processing_class=tokenizer())
    if first == "trainer":
        fastpack.patch(trainer)
    ACTIONS[action](trainer)
    before = len(calls.all)
    check_equal(losses(trainer), want)
    assert (len(calls.all) > before) == fastpack.is_patched(model) == (action != "unpatch")


def test_verify_leaves_everything_as_it_was() -> None:
    model = fastpack.patch(tiny_model("llama"))
    before = fingerprint(model)
    fastpack.verify(model, lengths=SHORT)
    assert fingerprint(model) == before


class VerifyMidway(TrainerCallback):
    def __init__(self) -> None:
        self.passed: list[bool] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self.passed.append(fastpack.verify(kwargs["model"], lengths=SHORT).passed)


def test_autocast_stays_after_verify(tmp_path: Path) -> None:
    """accelerate puts it around the head's forward; what is verified is the float32 model beneath it."""
    model = fastpack.patch(tiny_model("llama"))
    seen: list[torch.dtype] = []
    down = model.model.layers[0].mlp.down_proj
    down.register_forward_hook(lambda *args: seen.append(args[-1].dtype) if model.training else None)
    midway = VerifyMidway()
    arguments = config(tmp_path, max_steps=4, bf16=True)
    trainer = SFTTrainer(model, args=arguments, train_dataset=rows(), processing_class=tokenizer(), callbacks=[midway])
    trainer.train()
    assert midway.passed == [True]
    assert seen == [torch.bfloat16] * 4


@pytest.mark.parametrize("beneath", [False, True])
def test_a_users_own_wrapper(beneath: bool, calls: Calls) -> None:
    """It goes on to be called, with the stock model beneath it, and with ours once more."""
    model = tiny_model("llama")
    alone = run_alone(model, make_sequences(VOCAB))
    if beneath:
        fastpack.patch(model)
    called: list[int] = []
    under = model.forward

    @functools.wraps(under)
    def over(*args: Any, **kwargs: Any) -> Any:
        called.append(1)
        return under(*args, **kwargs)

    model.forward = over
    fastpack.patch(model)
    check_exact(model, alone)
    fastpack.unpatch(model)
    assert model.forward is over
    assert not ours_in(model)
    called.clear()
    before = len(calls.all)
    assert compare(run_alone(model, make_sequences(VOCAB)), alone).worst == 0
    assert called
    assert len(calls.all) == before
    fastpack.patch(model)
    called.clear()
    check_exact(model, alone)
    assert called
    assert len(calls.all) > before
    fastpack.unpatch(model)
    assert compare(run_alone(model, make_sequences(VOCAB)), alone).worst == 0


@pytest.mark.parametrize("order", ["hooks first", "patch first"])
@pytest.mark.parametrize("unhooked", ["before", "after"])
def test_accelerates_hooks_and_unpatch(order: str, unhooked: str) -> None:
    from accelerate.hooks import add_hook_to_module, remove_hook_from_module

    model = tiny_model("llama")
    alone = run_alone(model, make_sequences(VOCAB))
    if order == "patch first":
        fastpack.patch(model)
    hooks = {m: CountingHook() for m in model.modules() if not isinstance(m, nn.ModuleList)}
    for module, hook in hooks.items():
        add_hook_to_module(module, hook)
    if order == "hooks first":
        fastpack.patch(model)
    if unhooked == "after":
        fastpack.unpatch(model)
        for hook in hooks.values():
            hook.calls = 0
        assert compare(run_alone(model, make_sequences(VOCAB)), alone).worst == 0
        assert all(hook.calls for hook in hooks.values())
    for module in hooks:
        remove_hook_from_module(module)
    if unhooked == "before":
        check_exact(model, alone)
    fastpack.unpatch(model)
    assert not ours_in(model)
    assert compare(run_alone(model, make_sequences(VOCAB)), alone).worst == 0
    check_exact(fastpack.patch(model), alone)


@pytest.mark.parametrize("saved", [["self_attn"], ["norm", "input_layernorm"], ["mlp"]])
def test_modules_that_peft_copied(saved: list[str]) -> None:
    """``modules_to_save`` copies modules with our forwards on them."""
    from peft import LoraConfig, get_peft_model

    target = ["down_proj"] if saved != ["mlp"] else ["q_proj"]
    model = fastpack.patch(tiny_model("llama"))
    wrapped: Any = get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", target_modules=target, modules_to_save=saved, r=4)
    )
    fastpack.verify(wrapped, lengths=SHORT)
    assert fastpack.is_patched(wrapped)
    fastpack.unpatch(wrapped)
    assert not ours_in(wrapped)
    alone = run_alone(wrapped, make_sequences(VOCAB))
    check_exact(fastpack.patch(wrapped, strict=True), alone)


def test_norms_that_peft_copied() -> None:
    """LN tuning trains copies of norms, with our forwards on them."""
    from peft import LNTuningConfig, get_peft_model

    model = fastpack.patch(tiny_model("llama"))
    wrapped: Any = get_peft_model(model, LNTuningConfig(task_type="CAUSAL_LM", target_modules=["input_layernorm"]))
    fastpack.unpatch(wrapped)
    assert not ours_in(wrapped)
    merged = wrapped.merge_and_unload().requires_grad_(True)
    alone = run_alone(merged, make_sequences(VOCAB))
    check_exact(fastpack.patch(merged, strict=True), alone)
    assert not fastpack.report(merged).skipped


def test_patched_puts_back_what_was_in_force() -> None:
    model = fastpack.patch(tiny_model("llama"), kernels="torch")
    with fastpack.patched(model, kernels="torch"):
        pass
    assert fastpack.is_patched(model)
    with pytest.raises(ZeroDivisionError), fastpack.patched(model, loss="fused"):
        raise ZeroDivisionError
    assert options_of(model) == PatchOptions(kernels="torch")


def test_another_backbone_is_not_taken_for_the_patched_one() -> None:
    model, other = fastpack.patch(tiny_model("llama")), tiny_model("llama", seed=1)
    want = tiny_model("llama")
    want.model = copy.deepcopy(other.model)
    alone = run_alone(want, make_sequences(VOCAB))
    model.model = other.model
    with pytest.raises(PatchError, match=r"LlamaModel inside this LlamaForCausalLM is not patched.*patch\(model\)"):
        model(**padded(make_sequences(VOCAB), "right"))
    check_exact(fastpack.patch(model), alone)
    fastpack.unpatch(model)
    assert not ours_in(model)
    assert compare(run_batch(model, make_sequences(VOCAB), "padded right"), alone).worst <= FLOAT32_BOUND


@pytest.mark.parametrize("model_type", ["llama", "mamba", "bloom", "rwkv", "gpt2"])
def test_a_model_that_shares_layers_with_a_patched_one(model_type: str) -> None:
    """Neither unpatching it, which was never patched, nor trying to patch it takes anything off the other."""
    policy, reference = fastpack.patch(tiny_model(model_type)), tiny_model(model_type, seed=1)
    want = run_batch(policy, make_sequences(VOCAB), "TRL's keywords")
    for name, child in policy.base_model.named_children():
        if isinstance(child, nn.ModuleList):
            setattr(reference.base_model, name, child)
    for act in (fastpack.unpatch, fastpack.patch):
        refused = model_type == "llama" and act is fastpack.patch
        with pytest.raises(PatchError, match="already replaced") if refused else contextlib.nullcontext():
            act(reference)
        assert compare(run_batch(policy, make_sequences(VOCAB), "TRL's keywords"), want).worst == 0


@pytest.mark.usefixtures("accelerate_afresh")
@pytest.mark.parametrize("order", ["stay patched", "unpatch and unwrap", "unwrap and unpatch"])
def test_accelerates_unwrap_model(order: str) -> None:
    """It makes a method of our forward, which knows its module already."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model = tiny_model("llama")
    alone = run_alone(model, make_sequences(VOCAB))
    prepared = accelerator.prepare_model(fastpack.patch(model))
    if order == "unpatch and unwrap":
        fastpack.unpatch(prepared)
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    if order == "unwrap and unpatch":
        fastpack.unpatch(unwrapped)
    ids = make_sequences(VOCAB)[3][None]
    assert torch.equal(unwrapped(ids).logits, unwrapped(input_ids=ids).logits)
    check_exact(fastpack.patch(unwrapped), alone)
    assert compare(run_alone(fastpack.unpatch(unwrapped), make_sequences(VOCAB)), alone).worst == 0


@pytest.mark.usefixtures("accelerate_afresh")
def test_verify_knows_autocast_from_float32() -> None:
    """Ours over accelerate's autocast, and inside the user's own."""
    from accelerate import Accelerator

    prepared = Accelerator(mixed_precision="bf16", cpu=True).prepare_model(tiny_model("llama"))
    result = fastpack.verify(fastpack.patch(prepared), lengths=SHORT)
    assert result.dtype == "bfloat16"
    assert min(check.bound for check in result.checks) >= torch.finfo(torch.bfloat16).eps / 2
    model = fastpack.patch(tiny_model("llama"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fastpack.verify(model, lengths=SHORT).dtype == "bfloat16"
    result = fastpack.verify(model, lengths=SHORT)
    assert (result.dtype, {check.bound for check in result.checks if not check.at_least}) == ("float32", {1e-5})


def test_verify_refuses_what_gives_one_result_a_row() -> None:
    model = fastpack.patch(tiny_model("llama", auto=AutoModelForSequenceClassification, num_labels=2))
    with pytest.raises(PatchError, match="LlamaForSequenceClassification gives one result a row"):
        fastpack.verify(model)


def test_a_patch_that_can_t_be_changed_stays() -> None:
    model = fastpack.patch(tiny_model("llama"), kernels="torch")
    alone = run_alone(tiny_model("llama"), make_sequences(VOCAB))
    attention = model.model.layers[0].self_attn
    under = attention.forward
    attention.forward = lambda *args, **kwargs: under(*args, **kwargs)
    for _ in range(2):
        with pytest.raises(PatchError, match="already replaced"):
            fastpack.patch(model, loss="fused")
        result = options_of(model)
        assert result == PatchOptions(kernels="torch")
        check_exact(model, alone)
    fastpack.unpatch(model)
    assert not ours_in(model)
    assert compare(run_alone(model, make_sequences(VOCAB)), alone).worst == 0


@pytest.mark.parametrize("first", ["patch", "hooks"])
def test_copies_under_accelerates_hooks(first: str) -> None:
    from accelerate import dispatch_model
    from peft import LoraConfig, get_peft_model

    model: Any = tiny_model("llama")
    alone = run_alone(model, make_sequences(VOCAB))
    if first == "patch":
        fastpack.patch(model)
    model = dispatch_model(model, {"": "cpu"}, force_hooks=True)
    fastpack.patch(model)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["down_proj"], modules_to_save=["norm", "self_attn"])
    wrapped: Any = get_peft_model(model, config)
    fastpack.unpatch(wrapped)
    out = wrapped(**padded(make_sequences(VOCAB), "right"))
    assert (out.loss - alone.loss).abs() <= 0.1 * alone.loss


def test_a_compiled_decoder_is_the_patched_one() -> None:
    model, plain = fastpack.patch(tiny_model("opt").eval()), tiny_model("opt").eval()
    batch = padded(make_sequences(VOCAB), "right")
    model.model.decoder = torch.compile(model.model.decoder, backend="eager")  # without dropout: in evaluation
    assert torch.allclose(model(**batch).loss, plain(**batch).loss, rtol=1e-5)


def test_a_hook_of_a_c_function_is_nobody_s() -> None:
    model = tiny_model("llama")
    model.register_forward_pre_hook(functools.partial([].count))
    fastpack.unpatch(fastpack.patch(model))
