"""On a GPU in bf16: error against float32 at most 1.5 times plain torch's own, for each backend that serves."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import LENGTHS, build, check, oracle_and_plain
from oracle import GPU_FLOAT32_BOUND, INPUT_KINDS, compare, make_sequences, run_alone, run_batch
from tiny import EXPERTS, FAST, VOCAB, tiny_model
from torch import nn

import fastpack
from fastpack.attention_dispatch import BACKENDS
from fastpack.cuda_graphs.recorder import no_synchronisation
from fastpack.exactness.oracle import Oracle

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mistral"])
def test_backends(model_type: str, attention: str) -> None:
    model = build(model_type, torch.bfloat16)
    try:
        fastpack.patch(model, attention=attention)
    except fastpack.BackendUnavailableError as error:
        pytest.skip(str(error))
    wide, plain = oracle_and_plain(model_type)
    sequences = make_sequences(VOCAB, LENGTHS)
    for kind in ("padded right", "TRL's keywords"):
        check(compare(run_batch(model, sequences, kind), wide, half=True), plain)


@pytest.mark.parametrize("model_type", [name for name in FAST if name not in EXPERTS])
def test_families(model_type: str) -> None:
    wide, plain = oracle_and_plain(model_type)
    model = fastpack.patch(build(model_type, torch.bfloat16), strict=True)
    sequences = make_sequences(VOCAB, LENGTHS)
    for kind in INPUT_KINDS:
        check(compare(run_batch(model, sequences, kind), wide, half=True), plain)


@pytest.mark.parametrize("model_type", ["llama", *EXPERTS])
def test_float32(model_type: str) -> None:
    """Experts are included: their routing flips between any two runs in bf16, so that no bound would have a meaning.

    Some (gpt-oss, Granite) amplify rounding: two batches of the stock model differ by more than the bound.
    """
    sequences = make_sequences(VOCAB, LENGTHS)
    alone = run_alone(build(model_type, torch.float32), sequences)
    stock = compare(run_batch(build(model_type, torch.float32), sequences, "padded right"), alone)
    model = fastpack.patch(build(model_type, torch.float32), strict=True)
    for kind in INPUT_KINDS:
        error = compare(run_batch(model, sequences, kind), alone)
        assert error.worst <= max(GPU_FLOAT32_BOUND, 2 * stock.worst), (error, stock)


VARLEN = ("gpt2", "gpt_neox", "olmo", "persimmon", "phi")


@pytest.mark.parametrize("model_type", VARLEN)
def test_varlen_families(model_type: str) -> None:
    def build_tiny(dtype: torch.dtype) -> nn.Module:
        return tiny_model(model_type).to("cuda", dtype)

    oracle = Oracle.of(build_tiny, torch.bfloat16)
    model = fastpack.patch(build_tiny(oracle.dtype))
    assert fastpack.report(model).tier == "varlen"
    assert oracle.prove(model).problem is None


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "not reentrant"])
def test_lora_with_checkpointing(checkpointing: str) -> None:
    from adapter_cases import with_lora

    sequences = make_sequences(VOCAB, LENGTHS)

    def adapted(dtype: torch.dtype) -> nn.Module:
        return with_lora(build("llama", dtype)).to(dtype)

    wide = run_alone(adapted(torch.float32), sequences)
    plain = compare(run_alone(adapted(torch.bfloat16), sequences), wide, half=True)
    model = fastpack.patch(adapted(torch.bfloat16))
    if checkpointing != "none":
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
    for kind in INPUT_KINDS:
        check(compare(run_batch(model, sequences, kind), wide, half=True), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_over_float32_weights(dtype: torch.dtype) -> None:
    sequences = make_sequences(VOCAB, LENGTHS)
    wide = run_alone(build("llama", torch.float32), sequences)
    stock = build("llama", torch.float32)
    with torch.autocast("cuda", dtype):
        plain = compare(run_alone(stock, sequences), wide, half=True)
    model = fastpack.patch(build("llama", torch.float32), attention="torch_varlen")
    with torch.autocast("cuda", dtype):
        check(compare(run_batch(model, sequences, "padded left"), wide, half=True), plain)


def test_one_synchronisation_a_step() -> None:
    """Layers never wait for the device: a packed batch with checked lengths raises no synchronisation at all."""
    model = fastpack.patch(build("llama", torch.bfloat16))
    sequences = make_sequences(VOCAB, LENGTHS)
    ids = torch.cat(sequences)[None].cuda()
    lengths = [len(s) for s in sequences]
    model(input_ids=ids, packed_seq_lens=lengths).logits.float().sum().backward()
    torch.cuda.synchronize()
    packed = fastpack.PackedSeqLens.from_lengths(lengths, device="cuda")
    hidden = model.model.embed_tokens(ids)
    tables = model.model.rotary_emb(hidden, packed.position_ids)
    with no_synchronisation():
        for layer in model.model.layers:
            hidden = layer(hidden, position_embeddings=tables, packed_seq_lens=packed)
        hidden.float().sum().backward()
