"""Sequences as rows, and back; and packing for modules that get no keyword."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastpack
from fastpack import PackedSeqLens, PatchError
from fastpack.exactness.tiny import build_tiny, plain_tokens
from fastpack.families.mixer_spec import MixerSpec
from fastpack.layers.mixers.forward import mixer_forward
from fastpack.layers.mixers.rows import RATIO, repad, row_groups, similar, unpad
from fastpack.layers.runtime import Runtime
from fastpack.model.model_runtime import runtime_of
from fastpack.model.unwrap import find_parts
from fastpack.packing.context import PackingContext
from fastpack.packing.mask import mask_placeholder
from fastpack.utils.replacement import Replacement

lists_of_lengths = st.lists(st.integers(1, 60), min_size=1, max_size=30)


def layers_of(model: nn.Module) -> nn.ModuleList:
    return next(m for m in find_parts(model).backbone.modules() if isinstance(m, nn.ModuleList))


def test_small_groups_are_joined_where_launches_cost_more_than_slots() -> None:
    lengths = [10, 100, 40, 90, 45, 12]
    assert list(similar(lengths, 0.75, 0)) == [[1, 3], [2, 4], [0, 5]]
    assert list(similar(lengths, 0.75, 201)) == [[1, 3, 4], [0, 2, 5]]
    assert list(similar(lengths, 0.75, 1000)) == [[0, 1, 2, 3, 4, 5]]
    assert list(similar([3], 1.0, 1000)) == [[0]]


@given(lists_of_lengths, st.booleans())
@settings(deadline=None)
def test_there_and_back(lengths: list[int], equal: bool) -> None:
    packed = PackedSeqLens.from_lengths(lengths)
    groups = row_groups(packed, equal=equal)
    x = torch.arange(packed.total_tokens)[None, :, None].expand(-1, -1, 2)
    results = [repad(x, rows, packed.total_tokens) for rows in groups.groups]
    assert torch.equal(unpad(results, groups, "it"), x)
    assert torch.equal(unpad([r.flatten(0, 1) for r in results], groups, "it"), x[0])
    for rows, result in zip(groups.groups, results, strict=True):
        steps = result[..., 0].diff(dim=1)
        assert bool(((steps == 1) | (steps == 0)).all()), "a row is one sequence, then copies of its last token"
        assert (rows.slots is None) == bool((steps == 1).all())
        if equal:
            assert rows.slots is None
        elif rows.slots is not None:
            assert len(rows.slots) >= RATIO * rows.count * rows.length
    assert sum(rows.count for rows in groups.groups) == len(lengths)


def test_what_is_taken() -> None:
    packed = PackedSeqLens.from_lengths([3, 2, 2])
    (rows,) = row_groups(PackedSeqLens.from_lengths([3, 3]), equal=True).groups
    x = torch.arange(6.0)
    shapes = {
        "tokens": (x[None], (2, 3)),
        "hidden": (x[None, :, None].expand(1, 6, 5), (2, 3, 5)),
        "heads": (x[None, None, :, None].expand(1, 4, 6, 5), (2, 4, 3, 5)),
        "axes": (x[None, None].expand(3, 1, 6), (3, 2, 3)),
        "positions": (torch.arange(6), (3,)),
        "a weight": (torch.zeros(7, 6), (7, 6)),
    }
    for what, (given_, shape) in shapes.items():
        assert repad(given_, rows, 6).shape == shape, what
    assert repad(torch.Size((1, 6, 8)), rows, 6) == torch.Size((2, 3, 8))
    nested = repad({"a": (x[None], [None, x[None]])}, rows, 6)
    assert nested["a"][0].shape == nested["a"][1][1].shape == (2, 3)
    assert len(row_groups(packed, equal=True).groups) == 2
    assert row_groups(packed, equal=True) is row_groups(packed, equal=True), "planned once a batch"


def test_what_cannot_be_put_back() -> None:
    groups = row_groups(PackedSeqLens.from_lengths([3, 3]), equal=True)
    with pytest.raises(PatchError, match=r"shape \(5, 5\)"):
        unpad([torch.zeros(5, 5)], groups, "Some")
    weight = nn.Parameter(torch.zeros(5))
    assert unpad([weight], groups, "Some") is weight
    assert unpad([torch.zeros(2, 4, 3, 3)], groups, "Some") is None, "attention weights"
    alike = unpad([torch.arange(3.0)[None, :, None]], groups, "Some")
    assert alike[0, :, 0].tolist() == [0, 1, 2, 0, 1, 2]


class Sum(nn.Module):
    """A mixer: each token becomes the sum of the row's tokens up to it, weighted by a mask if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.config: Any = type("Config", (), {"layer_types": ["full_attention"], "window": 2})()
        self.layer_idx = 0
        self.masks: list[Tensor | None] = []

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.masks.append(mask)
        return x.cumsum(1) * self.weight


def mix(module: nn.Module, spec: MixerSpec, context: PackingContext, *args: Any, **kwargs: Any) -> Any:
    patched = Replacement(module, "forward", mixer_forward, spec, Runtime(context=context))
    return patched(*args, **kwargs)


