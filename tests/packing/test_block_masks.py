"""4-D masks of one causal block a sequence, as LLaMA-Factory's ``neat_packing`` sends them: trained packed, or refused.

The oracle is the stock model, on each sequence alone and on the same batch under the same mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import FLOAT32_BOUND, Result, compare, make_sequences, relative, run_alone
from packing_cases import CPU, read
from tiny import VOCAB, WINDOW, tiny_model
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import fastpack
from fastpack import PackingError
from fastpack.cuda_graphs.recorder import no_synchronisation
from fastpack.exactness.tiny import build_tiny
from fastpack.packing.block_masks import read_blocks
from fastpack.packing.inputs import read_packing
from fastpack.trainers.loss_units import LOSS_UNITS, lengths
from fastpack.trainers.metrics.counting import count_batch

T = torch.tensor
SEQUENCES = make_sequences(VOCAB, (7, 1, 12, 5, 20))
PLACES = ((0, 0), (0, 7), (0, 8), (1, 3), (1, 8))
"""Row and first column of each; between them, and behind, is padding."""
SHAPE = (2, 30)


def seen_in(numbers: Tensor) -> Tensor:
    """Bool ``[B, 1, S, S]``: tokens of a number see those of the same number up to themselves; 0 is padding."""
    same = (numbers[:, :, None] == numbers[:, None]) & (numbers != 0)[:, None]
    return same.tril()[:, None]


def added(seen: Tensor, dtype: torch.dtype = torch.float32, hidden: float | None = None) -> Tensor:
    lowest = torch.finfo(dtype).min if hidden is None else hidden
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, lowest)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "added": added,
    "infinite": lambda seen: added(seen, hidden=-torch.inf),
    "bools": lambda seen: seen,
    "bfloat16": lambda seen: added(seen, torch.bfloat16),
    "float16": lambda seen: added(seen, torch.float16),
}


def neat_packing(form: str = "added", with_positions: bool = True) -> dict[str, Any]:
    """Ids and labels ``[B, S]`` with their numbers, which the model is not given."""
    ids, numbers, positions = (torch.zeros(SHAPE, dtype=torch.long) for _ in range(3))
    for number, (sequence, (row, column)) in enumerate(zip(SEQUENCES, PLACES, strict=True), 1):
        place = row, slice(column, column + len(sequence))
        ids[place], numbers[place], positions[place] = sequence, number, torch.arange(len(sequence))
    batch = {"input_ids": ids, "labels": ids.masked_fill(numbers == 0, -100), "numbers": numbers}
    batch["attention_mask"] = FORMS[form](seen_in(numbers))
    return {**batch, "position_ids": positions} if with_positions else batch


def run(model: Any, batch: dict[str, Any], **further: Any) -> Result:
    """Logits of real tokens in order, loss and gradients."""
    batch = dict(batch)
    real = batch.pop("numbers") > 0
    model.zero_grad(set_to_none=True)
    out = model(**batch, num_items_in_batch=sum(len(s) - 1 for s in SEQUENCES), **further)
    out.loss.backward()
    grads = {name: p.grad.clone().float() for name, p in model.named_parameters() if p.grad is not None}
    return Result(list(out.logits.detach()[real].split([len(s) for s in SEQUENCES])), out.loss.detach(), grads)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_read_as_its_numbers_are(form: str, data: st.DataObject) -> None:
    rows = []
    for _ in range(2):
        parts = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
        row = [n for n, length in enumerate(parts, 1) for n in [n] * length][:10]
        before = data.draw(st.integers(0, 10 - len(row)))
        rows.append([0] * before + row + [0] * (10 - len(row) - before))
    numbers = T(rows)
    want, result = read((2, 10), numbers), read((2, 10), FORMS[form](seen_in(numbers)))
    assert result.lengths == want.lengths
    assert result.position_ids.tolist() == want.position_ids.tolist()
    ours, theirs = result.padding, want.padding
    assert (ours.is_empty, ours.starts_rows) == (theirs.is_empty, theirs.starts_rows)
    assert (ours.indices is None) == (theirs.indices is None)
    assert ours.indices is None or theirs.indices is None or torch.equal(ours.indices, theirs.indices)


def test_what_padding_sees_is_not_read() -> None:
    """transformers' own 4-D mask of a batch padded on the right: slots of padding see the real tokens before them."""
    real = T([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    mask = torch.ones(5, 5, dtype=torch.bool).tril() & real[:, None, None]
    packed = read((2, 5), added(mask))
    assert packed.lengths == (3, 5)
    assert read((3, 5), torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()).lengths == (5, 5, 5), "one for all rows"


class Watched(TorchDispatchMode):
    """What ran, and of the results as large as the mask the dtypes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.names, self.large = size, set(), []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self.names.add(str(function))
        if isinstance(out, Tensor) and out.numel() >= self.size:
            self.large.append(out.dtype)
        return out


@pytest.mark.parametrize("form", FORMS)
def test_the_host_waits_for_nothing_and_nothing_large_is_made(form: str) -> None:
    mask = FORMS[form](seen_in(torch.arange(1, 5).repeat_interleave(8).expand(2, 32)))
    with Watched(mask.numel()) as seen:
        read_blocks(mask, (2, 32))
    assert not [name for name in seen.names if "_local_scalar_dense" in name or "nonzero" in name or "item" in name]
    assert set(seen.large) - {mask.dtype} <= {torch.bool, torch.uint8}, "and views of the mask"


@pytest.mark.gpu
def test_one_look_at_the_device() -> None:
    mask = added(seen_in(torch.ones(2, 32, dtype=torch.long))).to("cuda")
    with no_synchronisation():
        read_blocks(mask, (2, 32))
        with pytest.raises(RuntimeError, match="synchroniz"):
            read_packing((2, 32), mask.device, attention_mask=mask)


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {},
    "qwen3_moe": {},
    "cohere": {},
}


@pytest.mark.parametrize("with_positions", [True, False])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_exact(model_type: str, with_positions: bool) -> None:
    """Without positions they begin at 0 in each sequence, as in any other packed batch."""
    model = tiny_model(model_type, attn_implementation="sdpa")
    alone = run_alone(model, SEQUENCES)
    batch = neat_packing(with_positions=with_positions)
    # nothing predicts a sequence's first token
    first = batch["labels"].clone()
    for row, column in PLACES:
        first[row, column] = -100
    same = {**batch, "labels": first, "position_ids": neat_packing()["position_ids"]}
    stock = run(model, same)
    assert compare(stock, alone).worst <= FLOAT32_BOUND, "stock under the same mask"
    assert compare(run(model, {**same, "attention_mask": None}), alone).worst > 1e3 * FLOAT32_BOUND
    fastpack.patch(model)
    ours = run(model, batch)
    assert compare(ours, alone).worst <= FLOAT32_BOUND
    assert compare(ours, stock).worst <= FLOAT32_BOUND


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str) -> None:
    model = tiny_model("llama")
    alone = run_alone(model, SEQUENCES)
    assert compare(run(fastpack.patch(model), neat_packing(form)), alone).worst <= FLOAT32_BOUND


@pytest.mark.parametrize("model_type", ["bamba", "bloom", "opt", "roberta", "big_bird"])
def test_other_tiers(model_type: str) -> None:
    """Where mixers, or the whole model, run on rows, and where keywords are dropped on the way to attention."""
    model = build_tiny(model_type).train()
    alone = run_alone(model, SEQUENCES)
    result = run(fastpack.patch(model), neat_packing(with_positions=False))
    assert compare(result, alone).worst <= 5 * FLOAT32_BOUND, "the gradients of keys' biases are nothing but rounding"


def test_the_balance_of_experts_is_over_real_tokens() -> None:
    """As with the numbers themselves; stock can't read a 4-D mask there."""
    model = fastpack.patch(tiny_model("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.5))
    batch = neat_packing()
    numbered = {**batch, "attention_mask": batch["numbers"]}
    assert relative(run(model, batch).loss, run(model, numbered).loss) <= FLOAT32_BOUND
    unmasked = {key: value for key, value in numbered.items() if key != "attention_mask"}
    everything = {**unmasked, "packed_seq_lens": None, "position_ids": torch.arange(SHAPE[1]).expand(SHAPE)}
    assert relative(run(model, everything).loss, run(model, numbered).loss) > 1e3 * FLOAT32_BOUND


def test_a_classifier_that_would_pool_padding() -> None:
    """The mask of a padded batch, in four dimensions: as in two."""
    from transformers import AutoModelForSequenceClassification

    model = tiny_model("llama", auto=AutoModelForSequenceClassification, num_labels=2).eval()
    ids, real = T([[5, 6, 7, 0, 0], [5, 6, 7, 8, 9]]), T([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    stock = model(input_ids=ids, attention_mask=real).logits
    fastpack.patch(model)
    assert relative(model(input_ids=ids, attention_mask=added(seen_in(real))).logits, stock) <= FLOAT32_BOUND
    with pytest.raises(PackingError, match="would pool a slot of padding in 1 of 2 rows"):
        model(input_ids=ids.masked_fill(real == 0, 3), attention_mask=added(seen_in(real)))


def test_the_collator_reads_it() -> None:
    model = tiny_model("llama")
    alone = run_alone(model, SEQUENCES)
    batch = fastpack.with_packed_seq_lens(lambda examples: neat_packing())(None)
    assert batch["packed_seq_lens"].lengths == tuple(map(len, SEQUENCES))
    assert compare(run(fastpack.patch(model), batch), alone).worst <= FLOAT32_BOUND


def test_counted_as_its_numbers_are() -> None:
    batch = neat_packing()
    numbered = {**batch, "attention_mask": batch["numbers"]}
    for with_labels in (True, False):
        ours, want = ({k: v for k, v in b.items() if with_labels or k != "labels"} for b in (batch, numbered))
        assert count_batch(ours) == count_batch(want)
    assert lengths(batch, LOSS_UNITS["Trainer"]) == lengths(numbered, LOSS_UNITS["Trainer"]) == [20, 25]


def test_a_cache_is_stocks() -> None:
    """Untouched: the stock forward follows the mask."""
    model = tiny_model("llama", attn_implementation="sdpa").eval()
    batch = {k: v for k, v in neat_packing().items() if k not in ("labels", "numbers")}
    stock = model(**batch, use_cache=True)
    result = fastpack.patch(model)(**batch, use_cache=True)
    assert torch.equal(result.logits, stock.logits)
    assert result.past_key_values.get_seq_length() == SHAPE[1]


def test_a_window() -> None:
    """Stock leaves its window out under such a mask, and a patched model has it; the advice works."""
    model = tiny_model("mistral", attn_implementation="sdpa")
    alone = run_alone(model, SEQUENCES)
    batch = neat_packing()
    fastpack.patch(model)
    with pytest.raises(PackingError, match=f"sequence of 20 before them, and this model has layers that see {WINDOW}"):
        run(model, batch)
    assert compare(run(model, {**batch, "attention_mask": batch["numbers"]}), alone).worst <= FLOAT32_BOUND
    short = {key: value[:, :8] for key, value in batch.items() if key not in ("attention_mask", "labels")}
    mask = added(seen_in(short.pop("numbers")))
    result = model(**short, attention_mask=mask).logits[0, :7]
    assert relative(result, alone.logits[0]) <= FLOAT32_BOUND, "no sequence is longer than the window"


@pytest.mark.parametrize("model_type", ["llama4_text", "deepseek_v4", "gpt_oss", "gemma3_text", "ministral3"])
def test_windows_and_chunks_of_others(model_type: str) -> None:
    model = fastpack.patch(build_tiny(model_type))
    with pytest.raises(PackingError, match="has layers that see"):
        model(input_ids=torch.ones(1, 60, dtype=torch.long), attention_mask=torch.ones(1, 1, 60, 60).bool().tril())


def seen_of(size: int, sees: Callable[[int, int], bool]) -> Tensor:
    return T([[sees(q, k) for k in range(size)] for q in range(size)])[None, None]


CAUSAL = seen_of(6, lambda q, k: k <= q)
IN_ONE_BLOCK = T([[0, 1, 2, 3, 4, 5]])
ALIBI = added(CAUSAL) - 0.1 * (torch.arange(6)[:, None] - torch.arange(6)).abs()
REFUSED: dict[str, tuple[Tensor, str]] = {
    "both directions": (added(torch.ones(1, 1, 6, 6).bool()), r"row 0, column 0, lets the token see later ones"),
    "an image looks ahead": (
        added(CAUSAL | seen_of(6, lambda q, k: 2 <= min(q, k) <= max(q, k) <= 3)),
        "column 2.*lat",
    ),
    "a prefix in both directions": (added(CAUSAL | seen_of(6, lambda q, k: k < 2)), "column 0.*later ones"),
    "a window": (
        added(seen_of(6, lambda q, k: q - 3 < k <= q)),
        "column 3, does not let the token see exactly.*a window",
    ),
    "a shared prefix": (
        added(seen_of(6, lambda q, k: k <= q and not (q >= 4 and k in (2, 3)))),
        "column 4.*a shared prefix",
    ),
    "a gap": (added(CAUSAL & ~seen_of(6, lambda q, k: (q, k) == (5, 2))), "column 5.*or a gap"),
    "a chunk that reaches back": (added(seen_of(6, lambda q, k: k <= q and (q < 3 or k >= 2))), "column 3"),
    "strictly causal": (added(seen_of(6, lambda q, k: k < q)), "column 0.*does not see itself"),
    "the other way round": (~CAUSAL, "column 1.*does not see itself"),
    "a bias": (ALIBI, r"column 1, adds something other than 0 \(seen\) or -65504"),
    "a soft bias": (added(CAUSAL, hidden=-100.0), "a bias, or NaN"),
    "NaN": (added(CAUSAL, hidden=torch.nan), "a bias, or NaN"),
    "one for each head": (added(CAUSAL).expand(1, 4, 6, 6), r"\(1, 4, 6, 6\).*for all heads"),
    "of another width": (added(CAUSAL)[..., :5], r"\(1, 1, 6, 5\)"),
    "integers": (CAUSAL.long(), "int64.*bool, True for keys that are seen"),
    "padding inside a sequence": (
        added(seen_of(6, lambda q, k: k <= q and k != 2 and q != 2)),
        "attention_mask has a hole",
    ),
}


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str, labels: bool) -> None:
    mask, match = REFUSED[what]
    model = fastpack.patch(tiny_model("llama", num_hidden_layers=1))
    ids = torch.arange(3, 9)[None]
    with pytest.raises(PackingError, match=match):
        model(input_ids=ids, attention_mask=mask, labels=ids if labels else None)
    model(input_ids=ids, attention_mask=CAUSAL, labels=ids if labels else None)


@pytest.mark.parametrize(
    ("numbers", "further", "match"),
    [
        ([1] * 6, {"positions": T([[0, 1, 2, 0, 1, 2]])}, "position_ids disagree: token 3 should continue one"),
        ([1, 1, 1, 2, 2, 2], {"positions": IN_ONE_BLOCK}, "disagree: token 3 should begin a sequence"),
        ([1] * 6, {"cu_seq_lens_q": T([0, 3, 6])}, "cu_seq_lens_q begins a sequence at token 3, in the middle"),
        ([1, 1, 1, 2, 2, 2], {"packed_seq_lens": [6]}, "lets a sequence run over token 3"),
    ],
)
def test_what_contradicts_it(numbers: Sequence[int], further: dict[str, Any], match: str) -> None:
    mask = added(seen_in(T([numbers])))
    with pytest.raises(PackingError, match=match):
        read((1, 6), mask, **further)
    assert read_packing((1, 6), CPU, attention_mask=mask).num_sequences == len(set(numbers))


@pytest.mark.slow
@pytest.mark.usefixtures("compile_anew")
def test_compiled_with_one_break() -> None:
    """As any batch that is read in the model: the lengths between two regions, all else in one."""
    model = tiny_model("llama", num_hidden_layers=1)
    alone = run_alone(model, SEQUENCES)
    batch = neat_packing()
    real = batch.pop("numbers") > 0
    compiler = CompileCounterWithBackend("eager")
    result = torch.compile(fastpack.patch(model), backend=compiler)(**batch).logits[real]
    assert relative(result, torch.cat(alone.logits)) <= FLOAT32_BOUND
    assert sum(any(node.op.startswith("call") for node in graph.graph.nodes) for graph in compiler.graphs) == 1
