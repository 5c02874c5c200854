"""What stands around blocks of experts: hooks, checkpointing, autocast, compilation, the user's own implementation."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from adapter_cases import KINDS
from expert_models import (
    FAMILIES,
    blocks_of,
    check_against_stock,
    check_half,
    expert_model,
    outermost_of,
    plain,
    reasons,
    with_expert_lora,
)
from oracle import FLOAT32_BOUND, Result, compare, flat, make_sequences, relative, run_alone, run_batch
from patch_checks import CountingHook
from tiny import VOCAB, tiny_model
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastpack

SEQUENCES = make_sequences(VOCAB, (7, 1, 9))
BUILD = {"whole": expert_model, "LoRA": lambda model_type, **more: with_expert_lora(expert_model(model_type, **more))}


# --- hooks and forwards of others -------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["the block", "a wrapper inside", "the outermost wrapper"])
def test_hooks_are_called(where: str, expert_calls: list[Any]) -> None:
    """Hooks of the outermost module run around the fast forward; with hooks further inside the stock one runs."""
    model, stock = (with_expert_lora(expert_model("qwen3_moe")) for _ in range(2))
    fastpack.patch(model)
    seen: list[Tensor] = []
    for each in (model, stock):
        outermost = outermost_of(each)[0]
        inside = {"the block": blocks_of(each)[0], "a wrapper inside": outermost.base_layer}
        inside.get(where, outermost).register_forward_hook(lambda _, __, out: seen.append(out.detach()) or out * 1.5)
    fast = 2 if where == "the outermost wrapper" else 1
    check_against_stock(model, stock, expert_calls, runs=fast)
    ours, theirs = seen[-1], torch.cat(seen[:5])
    assert relative(ours.view(theirs.shape), theirs) <= FLOAT32_BOUND
    assert len(reasons(model)) == 2 - fast
    assert all("hooks" in why for why in reasons(model))


def test_hooks_on_a_block_without_lora(expert_calls: list[Any]) -> None:
    model, stock = expert_model("gpt_oss"), expert_model("gpt_oss")
    fastpack.patch(model)
    for each in (model, stock):
        blocks_of(each)[1].register_forward_pre_hook(lambda _, args: (args[0] * 1.5, *args[1:]))
        blocks_of(each)[0].register_full_backward_hook(lambda _, grads, __: (grads[0] * 2, *grads[1:]))
    check_against_stock(model, stock, expert_calls)
    assert reasons(model) == []


def test_a_forward_that_was_replaced_before(expert_calls: list[Any]) -> None:
    """Other code's forward stays, and the report names it."""
    model, stock = expert_model("qwen3_moe"), expert_model("qwen3_moe")
    for each in (model, stock):
        block = blocks_of(each)[0]
        block.forward = functools.partial(lambda own, *args: 1.5 * type(own).forward(own, *args), block)
    fastpack.patch(model)
    check_against_stock(model, stock, expert_calls, runs=1)
    assert reasons(model) == ["other code had already replaced its forward: left alone"]
    fastpack.unpatch(model)
    assert "forward" in blocks_of(model)[0].__dict__


