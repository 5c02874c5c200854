"""``exact_merges``: PEFT's merged weights, bit for bit, and the same base weights after a hundred merges."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import NF4, TARGETS, lora_config, quantised, with_ia3, with_lora
from expert_models import expert_model, with_expert_lora
from oracle import make_sequences
from peft import (
    HRAConfig,
    LNTuningConfig,
    LoraConfig,
    OFTConfig,
    TrainableTokensConfig,
    VeraConfig,
    get_peft_model,
)
from tiny import VOCAB, tiny_model
from torch import Tensor, nn

import fastpack
from fastpack.patching.merges import replacements_on

SYNCS = 100


def half(model: nn.Module) -> nn.Module:
    return model.bfloat16()


def two_adapters(**settings: Any) -> Any:
    model = with_lora(half(tiny_model("llama")), **settings)
    model.add_adapter("other", lora_config(r=2, **settings))
    model.base_model.set_adapter(["default", "other"])
    return fill(model)


def fill(model: Any, seed: int = 3) -> Any:
    """Give every weight of the adapters a step, as training does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if model.prefix in name and parameter.is_floating_point():
                step = torch.randn(parameter.shape, generator=generator) * 0.05
                parameter.add_(step.to(parameter))
    return model


def gpt2() -> Any:
    config = LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    return fill(get_peft_model(half(tiny_model("gpt2")), config))


def with_bias() -> Any:
    model = half(tiny_model("qwen2"))
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_bias=True, task_type="CAUSAL_LM")
    return fill(get_peft_model(model, config))


def tied() -> Any:
    """Both ends of a tied weight have an adapter of their own."""
    model = half(tiny_model("llama", tie_word_embeddings=True))
    wrapped = fill(get_peft_model(model, lora_config(target_modules=["embed_tokens", "lm_head"])))
    base = wrapped.get_base_model()
    assert base.lm_head.weight is base.model.embed_tokens.weight
    return wrapped


CASES: dict[str, Callable[[], Any]] = {
    "lora": lambda: with_lora(half(tiny_model("llama"))),
    "dora": lambda: with_lora(half(tiny_model("llama")), use_dora=True),
    "two adapters": two_adapters,
    "two adapters, dora": lambda: two_adapters(use_dora=True),
    "embeddings": lambda: fill(with_lora(half(tiny_model("llama")), target_modules=["embed_tokens", "q_proj"])),
    "tied": tied,
    "bias": with_bias,
    "conv1d": gpt2,
    "experts": lambda: with_expert_lora(half(expert_model("qwen3_moe"))),
    "transposed experts": lambda: with_expert_lora(half(expert_model("gpt_oss"))),
}


def base_weights(model: Any) -> dict[str, Tensor]:
    """Return copies of all weights but the adapters'."""
    return {name: each.detach().clone() for name, each in model.named_parameters() if model.prefix not in name}


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    assert ours.keys() == theirs.keys()
    assert all(ours[name].shape == theirs[name].shape for name in ours)
    assert all(ours[name].dtype == theirs[name].dtype for name in ours)
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


