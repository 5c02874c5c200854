"""Every family of the fast tier, and LoRA over NF4, trains as one graph with the loss and gradients of eager.

The graph is traced from the fast forwards, and a packing that is not the batch's changes its results.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import in_float32, nf4, qlora, with_lora
from oracle import FLOAT32_BOUND, compare
from test_compile import LENGTHS, SAME_SIZES, against, alone, calls_of_ours, collate, error, step
from tiny import tiny_model
from torch import nn
from torch._dynamo.testing import AotEagerAndRecordGraphs

import fastpack
from fastpack.exactness.tiny import model_types
from fastpack.families.fast import FAST_FAMILIES

pytestmark = pytest.mark.usefixtures("compile_anew")

FAMILIES = [f.model_type for f in FAST_FAMILIES if f.model_type in model_types() and not f.drops_packing]
TRACED = {
    "attention": "attention.attend_heads",
    "experts": "experts.experts_forward",
    "head": "head.head_forward",
    "layer": "decoder._run",
    "mlp": "mlp.mlp_block",
    "norm": "norm.norm_forward",
}
"""The function that computes each part that the report counts, called from the part's forward or the layer's."""


@pytest.fixture(scope="module", autouse=True)
def _nothing_older_is_collected() -> Iterator[None]:
    """Freeze older objects: the garbage collector would spend a third of the time on imported modules."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def plain(module: nn.Module) -> dict[str, Any]:
    """Return a module's settings besides its weights, without the layer's index."""
    settings = {name: value for name, value in vars(module).items() if isinstance(value, bool | int | float | str)}
    return {name: value for name, value in settings.items() if name != "layer_idx"}


def one_of_each_kind(model: Any) -> Any:
    """Remove the last layers if they compute the same as an earlier one."""
    layers, kinds = model.base_model.layers, getattr(model.config, "layer_types", None)
    known = [(kinds and kinds[i], str(layer), list(map(plain, layer.modules()))) for i, layer in enumerate(layers)]
    while known[-1] in known[:-1]:
        del layers[-1], known[-1]
    model.config.num_hidden_layers = len(layers)
    return model


def traced(graph: torch.fx.GraphModule) -> set[str]:
    """Return the functions of our layers from which a graph's operations come."""
    stacks = (str(node.meta.get("stack_trace", "")) for node in graph.graph.nodes)
    frame = re.compile(r'fastpack/(?:layers|model)/(\w+)\.py", line \d+, in (\w+)')
    return {".".join(match) for stack in stacks for match in frame.findall(stack)}


@pytest.mark.sample(3)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_one_graph_of_the_fast_forwards(model_type: str) -> None:
    model = fastpack.patch(one_of_each_kind(tiny_model(model_type)))
    report = fastpack.report(model)
    compiler = AotEagerAndRecordGraphs()
    compiled = torch.compile(model, fullgraph=True, backend=compiler)

    def seeded(function: Any, batch: dict[str, Any]) -> Any:
        torch.manual_seed(0)  # Phi-MoE's routing is random
        return step(function, batch, model)

    eager = []
    for lengths in (LENGTHS, SAME_SIZES):
        batch = collate(lengths)
        eager.append(seeded(model, batch))
        result = error(seeded(compiled, batch), eager[-1])
        assert result <= FLOAT32_BOUND
    assert len(compiler.graphs) == len(compiler.fw_graphs) == len(compiler.bw_graphs) == 1
    (graph,) = compiler.graphs
    assert (report.tier, report.skipped) == ("fast", ())
    assert calls_of_ours(graph) == report.swapped["attention"] == model.config.num_hidden_layers
    functions = traced(graph)
    assert {kind for kind, name in TRACED.items() if name in functions} == report.swapped.keys() - {"backbone"}
    # negative control: the graph uses the lengths that it gets, and wrong lengths show
    wrong = collate(LENGTHS) | {"packed_seq_lens": collate(SAME_SIZES)["packed_seq_lens"]}
    assert error(seeded(compiled, wrong), eager[0]) > 1e3 * FLOAT32_BOUND


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["cohere", "gemma2", "granite", "mixtral"])
def test_fused_loss_of_heads(model_type: str) -> None:
    """Heads that scale their logits, cap or divide them, and one that returns router logits."""
    model = fastpack.patch(one_of_each_kind(tiny_model(model_type)), loss="fused")
    batch = collate(LENGTHS)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    result = step(compiled, batch, model)
    assert compiled(**batch).logits is None
    assert error(result, step(model, batch, model)) <= FLOAT32_BOUND
    stock = alone(one_of_each_kind(tiny_model(model_type)))
    assert against(result, stock) <= FLOAT32_BOUND


@pytest.mark.slow
@pytest.mark.parametrize("loss", [None, "fused"])
def test_lora_over_4_bits(loss: Any, tmp_path: Path) -> None:
    """The compiler gets bitsandbytes' operator for the weights, and plain LoRA."""
    stock = alone(with_lora(nf4(tmp_path)))
    model = fastpack.patch(with_lora(nf4(tmp_path)), loss=loss)
    assert fastpack.report(model).projections == {"4-bit + lora": 14}
    compiler = AotEagerAndRecordGraphs()
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    batch = collate(LENGTHS)
    result = step(compiled, batch, model)
    assert error(result, step(model, batch, model)) <= FLOAT32_BOUND
    assert against(result, stock) <= FLOAT32_BOUND
    assert len(result.grads) == 28, "A and B of 14 projections"
    assert all(grad.any() for grad in result.grads.values())
    assert len(compiler.graphs) == len(compiler.bw_graphs) == 1
    assert calls_of_ours(compiler.graphs[0]) == 2
    assert all("bitsandbytes" in str(graph.graph) for graph in (*compiler.fw_graphs, *compiler.bw_graphs))


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [None, False])
def test_lora_over_4_bits_under_autocast(reentrant: bool | None, tmp_path: Path) -> None:
    """The model is prepared by PEFT, with and without checkpointing; norms and embeddings are trained too."""

    def build() -> Any:
        return qlora(tmp_path, torch.bfloat16, torch.bfloat16, prepared=True, reentrant=reentrant)

    batch = collate(LENGTHS)
    wide = fastpack.patch(in_float32(build()))
    true = step(wide, batch, wide)
    model = fastpack.patch(build())
    compiler = AotEagerAndRecordGraphs()
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    with torch.autocast("cpu", torch.bfloat16):
        result, expected = step(compiled, batch, model), step(model, batch, model)
    ours, allowed = compare(result, true, half=True), compare(expected, true, half=True)
    assert 1e-4 < ours.grads <= 1.5 * allowed.grads, (ours, allowed)
    assert ours.logits <= 1.5 * allowed.logits
    assert len(compiler.graphs) == len(compiler.bw_graphs) == 1
    assert ("checkpoint" in str(compiler.graphs[0].graph)) == (reentrant is not None)