def ones(packed: PackedSeqLens) -> Tensor:
    return torch.ones(1, packed.total_tokens, 1, requires_grad=True)


def test_a_mixer_sees_one_sequence_a_row() -> None:
    packed, scope, module = PackedSeqLens.from_lengths([2, 3]), PackingContext(), Sum()
    assert mix(module, MixerSpec(), scope, ones(packed)).flatten().tolist() == [1, 2, 3, 4, 5]
    with scope.around(module, packed):
        out = mix(module, MixerSpec(), scope, ones(packed))
    assert out.flatten().tolist() == [1, 2, 1, 2, 3]


@pytest.mark.parametrize("kind", ["added", "seen", "hidden", None])
@pytest.mark.parametrize("windowed", [True, False])
def test_masks(kind: Any, windowed: bool) -> None:
    packed, scope, module = PackedSeqLens.from_lengths([3, 3]), PackingContext(), Sum()
    module.config.layer_types = ["sliding_attention" if windowed else "full_attention"]
    spec = MixerSpec(kind, window="config.window")
    with scope.around(module, packed):
        mix(module, spec, scope, ones(packed), mask=mask_placeholder(packed))
    (mask,) = module.masks
    if kind is None:
        assert mask is None
        return
    assert mask is not None
    assert mask.shape == (2, 1, 3, 3)
    seen = {"added": mask == 0, "seen": mask, "hidden": mask == 0}[kind]
    assert seen[0, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [0 if windowed else 1, 1, 1]]


def test_chunks() -> None:
    packed, scope, module = PackedSeqLens.from_lengths([3, 3]), PackingContext(), Sum()
    module.config.layer_types = ["chunked_attention"]
    with scope.around(module, packed):
        mix(module, MixerSpec("seen", chunk="config.window"), scope, ones(packed), mask_placeholder(packed))
    assert module.masks[0][0, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]  # type: ignore[index]


def test_a_wrapper_that_checkpoints_layers_is_refused() -> None:
    """Its backward pass does not know the packing, so it raises: a loud error, not a leak."""
    model = fastpack.patch(build_tiny("mamba").train())
    layer = model.backbone.layers[0]
    plain = layer.forward
    layer.forward = lambda *args, **kwargs: checkpoint(plain, *args, use_reentrant=False, **kwargs)
    ids = plain_tokens(1, 8, seed=0)
    loss = model(input_ids=ids, packed_seq_lens=[3, 5]).logits.sum()
    with pytest.raises(PatchError, match="its packing is no longer known"):
        loss.backward()


def test_an_interrupted_forward_leaves_no_packing_behind() -> None:
    """The next caller with the same ids must not find it."""
    model = fastpack.patch(build_tiny("bamba").eval())
    ids = plain_tokens(1, 12, seed=0)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with torch.no_grad():
        want = model.model(input_ids=ids).last_hidden_state
        hook = model.model.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(input_ids=ids, packed_seq_lens=[5, 7])
        hook.remove()
        assert torch.equal(model.model(input_ids=ids).last_hidden_state, want)
        assert not torch.equal(model.model(input_ids=ids, packed_seq_lens=[5, 7]).last_hidden_state, want)


@pytest.mark.parametrize("reentrant", [False, True])
def test_two_forwards_before_their_backwards(reentrant: bool) -> None:
    """Each checkpointed layer runs again with the packing of its own forward."""
    results = []
    for enabled in (False, True):
        model = fastpack.patch(build_tiny("bamba").train())
        if enabled:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        ids = plain_tokens(1, 12, seed=0)
        losses = [model(input_ids=ids, packed_seq_lens=n).logits.square().sum() for n in ([5, 7], [1, 11])]
        with ThreadPoolExecutor(1) as thread:  # as a GPU's backward has one
            thread.submit(sum(losses).backward).result()  # type: ignore[union-attr]
        results.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for name, gradient in results[0].items():
        assert float((results[1][name] - gradient).abs().max()) <= 1e-5 * max(1e-3, float(gradient.abs().max())), name


