"""Offloading on a GPU: the same bits, less memory, and copies and computation that wait for each other."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from adapter_cases import with_lora
from offloading import KINDS, backbone_of, collected, equal, in_use, offload, prepared
from oracle import relative
from tiny import tiny_model
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fastpack
from fastpack.cuda_graphs.recorder import no_synchronisation
from fastpack.exactness.tiny import build_tiny, plain_tokens
from fastpack.model.model_runtime import runtime_of
from fastpack.offload.checkpoints import CheckpointOffload
from fastpack.offload.saved import KEEP
from fastpack.offload.transfer import CudaLink, Rates

pytestmark = pytest.mark.gpu

LAYERS, HIDDEN = 12, 1024
LENGTHS = [256] * 15 + [255, 1]
TOKENS = sum(LENGTHS)
BYTES = TOKENS * HIDDEN * 2
SLACK = 2 * BYTES
"""Bytes being copied at the peak: half a layer's, and more if other processes use the link."""
SLEEP = 20_000_000
"""Clock cycles, some 10 ms: longer than anything else here takes."""


def build(*, lora: bool) -> Any:
    model = tiny_model(
        "llama",
        num_hidden_layers=LAYERS,
        hidden_size=HIDDEN,
        intermediate_size=2048,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
    )
    return (with_lora(model) if lora else model).to("cuda", torch.bfloat16)


def step(model: Any, seed: int = 0) -> tuple[dict[str, Tensor], int]:
    """Return the gradients, and the peak memory of the pass above what was allocated before."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 97, (1, TOKENS), generator=generator).cuda()
    grad = torch.randn(1, TOKENS, HIDDEN, generator=generator).to("cuda", torch.bfloat16)
    for parameter in model.parameters():  # there before: they would outgrow what is measured
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    gc.collect()  # nor may what an earlier test left be freed in the middle
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    backbone_of(model)(input_ids=ids, packed_seq_lens=LENGTHS).last_hidden_state.backward(grad)
    torch.cuda.synchronize()
    return collected(model), torch.cuda.max_memory_allocated() - before


@KINDS
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_same_bits_in_less_memory(lora: bool, reentrant: bool) -> None:
    model = fastpack.patch(build(lora=lora), attention="reference")  # whose backward repeats itself
    results = []
    for choice in (None, None, "checkpoints"):
        fastpack.patch(model, attention="reference", offload=choice)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if lora:
            model.enable_input_require_grads()
        results += [step(model), step(model, seed=1)]
    for seed in range(2):
        (want, _), (again, most), (ours, less) = results[seed::2]
        assert equal(again, want), "a model that repeats itself, or equal bits would mean nothing"
        assert equal(ours, want)
        # Not the last ones and the one on its way back; with LoRA the first is a leaf, which the graph holds on to.
        assert most - less >= (LAYERS - KEEP - lora) * BYTES - SLACK
    assert not equal(results[0][0], results[1][0])
    stats, pool = offload(model).stats, next(iter(offload(model)._channels.values())).pool
    left = LAYERS + 1 - KEEP - lora
    assert (stats.forwards, stats.tensors) == (2, 2 * left)
    assert (pool.count, in_use(pool), pool.nbytes) == (left, 0, left * BYTES)
    assert all(buffer.is_pinned() for buffer in pool._free)
    assert f"offload: {2 * left} layer inputs of 2 forwards" in fastpack.report(model).notes[-1]


@KINDS
def test_the_backend_that_serves(reentrant: bool) -> None:
    """With FlashAttention, whose backward adds in any order: as near as any two runs, and again in less memory."""
    results = [
        step(prepared(build(lora=True), choice, reentrant=reentrant))
        for choice in (None, "checkpoints", None, "checkpoints")
    ]
    (want, _), (ours, _), (again, most), (_, less) = results
    assert distance(ours, want) <= 2 * distance(again, want) + 1e-3
    assert most - less >= (LAYERS - KEEP - 1) * BYTES - SLACK


def distance(ours: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Return the relative root-mean-square difference of all gradients together."""
    assert ours.keys() == want.keys()
    difference = sum((ours[name].double() - gradient.double()).square().sum() for name, gradient in want.items())
    return float((difference / sum(gradient.double().square().sum() for gradient in want.values())) ** 0.5)


