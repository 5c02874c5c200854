"""The fused LoRA path and its kernels on a GPU, against PEFT: at most 1.5 times its error, in every setting.

The truth is the same model in float32, with the dequantised values of its weights. Errors are norms of differences: one
for all logits, and one for the gradient of each A and B.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import NF4, loaded_again, with_lora
from op_checks import count_calls
from oracle import INPUT_KINDS, Result, compare, make_sequences, split_logits, to_device, trained_tokens
from tiny import HEAD_DIM, VOCAB, tiny_model
from torch import Tensor, nn

import fastpack
from fastpack.exactness.rule import FACTOR

norm = pytest.importorskip("fastpack.ops.kernels.norm")
pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 512}
GAIN = (HEAD_DIM / SIZES["head_dim"]) ** 0.5
LENGTHS = (70, 1, 190, 190, 333)
KIND = "TRL's keywords"
BOUND = FACTOR
FUSED = {"project": 4, "gated_mlp": 2, "add_updates": 0}
UPDATES = {"project": 0, "gated_mlp": 0, "add_updates": 8}


@dataclass(frozen=True)
class Base:
    """The base model under LoRA.

    Attributes:
        dtype: the dtype of everything that is not quantised; 4-bit weights compute in it.
        bits: the bits of the projections' weights, or None if they are not quantised.
        half_lora: A and B are in the dtype of the base, not in float32.
        prepared: PEFT has prepared the model, so everything that is not quantised is float32.
    """

    dtype: torch.dtype
    bits: int | None = None
    half_lora: bool = False
    prepared: bool = False

    @property
    def calls(self) -> dict[str, int]:
        """Count the fused Functions of two layers: LLM.int8 keeps its own matmul, and the updates on top are fused."""
        return UPDATES if self.bits == 8 else FUSED


BASES = {
    "float32": Base(torch.float32),
    "bf16": Base(torch.bfloat16),
    "fp16": Base(torch.float16),
    "bf16, A and B too": Base(torch.bfloat16, half_lora=True),
    "NF4": Base(torch.bfloat16, 4),
    "NF4 in fp16": Base(torch.float16, 4),
    "NF4, prepared": Base(torch.bfloat16, 4, prepared=True),
    "8-bit": Base(torch.bfloat16, 8),
    "8-bit in fp16": Base(torch.float16, 8),
    "8-bit, prepared": Base(torch.float16, 8, prepared=True),
}
PLAIN, BF16, FP16 = None, torch.bfloat16, torch.float16
SETTINGS = [
    *((name, PLAIN) for name in ("bf16", "bf16, A and B too", "NF4", "8-bit", "8-bit in fp16")),
    *((name, BF16) for name in ("float32", "bf16", "NF4", "NF4, prepared", "8-bit", "8-bit, prepared")),
    *((name, FP16) for name in ("float32", "fp16", "NF4 in fp16", "8-bit in fp16", "8-bit, prepared")),
]


def build(base: Base, folder: Path, dropout: float = 0.0) -> Any:
    """Return a small Llama with LoRA over this base."""
    from peft import prepare_model_for_kbit_training

    model: Any = tiny_model("llama", **SIZES)
    with torch.no_grad():  # smaller weights, as with the tiny sizes: rounding grows less, and hides less
        for parameter in model.parameters():
            parameter.mul_(GAIN if parameter.ndim > 1 else 1)
    if base.bits is None:
        model = model.to(DEVICE, base.dtype)
    else:
        model = quantised(model, base, folder)
        if base.prepared:
            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model = with_lora(model, lora_dropout=dropout)
    of_lora = {p.dtype for name, p in model.named_parameters() if "lora_" in name}
    assert of_lora == {torch.float32}, "which PEFT makes of half precision"
    if base.half_lora:
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(base.dtype)
    return model


def quantised(model: nn.Module, base: Base, folder: Path) -> Any:
    """Return an LLM.int8 layer without outlier columns, which would be picked over all tokens of a batch."""
    settings: dict[str, Any] = {"load_in_8bit": True, "llm_int8_threshold": 0.0}
    if base.bits == 4:
        settings = NF4 | {"bnb_4bit_compute_dtype": base.dtype}
    return loaded_again(folder, model, base.dtype, DEVICE, **settings)


def in_float32(model: Any, dropout: float = 0.0) -> Any:
    """Return a float32 model of the same values; the model must not have run, since LLM.int8 then drops its scales."""
    true: Any = with_lora(tiny_model("llama", **SIZES), lora_dropout=dropout).to(DEVICE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            true.get_parameter(name).copy_(dense(parameter))
    return true


def dense(parameter: Any) -> Tensor:
    """Return the dense values of a weight."""
    if type(parameter).__name__ == "Params4bit":
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(parameter.data, parameter.quant_state)
    if type(parameter).__name__ == "Int8Params":
        return parameter.data.float() * parameter.SCB[:, None].float() / 127
    return parameter.data


def run(model: Any, sequences: list[Tensor], autocast: torch.dtype | None, *, packed: bool) -> Result:
    """Return all logits and LoRA's gradients, with sequences packed or alone; in fp16 the loss is scaled."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 28, "A and B of 14 projections"
    model.zero_grad(set_to_none=True)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, enabled=autocast == torch.float16)
    with torch.autocast(DEVICE, autocast or torch.bfloat16, enabled=autocast is not None):
        if packed:
            batch = to_device(INPUT_KINDS[KIND](sequences), torch.device(DEVICE))
            out = model(**batch, num_items_in_batch=trained_tokens(sequences))
            logits, loss = split_logits(out.logits, batch, sequences), out.loss
        else:
            logits = [model(input_ids=s[None].to(DEVICE), use_cache=False).logits[0] for s in sequences]
            targets = torch.cat([s[1:] for s in sequences]).to(DEVICE)
            loss = nn.functional.cross_entropy(torch.cat([x[:-1] for x in logits]).float(), targets)
    scaler.scale(loss).backward()
    scaler.unscale_(torch.optim.SGD(trained.values(), lr=0.1))
    gradients = {name: p.grad.detach().clone() for name, p in trained.items()}
    return Result([torch.cat(logits).detach()], loss.detach(), gradients)