@contextmanager
def without_peft_warnings() -> Iterator[None]:
    """PEFT warns of tied weights, of rounding, and of adapters that are merged beside others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("error", fastpack.FastpackWarning)
        yield


def sync(model: Any, times: int = SYNCS, **settings: Any) -> None:
    """Train, merge and unmerge this many times."""
    with without_peft_warnings():
        for step in range(times):
            fill(model, step)
            model.merge_adapter(**settings)
            model.unmerge_adapter()


def merged(model: Any, **settings: Any) -> dict[str, Tensor]:
    with without_peft_warnings():
        model.merge_adapter(**settings)
    return base_weights(model)


def unmerge(model: Any) -> None:
    with without_peft_warnings():
        model.unmerge_adapter()


@pytest.mark.parametrize(
    ("case", "safe"), [*((case, False) for case in CASES), *((case, True) for case in ("lora", "dora", "experts"))]
)
def test_a_hundred_syncs(case: str, safe: bool) -> None:
    """Stock drifts; merged weights are PEFT's own, for the first sync and for the last."""
    model = CASES[case]()
    before, stock = base_weights(model), copy.deepcopy(model)
    sync(stock, 10, safe_merge=safe)
    assert not equal(base_weights(stock), before), "control: stock must drift"
    assert fastpack.exact_merges(model) is model
    for _ in range(2):
        theirs = fastpack.exact_merges(copy.deepcopy(model), keep=None)
        of_peft = merged(theirs, safe_merge=safe)
        assert not equal(of_peft, before), "control: a merge must change the weights"
        assert equal(merged(model, safe_merge=safe), of_peft)
        assert [m.merged for m in model.modules() if hasattr(m, "merged")]
        unmerge(model)
        assert equal(base_weights(model), before)
        sync(model, SYNCS // 2, safe_merge=safe)
        assert equal(base_weights(model), before)
    assert not any(getattr(layer, "merged", False) for layer in model.modules())


@pytest.mark.sample(2)
@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("case", ["lora", "experts", "two adapters"])
def test_in_a_patched_model(case: str, patch_first: bool) -> None:
    """Logits are the same before and after, and PEFT's merge of the patched model is stock's."""
    model = CASES[case]().eval()
    batch = {"input_ids": torch.cat(make_sequences(VOCAB))[None], "packed_seq_lens": [7, 1, 19, 19, 33]}
    of_stock, before = merged(copy.deepcopy(model)), base_weights(model)
    steps = [fastpack.patch, fastpack.exact_merges]
    for step in steps if patch_first else reversed(steps):
        step(model)
    adapters = {name: each.clone() for name, each in model.state_dict().items() if model.prefix in name}
    logits = model(**batch).logits
    assert equal(merged(model), of_stock)
    unmerge(model)
    sync(model, 20)
    model.load_state_dict(adapters, strict=False)
    assert equal(base_weights(model), before)
    assert torch.equal(model(**batch).logits, logits)
    fastpack.unpatch(model)
    sync(model, 5)
    assert equal(base_weights(model), before), "the two are undone each for itself"


OTHERS: dict[str, Any] = {
    "ia3": lambda: with_ia3(half(tiny_model("llama"))),
    "oft": lambda: of(OFTConfig(oft_block_size=4, target_modules=["q_proj", "v_proj"])),
    "hra": lambda: of(HRAConfig(r=4, target_modules=["q_proj", "v_proj"])),
    "vera": lambda: of(VeraConfig(r=4, target_modules=["q_proj", "v_proj"]), "vera_lambda"),
    "ln_tuning": lambda: of(LNTuningConfig(target_modules=["input_layernorm"])),
    "trainable_tokens": lambda: of(TrainableTokensConfig(token_indices=[3, 4], target_modules=["embed_tokens"])),
}


def of(config: Any, prefix: str | None = None) -> Any:
    config.task_type = "CAUSAL_LM"
    return fill(get_peft_model(half(tiny_model("llama")), config))


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", OTHERS)
def test_other_methods_of_peft(case: str) -> None:
    model = OTHERS[case]()
    before = base_weights(model)
    fastpack.exact_merges(model)
    theirs = fastpack.exact_merges(copy.deepcopy(model), keep=None)
    assert equal(merged(model), merged(theirs))
    unmerge(model)
    assert equal(base_weights(model), before)
    sync(model, 10)
    assert equal(base_weights(model), before)


@pytest.mark.parametrize("settings", [NF4, {"load_in_8bit": True}], ids=["4-bit", "8-bit"])
def test_quantised_weights(settings: dict[str, Any], tmp_path: Path) -> None:
    """A merge quantises anew; the quantised weight from before comes back, with its scales."""
    model = with_lora(quantised(tmp_path, dtype=torch.bfloat16, **settings)).eval()
    batch = {"input_ids": torch.cat(make_sequences(VOCAB))[None]}
    with torch.no_grad():
        logits = model(**batch).logits
        adapters = {name: each.clone() for name, each in model.named_parameters() if model.prefix in name}
        before, stock = base_weights(model), copy.deepcopy(model)
        sync(stock, 2)
        stock.load_state_dict(adapters, strict=False)
        assert not torch.equal(stock(**batch).logits, logits), "control"
        fastpack.exact_merges(model)
        for each in (model, copy.deepcopy(model)):
            sync(each, 5)
            with without_peft_warnings():
                each.merge_adapter()
                assert not torch.equal(each(**batch).logits, logits), "control: a forward while it is merged"
                each.unmerge_adapter()
            each.load_state_dict(adapters, strict=False)
            assert equal(base_weights(each), before)
            assert torch.equal(each(**batch).logits, logits)
            kinds = {type(p) for n, p in each.named_parameters() if "q_proj.base_layer.weight" in n}
            assert {kind.__name__ for kind in kinds} <= {"Params4bit", "Int8Params"}


def test_while_fsdp2_shards_the_model(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model = fastpack.exact_merges(CASES["lora"]())
    before = base_weights(model)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        for layer in model.get_base_model().model.layers:
            fully_shard(layer)
        sharded = [p for p in model.parameters() if hasattr(p, "placements")]
        assert len(sharded) > 14
        with without_peft_warnings():
            for _ in range(3):
                model.merge_adapter()
                assert not equal(whole(model), before), "control"
                model.unmerge_adapter()
                assert equal(whole(model), before)
    finally:
        dist.destroy_process_group()


def whole(model: Any) -> dict[str, Tensor]:
    weights = {name: each for name, each in model.named_parameters() if model.prefix not in name}
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in weights.items()}


@pytest.mark.parametrize("through", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles_keep_it(through: Callable[[Any], Any]) -> None:
    """Also while they are merged; the copy and the original share nothing."""
    model = fastpack.exact_merges(CASES["tied"]())
    before = base_weights(model)
    merged(model)
    twin = through(model)
    unmerge(twin)
    assert equal(base_weights(twin), before)
    assert not equal(base_weights(model), before), "the original is still merged"
    unmerge(model)
    sync(twin, 10)
    sync(model, 10)
    assert equal(base_weights(twin), before)
    assert equal(base_weights(model), before)


def test_it_is_undone() -> None:
    model = CASES["lora"]()
    before, attributes = base_weights(model), [sorted(vars(module)) for module in model.modules()]
    fastpack.exact_merges(fastpack.exact_merges(model, keep="device"))
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    assert all(len(replacements_on(layer)) == 2 for layer in layers)
    assert all(each.earlier is None for layer in layers for each in replacements_on(layer)), "once, not twice"
    fastpack.exact_merges(model, keep=None)
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    sync(model, 10)
    assert not equal(base_weights(model), before), "PEFT's own merges round"
    fastpack.exact_merges(model, keep=None)


def test_a_base_that_changes_while_it_is_merged() -> None:
    """The copy is out of date, so the result is PEFT's own, with a warning."""
    model = fastpack.exact_merges(CASES["lora"]())
    theirs = fastpack.exact_merges(copy.deepcopy(model), keep=None)
    place = "base_model.model.model.layers.0.self_attn.q_proj"
    for each in (model, theirs):
        merged(each)
        each.get_submodule(place).base_layer.weight.data.add_(0.5)
    with pytest.warns(fastpack.FastpackWarning, match=f"{place} was changed while an adapter was merged"):
        model.unmerge_adapter()
    unmerge(theirs)
    key = f"{place}.base_layer.weight"
    assert torch.equal(base_weights(model)[key], base_weights(theirs)[key])
    before = base_weights(model)
    sync(model, 5)
    assert equal(base_weights(model), before), "exact from then on"
    merged(model)
    model.to(torch.float32)
    with pytest.warns(fastpack.FastpackWarning, match="or cast"):
        model.unmerge_adapter()


def test_merge_and_unload() -> None:
    model = CASES["lora"]()
    stock = copy.deepcopy(model).merge_and_unload()
    ours = fastpack.exact_merges(model).merge_and_unload()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), stock.parameters(), strict=True))
    assert not any(replacements_on(module) for module in ours.modules())


