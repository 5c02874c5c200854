"""The fused decoder layer: its fused parts, its fallbacks, and what checkpointing runs again."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from adapter_cases import with_lora
from oracle import FLOAT32_BOUND, Result, compare, make_sequences, relative, run_alone, run_batch
from tiny import VOCAB, tiny_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastpack
from fastpack.layers import decoder, mlp
from fastpack.utils.hooks import has_hooks

KIND = "TRL's keywords"


def test_a_layer_is_three_functions_and_attention(calls: dict[str, int]) -> None:
    sequences = make_sequences(VOCAB)
    alone = run_alone(tiny_model("llama"), sequences)
    model = fastpack.patch(tiny_model("llama"))
    assert compare(run_batch(model, sequences, KIND), alone).worst <= FLOAT32_BOUND
    assert calls == {"project": 4, "gated_mlp": 2, "add_updates": 0}, "q, k, v and o of two layers; their MLPs"


@pytest.mark.parametrize("where", ["self_attn", "mlp", "input_layernorm", "post_attention_layernorm"])
def test_hooks_on_a_module_are_called(where: str, calls: dict[str, int]) -> None:
    """Their changes take effect, since a module with hooks is called as a module."""
    sequences = make_sequences(VOCAB)
    seen: list[str] = []

    def hook(module: Any, args: Any, output: Any) -> Any:
        seen.append(where)
        return (output[0] * 1.5, *output[1:]) if isinstance(output, tuple) else output * 1.5

    stock, model = tiny_model("llama"), fastpack.patch(tiny_model("llama"))
    getattr(stock.model.layers[0], where).register_forward_hook(hook)
    alone = run_alone(stock, sequences)
    seen.clear()
    getattr(model.model.layers[0], where).register_forward_hook(hook)
    assert compare(run_batch(model, sequences, KIND), alone).worst <= FLOAT32_BOUND
    assert seen == [where]
    assert calls["gated_mlp"] >= 1, "the other layer is as fast as before"


def test_hooks_on_a_projection_are_called() -> None:
    sequences = make_sequences(VOCAB)
    stock, model = tiny_model("llama"), fastpack.patch(tiny_model("llama"))
    seen: list[Tensor] = []
    for each in (stock, model):
        each.model.layers[1].mlp.up_proj.register_forward_hook(lambda m, a, out: seen.append(out) or out * 2)
    alone = run_alone(stock, sequences)
    seen.clear()
    assert compare(run_batch(model, sequences, KIND), alone).worst <= FLOAT32_BOUND
    assert len(seen) == 1
    reasons = fastpack.report(model).as_modules
    assert list(reasons.values()) == [1]
    assert "hooks" in next(iter(reasons))


def products(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record for each MLP call whether its last matmul was computed."""
    result: list[bool] = []
    stock = mlp.gated_mlp

    def recorded(*args: Any, need_output: bool = True, **kwargs: Any) -> Tensor:
        result.append(need_output)
        return stock(*args, need_output=need_output, **kwargs)

    monkeypatch.setattr(mlp, "gated_mlp", recorded)
    return result


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_checkpointing_leaves_out_the_last_product(
    model_type: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = make_sequences(VOCAB)
    alone = run_alone(tiny_model(model_type), sequences)
    model = fastpack.patch(tiny_model(model_type))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    result = products(monkeypatch)
    assert compare(run_batch(model, sequences, KIND), alone).worst <= FLOAT32_BOUND
    again = model_type == "gemma2" or reentrant  # a norm follows; the reentrant kind does not say what it is
    layers = len(model.model.layers)
    assert result == [True] * layers + [again] * layers


def test_checkpointing_around_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the recomputation of an outer checkpoint, a layer's first forward must give its result."""
    sequences = make_sequences(VOCAB)
    ids = torch.cat(sequences)[None]
    lengths = [len(s) for s in sequences]
    gradients = []
    for nested in (False, True):
        model = fastpack.patch(tiny_model("llama"))
        model.gradient_checkpointing_enable({"use_reentrant": False})
        result = products(monkeypatch) if nested else []
        embeds = model.model.embed_tokens(ids).detach().requires_grad_()

        def run(x: Tensor, model: Any = model) -> Tensor:
            return model.model(inputs_embeds=x, packed_seq_lens=lengths, use_cache=False).last_hidden_state

        out = torch.utils.checkpoint.checkpoint(run, embeds, use_reentrant=False) if nested else run(embeds)
        out.sum().backward()
        gradients.append(embeds.grad)
    assert relative(gradients[1], gradients[0]) <= FLOAT32_BOUND
    assert result[:4] == [True] * 4, "forward, and forward again for the model's recomputation"
    assert result[4:] == [False, False], "and each layer's own"


def test_the_check_knows_torch_s_checkpointing() -> None:
    """If torch renames the names that the check reads, only the saving is lost, and this test fails."""
    model = tiny_model("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layer = model.model.layers[0]
    result: list[bool] = []

    def function(x: Tensor) -> Tensor:
        result.append(decoder._is_run_again(layer))
        return x * x

    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False).sum().backward()
    assert result == [False, True]


def test_the_oracle_refuses_nan() -> None:
    sequences = make_sequences(VOCAB)
    alone = run_alone(tiny_model("llama"), sequences)
    for name in ("model.layers.0.self_attn.k_proj.weight", "lm_head.weight"):
        bad = Result(alone.logits, alone.loss, {**alone.grads, name: alone.grads[name] * float("nan")})
        assert compare(bad, alone).worst == float("inf")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_hook_on_the_layer_reads_what_it_gives(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If checkpointing runs the hook again with the layer, the result is computed again too."""
    sequences = make_sequences(VOCAB)
    results = []
    for patched in (False, True):
        model = tiny_model("llama")
        for layer in model.model.layers:
            layer.steer = nn.Parameter(torch.linspace(0.5, 1.5, 32))
            layer.register_forward_hook(lambda module, args, out: out * module.steer)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        if patched:
            fastpack.patch(model)
        results.append(run_batch(model, sequences, KIND) if patched else run_alone(model, sequences))
    error = compare(results[1], results[0])
    assert error.worst <= FLOAT32_BOUND, error
    layer = model.model.layers[0]
    monkeypatch.setattr(decoder, "_checkpoints_in_forward", lambda cls: False)  # as transformers did before
    result: list[bool] = []

    def function(x: Tensor) -> Tensor:
        result.append(decoder._is_run_again(layer))
        return x * x

    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False).sum().backward()
    assert result == [False, False]


def test_fsdp2_s_hooks_read_nothing() -> None:
    """Transformers up to 5.17 checkpoints around them, and the last product is left out all the same."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    layer = tiny_model("llama").model.layers[0]
    state = object.__new__(FSDPState)
    layer.register_forward_pre_hook(state._pre_forward, with_kwargs=True)
    layer.register_forward_hook(state._post_forward)
    assert has_hooks(layer)
    assert not has_hooks(layer, that_read=True)
    layer.register_forward_hook(lambda module, args, out: out)
    assert has_hooks(layer, that_read=True), "the control"


@pytest.mark.parametrize("lora", [False, True])
def test_selective_checkpointing(lora: bool) -> None:
    """Torch's own policy chooses what is saved. Matmul results are saved, and nothing overwrites them."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE

    sequences = make_sequences(VOCAB)

    def build() -> Any:
        return with_lora(tiny_model("llama")) if lora else tiny_model("llama")

    alone = run_alone(build(), sequences)
    model = fastpack.patch(build())
    context = functools.partial(create_selective_checkpoint_contexts, policy)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": context})
    model.enable_input_require_grads()
    error = compare(run_batch(model, sequences, KIND), alone)
    assert error.worst <= FLOAT32_BOUND, error


def test_phi3_s_dropouts_are_the_modules() -> None:
    """A dropout is called as a module if it alone is in training mode, was replaced, or is watched."""
    ids = torch.cat(make_sequences(VOCAB, [37]))[None]

    def logits(change: Any, patched: bool) -> Tensor:
        model = tiny_model("phi3", resid_pdrop=0.5).eval()
        for layer in model.model.layers:
            change(layer)
        if patched:
            fastpack.patch(model)
        torch.manual_seed(3)
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False, **({"packed_seq_lens": [37]} if patched else {})).logits

    def by_hand(layer: Any) -> None:
        layer.resid_mlp_dropout.p = 0.5
        layer.resid_mlp_dropout.train()

    def replaced(layer: Any) -> None:
        layer.resid_attn_dropout = nn.Identity()

    def watched(layer: Any) -> None:
        layer.resid_mlp_dropout.register_forward_hook(lambda module, args, out: out * 1.5)

    for change in (by_hand, replaced, watched):
        assert relative(logits(change, True), logits(change, False)) <= FLOAT32_BOUND


def test_capturing_hidden_states_once_does_not_undo_the_fusion(calls: dict[str, int]) -> None:
    """transformers never removes its capturing hooks from attention modules."""
    model = fastpack.patch(tiny_model("llama"))
    batch = {"input_ids": torch.cat(make_sequences(VOCAB))[None], "packed_seq_lens": [7, 1, 19, 19, 33]}
    model(**batch, output_hidden_states=True)
    calls.update(dict.fromkeys(calls, 0))
    model(**batch)
    assert calls == {"project": 4, "gated_mlp": 2, "add_updates": 0}


def test_hooks_for_every_module_are_called() -> None:
    from torch.nn.modules.module import register_module_forward_hook

    ids = torch.cat(make_sequences(VOCAB, [37]))[None]
    stock, model = tiny_model("llama").eval(), fastpack.patch(tiny_model("llama").eval())
    handle = register_module_forward_hook(lambda m, args, out: out * 1.5 if type(m) is nn.Linear else None)
    try:
        want = stock(input_ids=ids, use_cache=False).logits
        assert relative(model(input_ids=ids, packed_seq_lens=[37]).logits, want) <= FLOAT32_BOUND
    finally:
        handle.remove()
    assert relative(model(input_ids=ids, packed_seq_lens=[37]).logits, want) > 1e-2


@pytest.mark.parametrize("inside", ["none", "reentrant", "not reentrant", "half of the layers", "somebody's own"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_inside_checkpointing(reentrant: bool, inside: str) -> None:
    """A layer's first forward inside the model's recomputation must give its result."""
    ids = torch.randint(3, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))

    def gradients(model: Any, around: bool) -> Tensor:
        def loss(zero: Tensor) -> Any:
            return model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss + zero

        zero = torch.zeros((), requires_grad=True)
        (checkpoint(loss, zero, use_reentrant=reentrant) if around else loss(zero)).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    want = gradients(tiny_model("llama"), around=False)
    model = fastpack.patch(tiny_model("llama"))
    if inside != "none":
        model.gradient_checkpointing_enable({"use_reentrant": inside == "reentrant"})
    if inside == "half of the layers":
        model.model.layers[1]._gradient_checkpointing_func = lambda run, *args, **kwargs: run(*args, **kwargs)
    if inside == "somebody's own":
        for layer in model.model.layers:
            layer._gradient_checkpointing_func = lambda run, *args: checkpoint(run, *args, use_reentrant=False)
    assert relative(gradients(model, around=True), want) <= FLOAT32_BOUND