class Louder(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1.2


def test_a_parametrized_stack(expert_calls: list[Any]) -> None:
    """Its weight is computed anew at each use, so the stock forward runs."""
    model, stock = expert_model("qwen3_moe"), expert_model("qwen3_moe")
    fastpack.patch(model)
    for each in (model, stock):
        parametrize.register_parametrization(blocks_of(each)[0], "down_proj", Louder())
    check_against_stock(model, stock, expert_calls, runs=1)
    assert reasons(model) == ["its down_proj is not a plain parameter: the stock forward runs"]


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("hooked_first", [False, True])
def test_accelerate_s_hooks(hooked_first: bool, wrapped: bool, expert_calls: list[Any]) -> None:
    """Offloading loads weights in such a hook."""
    from accelerate.hooks import add_hook_to_module, remove_hook_from_module

    build = BUILD["LoRA" if wrapped else "whole"]
    model, stock, hook = build("qwen3_moe"), build("qwen3_moe"), CountingHook()
    if not hooked_first:
        fastpack.patch(model)
    add_hook_to_module(outermost_of(model)[0], hook)
    if hooked_first:
        fastpack.patch(model)
    check_against_stock(model, stock, expert_calls)
    assert hook.calls == len(KINDS)
    fastpack.unpatch(model)
    check_stock(model, stock)
    assert hook.calls > len(KINDS)
    remove_hook_from_module(outermost_of(model)[0])


def check_stock(model: Any, stock: Any) -> None:
    assert not fastpack.is_patched(model)
    assert compare(run_alone(model, SEQUENCES), run_alone(stock, SEQUENCES)).worst <= FLOAT32_BOUND


# --- the user's implementation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["batched_mm", "eager"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("build", BUILD.values(), ids=BUILD)
def test_an_implementation_that_was_chosen_by_name(build: Any, when: str, name: str, expert_calls: list[Any]) -> None:
    model, stock = build("qwen3_moe"), build("qwen3_moe")
    stock.set_experts_implementation(name)
    if when == "before":
        model.set_experts_implementation(name)
    fastpack.patch(model)
    if when == "after":
        model.set_experts_implementation(name)
    check_against_stock(model, stock, expert_calls, runs=0)
    (reason,) = reasons(model)
    assert f"experts_implementation={name!r} was chosen by name" in reason


def test_the_default_by_name(expert_calls: list[Any]) -> None:
    model = expert_model("gpt_oss")
    model.set_experts_implementation("grouped_mm")
    check_against_stock(fastpack.patch(model), expert_model("gpt_oss"), expert_calls)


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("build", BUILD.values(), ids=BUILD)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_checkpointing(model_type: str, build: Any, reentrant: bool, expert_calls: list[Any]) -> None:
    model, stock = build(model_type), build(model_type)
    fastpack.patch(model)
    for each in (model, stock):
        each.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            each.enable_input_require_grads()
    check_against_stock(model, stock, expert_calls, runs=4)


@pytest.mark.parametrize("build", ["whole", "LoRA"])
def test_jitter_of_routers(build: str, expert_calls: list[Any]) -> None:
    """Mixtral's is drawn for each token as the stock model draws it, so one seed gives one loss."""
    results = []
    (sequence,) = make_sequences(VOCAB, (37,))
    for patched in (False, True):
        model: Any = tiny_model("mixtral", router_jitter_noise=0.3)
        model = with_expert_lora(model) if build == "LoRA" else model
        if patched:
            fastpack.patch(model)
        expert_calls.clear()
        for seed in (5, 6):
            torch.manual_seed(seed)
            out = model(**flat([sequence]), use_cache=False)
            out.loss.backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            results.append(Result([out.logits[0].detach()], out.loss.detach(), gradients))
            model.zero_grad()
        assert len(expert_calls) == (4 if patched else 0)
    for ours, theirs in zip(results[2:], results[:2], strict=True):
        assert compare(ours, theirs).worst <= FLOAT32_BOUND
    assert compare(results[3], results[0]).worst > 1e-2, "the control: another seed draws another jitter"


@pytest.mark.parametrize("build", BUILD.values(), ids=BUILD)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_balancing_losses(model_type: str, build: Any, expert_calls: list[Any]) -> None:
    """Routers' logits are the stock ones, and so is the loss over them, of real tokens alone."""
    settings = {"router_aux_loss_coef": 0.5, "output_router_logits": True}
    model, stock = build(model_type, **settings), build(model_type, **settings)
    fastpack.patch(model)
    batch = flat(SEQUENCES)
    padded = {"input_ids": nn.utils.rnn.pad_sequence(SEQUENCES, batch_first=True)}
    lengths = torch.tensor([len(s) for s in SEQUENCES])
    padded["attention_mask"] = (torch.arange(9) < lengths[:, None]).long()
    padded["labels"] = padded["input_ids"].masked_fill(padded["attention_mask"] == 0, -100)
    expert_calls.clear()
    ours, theirs = (each(**padded, use_cache=False) for each in (model, stock))
    assert relative(ours.aux_loss, theirs.aux_loss) <= FLOAT32_BOUND
    assert relative(ours.loss, theirs.loss) <= FLOAT32_BOUND
    for each, out in ((model, ours), (stock, theirs)):
        each.zero_grad()
        out.aux_loss.backward()
    for (name, mine), right in zip(model.named_parameters(), stock.parameters(), strict=True):
        if right.grad is not None and right.grad.abs().max() > 1e-6:
            assert relative(mine.grad, right.grad) <= 1e-4, name
    assert len(expert_calls) == 2
    assert batch["input_ids"].shape[1] == 17


@pytest.mark.parametrize("build", BUILD.values(), ids=BUILD)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_autocast(model_type: str, build: Any, expert_calls: list[Any]) -> None:
    """The stock model computes expert by expert: transformers' grouped matmuls don't know autocast."""
    model, stock, wide = (build(model_type) for _ in range(3))
    stock.set_experts_implementation("eager")
    check_half(fastpack.patch(model), stock, wide, expert_calls, autocast="cpu")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_models_in_bfloat16(model_type: str, expert_calls: list[Any]) -> None:
    model, stock, wide = (with_expert_lora(expert_model(model_type).to(torch.bfloat16)) for _ in range(3))
    assert all(p.dtype == torch.float32 for name, p in model.named_parameters() if "lora_" in name)
    check_half(fastpack.patch(model), stock, wide.float(), expert_calls)


@pytest.mark.usefixtures("compile_anew")
@pytest.mark.parametrize("build", [expert_model, pytest.param(BUILD["LoRA"], marks=pytest.mark.slow)], ids=BUILD)
def test_compiled(build: Any, expert_calls: list[Any]) -> None:
    """Inside ``torch.compile`` the stock forward runs."""
    model, stock = build("qwen3_moe"), build("qwen3_moe")
    alone = run_alone(stock, SEQUENCES)
    fastpack.patch(model)
    expert_calls.clear()
    compiled = torch.compile(model, backend="eager")
    ours = run_batch(compiled, SEQUENCES, "TRL's keywords")
    assert len(expert_calls) == 0
    grads = {name.removeprefix("_orig_mod."): grad for name, grad in ours.grads.items()}
    assert compare(Result(ours.logits, ours.loss, grads), alone).worst <= FLOAT32_BOUND
    check_against_stock(model, stock, expert_calls)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_generation(model_type: str) -> None:
    """The same tokens as the stock model's, with adapters."""
    model, stock = (with_expert_lora(expert_model(model_type)).eval() for _ in range(2))
    fastpack.patch(model)
    ids = SEQUENCES[0][None]
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **settings), stock.generate(ids, **settings))
    assert plain(model).config._experts_implementation == plain(stock).config._experts_implementation


