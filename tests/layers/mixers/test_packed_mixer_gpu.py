"""Mixers on packed tokens over the installed kernels or our own: kernels alone, and layers at real sizes in bf16.

``pytest tests/layers/mixers/test_packed_mixer_gpu.py`` with flash-linear-attention, or mamba-ssm and causal-conv1d,
on the path. Without a GPU the first half runs in Triton's interpreter, as far as that goes.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Error, Result, compare, make_sequences, run_alone, run_batch
from torch import Tensor, nn

import fastpack
from fastpack import PackedSeqLens
from fastpack.layers.mixers import kernels as mixer_kernels
from fastpack.layers.mixers import packed as packed_mixer
from fastpack.layers.mixers.kernels import Op, packed_conv, packed_recurrence

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
LENGTHS = (70, 1, 64, 190, 333, 128) if GPU else (7, 1, 70, 3)
TOTAL = sum(LENGTHS)
STARTS = list(itertools.pairwise([0, *itertools.accumulate(LENGTHS)]))
FLOAT32_BOUND = 1e-5
BOUND = 2.0
"""Times plain bf16's own error: these kernels hand a sequence's state from chunk to chunk in bf16, torch's functions
in float32."""
FLOOR = 4e-3
"""The rounding of one value in bf16. Smaller errors are not compared as ratios."""


def torch_function(family: str, name: str) -> Callable[..., Any]:
    """Return transformers' own torch version, even if it found kernels."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    actual: Callable[..., Any] = inspect.unwrap(getattr(module, name))
    return actual


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE)


Sides = tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]


