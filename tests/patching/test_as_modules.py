"""``report(model).as_modules`` gives each reason if its cause is present, and no reason otherwise.

A projection that can't be read must be called as a module, with the stock result. This is checked too. Some reasons
have tests of their own: adapters that read rows and a compute dtype that is not the input's (test_fused_lora.py),
weights of ZeRO-3 and FSDP2 (distributed).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import lora_config, nf4, with_ia3, with_lora
from op_checks import count_calls
from oracle import FLOAT32_BOUND, INPUT_KINDS, compare, make_sequences, relative, run_alone, run_batch, split_logits
from tiny import VOCAB, tiny_model
from torch import Tensor, nn

import fastpack
from fastpack.layers.read_projection import read_projection

KIND = "TRL's keywords"
WHERE = "layers.1.mlp.up_proj"
BOTH = ("layers.0.mlp.up_proj", WHERE)
HOOKS = "it carries hooks, or a forward of its own (offloading does this)"
FUSED = {"project": 4, "gated_mlp": 2, "add_updates": 0}


@dataclass(frozen=True)
class Case:
    """A model with fused projections, a cause that keeps some of them from it, and the report's reason.

    Attributes:
        build: the model.
        cause: the change to the model and to its projection :data:`WHERE`.
        reason: the report's reason for each projection in ``where``.
        called: the module that is called: the base layer, if LoRA's update can be fused on top.
        trains: False if bitsandbytes itself supports inference only.
        once: the call itself removes the cause.
    """

    build: Callable[[Path], Any]
    cause: Callable[[Any, Any], object]
    reason: str
    where: tuple[str, ...] = (WHERE,)
    called: str = WHERE
    trains: bool = True
    once: bool = False


class Tagged(nn.Parameter):
    """A weight of a subclass, as other libraries use them."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, data: Tensor, requires_grad: bool = True) -> Any:
        return Tensor._make_subclass(cls, data.detach(), requires_grad)


class Doubled(nn.Linear):
    """A linear layer that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Halved(nn.Module):
    """A module in the place of an adapter's dropout that draws nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def plain(tmp_path: Path) -> Any:
    return tiny_model("llama")


def lora(tmp_path: Path) -> Any:
    return with_lora(tiny_model("llama"))


def qlora(tmp_path: Path) -> Any:
    return with_lora(nf4(tmp_path))


def half_as_much(module: Any) -> None:
    """Halve a result, as a hook whose absence would show."""
    module.register_forward_hook(lambda module, args, out: out / 2)


def set_forward(module: Any) -> None:
    module.forward = lambda x: nn.functional.linear(x, module.weight) / 2


def tag(module: Any) -> None:
    module.weight = Tagged(module.weight, module.weight.requires_grad)


def replace(model: Any, built: Callable[[Any], nn.Module]) -> None:
    mlp = model.get_submodule("model.layers.1.mlp")
    mlp.up_proj = built(mlp.up_proj)


def doubled(linear: Any) -> nn.Module:
    built = Doubled(linear.in_features, linear.out_features, bias=False)
    built.weight = linear.weight
    return built


def in_8_bit(linear: Any) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    built = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, bias=False, has_fp16_weights=False)
    built.weight = bnb.nn.Int8Params(linear.weight.detach(), requires_grad=False, has_fp16_weights=False)
    return built.to("cpu")


def second(model: Any, active: Any = "second", **settings: Any) -> None:
    """Add another active adapter to both up_proj."""
    torch.manual_seed(2)
    model.add_adapter("second", lora_config(r=2, target_modules=["up_proj"], init_lora_weights=False, **settings))
    model.base_model.set_adapter(active)


def forget_compute_dtype(module: Any) -> None:
    module.compute_dtype, module.compute_type_is_set = None, False


def pack_for_a_cpu(module: Any) -> None:
    """Pack a weight as bitsandbytes does in evaluation on a CPU."""
    if not pytest.importorskip("bitsandbytes").functional.has_avx512bf16():
        pytest.skip("bitsandbytes packs weights for CPUs with AVX512-BF16 alone")
    module.eval()
    with torch.no_grad():
        module(torch.zeros(1, module.in_features))
    module.train()


def part(name: str) -> Callable[[Any], Any]:
    """Return a function that returns a projection's LoRA A, B or dropout."""
    return lambda module: getattr(module, name)["default"]