# --- no dense updates -------------------------------------------------------------------------------------------------


class LargeTensors(TorchDispatchMode):
    """Count new tensors of at least so many elements; views are not new."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.seen, self.all = least, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in known:
                self.all += 1
                self.seen += x.numel() >= self.least
        return result


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_update_or_gradient_of_a_stack_is_made(model_type: str, checkpointed: bool, expert_calls: list[Any]) -> None:
    """In a whole step of training; the control is PEFT's forward, which makes several for each stack."""
    counts = []
    for patched in (True, False):
        wide = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64}
        model = with_expert_lora(expert_model(model_type, **wide))
        least = min(p.numel() for block in blocks_of(model) for p in block.parameters() if p.ndim == 3)
        assert least > 3 * VOCAB * 64 // 2
        if patched:
            fastpack.patch(model)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        large = LargeTensors(least // 2)
        for experts in outermost_of(model):
            experts.register_forward_pre_hook(lambda *_, mode=large: mode.__enter__() and None)
            experts.register_forward_hook(lambda *_, mode=large: mode.__exit__(None, None, None))
        expert_calls.clear()
        loss = model(**flat(SEQUENCES), use_cache=False).loss
        with large:
            loss.backward()
        counts.append(large.seen)
        assert large.all > 100
        assert len(expert_calls) == (2 + 2 * checkpointed) * patched
    assert counts[0] == 0
    assert counts[1] >= 2 * 2 * 2, "forward and backward of two stacks in two layers"