def check(result: Result, stock: Result, true: Result) -> None:
    """Check the rule for the logits and for each gradient."""
    for name in true.grads:
        only = [Result(each.logits, each.loss, {name: each.grads[name]}) for each in (result, stock, true)]
        error, allowed = compare(only[0], only[2], half=True), compare(only[1], only[2], half=True)
        assert 1e-4 < error.grads <= BOUND * allowed.grads, f"{error}, PEFT's {allowed}"
    assert 1e-4 < error.logits <= BOUND * allowed.logits, f"{error}, PEFT's {allowed}"


def check_control(model: Any, stock: Result, true: Result, *kwargs: Any) -> None:
    """Check that a tenth more scale in one layer shows in logits and gradients."""
    for name, module in model.named_modules():
        if "layers.0." in name and hasattr(module, "lora_A"):
            module.scaling["default"] *= 1.1
    error, allowed = compare(run(model, *kwargs, packed=True), true, half=True), compare(stock, true, half=True)
    assert error.grads > BOUND * allowed.grads, f"{error}, PEFT's {allowed}"
    assert error.logits > BOUND * allowed.logits, f"{error}, PEFT's {allowed}"


@pytest.mark.parametrize(("name", "autocast"), SETTINGS)
def test_no_worse_than_peft(
    name: str, autocast: torch.dtype | None, tmp_path: Path, calls: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, sequences = BASES[name], make_sequences(VOCAB, LENGTHS)
    stock, model = build(base, tmp_path), build(base, tmp_path)
    true = run(in_float32(stock), sequences, None, packed=False)
    alone = run(stock, sequences, autocast, packed=False)
    assert not any(calls.values())
    launches = count_calls(monkeypatch, norm, "forward")
    fastpack.patch(model)
    result = run(model, sequences, autocast, packed=True)
    assert calls == base.calls
    assert launches, "kernels are what ran"
    check(result, alone, true)
    check_control(model, alone, true, sequences, autocast)


# --- dropout ----------------------------------------------------------------------------------------------------------

DROPOUT = 0.3


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Record the masks that fastpack draws inside, in order."""
    result: list[Tensor] = []
    stock = torch.native_dropout

    def native_dropout(x: Tensor, probability: float, train: bool) -> tuple[Tensor, Tensor]:
        dropped, mask = stock(x, probability, train)
        result.append(mask)
        return dropped, mask

    with monkeypatch.context() as context:
        context.setattr(torch, "native_dropout", native_dropout)
        yield result


def dropouts(model: Any) -> list[nn.Module]:
    """Return LoRA's dropouts, in the order in which projections are called."""
    result = [module for name, module in model.named_modules() if name.endswith("lora_dropout.default")]
    assert len(result) == 14
    return result


def drops_what(model: Any, masks: list[Tensor], lengths: tuple[int, ...]) -> None:
    """Let a stock model drop, sequence by sequence, the elements that were dropped in a packed row."""
    for module, mask in zip(dropouts(model), masks, strict=True):
        parts = iter(mask.split(lengths))
        module.register_forward_hook(lambda _, args, out, parts=parts: args[0] * next(parts) / (1 - DROPOUT))


@pytest.mark.parametrize(
    ("name", "autocast"),
    [
        *((name, PLAIN) for name in ("bf16", "bf16, A and B too", "NF4", "8-bit")),
        ("NF4, prepared", BF16),
        ("8-bit, prepared", BF16),
        ("float32", FP16),
    ],
)
def test_dropout_is_no_worse_than_peft(
    name: str, autocast: torch.dtype | None, tmp_path: Path, calls: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT drops the same elements: masks may depend on a tensor's dtype, and the input has A's dtype."""
    base, sequences = BASES[name], make_sequences(VOCAB, LENGTHS)
    stock, model = build(base, tmp_path, DROPOUT), build(base, tmp_path, DROPOUT)
    wide = in_float32(stock, DROPOUT)
    fastpack.patch(model)
    torch.manual_seed(11)
    with recorded(monkeypatch) as masks:
        result = run(model, sequences, autocast, packed=True)
    assert calls == base.calls
    for each in (stock, wide):
        drops_what(each, masks, LENGTHS)
    true = run(wide, sequences, None, packed=False)
    alone = run(stock, sequences, autocast, packed=False)
    assert 0.25 < 1 - torch.cat([mask.flatten() for mask in masks]).double().mean() < 0.35
    check(result, alone, true)
    torch.manual_seed(12)
    other = compare(run(model, sequences, autocast, packed=True), true, half=True)
    assert other.grads > 2 * BOUND * compare(alone, true, half=True).grads, "the control: another seed is another draw"


@pytest.mark.parametrize("name", ["float32", "bf16, A and B too"])
def test_dropout_draws_what_peft_draws(
    name: str, tmp_path: Path, calls: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both start from the same generator state, and drop in the same dtype."""
    base, sequences = BASES[name], make_sequences(VOCAB, [333])
    stock, model = build(base, tmp_path, DROPOUT), fastpack.patch(build(base, tmp_path, DROPOUT))
    theirs: list[tuple[Tensor, Tensor]] = []
    for module in dropouts(stock):
        module.register_forward_hook(lambda _, args, out: theirs.append((args[0][0] != 0, out[0] != 0)))
    torch.manual_seed(11)
    run(stock, sequences, None, packed=False)
    for seed in (11, 12):
        torch.manual_seed(seed)
        with recorded(monkeypatch) as masks:
            run(model, sequences, None, packed=True)
        assert len(masks) == len(theirs) == 14
        alike = [torch.equal(mask[kwargs], kept[kwargs]) for mask, (kwargs, kept) in zip(masks, theirs, strict=True)]
        assert all(alike) if seed == 11 else not any(alike)
    assert calls == {key: 2 * count for key, count in FUSED.items()}