def conv(packed: PackedSeqLens) -> Sides:
    function = torch_function("qwen3_next", "causal_conv1d_fn")
    inputs = [numbers(1, TOTAL, 64), numbers(64, 4), numbers(64)]

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return packed_conv(packed, x.transpose(1, 2), weight, bias, "silu")

    def alone(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        return torch.cat([function(x[:, :, a:z], weight, bias, activation="silu") for a, z in STARTS], 2)

    return ours, alone, inputs


def delta(packed: PackedSeqLens, op: Op, family: str, name: str, wide: bool) -> Sides:
    function = torch_function(family, name)
    heads, size = (4, 128) if GPU else (1, 16)
    q, k, v = (numbers(1, TOTAL, heads, size, seed=i) for i in range(3))
    g = nn.functional.logsigmoid(numbers(*((1, TOTAL, heads, size) if wide else (1, TOTAL, heads)), seed=4))
    inputs = [q, k, v, g, numbers(1, TOTAL, heads, seed=5).sigmoid()]

    def alone(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        parts = (
            function(*(x[:, a:z] for x in (q, k, v)), g=g[:, a:z], beta=beta[:, a:z], use_qk_l2norm_in_kernel=True)
            for a, z in STARTS
        )
        return torch.cat([part[0] for part in parts], 1)

    return lambda *xs: packed_recurrence(op, packed, *xs, True), alone, inputs


def gated_delta(packed: PackedSeqLens) -> Sides:
    return delta(packed, "gated_delta", "qwen3_next", "torch_chunk_gated_delta_rule", False)


def kda(packed: PackedSeqLens) -> Sides:
    return delta(packed, "kda", "kimi_linear", "chunk_kimi_delta_attention", True)


def ssd(packed: PackedSeqLens) -> Sides:
    function = torch_function("bamba", "mamba2_chunk_scan")
    heads, groups, state, value = (8, 2, 128, 64) if GPU else (2, 1, 16, 16)
    inputs = [
        numbers(1, TOTAL, heads, value),
        nn.functional.softplus(numbers(1, TOTAL, heads, seed=1) - 2),
        -torch.arange(1.0, heads + 1, device=DEVICE),
        numbers(1, TOTAL, groups, state, seed=2),
        numbers(1, TOTAL, groups, state, seed=3),
        numbers(heads, seed=4),
    ]

    def alone(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
        parts = (function(x[:, a:z], dt[:, a:z], A, B[:, a:z], C[:, a:z], chunk_size=64, D=D) for a, z in STARTS)
        return torch.cat(list(parts), 1)

    return lambda *xs: packed_recurrence("ssd", packed, *xs, 64), alone, inputs


KEPT_WIDE = {"conv": (), "gated_delta": (3,), "kda": (3,), "ssd": (1, 2)}
"""The inputs that are float32 in every model: decays and steps."""


def pass_through(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Return the result and every gradient, in float32."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    direction = numbers(*out.shape, seed=9)
    return [out.detach().float(), *(g.float() for g in torch.autograd.grad((out.float() * direction).sum(), inputs))]


def relative(actual: list[Tensor], reference: list[Tensor]) -> list[float]:
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(actual, reference, strict=True)]


@pytest.fixture(autouse=True)
def _first_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels' first configuration that fits this GPU, not the fastest: there are about a hundred."""
    if not GPU:
        return
    autotuner: Any = importlib.import_module("triton.runtime.autotuner").Autotuner
    prune, bench = autotuner.prune_configs, autotuner._bench
    settled: set[Any] = set()

    def begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        settled.discard(self)
        return prune(self, *args, **kwargs)

    def first_alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self in settled:
            return [float("inf")] * 3
        times = bench(self, *args, **kwargs)
        if times[0] < float("inf"):
            settled.add(self)
        return times

    monkeypatch.setattr(autotuner, "prune_configs", begin)
    monkeypatch.setattr(autotuner, "_bench", first_alone)


@pytest.mark.parametrize("name", KEPT_WIDE)
def test_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences run alone: on a GPU in bf16, relative to bf16's own error; interpreted in float32."""
    op: Any = name
    if not GPU:
        monkeypatch.setattr(mixer_kernels, "_others_serve", lambda device, dtype: True)
        autotuner: Any = importlib.import_module("triton.runtime.autotuner")
        monkeypatch.setattr(autotuner.Autotuner, "_bench", lambda *_, **__: [0.0] * 3)  # nothing to be timed there
    dtype = torch.bfloat16 if GPU else torch.float32
    if not GPU and mixer_kernels.names(op, DEVICE, dtype) == "fastpack":
        pytest.skip("NO OTHER KERNEL HERE: ours has tests of its own")
    ours, alone, inputs = globals()[name](PackedSeqLens.from_lengths(LENGTHS, device=DEVICE))
    wide = pass_through(alone, inputs)
    arguments = [x if i in KEPT_WIDE[name] else x.to(dtype) for i, x in enumerate(inputs)]
    try:
        actual = pass_through(ours, arguments)
    except Exception as error:
        if not GPU and "'int' object has no attribute 'to'" in str(error):
            pytest.skip("THIS TRITON'S INTERPRETER CAN'T: its loops count in Python's ints, which the kernel converts")
        raise
    errors = relative(actual, wide)
    if GPU:
        plain = relative(pass_through(alone, arguments), wide)
        print(name, mixer_kernels.names(op, DEVICE, dtype), "ours", errors, "plain bf16", plain)
        # torch's functions compute in float32 inside: the kernels' own products are bf16's, of which a few follow
        assert all(a <= BOUND * max(b, 2 * FLOOR) for a, b in zip(errors, plain, strict=True)), (errors, plain)
    else:
        assert max(errors) <= FLOAT32_BOUND, errors


# Layers at real sizes.

VOCAB = 2048
LAYERS = 4
SHAPES: dict[str, dict[str, Any]] = {
    # Qwen3-Next-80B-A3B's heads and sizes; dense MLPs, since routing flips between any two runs in bf16
    "qwen3_next": {
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "mlp_only_layers": list(range(LAYERS)),
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    # Bamba-9B's states, half as wide
    "bamba": {
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "mamba_n_heads": 64,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 256,
        "attn_layer_indices": [LAYERS - 1],
    },
}
FALLBACKS = {
    "qwen3_next": ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"),
    "bamba": ("mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined", "causal_conv1d_fn"),
}


def build(model_type: str, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, vocab_size=VOCAB, num_hidden_layers=LAYERS, **SHAPES[model_type])
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.to(dtype).train()


def over_torch(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use transformers' own functions inside the context, even if it found kernels."""
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    for name in FALLBACKS[model_type]:
        monkeypatch.setattr(module, name, dropping(torch_function(model_type, name)))


def dropping(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function with only the keywords that it takes, as transformers' decorator does."""
    taken = inspect.signature(function).parameters

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{k: v for k, v in kwargs.items() if k in taken})

    return run


@pytest.mark.gpu
@pytest.mark.parametrize("on_rows", [True, False], ids=["on rows", "packed"])
@pytest.mark.parametrize("model_type", SHAPES)
def test_layers_at_real_sizes(model_type: str, on_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if on_rows:
        monkeypatch.setattr(packed_mixer, "packed_rejects", lambda *_: "rows were asked for")
        over_torch(model_type, monkeypatch)
    sequences = make_sequences(VOCAB, LENGTHS)
    with monkeypatch.context() as stock, warnings.catch_warnings():
        over_torch(model_type, stock)
        wide = on_host(run_alone(build(model_type, torch.float32), sequences))
        plain = compare(on_host(run_alone(build(model_type, torch.bfloat16), sequences)), wide)
    torch.cuda.empty_cache()

    calls: list[int] = []

    def counted(op: Op, packed: PackedSeqLens, *args: Any, **options: Any) -> Tensor:
        calls.append(packed.total_tokens)
        return packed_recurrence(op, packed, *args, **options)

    for module in (packed_mixer, importlib.import_module("fastpack.layers.mixers.fast")):
        monkeypatch.setattr(module, "packed_recurrence", counted)
    model = fastpack.patch(build(model_type, torch.bfloat16))
    print(fastpack.report(model))
    assert fastpack.report(model).swapped["re-padded mixer" if on_rows else "packed mixer"] == LAYERS - 1
    for kind in ("packed_seq_lens", "padded right"):
        calls.clear()
        check(compare(on_host(run_batch(model, sequences, kind)), wide), plain, kind)
        assert calls == ([] if on_rows else [TOTAL] * (LAYERS - 1)), "once a layer, with all tokens"
    ids = torch.cat(sequences)[None].cuda()
    with torch.no_grad():
        as_one = model(input_ids=ids, packed_seq_lens=[TOTAL]).logits[0].float().cpu()
    reference = torch.cat(wide.logits)
    control = float((as_one - reference).abs().max() / reference.abs().max())
    assert control > 5 * BOUND * max(plain.logits, FLOOR), "as one sequence the result is another"


def on_host(result: Result) -> Result:
    """Move gradients to the host, so that the GPU need not hold three sets."""
    return Result(
        [x.float().cpu() for x in result.logits],
        result.loss.float().cpu(),
        {name: grad.float().cpu() for name, grad in result.grads.items()},
    )


def check(ours: Error, plain: Error, kind: str) -> None:
    print(kind, "ours", ours, "plain bf16", plain)
    for what in ("logits", "loss", "grads"):
        bound = BOUND * max(getattr(plain, what), FLOOR)
        actual = getattr(ours, what)
        assert actual <= bound, f"{what}: {actual:.2e}, plain {getattr(plain, what):.2e}"