CASES = {
    "hooks": Case(plain, lambda _, up: half_as_much(up), HOOKS),
    "a forward of its own": Case(plain, lambda _, up: set_forward(up), HOOKS),
    "a weight's class": Case(plain, lambda _, up: tag(up), "its weight is a Tagged"),
    "partitioned": Case(plain, lambda _, up: setattr(up.weight, "ds_id", 0), "its weight is partitioned"),
    "another layer": Case(plain, lambda model, _: replace(model, doubled), "a Doubled"),
    "8-bit": Case(plain, lambda model, _: replace(model, in_8_bit), "LLM.int8 has a matmul of its own"),
    "IA3": Case(
        plain,
        lambda model, _: with_ia3(model, target_modules=["up_proj"], feedforward_modules=[]),
        "wrapped by peft.tuners.ia3.layer.Linear, an adapter that is not read (plain LoRA is)",
        BOTH,
    ),
    "4-bit without a compute dtype": Case(
        nf4, lambda _, up: forget_compute_dtype(up), "it has not chosen its compute dtype yet", once=True
    ),
    "4-bit for a CPU": Case(
        nf4, lambda _, up: pack_for_a_cpu(up), "its 4-bit weight is packed for a CPU", trains=False
    ),
    "4-bit for a CPU under LoRA": Case(
        qlora,
        lambda _, up: pack_for_a_cpu(up.base_layer),
        "under LoRA, its 4-bit weight is packed for a CPU",
        called=f"{WHERE}.base_layer",
        trains=False,
    ),
    "hooks under LoRA": Case(
        lora, lambda _, up: half_as_much(up.base_layer), f"under LoRA, {HOOKS}", called=f"{WHERE}.base_layer"
    ),
    "hooks around LoRA": Case(lora, lambda _, up: half_as_much(up), HOOKS),
    "two adapters": Case(
        lora, lambda model, _: second(model, ["default", "second"]), "2 adapters are active at once", BOTH
    ),
    "DoRA": Case(
        lora, lambda model, _: second(model, use_dora=True), "its adapter is a DoraLinearVariant", BOTH
    ),
    "LoRA with a bias": Case(
        lora, lambda model, _: second(model, lora_bias=True), "its adapter is not two plain matrices", BOTH
    ),
    **{
        f"hooks of {name}": Case(
            lora, lambda _, up, name=name: half_as_much(part(name)(up)), "its adapter carries hooks"
        )
        for name in ("lora_A", "lora_B", "lora_dropout")
    },
    "another dropout": Case(
        lora, lambda _, up: up.lora_dropout.update({"default": Halved()}), "its adapter's dropout is a Halved"
    ),
    **{
        f"the class of {name}": Case(
            lora, lambda _, up, name=name: tag(part(name)(up)), "in its adapter, its weight is a Tagged"
        )
        for name in ("lora_A", "lora_B")
    },
}  # fmt: skip


def found_at(model: Any, where: str = WHERE) -> Any:
    """Return the module at this place, inside any wrappers of the model."""
    (module,) = (module for name, module in model.named_modules() if name.endswith(where))
    return module


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Count the calls of each module without a hook, since a hook would itself be a reason."""
    result: Counter[int] = Counter()
    stock = nn.Module.__call__

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result[id(self)] += 1
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", counted)
    return result


def test_a_4bit_weight_whose_layer_keeps_the_state_is_read(tmp_path: Path, called: Counter[int]) -> None:
    """Wrappers and FSDP2 make plain parameters of it; bitsandbytes restores them in the module's call."""
    alone = run_alone(nf4(tmp_path), make_sequences(VOCAB))
    model = fastpack.patch(nf4(tmp_path))
    up = found_at(model)
    up.weight = nn.Parameter(up.weight.data, requires_grad=False)
    assert compare(run_batch(model, make_sequences(VOCAB), KIND), alone).worst <= FLOAT32_BOUND
    assert fastpack.report(model).as_modules == {}
    assert not called[id(up)]
    up.quant_state = None
    assert read_projection(up) == "its 4-bit weight is not quantised yet, partitioned or offloaded"


