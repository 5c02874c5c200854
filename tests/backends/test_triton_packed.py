"""Fastpack's own attention kernels, through Triton's interpreter, and on a GPU for what only a GPU can show.

``test_backends_gpu.py`` measures the compiled kernels like every other backend. ``test_triton_packed_sharing.py`` tests
walks that several programs share.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from attention_cases import FACTORS, Case, assert_exact, errors, formula, measure, pairwise, truth_of
from oracle import relative
from packed_kernels import (
    FLOAT,
    HALF,
    ONE_LOOP,
    TILED,
    TWO_LOOPS,
    Cut,
    all_of,
    interpreted,
    make,
    offsets,
    on_gpu,
    same,
)
from torch import Tensor

from fastpack.backends import reference, triton_packed
from fastpack.backends.call import AttentionCall
from fastpack.ops.kernels import attention, attention_keys, attention_queries, launch
from fastpack.ops.kernels.attention import AttentionTile, Scores
from fastpack.packing.seqlens import PackedSeqLens

# Triton's interpreter multiplies the bits of bfloat16, so bfloat16 is tested with compiled kernels
CASES = pairwise({**FACTORS, "lengths": ("mixed", "ones", "alone"), "head_dim": (8, 64), "groups": (1, 4, 7)})
EVERY = [(case, FLOAT) for case in CASES] + [(case, HALF) for case in CASES[::3]]
SIZES = [
    Case(head_dim=80, value_dim="other", groups=1),
    Case(head_dim=96, window=7),
    Case(head_dim=192, value_dim="other", lengths="ones"),
    Case(head_dim=256, lengths="ones", groups=1),
    Case(head_dim=20, softcap=1.5, sinks=True),
]
# more heads than a program takes: two equal parts of a group, and two of which one lacks a head
LARGE_GROUPS = [Case(groups=32, head_dim=8, lengths="ones"), Case(groups=17, head_dim=8, lengths="ones", sinks=True)]


# --- exact ------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(5)
@interpreted
@pytest.mark.parametrize(("case", "dtype"), EVERY, ids=str)
def test_exact(case: Case, dtype: torch.dtype) -> None:
    assert_exact(triton_packed.run, case, dtype)


@pytest.mark.sample(2)
@interpreted
@pytest.mark.parametrize("case", [*SIZES, *LARGE_GROUPS], ids=str)
def test_sizes_and_groups(case: Case) -> None:
    assert_exact(triton_packed.run, case, FLOAT)


@pytest.mark.sample(1)
@interpreted
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")  # in rows that are not stored
@pytest.mark.parametrize(("case", "tile"), TILED, ids=str)
def test_many_tiles(case: Case, tile: AttentionTile, cut: Cut) -> None:
    cut(tile)
    assert_exact(triton_packed.run, case, FLOAT)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("window", [None, 129])
def test_many_tiles_of_the_usual_size(window: int | None) -> None:
    assert_exact(triton_packed.run, Case(lengths="blocks", groups=4, window=window, head_dim=8), HALF)


@pytest.mark.sample(1)
@interpreted
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_that_are_not_positive(scale: float) -> None:
    """The kernel looks for the largest score of a row before it applies the scale."""
    assert_exact(triton_packed.run, Case(scale=scale, head_dim=8), FLOAT)


@interpreted
def test_naive_concatenation_fails_the_same_check() -> None:
    """Negative control: one sequence of all tokens is far outside the bound."""
    case = Case()
    call = case.make(FLOAT)
    naive = replace(call, packed=PackedSeqLens.from_lengths([call.packed.total_tokens]))
    result = errors(measure(triton_packed.run, naive), truth_of(case, "cpu"))
    assert min(result.values()) > 0.1, result


@pytest.mark.sample(1)
@interpreted
@pytest.mark.parametrize("sinks", [False, True])
def test_sequences_that_do_not_count_are_left_out(sinks: bool) -> None:
    """They are not read and get zeros. The others have the same bits as when they are computed alone."""
    call = make([5, 40, 3], heads=4, kv_heads=2, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]) if sinks else None)
    grad = torch.randn(48, 4, 16, generator=torch.Generator().manual_seed(1))
    parts = {name: getattr(call, name)[:45].clone() for name in "qkv"}
    alone = replace(call, packed=PackedSeqLens.from_lengths([5, 40]), **parts)
    want = all_of(alone, offsets(0, 5, 45), grad[:45])
    for tensor in (call.q, call.k, call.v, grad):
        tensor[45:] = float("nan")
    result = all_of(call, call.packed.cu_seqlens, grad, torch.tensor([45], dtype=torch.int32))
    assert same([t[:45] for t in result], want)
    out, lse, *grads = result
    assert not any(t[45:].any() for t in (out, *grads))
    assert lse[45:].min() >= 1e29, "whatever a sink is, it has no weight there"
    assert all(t[45:].isnan().any() for t in all_of(call, call.packed.cu_seqlens, grad)), "the check can fail"


@interpreted
@pytest.mark.parametrize("sinks", [False, True])
def test_what_the_forward_keeps(sinks: bool) -> None:
    """It keeps the log-sum-exp ``[T, H]`` of the scores and the sink, in base 2."""
    call = make([5, 1, 3], heads=4, kv_heads=2, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]) if sinks else None)
    _, lse = attention.forward(call.q, call.k, call.v, call.sinks, call.packed.cu_seqlens, Scores(call.scale))
    scores = torch.einsum("qhd,khd->qhk", call.q, call.expanded_kv()[0]) * call.scale
    token, sequence = torch.arange(9), torch.tensor([0] * 5 + [1] + [2] * 3)
    hidden = (sequence[:, None] != sequence) | (token > token[:, None])
    scores = scores.masked_fill(hidden[:, None], float("-inf"))
    if call.sinks is not None:
        scores = torch.cat([scores, call.sinks[None, :, None].expand(9, 4, 1)], -1)
    assert relative(lse, scores.logsumexp(-1) * attention.LOG2E) <= 1e-6


@interpreted
def test_large_scores_do_not_overflow() -> None:
    """Exponents reach several hundred; the largest is subtracted first."""
    call = make([40, 3])
    call = replace(call, scale=100.0)
    wide = call.with_qkv(call.q.double(), call.k.double(), call.v.double())
    truth = reference.run(wide)
    assert (call.q @ call.k.mT).max() * 100.0 > 500
    assert (triton_packed.run(call) - truth).abs().max() <= 1e-4 * truth.abs().max()
    assert (reference.run(replace(wide, scale=20.0)) - truth).abs().max() > 0.1 * truth.abs().max()


# --- where sequences begin ------------------------------------------------------------------------------------------


@pytest.mark.slow
@interpreted
def test_offsets_that_repeat() -> None:
    """Sequences without a token change no bit, at the end (as in a bucket) or between other sequences."""
    call = make([7, 1, 19])
    grad = torch.randn_like(call.q)
    expected = all_of(call, offsets(0, 7, 8, 27), grad)
    for cu_seqlens in (
        offsets(0, 7, 8, 27, 27, 27, 27),
        offsets(0, 0, 7, 8, 27),
        offsets(0, 7, 7, 7, 8, 8, 27),
        offsets(*([0] * 260), 7, 8, *([27] * 20)),  # more offsets than are read at once
    ):
        assert same(all_of(call, cu_seqlens, grad), expected)
    assert not same(all_of(call, offsets(0, 7, 9, 27), grad), expected)


@interpreted
def test_a_bucket() -> None:
    """Rounding a batch up to a bucket does not change the results of its real tokens."""
    call = make([70, 1, 19])
    packed = call.packed.bucketed()
    assert (packed.total_tokens, packed.cu_seqlens.numel()) == (128, 17)
    wide = AttentionCall(*(packed.unpad(t[None])[0] for t in (call.q, call.k, call.v)), packed, call.scale)
    assert torch.equal(triton_packed.run(wide)[:90], triton_packed.run(call))


@pytest.mark.sample(1)
@interpreted
@pytest.mark.parametrize("seed", range(4))
def test_every_tile_finds_its_sequence(seed: int, cut: Cut) -> None:
    """Lengths are random, on and off the edges of tiles, whose tokens are no power of two."""
    draw = random.Random(seed)
    cut((ONE_LOOP, TWO_LOOPS)[seed % 2])
    lengths = [draw.choice([1, 2, 5, 15, 16, 17, 31, 32, 33]) for _ in range(draw.randint(1, 9))]
    call = make(lengths, heads=(1, 3, 5, 6)[seed], size=8)
    truth = measure(formula, replace(call, q=call.q.double(), k=call.k.double(), v=call.v.double()))
    assert max(errors(measure(triton_packed.run, call), truth).values()) <= 1e-5, lengths


@interpreted
def test_lengths_are_read_on_the_device_alone() -> None:
    """As in a recorded launch, the offsets change while the call knows no lengths."""
    call = make([7, 1, 19])
    cu_seqlens = call.packed.cu_seqlens.clone()
    unknown = PackedSeqLens((), cu_seqlens, call.packed.position_ids, max_seqlen=512)
    blind = replace(call, packed=unknown)
    assert torch.equal(triton_packed.run(blind), triton_packed.run(call))
    cu_seqlens.copy_(offsets(0, 12, 27, 27))
    other = replace(call, packed=PackedSeqLens.from_lengths([12, 15]))
    assert torch.equal(triton_packed.run(blind), triton_packed.run(other))
    assert not torch.equal(triton_packed.run(blind), triton_packed.run(call))


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("sharing", [0, 1000])
@pytest.mark.parametrize("window", [None, 7])
def test_a_sequence_is_not_moved_by_its_neighbours(window: int | None, sharing: int, cut: Cut) -> None:
    """NaN in a sequence or its gradient reaches no other one: masked values are never multiplied by zero."""
    case = Case(window=window, head_dim=8)
    cut(replace(ONE_LOOP, sharing=sharing))
    call = case.make(FLOAT, requires_grad=False)
    grad = torch.randn_like(triton_packed.run(call))
    before = all_of(call, call.packed.cu_seqlens, grad)
    for sequence in (0, 2, 5):
        begin, end = call.packed.cu_seqlens[sequence : sequence + 2].tolist()
        spoilt = [t.clone() for t in (call.q, call.k, call.v, grad)]
        for tensor in spoilt:
            tensor[begin:end] = float("nan")
        after = all_of(call.with_qkv(*spoilt[:3]), call.packed.cu_seqlens, spoilt[3])
        assert all(torch.isnan(t[begin:end]).all() for t in after)
        assert same([t[:begin] for t in after], [t[:begin] for t in before])
        assert same([t[end:] for t in after], [t[end:] for t in before])


# --- tensors as they come ---------------------------------------------------------------------------------------------


@interpreted
def test_any_strides() -> None:
    """Slices of a projection, heads before tokens, a last stride above 1, expanded gradients: the bits are the same."""
    call = make([7, 1, 19], heads=4, kv_heads=2)
    expected, *gradients = all_of(call, call.packed.cu_seqlens, torch.ones_like(call.q))
    gradients = gradients[1:]  # without the log-sum-exp
    fused = torch.cat([call.q, call.k, call.v], 1)
    stepped = torch.stack([call.k, call.k + 1], -1).flatten(2)[..., ::2]
    assert torch.equal(stepped, call.k)
    for q, k, v in (
        fused.split((4, 2, 2), 1),
        [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (call.q, call.k, call.v)],
        (call.q, stepped, call.v),
    ):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]  # with their strides
        out = triton_packed.run(call.with_qkv(*leaves))
        assert torch.equal(out, expected)
        assert same(list(torch.autograd.grad(out.sum(), leaves)), gradients)


@interpreted
def test_unneeded_gradients_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make([7, 1, 19], sinks=torch.randn(2))
    assert call.sinks is not None
    full = measure(triton_packed.run, call)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(call.q.shape, generator=generator, dtype=torch.float64).bfloat16().float()  # as measure draws it
    monkeypatch.setattr(attention_keys, "keys_kernel", None)
    q, sinks = call.q.clone().requires_grad_(), call.sinks.clone().requires_grad_()
    out = triton_packed.run(replace(call, q=q, sinks=sinks))
    assert same(list(torch.autograd.grad(out, (q, sinks), grad)), [full.grads["q"], full.grads["sinks"]])
    k = call.k.clone().requires_grad_()
    with pytest.raises(TypeError):
        triton_packed.run(replace(call, k=k)).sum().backward()


def test_stages_that_fit_a_small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory holds one side of a tile once, and the other side once for each stage."""
    q = v = torch.empty(1, 4, 128, dtype=HALF)
    table = {128: AttentionTile(rows=64, keys=32, warps=4, stages=3)}
    each = 32 * 256 * 2
    for room, stages in ((2 * each + 3 * each, 3), (2 * each + 3 * each - 1, 2), (2 * each + each, 1), (0, 1)):
        monkeypatch.setattr(launch, "shared_memory", lambda device, room=room: room)
        assert attention.chosen(table, q, v, streams_keys=True) == replace(table[128], stages=stages)
    monkeypatch.setattr(launch, "shared_memory", lambda device: each + 2 * each)  # one side of keys, one of rows
    assert attention.chosen(table, q, v, streams_keys=False).stages == 1
    assert attention.chosen(table, q, v, streams_keys=True).stages == 1
    monkeypatch.setattr(launch, "shared_memory", lambda device: each + 4 * each)
    assert attention.chosen(table, q, v, streams_keys=False).stages == 2
    assert attention.chosen(table, q, v, streams_keys=True).stages == 3