def test_disabled_adapters_unmerge() -> None:
    """PEFT's forward unmerges a layer whose adapters are disabled, and so does fastpack's."""
    for prepare in (fastpack.patch, lambda model: model):
        model = prepare(fastpack.exact_merges(CASES["lora"]().eval()))
        before, batch = base_weights(model), {"input_ids": torch.full((1, 9), 5)}
        with model.disable_adapter():
            base = model(**batch).logits
        merged(model)
        with model.disable_adapter():
            assert torch.equal(model(**batch).logits, base)
        assert equal(base_weights(model), before)


def test_a_merge_that_fails_changes_nothing() -> None:
    model = fastpack.exact_merges(CASES["lora"]())
    before = base_weights(model)
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    good = layer.lora_B["default"].weight.detach().clone()
    layer.lora_B["default"].weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaNs detected"):
        model.merge_adapter(safe_merge=True)
    layer.lora_B["default"].weight.data.copy_(good)
    assert equal(base_weights(model), before)
    sync(model, 3)
    assert equal(base_weights(model), before)


@pytest.mark.parametrize("keep", ["host", "device"])
def test_the_copies_live_while_it_is_merged(keep: Any) -> None:
    model = fastpack.exact_merges(CASES["lora"](), keep=keep)

    def copies() -> list[Any]:
        layers = [module for module in model.modules() if hasattr(module, "lora_A")]
        return [w.before for layer in layers for w in replacements_on(layer)[0].spec if w.before is not None]

    assert not copies()
    merged(model)
    assert len(copies()) == 2 * len(TARGETS)
    unmerge(model)
    assert not copies()


