"""Patched models inside wrappers of other libraries: accelerate, ``torch.compile``, FSDP."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import (
    FLOAT32_BOUND,
    INPUT_KINDS,
    compare,
    make_sequences,
    padded,
    relative,
    run_alone,
    run_batch,
    split_logits,
)
from patch_checks import CountingHook, check_exact
from tiny import VOCAB, tiny_model
from torch import nn

import fastpack


def test_accelerate_hooks_before_and_after() -> None:
    from accelerate.hooks import add_hook_to_module, remove_hook_from_module

    for order in ("hooks first", "patch first"):
        model = tiny_model("llama")
        alone = run_alone(model, make_sequences(VOCAB))
        if order == "patch first":
            fastpack.patch(model)
        hooks = {module: CountingHook() for module in model.modules() if module is not model}
        for module, hook in hooks.items():
            add_hook_to_module(module, hook)
        if order == "hooks first":
            fastpack.patch(model)
        check_exact(model, alone)
        assert all(hook.calls for module, hook in hooks.items() if not isinstance(module, nn.ModuleList))
        if order == "hooks first":
            fastpack.unpatch(model)
        for module in hooks:
            remove_hook_from_module(module)
        fastpack.unpatch(model)
        assert compare(run_alone(model, make_sequences(VOCAB)), alone).worst == 0


@pytest.mark.parametrize("loss", [None, "fused"])
@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("disk", [False, True])
def test_accelerate_offload(disk: bool, patch_first: bool, loss: Any, tmp_path: Path) -> None:
    """Its hook on the root moves every keyword, lengths included, to its device, which is None."""
    from accelerate import cpu_offload, disk_offload

    sequences = make_sequences(VOCAB)
    model = tiny_model("llama")
    alone = run_alone(model, sequences)
    if patch_first:
        fastpack.patch(model, loss=loss)
    cpu = torch.device("cpu")
    if disk:
        disk_offload(model, tmp_path, execution_device=cpu)
    else:
        cpu_offload(model, execution_device=cpu)
    if not patch_first:
        fastpack.patch(model, loss=loss)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    hooks = "it carries hooks, or a forward of its own (offloading does this)"
    assert fastpack.report(model).as_modules == {hooks: 14}
    for kind in ("padded left", "packed_seq_lens"):
        batch = INPUT_KINDS[kind](sequences)
        with pytest.warns(fastpack.errors.FastpackWarning) if loss and patch_first else nullcontext():
            out = model(**batch)
        result = split_logits(out.logits, batch, sequences)
        assert max(relative(a, b) for a, b in zip(result, alone.logits, strict=True)) <= FLOAT32_BOUND
        assert relative(out.loss, alone.loss) <= FLOAT32_BOUND


@pytest.mark.usefixtures("accelerate_afresh")
def test_accelerate_bf16_wrapper() -> None:
    from accelerate import Accelerator

    model = fastpack.patch(tiny_model("llama"))
    prepared = Accelerator(mixed_precision="bf16", cpu=True).prepare_model(model)
    out = prepared(**padded(make_sequences(VOCAB), "right"))
    assert out.logits.dtype == torch.float32
    out.loss.backward()


def test_torch_compile_after_patching() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    alone = run_alone(model, make_sequences(VOCAB))
    renamed = alone._replace(grads={f"_orig_mod.{name}": grad for name, grad in alone.grads.items()})
    compiled = torch.compile(fastpack.patch(model), backend="eager")
    for kind in ("padded left", "TRL's keywords"):
        assert compare(run_batch(compiled, make_sequences(VOCAB), kind), renamed).worst <= FLOAT32_BOUND


def test_fsdp2_after_patching(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model = tiny_model("llama")
    alone = run_alone(model, make_sequences(VOCAB))
    fastpack.patch(model)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        batch = padded(make_sequences(VOCAB), "left")
        out = model(**batch)
        out.loss.backward()
        logits = out.logits[batch["attention_mask"].bool()]
        assert relative(logits, torch.cat(alone.logits)) <= FLOAT32_BOUND
        assert all(p.grad is not None for p in model.parameters())
    finally:
        dist.destroy_process_group()


def test_fsdp_wraps_by_layer_class_name() -> None:
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    model = fastpack.patch(tiny_model("llama"))
    layer = type(model.model.layers[0])
    assert transformer_auto_wrap_policy(model.model.layers[0], False, 0, transformer_layer_cls={layer})