class SlowLink(CudaLink):
    """A link whose copies are late."""

    def send(self, source: Tensor, host: Any, since: torch.cuda.Event) -> torch.cuda.Event:
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(SLEEP)
        return super().send(source, host, since)

    def copy_back(self, host: Any, nbytes: int) -> tuple[Tensor, torch.cuda.Event]:
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(SLEEP)
        return super().copy_back(host, nbytes)


class ForgetfulLink(SlowLink):
    """A slow link for whose copies nothing waits."""

    def wait(self, event: torch.cuda.Event) -> None: ...


class HastyLink(CudaLink):
    """A link that does not wait for the data that it copies."""

    def send(self, source: Tensor, host: Any, since: torch.cuda.Event) -> torch.cuda.Event:
        return super().send(source, host, torch.cuda.Event())


def chain(x: Tensor, *, slow: bool, reentrant: bool) -> Tensor:
    def layer(x: Tensor) -> Tensor:
        if slow:
            torch.cuda._sleep(SLEEP)
        return torch.tanh(x * 1.1)

    for _ in range(8):
        x = checkpoint(layer, x, use_reentrant=reentrant, preserve_rng_state=False)
    return x


@KINDS
@pytest.mark.parametrize(
    ("link", "slow", "right"),
    [(CudaLink, True, True), (SlowLink, False, True), (ForgetfulLink, False, False), (HastyLink, True, False)],
)
def test_each_waits_for_the_other(link: Any, slow: bool, right: bool, reentrant: bool) -> None:
    """Nothing waits on the host: no synchronisation from the second pass on, when buffers exist."""
    ours = CheckpointOffload(connect=link)
    got, want = [], []
    for seed in range(3):
        data = torch.randn(1, 4096, 1024, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
        x = data.clone().requires_grad_()
        chain(x * 1, slow=False, reentrant=reentrant).sum().backward()
        want.append(x.grad)
        x = data.clone().requires_grad_()
        if seed == 0:  # pinning memory waits for the device
            with ours.saving():
                out = chain(x * 1, slow=False, reentrant=reentrant)
            out.sum().backward()
            torch.cuda.synchronize()
            continue
        with no_synchronisation():
            with ours.saving():
                out = chain(x * 1, slow=slow, reentrant=reentrant)
            out.sum().backward()
        del out
        got.append(x.grad)
        torch.cuda.synchronize()  # what nobody waits for must not reach the next pass
    assert ours.stats.tensors == 3 * (8 - KEEP)
    assert all(torch.equal(a, b) for a, b in zip(got, want[1:], strict=True)) == right


def test_half_a_backward_leaves_memory_in_order() -> None:
    """Memory that was being copied into when the graph was dropped is not reused before the copy is done."""
    ours = CheckpointOffload(connect=SlowLink)
    for _ in range(4):
        hidden = [torch.ones(1, 4096, 1024, device="cuda", requires_grad=True) * 1]
        with ours.saving():
            for _ in range(8):
                hidden.append(checkpoint(torch.tanh, hidden[-1] * 1, use_reentrant=False))
        torch.autograd.grad(hidden[-1].sum(), hidden[5])
        del hidden
        others = [torch.zeros(1, 4096, 1024, device="cuda") for _ in range(12)]
        torch.cuda.synchronize()
        assert not any(other.any() for other in others)


class FastLink(CudaLink):
    """A link that has time for everything."""

    def rates(self, dtype: torch.dtype) -> Rates:
        return Rates(bytes=1e18, operations=1.0)


class LossyLink(FastLink):
    """The negative control: zeros come back."""

    def copy_back(self, host: Any, nbytes: int) -> tuple[Tensor, torch.cuda.Event]:
        tensor, event = super().copy_back(host, nbytes)
        self.wait(event)
        return tensor.zero_(), self.record_event()


OFFLOADED = LAYERS - 2
"""The number of layers whose activations are offloaded; those of the last two stay."""


@pytest.mark.parametrize("graphs", [None, "auto"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_activations_come_back(lora: bool, graphs: Any) -> None:
    """The same bits with gate and up offloaded, recorded or not, over several batches."""
    results: dict[Any, list[Any]] = {}
    for link in (None, FastLink, LossyLink):
        model = fastpack.patch(
            build(lora=lora), attention="triton_packed", graphs=graphs, offload=None if link is None else "activations"
        )
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if lora:
            model.enable_input_require_grads()
        if link is not None:
            offload(model).connect = link
        results[link] = [step(model, seed) for seed in (0, 1, 0)]
        if link is FastLink:
            stats, graph = offload(model).stats, getattr(runtime_of(backbone_of(model)), "graphs", None)
            if graph is None:
                assert (stats.forwards, stats.products) == (3, 3 * OFFLOADED)
                assert stats.tensors == 3 * (LAYERS + 1 - KEEP - lora)
            else:
                assert (stats.forwards, stats.recorded) == (0, (LAYERS + 1 - KEEP, OFFLOADED, 0))
                assert (graph.stats.recordings, graph.stats.replays) == (1, 3)
    for want, ours, lost in zip(*results.values(), strict=True):
        assert equal(ours[0], want[0])
        assert not equal(lost[0], want[0])
    assert results[None][1][0].keys() == results[None][0][0].keys()
    assert not equal(results[None][1][0], results[None][0][0])


def test_time_is_measured_once_and_not_under_capture() -> None:
    link = CudaLink(torch.device("cuda"))
    with no_synchronisation():
        assert link.rates(torch.bfloat16) is None
    state = torch.cuda.get_rng_state()
    rates = link.rates(torch.bfloat16)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert rates is not None
    assert 1e9 < rates.bytes < 1e12
    assert 1e12 < rates.operations < 1e16
    assert link.rates(torch.bfloat16) is rates


@KINDS
@pytest.mark.parametrize("model_type", ["ernie", "gemma4_text"])
def test_where_a_scope_carries_the_packing(model_type: str, reentrant: bool) -> None:
    """A slot of one forward is gone in the next."""
    model = fastpack.patch(build_tiny(model_type, head_dim=64).cuda().train(), attention="reference")
    ids = plain_tokens(1, TOKENS, seed=0).cuda()
    results = []
    for choice in (None, "activations"):
        fastpack.patch(model, attention="reference", offload=choice)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            model(input_ids=ids, labels=ids, packed_seq_lens=LENGTHS).loss.backward()
            results.append(collected(model))
    assert offload(model).stats.tensors > 0
    for ours in results[3:]:
        assert max(relative(ours[name], want) for name, want in results[0].items()) <= 1e-3


def test_long_attention_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastpack.ops.kernels import attention

    model = build(lora=True)
    ids = torch.randint(3, 97, (1, 32768), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    ran: list[int] = []
    forward = attention.forward
    monkeypatch.setattr(attention, "forward", lambda q, *args, **kw: ran.append(len(q)) or forward(q, *args, **kw))
    results = []
    for choice in (None, "checkpoints"):
        fastpack.patch(model, attention="triton_packed", offload=choice)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
        for lengths in ([32768], [1024] * 32):
            ran.clear()
            model.zero_grad(set_to_none=True)
            backbone_of(model)(
                input_ids=ids, packed_seq_lens=lengths
            ).last_hidden_state.float().square().sum().backward()
            results.append((len(ran), collected(model)))
    (twice, want), (short, others), (once, ours), (again, theirs) = results
    assert (twice, short, once, again) == (2 * LAYERS, 2 * LAYERS, LAYERS, 2 * LAYERS)
    assert equal(ours, want)
    assert equal(theirs, others)
    assert offload(model).stats.attention == LAYERS - 2