def test_every_size_has_a_tile_for_every_group() -> None:
    for table in (attention.FORWARD, attention.FLOAT32, attention_queries.QUERIES, attention_keys.KEYS):
        assert list(table) == [64, 128, 256]
        for tile in table.values():
            for count in (tile.rows, tile.keys):
                assert 16 <= count <= attention.MAX_TILE
                assert count & (count - 1) == 0
            assert tile.rows >= attention.MAX_PART
    for group in range(1, 100):
        part, parts = attention.parts_of(group)
        assert part <= attention.MAX_PART
        assert part * (parts - 1) < group <= part * parts


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(32, 8, 128), (14, 2, 64)])
def test_the_same_bits_each_time(heads: int, kv_heads: int, size: int) -> None:
    call = on_gpu([441, 33, 370, 60, 112, 1, 122], heads, kv_heads, size)
    runs = []
    for _ in range(3):
        out = triton_packed.run(call)
        runs.append([out, *torch.autograd.grad(out, (call.q, call.k, call.v), out.detach())])
    assert same(runs[0], runs[1])
    assert same(runs[0], runs[2])


@pytest.mark.gpu
def test_a_recorded_launch_serves_other_lengths() -> None:
    """It is recorded with one batch, and replayed with others of the same T and N, some without tokens."""
    batches = [[100, 28, 1, 127], [256, 0, 0, 0], [3, 250, 3, 0]]
    ends = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in batches]
    call = on_gpu(batches[0], 8, 2, 64)
    cu_seqlens = ends[0].cuda()
    packed = PackedSeqLens((), cu_seqlens, call.packed.position_ids, max_seqlen=256)
    blind = replace(call, packed=packed)

    def step() -> list[Tensor]:
        out = triton_packed.run(blind)
        return [out, *torch.autograd.grad(out, (call.q, call.k, call.v), torch.ones_like(out))]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    result = []
    for end in ends:
        cu_seqlens.copy_(end)
        graph.replay()
        assert same(recorded, step())
        result.append(recorded[0].clone())
    assert not torch.equal(result[0], result[1])


@pytest.mark.gpu
def test_more_elements_than_int32_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last sequence among 2^31 elements has the same bits as alone, with shared walks switched off."""
    monkeypatch.setattr(attention_keys, "MOST_PIECES", 1)
    tokens, heads, size = 2**20 + 300, 16, 128
    q = torch.zeros(tokens, heads, size, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.zeros(tokens, 1, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    alone = on_gpu([300], heads, 1, size)
    for whole, last in ((q, alone.q), (k, alone.k), (v, alone.v)):
        whole[-300:] = last.detach()
        whole.requires_grad_()
    lengths = [2**12] * 2**8 + [300]
    call = AttentionCall(q, k, v, PackedSeqLens.from_lengths(lengths, device="cuda"), alone.scale)
    results = []
    for each in (call, alone):
        out = triton_packed.run(each)
        results.append([out[-300:], *(g[-300:] for g in torch.autograd.grad(out.sum(), (each.q, each.k, each.v)))])
    assert same(*results)
    assert results[0][0].any()
