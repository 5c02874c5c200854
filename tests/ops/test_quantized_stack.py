"""The parameter of a quantised stack: it behaves like the dense stack; what moves and is copied and saved are bytes."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from fastpack.ops.quantized_stack import QuantizedStack, save_by_hooks
from fastpack.ops.stack_formats import FourBitFormat, Mxfp4Format

E, OUT, IN = 3, 8, 96
KINDS = ["nf4", "nf4 nested", "fp4", "mxfp4", "mxfp4 transposed"]


def make_stack(kind: str, seed: int = 0) -> QuantizedStack:
    generator = torch.Generator().manual_seed(seed)
    if kind.startswith("mxfp4"):
        scales = torch.randint(120, 126, (E, OUT, IN // 32), generator=generator, dtype=torch.uint8)
        blocks = torch.randint(256, (E, OUT, IN // 2), generator=generator, dtype=torch.uint8)
        return QuantizedStack(blocks, Mxfp4Format.of(scales, transposed="transposed" in kind, dtype=torch.float32))
    functional = pytest.importorskip("bitsandbytes").functional
    packed, state = functional.quantize_4bit(
        torch.randn(E, OUT, IN, generator=generator),
        blocksize=64,
        quant_type=kind[:3],
        compress_statistics="nested" in kind,
    )
    return QuantizedStack(packed, FourBitFormat(state, torch.float32))


def make_module(kind: str, seed: int = 0) -> Any:
    module = nn.Module()
    module.register_parameter("stack", make_stack(kind, seed))
    save_by_hooks(module)
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_it_looks_and_computes_like_the_dense_stack(kind: str) -> None:
    stack = make_stack(kind)
    dense = stack.dense()
    assert type(dense) is Tensor
    assert isinstance(stack, nn.Parameter)
    assert not stack.requires_grad
    assert (stack.shape, stack.dtype, stack.ndim, len(stack)) == (dense.shape, dense.dtype, 3, E)
    assert (stack.size(1), stack.dim(), stack.numel()) == (dense.shape[1], 3, dense.numel())
    assert stack.nbytes == stack.packed.nbytes == dense.numel() // 2
    assert "QuantizedStack" in repr(stack)
    x = torch.randn(5, stack.shape[2])
    for expert in (0, torch.tensor(1), -1):
        assert torch.equal(F.linear(x, stack[expert]), F.linear(x, dense[expert]))
    assert torch.equal(stack[1:], dense[1:])
    assert torch.equal(x @ stack.transpose(1, 2), x @ dense.transpose(1, 2))
    assert torch.equal(1 + stack.mT, 1 + dense.mT)
    assert torch.equal(torch.cat([stack, dense]), torch.cat([dense, dense]))


def test_gradients_flow_through_a_product_with_it() -> None:
    stack = make_stack("nf4")
    x = torch.randn(5, IN, requires_grad=True)
    F.linear(x, stack[1]).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad[0], stack.dense()[1].sum(0))


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_pickles(kind: str) -> None:
    module = make_module(kind)
    dense = module.stack.dense()
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(copied.stack) is QuantizedStack
        assert torch.equal(copied.stack.dense(), dense)
        assert copied.stack.packed.data_ptr() != module.stack.packed.data_ptr()
        assert copied.state_dict().keys() == module.state_dict().keys(), "its hooks are copied, too"
        copied.stack.packed.zero_()
        assert torch.equal(module.stack.dense(), dense)


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_saves_and_loads_plain_tensors(kind: str) -> None:
    module = make_module(kind)
    state = module.state_dict()
    assert all(type(value) is Tensor for value in state.values())
    assert len(state) > 1
    expected = module.stack.dense()
    for assign in (False, True):
        other = make_module(kind, seed=1)
        assert not torch.equal(other.stack.dense(), expected)
        other.load_state_dict(state, assign=assign)
        assert torch.equal(other.stack.dense(), expected)
        assert type(other.stack) is QuantizedStack
    filled = make_module(kind, seed=1).to("meta")
    assert filled.stack.device.type == "meta"
    filled.load_state_dict(state, assign=True)
    assert torch.equal(filled.stack.dense(), expected)
    emptied = copy.deepcopy(make_module(kind, seed=1)).to("meta").to_empty(device="cpu")
    emptied.load_state_dict(state)
    assert torch.equal(emptied.stack.dense(), expected)


def test_missing_and_unexpected_entries_are_told() -> None:
    module = make_module("nf4 nested")
    with pytest.raises(RuntimeError, match="Missing key"):
        module.load_state_dict({})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        module.load_state_dict({**module.state_dict(), "other": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="can't take dense values"):
        module.load_state_dict({"stack": module.stack.dense()})


def test_another_dtype_is_that_of_dense_copies() -> None:
    module = make_module("nf4")
    packed, dense = module.stack.packed.clone(), module.stack.dense()
    for cast, dtype in ((module.half, torch.float16), (module.bfloat16, torch.bfloat16), (module.float, torch.float32)):
        cast()
        assert module.stack.dtype == dtype
        assert torch.equal(module.stack.packed, packed)
        assert torch.equal(module.stack.dense(), dense.to(dtype))
    module.to(torch.float64)
    assert module.stack.dense().dtype == torch.float64
    with pytest.raises(TypeError, match=r"not of torch\.int8"):
        module.stack.to(torch.int8)


def test_it_can_t_be_written_or_trained() -> None:
    stack = make_stack("nf4")
    dense = stack.dense()
    for write in (lambda: stack.add_(1), lambda: stack.data.mul_(2), lambda: nn.init.zeros_(stack)):
        with pytest.raises(RuntimeError, match="merge it there"):
            write()
    with pytest.raises(RuntimeError, match="merge it there"):
        stack[0] = 1
    with pytest.raises(TypeError, match="can't take dense values"):
        stack.data = dense
    with pytest.raises(RuntimeError, match="floating point"):
        stack.requires_grad_()
    assert torch.equal(stack.dense(), dense)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def test_a_parametrisation_comes_and_goes() -> None:
    """PEFT adds LoRA's update by one, for each forward."""
    module = make_module("nf4")
    stack, dense = module.stack, module.stack.dense()
    for _ in range(2):
        parametrize.register_parametrization(module, "stack", Doubled())
        assert torch.equal(module.stack, dense * 2)
        parametrize.remove_parametrizations(module, "stack", leave_parametrized=False)
    assert module.stack is stack


def test_ddp_broadcasts_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = make_module("nf4 nested")
    module.linear = nn.Linear(2, 2)
    before = module.stack.packed.clone()
    monkeypatch.setattr(QuantizedStack, "dense", lambda stack: pytest.fail("a dense copy was made"))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(module)
    finally:
        dist.destroy_process_group()
    assert wrapped.module.stack is module.stack
    assert torch.equal(module.stack.packed, before)
