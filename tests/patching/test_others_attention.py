"""Other code's attention is refused by name, at the patch and in the forward; transformers' own is not."""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.utils import ParallelismConfig
from oracle import make_sequences, run_alone
from patch_checks import check_exact
from tiny import VOCAB, tiny_model
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from trainer_cases import plain
from transformers import AttentionInterface
from transformers.integrations import flash_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama

import fastpack
from fastpack.errors import PatchError
from fastpack.exactness.tiny import build_tiny
from fastpack.model.model_runtime import runtime_of

IDS = torch.arange(5, 15)[None]
BATCH: dict[str, Any] = {"input_ids": IDS, "packed_seq_lens": [4, 6]}
MINE = "attends by test_others_attention.mine"
SPREAD = "context or sequence parallelism"
CALLS: list[str] = []


def mine(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    CALLS.append("mine")
    return sdpa_attention_forward(module, query * 1.1, *args, **kwargs)


Places = Callable[[pytest.MonkeyPatch, str, Any], None]


def assigned(patch: pytest.MonkeyPatch, name: str, function: Any) -> None:
    patch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, name, function)


def registered(patch: pytest.MonkeyPatch, name: str, function: Any) -> None:
    patch.setitem(AttentionInterface._global_mapping, name, function)


def said_by(function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(PatchError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def model_of(family: str, attention: str = "sdpa") -> Any:
    return build_tiny(family, attn_implementation=attention).train()


FAMILIES = ("llama", "stablelm", "deepseek_v3", "bamba")
"""Families of the fast and the varlen tier, with latent attention, and with recurrent layers."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("place", [assigned, registered])
def test_a_function_in_the_shared_table(family: str, place: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, model = model_of(family), fastpack.patch(model_of(family))
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    with monkeypatch.context() as changed:
        place(changed, "sdpa", mine)
        assert MINE in said_by(fastpack.patch, stock)
        assert not fastpack.is_patched(stock)
        CALLS.clear()
        for each in (model, *copies):
            assert MINE in said_by(each, **BATCH)
            assert MINE in said_by(each, input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=IDS)
        assert MINE in said_by(model.base_model, **BATCH)
        assert not CALLS
        expected = stock(IDS, use_cache=True).logits
        assert torch.equal(model(IDS, use_cache=True).logits, expected), "what has a cache runs the stock forward"
        fastpack.unpatch(model)
        assert torch.equal(model(IDS).logits, expected)
        assert len(CALLS) >= 3
    fastpack.patch(model)
    model(**BATCH)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_own_is_not_refused(family: str, attention: str) -> None:
    """It may be changed to another of transformers' own after the patch."""
    model = model_of(family, attention)
    alone = run_alone(model, make_sequences(VOCAB))
    fastpack.patch(model)
    check_exact(model, alone)
    for other in ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "paged|eager"):
        model.config._attn_implementation = other
        model(**BATCH)
    model.set_attn_implementation("sdpa")
    check_exact(model, alone)


def test_the_eager_function_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    sdpa, eager = (fastpack.patch(tiny_model("llama", attn_implementation=name)) for name in ("sdpa", "eager"))
    monkeypatch.setattr(llama, "eager_attention_forward", mine)
    assert MINE in said_by(eager, **BATCH)
    sdpa(**BATCH)
    assert MINE in said_by(sdpa.set_attn_implementation("eager") or sdpa, **BATCH)


@pytest.mark.parametrize("where", ["_local_mapping", "_global_mapping"])
def test_masks_of_ones_own(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such masks decide which tokens attend to which. A patched model would ignore them, so it refuses them."""
    sdpa, eager = (fastpack.patch(tiny_model("llama", attn_implementation=name)) for name in ("sdpa", "eager"))
    monkeypatch.setitem(getattr(ALL_MASK_ATTENTION_FUNCTIONS, where), "sdpa", mine)
    for message in (said_by(sdpa, **BATCH), said_by(fastpack.patch, tiny_model("llama", attn_implementation="sdpa"))):
        assert "the masks of attn_implementation='sdpa' are made by test_others_attention.mine" in message
    eager(**BATCH)
    monkeypatch.undo()
    sdpa(**BATCH)


def ring(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("no step is run")


@pytest.mark.parametrize("where", ["entry", "_flash_attention_forward"])
def test_flash_attention_of_ones_own(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ring-flash-attn puts its own into the table, verl into the file that transformers' own calls."""
    model, other = fastpack.patch(tiny_model("llama")), fastpack.patch(tiny_model("llama", attn_implementation="sdpa"))
    model.config._attn_implementation = "flash_attention_2"
    model(**BATCH)
    if where == "entry":
        assigned(monkeypatch, "flash_attention_2", ring)
    else:
        monkeypatch.setattr(flash_attention, where, ring)
    assert "attends by test_others_attention.ring (attn_implementation='flash_attention_2')" in said_by(model, **BATCH)
    other(**BATCH)


def test_what_is_known_by_its_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases are DeepSpeed's Ulysses, registered by ``prepare()`` whatever it calls, and a callable object."""
    named = {"__name__": "deepspeed.runtime.sequence_parallel.ulysses_sp"}
    wrapper = types.FunctionType((lambda *args, **kwargs: None).__code__, named, "uattn_wrapper")

    class Attention:
        def __call__(self, *args: Any, **kwargs: Any) -> None: ...

    model = fastpack.patch(tiny_model("llama", attn_implementation="sdpa"))
    assigned(monkeypatch, "sdpa", wrapper)
    assert re.search(f"deepspeed.runtime.sequence_parallel.ulysses_sp.*{SPREAD}", said_by(model, **BATCH))
    assigned(monkeypatch, "sdpa", Attention())
    assert "attends by test_others_attention.Attention" in said_by(model, **BATCH)


def test_on_rows_the_stock_function_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On rows any function runs, so none is bypassed. Among processes it may spread sequences: see distributed/."""
    for family in ("gptj", "zaya"):
        model = build_tiny(family).train()
        model.set_attn_implementation("eager")
        assigned(monkeypatch, "eager", mine)
        CALLS.clear()
        alone = run_alone(model, make_sequences(VOCAB))
        assert CALLS
        fastpack.patch(model)
        check_exact(model, alone)


def louder(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch._C._nn.scaled_dot_product_attention(query * 1.1, *args, **kwargs)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_torchs_function_replaced(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fastpack.patch(model_of(family))
    monkeypatch.setattr(F, "scaled_dot_product_attention", louder)
    for message in (said_by(model, **BATCH), said_by(fastpack.patch, model_of(family))):
        assert "scaled_dot_product_attention is now test_others_attention.louder" in message
    mend = re.search(r"\((torch\S+ = torch\S+)\)", message)
    assert mend is not None
    target, value = mend[1].split(" = ")
    assert target == "torch.nn.functional.scaled_dot_product_attention"
    monkeypatch.setattr(F, target.rpartition(".")[2], eval_name(value))
    model(**BATCH)
    fastpack.patch(model_of(family))


def eval_name(dotted: str) -> Any:
    """Return the object of a dotted name."""
    result: Any = {"torch": torch, "transformers": transformers}[dotted.partition(".")[0]]
    for name in dotted.split(".")[1:]:
        result = getattr(result, name)
    return result


class Rerouted(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (louder if func is F.scaled_dot_product_attention else func)(*args, **(kwargs or {}))


class Below(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product" in str(func):
            raise AssertionError("no step is run")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [Rerouted, Below])
def test_modes_that_may_reroute_attention(make: Callable[[], Any]) -> None:
    model = fastpack.patch(tiny_model("llama", attn_implementation="sdpa"))
    with make() as mode:
        message = said_by(model, **BATCH)
        assert "Nothing was changed" in said_by(fastpack.patch, tiny_model("llama", attn_implementation="sdpa"))
    assert f"test_others_attention.{type(mode).__name__} is active" in message
    assert SPREAD in message
    model(**BATCH)


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


HARMLESS: dict[str, Callable[[], Any]] = {
    "counts FLOPs": lambda: FlopCounterMode(display=False),
    "a device": lambda: torch.device("cpu"),
    "a default device": default_device,
}


@pytest.mark.parametrize("name", HARMLESS)
def test_torchs_own_modes(name: str) -> None:
    model = tiny_model("llama", attn_implementation="sdpa").train()
    alone = run_alone(model, make_sequences(VOCAB))
    with HARMLESS[name]():
        fastpack.patch(model)
        check_exact(model, alone)


def test_selective_checkpointing_of_the_whole_model() -> None:
    model = tiny_model("llama", attn_implementation="sdpa").train()
    expected = fastpack.patch(model)(**BATCH).logits
    contexts = lambda: create_selective_checkpoint_contexts([torch.ops.aten.mm.default])  # noqa: E731
    result = checkpoint(lambda: model(**BATCH).logits, use_reentrant=False, context_fn=contexts)
    result.sum().backward()
    assert torch.equal(result, expected)


def hidden_in(attention: str, where: str, changed: pytest.MonkeyPatch, model: Any) -> Any:
    """Install other code's attention, and return the context in which it is active."""
    if where in ("assigned", "registered"):
        (assigned if where == "assigned" else registered)(changed, attention, mine)
    elif where == "torch's":
        changed.setattr(F, "scaled_dot_product_attention", louder)
    elif where == "its own name":
        assigned(changed, "mine", mine)
        changed.setattr(model.config, "_attn_implementation_internal", "mine")
    elif where == "a helper":
        changed.setitem(sdpa_attention_forward.__globals__, "repeat_kv", mine)
    return Rerouted() if where == "a mode" else contextlib.nullcontext()


PLACES = ("assigned", "registered", "torch's", "a mode", "its own name", "a helper")


@pytest.mark.parametrize("whole", [True, False])
def test_compiled_looks(whole: bool, monkeypatch: pytest.MonkeyPatch, compile_anew: None) -> None:
    """Guards notice attention that is installed after the compilation, and that it is removed again."""
    model: Any = fastpack.patch(model_of("llama"))
    runtime = runtime_of(model.base_model)
    watch = None if runtime is None else runtime.user_changes
    assert watch is not None
    attention = watch.attention

    def looked(x: Tensor) -> Tensor:
        attention.check()
        return x + 1

    compiled = torch.compile(looked, backend="eager", fullgraph=whole)
    refused = pytest.raises(torch._dynamo.exc.Unsupported if whole else PatchError, match="test_others_attention")
    assert float(compiled(torch.zeros(()))) == 1
    for where in PLACES:
        with monkeypatch.context() as changed, hidden_in("sdpa", where, changed, model), refused:
            compiled(torch.zeros(()))
        assert float(compiled(torch.zeros(()))) == 1


def test_compiled(monkeypatch: pytest.MonkeyPatch, compile_anew: None) -> None:
    """The whole model is one graph: the check adds none, and the error names the attention."""
    model: Any = fastpack.patch(tiny_model("llama", num_hidden_layers=1, attn_implementation="sdpa").eval())
    packed = fastpack.PackedSeqLens.from_lengths([4, 6]).bucketed()
    batch = {"input_ids": packed.unpad(IDS), "packed_seq_lens": packed.flattened()}
    compiler = CompileCounter()
    compiled = torch.compile(model, backend=compiler, fullgraph=True)
    expected = compiled(**batch).logits
    refused = pytest.raises(torch._dynamo.exc.Unsupported, match="test_others_attention")
    with monkeypatch.context() as changed, hidden_in("sdpa", "assigned", changed, model), refused:
        compiled(**batch)
    assert torch.equal(compiled(**batch).logits, expected)
    assert compiler.frame_count == 1


MENDS = {
    "registered sdpa": (registered, ("sdpa",), "set_attn_implementation('eager')"),
    "assigned sdpa": (assigned, ("sdpa",), "set_attn_implementation('eager')"),
    "one of its own name": (registered, ("mine",), "set_attn_implementation('sdpa')"),
    "both registered": (registered, ("sdpa", "eager"), "transformers.AttentionInterface.register"),
    "both assigned": (assigned, ("sdpa", "eager"), "del transformers.modeling_utils"),
}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("case", MENDS)
def test_the_advice_works(case: str, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    place, names, advice = MENDS[case]
    model: Any = tiny_model("llama", attn_implementation="sdpa")
    if after:
        fastpack.patch(model)
    for name in names:
        place(monkeypatch, name, mine)
    if names[0] != "sdpa":
        model.set_attn_implementation(names[0])
    message = said_by(model, **BATCH) if after else said_by(fastpack.patch, model)
    assert advice in message
    if other := re.search(r"model.set_attn_implementation\('(\w+)'\)", message):
        model.set_attn_implementation(other[1])
    elif entry := re.search(r"del transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS\['(\w+)'\]", message):
        del transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[entry[1]]
    else:
        call = re.search(r"\(([\w.]+)\('(\w+)', ([\w.]+)\)\)", message)
        assert call is not None
        eval_name(call[1])(call[2], eval_name(call[3]))
    fastpack.patch(model)
    model(**BATCH)


@pytest.mark.parametrize("size", ["cp_size", "sp_size"])
def test_a_trainer_whose_accelerator_spreads_sequences(size: str, tmp_path: Path, accelerate_afresh: None) -> None:
    trainer = plain(tmp_path)
    bare = fastpack.patch(tiny_model("llama"))
    trainer.accelerator.state.parallelism_config = ParallelismConfig(**{size: 1})
    fastpack.unpatch(fastpack.patch(trainer))
    trainer.accelerator.state.parallelism_config = ParallelismConfig(**{size: 2})
    kind = "context" if size == "cp_size" else "sequence"
    message = said_by(fastpack.patch, trainer)
    assert f"the accelerator of this {type(trainer).__name__} has {size}=2: {kind} parallelism" in message
    assert not fastpack.is_patched(trainer)
    for message in (said_by(fastpack.patch, tiny_model("llama")), said_by(bare, **BATCH)):
        assert f"has {size}=2: {kind} parallelism" in message
    bare(IDS, use_cache=True)


def test_what_prepare_brings(tmp_path: Path, accelerate_afresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate registers DeepSpeed's Ulysses there, long after a trainer was patched."""
    trainer = fastpack.patch(plain(tmp_path))
    prepare = trainer.accelerator.prepare

    def registering(*args: Any, **kwargs: Any) -> Any:
        assigned(monkeypatch, trainer.model.config._attn_implementation, mine)
        return prepare(*args, **kwargs)

    trainer.accelerator.prepare = registering
    assert MINE in said_by(trainer.train)