@pytest.mark.parametrize("name", CASES)
def test_reasons(name: str, tmp_path: Path, calls: dict[str, int], called: Counter[int]) -> None:
    case = CASES[name]
    sequences = make_sequences(VOCAB)
    stock, model = case.build(tmp_path), fastpack.patch(case.build(tmp_path))

    def error() -> float:
        if case.trains:
            return compare(run_batch(model, sequences, KIND), run_alone(stock, sequences)).worst
        batch = INPUT_KINDS[KIND](sequences)
        with torch.no_grad():
            alone = [stock(input_ids=s[None], use_cache=False).logits[0] for s in sequences]
            return relative(torch.cat(split_logits(model(**batch).logits, batch, sequences)), torch.cat(alone))

    assert error() <= FLOAT32_BOUND
    assert fastpack.report(model).as_modules == {}, "the control: nothing is reported without the cause"
    assert calls == FUSED
    assert not called[id(found_at(model, case.called))], "nor called"

    for each in (stock, model):
        case.cause(each, found_at(each))
    assert fastpack.report(model).as_modules == {case.reason: len(case.where)}
    assert {read_projection(found_at(model, where), at_rest=True) for where in case.where} == {case.reason}
    calls.update(dict.fromkeys(calls, 0))
    called.clear()
    assert error() <= FLOAT32_BOUND
    assert called[id(found_at(model, case.called))] == 1
    assert calls["gated_mlp"] == 2 - len(case.where), "the other MLP is as fast as before"
    assert fastpack.report(model).as_modules == ({} if case.once else {case.reason: len(case.where)})


def test_offloaded_with_the_module_around_them() -> None:
    """accelerate loads weights when the outer module is called. Until then, inner modules have no weights or hooks."""
    from accelerate import cpu_offload

    sequences = make_sequences(VOCAB)
    model = tiny_model("llama")
    alone = run_alone(model, sequences)
    fastpack.patch(model)
    assert fastpack.report(model).as_modules == {}
    cpu_offload(model, execution_device=torch.device("cpu"), preload_module_classes=["LlamaMLP"])
    result = fastpack.report(model).as_modules
    assert result == {HOOKS: 8, "its weight is offloaded": 6}, "q, k, v, o; gate, up, down; of two layers"
    batch = INPUT_KINDS[KIND](sequences)
    logits = split_logits(model(**batch).logits, batch, sequences)
    assert relative(torch.cat(logits), torch.cat(alone.logits)) <= FLOAT32_BOUND
    assert fastpack.report(model).as_modules == result


def test_an_adapter_that_is_offloaded_or_has_no_weight(tmp_path: Path) -> None:
    """The report says so at rest. Neither can run, stock or patched, before the weight is loaded."""
    model = fastpack.patch(lora(tmp_path))
    a = found_at(model).lora_A["default"]
    weight = a.weight
    assert fastpack.report(model).as_modules == {}
    a.weight = nn.Parameter(weight.to("meta"))
    assert fastpack.report(model).as_modules == {"in its adapter, its weight is offloaded": 1}
    del a.weight
    assert fastpack.report(model).as_modules == {"its adapter has no weight": 1}
    a.weight = weight
    assert fastpack.report(model).as_modules == {}


def test_merged_and_disabled(tmp_path: Path, calls: dict[str, int]) -> None:
    """A run unmerges the adapter and is fused; a report before it changes nothing."""
    (sequence,) = make_sequences(VOCAB, [19])
    model = fastpack.patch(lora(tmp_path))
    model.merge_adapter()
    assert fastpack.report(model).as_modules == {}, "merged alone, it is a base"
    model.base_model.disable_adapter_layers()
    assert fastpack.report(model).as_modules == {}
    assert all(module.merged for module in model.modules() if hasattr(module, "lora_A"))
    with torch.no_grad():
        base = plain(tmp_path)(input_ids=sequence[None]).logits
        assert relative(model(input_ids=sequence[None], packed_seq_lens=[19]).logits, base) <= FLOAT32_BOUND
    assert calls == FUSED


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_updates_over_modules_take_the_chosen_kernels(
    kernels: Any, tmp_path: Path, calls: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A and B are float32, activations half precision: one kernel expands all updates of a group."""
    expansions = count_calls(monkeypatch, pytest.importorskip("fastpack.ops.kernels.lora"), "expand")
    (sequence,) = make_sequences(VOCAB, [19])
    model = lora(tmp_path)
    for name, module in model.named_modules():
        if name.endswith("base_layer"):
            module.register_forward_hook(lambda *_: None)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        expected = model(input_ids=sequence[None]).logits
        fastpack.patch(model, kernels=kernels)
        result = model(input_ids=sequence[None], packed_seq_lens=[19]).logits
    assert relative(result, expected) <= 1e-2
    assert calls["add_updates"] == 8, "q, k, v; o; gate and up; down, of two layers"
    assert len(expansions) == (8 if kernels == "triton" else 0)
