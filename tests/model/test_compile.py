"""Patched models under ``torch.compile``: whole graphs, and the results of eager runs.

All families are in ``test_compile_families.py``; ``test_compile_buckets.py`` checks that there are as few graphs as
buckets. ``test_compile_parts.py`` tests what the compiler meets on the way (operators, facts, kernels).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import FLOAT32_BOUND, Result, compare, make_sequences, padded, relative, run_alone
from tiny import VOCAB, tiny_model
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

import fastpack
from fastpack import PackedSeqLens

pytestmark = pytest.mark.usefixtures("compile_anew")

LENGTHS = (7, 1, 19, 19, 33)
SAME_SIZES = (33, 19, 1, 7, 19)
"""Another batch of the same shapes."""


def collate(lengths: tuple[int, ...], *, bucketed: bool = True, seed: int = 0, device: str = "cpu") -> dict[str, Any]:
    """Return a batch as a collator makes it: ids and labels ``[1, T]`` with their lengths."""
    ids = torch.cat(make_sequences(VOCAB, lengths, seed))[None].to(device)
    packed = PackedSeqLens.from_lengths(lengths, device=device)
    if not bucketed:
        return {"input_ids": ids, "labels": ids, "packed_seq_lens": packed}
    packed = packed.bucketed()
    labels = packed.unpad(packed.mask_first_labels(ids))
    return {"input_ids": packed.unpad(ids), "labels": labels, "packed_seq_lens": packed.flattened()}


def step(function: Any, batch: dict[str, Any], model: nn.Module) -> Result:
    """Return logits, loss and every gradient of one step."""
    model.zero_grad(set_to_none=True)
    out = function(**batch)
    loss = out.loss if "labels" in batch else out.last_hidden_state.square().mean()
    loss.backward()
    output = out.logits if "labels" in batch else out.last_hidden_state
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    # the fused loss has no logits
    return Result([(loss if output is None else output).detach()], loss.detach(), grads)


def alone(model: nn.Module, lengths: tuple[int, ...] = LENGTHS) -> Result:
    """Return the same from a stock model that runs each sequence alone."""
    return run_alone(model, make_sequences(VOCAB, lengths))


def against(result: Result, stock: Result) -> float:
    """Return the error of a step's loss and gradients against sequences alone; the logits have bucket padding."""
    return error(Result([result.loss], result.loss, result.grads), Result([stock.loss], stock.loss, stock.grads))


def error(result: Result, reference: Result) -> float:
    return compare(result, reference).worst


def calls_of_ours(graph: torch.fx.GraphModule) -> int:
    """Count the calls of the attention operator in a graph and in the graphs inside it."""
    nodes = [n for g in graph.modules() if isinstance(g, torch.fx.GraphModule) for n in g.graph.nodes]
    return sum("packed_attention" in str(node.target) for node in nodes)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_one_graph_with_the_results_of_eager(family: str) -> None:
    """Other lengths of the same sizes run the same graph, which holds no length."""
    model = fastpack.patch(tiny_model(family))
    compiler = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    eager: list[Result] = []
    for lengths in (LENGTHS, SAME_SIZES):
        batch = collate(lengths)
        eager.append(step(model, batch, model))
        assert error(step(compiled, batch, model), eager[-1]) <= FLOAT32_BOUND
    assert compiler.frame_count == 1
    assert calls_of_ours(compiler.graphs[0]) == 2  # one a layer
    # negative control: the graph uses the lengths that it gets, and a wrong length shows
    wrong = collate(LENGTHS) | {"packed_seq_lens": collate(SAME_SIZES)["packed_seq_lens"]}
    assert error(step(compiled, wrong, model), eager[0]) > 1e3 * FLOAT32_BOUND


@pytest.mark.slow
def test_experts_are_balanced_however_much_is_bucket_padding() -> None:
    """The balance is over real tokens alone, in one compilation (transformers breaks it to collect routers)."""
    traits = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "experts_implementation": "batched_mm"}
    model = fastpack.patch(tiny_model("mixtral", num_hidden_layers=1, **traits))
    compiler = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=compiler, dynamic=False)
    frames = []
    for lengths in (LENGTHS, (33, 19, 1, 7, 40), (60, 67, 1)):
        batch = collate(lengths)
        assert error(step(compiled, batch, model), step(model, batch, model)) <= FLOAT32_BOUND
        frames.append(compiler.frame_count)
    assert frames == frames[:1] * 3