@pytest.mark.parametrize("model_type", ["mamba", "bloom", "nemotron", "zaya"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_come_back_patched(model_type: str, how: str) -> None:
    model = fastpack.patch(build_tiny(model_type).eval())
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    ids = plain_tokens(1, 12, seed=0)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        fresh = fastpack.patch(build_tiny(model_type).eval())
        want = fresh(input_ids=ids, packed_seq_lens=[5, 7]).logits
        assert torch.equal(twin(input_ids=ids, packed_seq_lens=[5, 7]).logits, want)
    assert fastpack.is_patched(twin)


@pytest.mark.parametrize("model_type", ["mamba2", "bamba", "bloom", "falcon", "opt"])
def test_a_copy_of_a_layer_finds_the_packing(model_type: str) -> None:
    """PEFT's ``modules_to_save`` makes such copies, also of a patched model."""
    model, stock = (build_tiny(model_type).eval() for _ in range(2))
    fastpack.patch(model)
    for changed in (model, stock):
        layers = layers_of(changed)
        layers[1] = copy.deepcopy(layers[1])
        with torch.no_grad():
            next(layers[1].parameters()).mul_(0.5)
    ids = plain_tokens(1, 12, seed=0)
    with torch.no_grad():
        alone = torch.cat([stock(input_ids=part).logits for part in ids.split([5, 7], 1)], 1)
        actual = model(input_ids=ids, packed_seq_lens=[5, 7]).logits
    assert float((actual - alone).abs().max()) <= 1e-5 * float(alone.abs().max())
    assert not any("put into the model" in why for _, why in fastpack.report(model).skipped)


def test_a_layer_of_another_patched_model_is_reported() -> None:
    model, other = (fastpack.patch(build_tiny("mamba2").eval()) for _ in range(2))
    layers_of(model)[1] = layers_of(other)[1]
    assert any("put into the model" in why for _, why in fastpack.report(model).skipped)


@pytest.mark.parametrize("model_type", ["mamba2", "falcon"])
def test_each_thread_has_its_own_batch(model_type: str) -> None:
    model = fastpack.patch(build_tiny(model_type).eval())
    batches = [{"input_ids": plain_tokens(1, 12, seed=i), "packed_seq_lens": [1 + i, 11 - i]} for i in range(4)]
    with torch.no_grad():
        expected = [model(**batch).logits for batch in batches]
    all_inside = threading.Barrier(len(batches), timeout=60)
    waited = threading.local()

    def wait(*_: Any) -> None:
        """Wait in the first layer until the forward has begun in every thread."""
        if not getattr(waited, "once", False):
            waited.once = True
            all_inside.wait()

    def run(batch: dict[str, Any]) -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(**batch).logits
        return logits

    handle = layers_of(model)[0].register_forward_pre_hook(wait)
    with ThreadPoolExecutor(len(batches)) as threads:
        actual = list(threads.map(run, batches))
    handle.remove()
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


@pytest.mark.parametrize("model_type", ["mamba", "bamba", "bloom", "opt", "roberta", "zaya", "rwkv"])
def test_unpatch_restores_everything(model_type: str) -> None:
    model = build_tiny(model_type).eval()
    before = {name: sorted(m.__dict__) for name, m in model.named_modules()}
    ids = plain_tokens(1, 12, seed=0)
    with torch.no_grad():
        want = model(input_ids=ids).logits
        with fastpack.patched(model):
            assert not torch.equal(model(input_ids=ids, packed_seq_lens=[5, 7]).logits, want)
        assert torch.equal(model(input_ids=ids).logits, want)
    assert {name: sorted(m.__dict__) for name, m in model.named_modules()} == before


@pytest.mark.parametrize("model_type", ["gptj", "bloom", "deepseek_v4", "llama4_text"])
@pytest.mark.parametrize("lengths", [[4, 30], [4, 4], [30, 4, 4]])
def test_rows_as_long_as_there_are_heads(model_type: str, lengths: list[int]) -> None:
    """Attention weights ``[n, 4, 4, 4]`` are not mistaken for a tensor with one entry for each token."""
    model = build_tiny(model_type).eval()
    model.set_attn_implementation("eager")
    ids = plain_tokens(1, sum(lengths), seed=0)
    with torch.no_grad():
        alone = torch.cat([model(input_ids=s[None], use_cache=False).logits[0] for s in ids[0].split(lengths)])
        packed = fastpack.patch(model)(input_ids=ids, packed_seq_lens=lengths).logits[0]
    assert float((packed - alone).abs().max() / alone.abs().max()) <= 1e-4


@pytest.mark.parametrize("model_type", ["bamba", "nemotron", "zaya"])
def test_offloading_is_asked_on_every_tier(model_type: str) -> None:
    """A CPU can't offload, and the report says so, also for models with a packing scope."""
    model = fastpack.patch(build_tiny(model_type).train(), offload="checkpoints")
    model(input_ids=plain_tokens(1, 8, seed=0), packed_seq_lens=[3, 5])
    runtime = runtime_of(find_parts(model).backbone)
    assert runtime is not None
    offload = runtime.offload
    assert offload is not None
    assert sum(offload.stats.idle.values()) == 1


def test_falcon_with_alibi_runs_on_rows() -> None:
    """Its biases are part of a mask that the backbone builds."""
    model = fastpack.patch(build_tiny("falcon", alibi=True).eval())
    assert fastpack.report(model).tier == "re-padded model"
    first, second = plain_tokens(1, 5, seed=0), plain_tokens(1, 7, seed=1)
    with torch.no_grad():
        logits = model(input_ids=torch.cat([first, second], 1), packed_seq_lens=[5, 7]).logits
        fastpack.unpatch(model)
        alone = torch.cat([model(input_ids=x, use_cache=False).logits for x in (first, second)], 1)
    assert float((logits - alone).abs().max()) <= 1e-5 * float(alone.abs().max())