@pytest.mark.gpu
def test_host_memory_on_a_gpu() -> None:
    """The copies are pinned, and take no device memory."""
    model = fastpack.exact_merges(CASES["lora"]().cuda())
    before = base_weights(model)
    merged(model)
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    (weight,) = replacements_on(layer)[0].spec
    assert weight.before.is_pinned()
    unmerge(model)
    sync(model, 10)
    assert equal(base_weights(model), before)


def test_what_is_refused_changes_nothing() -> None:
    model = CASES["lora"]()
    with pytest.raises(ValueError, match="'host', 'device', or None"):
        fastpack.exact_merges(model, keep="disk")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"pass trainer\.model"):
        fastpack.exact_merges(object())  # type: ignore[type-var]
    with pytest.raises(fastpack.PatchError, match="has no adapters of PEFT"):
        fastpack.exact_merges(tiny_model("llama"))
    merged(model)
    for keep in ("host", None):
        with pytest.raises(fastpack.PatchError, match=r"and 11 more: call model.unmerge_adapter\(\) first"):
            fastpack.exact_merges(model, keep=keep)  # type: ignore[arg-type]
    pytest.importorskip("bitsandbytes")
    stacks = with_expert_lora(fastpack.quantize_experts(expert_model("qwen3_moe")))
    with pytest.raises(fastpack.PatchError, match=r"mlp\.experts.*its weight is a QuantizedStack"):
        fastpack.exact_merges(stacks)
    attention = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    with pytest.raises(fastpack.PatchError, match=r"model\.0: PEFT takes its parameters away"):
        fastpack.exact_merges(get_peft_model(attention, LoraConfig(target_modules=["0", "1"])))
    for each in (model, stacks):
        assert not any(replacements_on(module) for module in each.modules())