@pytest.mark.slow
def test_lengths_alone_and_a_bare_backbone() -> None:
    """A collator need not round lengths up, nor pad the batch to its bucket; sizes become symbolic."""
    from transformers import AutoModel

    model = fastpack.patch(tiny_model("llama", auto=AutoModel, num_hidden_layers=1))
    compiler = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    for seed in range(4):
        lengths = tuple(torch.randint(1, 30, (4 + seed,), generator=torch.Generator().manual_seed(seed)).tolist())
        batch = collate(lengths, bucketed=False)
        del batch["labels"]
        for packed in (batch["packed_seq_lens"], batch["packed_seq_lens"].bucketed()):
            batch["packed_seq_lens"] = packed
            assert error(step(compiled, batch, model), step(model, batch, model)) <= FLOAT32_BOUND
    assert compiler.frame_count <= 4  # for each of the two kinds, one frame of fixed sizes and one of symbolic sizes


@pytest.mark.sample(1)
@pytest.mark.parametrize("patch_first", [True, False])
def test_lora_with_checkpointing(patch_first: bool) -> None:
    """transformers' hook that gives embeddings a gradient would break the graph by itself."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")

    def build(patch: bool) -> Any:
        model = tiny_model("llama", num_hidden_layers=1)
        torch.manual_seed(1)
        return get_peft_model(fastpack.patch(model) if patch else model, config)

    stock = alone(build(False))
    model = fastpack.patch(build(patch_first))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert model.get_input_embeddings()._forward_hooks
    compiler = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    batch = collate(LENGTHS)
    result = step(compiled, batch, model)
    assert error(result, step(model, batch, model)) <= FLOAT32_BOUND
    assert against(result, stock) <= FLOAT32_BOUND
    assert calls_of_ours(compiler.graphs[0]) == 1
    assert "checkpoint" in str(compiler.graphs[0].graph)


@pytest.mark.slow
def test_fused_loss_and_graphs() -> None:
    """The loss without logits compiles too, and recordings are skipped."""
    model = fastpack.patch(tiny_model("llama", num_hidden_layers=1), loss="fused", graphs="auto")
    batch = collate(LENGTHS)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert compiled(**batch).logits is None
    result, expected = step(compiled, batch, model), step(model, batch, model)
    assert error(result, expected) <= FLOAT32_BOUND
    assert against(result, alone(tiny_model("llama", num_hidden_layers=1))) <= FLOAT32_BOUND


def test_under_autocast() -> None:
    model = fastpack.patch(tiny_model("llama", num_hidden_layers=1))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    batch = collate(LENGTHS)
    with torch.autocast("cpu", torch.bfloat16):
        result, expected = step(compiled, batch, model), step(model, batch, model)
    exact = step(model, batch, model)
    assert 1e-4 < error(result, exact) <= 1.5 * error(expected, exact)
    assert relative(expected.logits[0], exact.logits[0]) > 1e-4, "it ran in bfloat16"


@pytest.mark.sample(1)
@pytest.mark.parametrize(("bare", "labels"), [(False, True), (False, False), (True, False)])
def test_a_padded_batch_breaks_once(bare: bool, labels: bool) -> None:
    """Its lengths are read between two regions, and one region has all tensor operations."""
    from transformers import AutoModel

    model = fastpack.patch(tiny_model("llama", num_hidden_layers=1, **({"auto": AutoModel} if bare else {})))
    batch: dict[str, Any] = padded(make_sequences(VOCAB, LENGTHS), "left")
    if not labels:
        del batch["labels"]
    explained = torch._dynamo.explain(model)(**batch)
    assert explained.graph_count <= 2
    assert explained.graph_break_count <= 1
    assert sum(any(node.op.startswith("call") for node in graph.graph.nodes) for graph in explained.graphs) == 1
    assert sum(map(calls_of_ours, explained.graphs)) == 1


@pytest.mark.slow
def test_padded_batches_of_any_lengths() -> None:
    model = fastpack.patch(tiny_model("llama", num_hidden_layers=1))
    compiler = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=compiler)
    seen = []
    for seed in range(6):
        lengths = torch.randint(1, 40, (4,), generator=torch.Generator().manual_seed(seed)).tolist()
        batch = padded(make_sequences(VOCAB, lengths), "right")
        assert error(step(compiled, batch, model), step(model, batch, model)) <= FLOAT32_BOUND
        seen.append(compiler.frame_count)
    assert seen[-1] == seen[2], f"new lengths compile nothing: {seen}"


def test_a_padded_batch_as_one_graph_is_refused_with_the_way_out() -> None:
    model = fastpack.patch(tiny_model("llama", num_hidden_layers=1))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="PackedSeqLens as packed_seq_lens, built in the collator"):
        compiled(**padded(make_sequences(VOCAB, LENGTHS), "left"))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "rope_type"), [("phi3", "longrope"), ("llama", "dynamic")])
def test_frequencies_by_length_compile(family: str, rope_type: str) -> None:
    """LongRoPE with its two sets compiles as one graph. Dynamic NTK breaks it to read the longest lengths."""
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 1e4}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}
        settings = {"original_max_position_embeddings": 16}
    else:
        rope["factor"] = 2.0
        settings = {"max_position_embeddings": 16}
    model = fastpack.patch(tiny_model(family, num_hidden_layers=1, rope_parameters=rope, **settings))
    batch = collate(LENGTHS, bucketed=False)
    expected = model(**batch).logits
    whole = torch.compile(model, fullgraph=True, backend="eager")
    if rope_type == "longrope":
        assert relative(whole(**batch).logits, expected) <= FLOAT32_BOUND
    else:
        with pytest.raises((torch._dynamo.exc.Unsupported, GuardOnDataDependentSymNode)):
            whole(**batch)
    torch.compiler.reset()
    assert relative(torch.compile(model, backend="eager")(**batch).logits, expected) <= FLOAT32_BOUND


@pytest.mark.slow
def test_a_numbered_mask_with_a_cache_raises_when_compiled_too() -> None:
    model = fastpack.patch(tiny_model("llama", num_hidden_layers=1)).eval()
    kwargs: dict[str, Any] = {"input_ids": torch.cat(make_sequences(VOCAB, (5, 6)))[None], "use_cache": True}
    mask = torch.tensor([[1] * 5 + [2] * 6])
    stock = model(**kwargs).logits
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="attention_mask as bools"):
        compiled(**kwargs, attention_mask=mask.clamp(max=1))
    assert relative(compiled(**kwargs, attention_mask=mask.bool()).logits, stock) <= FLOAT32_BOUND
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(fastpack.PackingError, match="attention_mask numbers several"):
        compiled(**kwargs, attention_mask=mask)
    assert relative(compiled(**kwargs, attention_mask=mask.clamp(max=1)).logits, stock) <= FLOAT32_BOUND


def test_first_labels_are_ignored_whoever_read_the_lengths() -> None:
    """This also holds eagerly, and for lengths that were rounded up and came with unmasked labels."""
    model = fastpack.patch(tiny_model("llama", num_hidden_layers=1))
    batch = collate(LENGTHS, bucketed=False)
    loss = model(**batch).loss
    packed = batch["packed_seq_lens"].bucketed()
    assert packed.bucket_padding
    assert relative(model(**batch | {"packed_seq_lens": packed}).loss, loss) <= FLOAT32_BOUND
    plain = batch | {"packed_seq_lens": batch["packed_seq_lens"].flattened()}
    assert plain["packed_seq_lens"].padding.batch_shape == tuple(batch["input_ids"].shape)
    assert relative(model(**plain).loss, loss) <= FLOAT32_BOUND
    unmasked = F.cross_entropy(model(**plain).logits[0, :-1], batch["labels"][0, 1:])
    assert relative(unmasked, loss) > 10 * FLOAT32_BOUND


class Partitions:
    """A compiler that runs graphs as they are and counts the bytes that each forward hands to its backward."""

    def __init__(self) -> None:
        self.saved: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
        from torch._dynamo.backends.common import aot_autograd

        def forward(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            (outputs,) = next(node for node in graph.graph.nodes if node.op == "output").args
            kept = [node.meta["val"] for node in outputs if node is not None and node.op != "placeholder"]
            self.saved.append(sum(v.numel() * v.element_size() for v in kept if isinstance(v, Tensor)))
            return make_boxed_func(graph.forward)

        backend = aot_autograd(
            fw_compiler=forward,
            bw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
            partition_fn=min_cut_rematerialization_partition,
        )
        return backend(graph, inputs)


@pytest.mark.slow
def test_activation_memory_budget() -> None:
    model = fastpack.patch(tiny_model("llama", num_hidden_layers=1))
    batch = collate(LENGTHS)
    expected = step(model, batch, model)
    stock = alone(tiny_model("llama", num_hidden_layers=1))
    compiler = Partitions()
    from torch._functorch import config

    before = config.activation_memory_budget
    for fraction in (1, 0.5, 0):
        torch.compiler.reset()
        with fastpack.activation_memory_budget(fraction):
            assert config.activation_memory_budget == fraction
            result = step(torch.compile(model, fullgraph=True, backend=compiler), batch, model)
        assert error(result, expected) <= FLOAT32_BOUND
        assert against(result, stock) <= FLOAT32_BOUND
        assert config.activation_memory_budget == before
    full, half, none = compiler.saved
    assert none < half < full
    assert none < 0.5 * full


@pytest.mark.parametrize("fraction", [-0.1, 1.5, math.nan])
def test_a_budget_that_is_no_fraction(fraction: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"), fastpack.activation_memory_budget(fraction):
        raise AssertionError("not reached")
