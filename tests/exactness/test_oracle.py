"""The oracle: its measures, half precision, and heads of a real size."""

from __future__ import annotations

import functools

import pytest
import torch

import fastpack
from fastpack.exactness import tiny
from fastpack.exactness.oracle import DRAWS, STEADY, finer_copy
from fastpack.exactness.rule import FACTOR, FULL_BOUND, Result, compare, compare_draws
from fastpack.testing.record import GPU_HEAD_DIM, Setting
from fastpack.testing.worker import oracle_of

HALF = Setting("cpu", "bfloat16", GPU_HEAD_DIM)
WIDE = Setting("cpu", "float32", GPU_HEAD_DIM)


def result(logits: list[float], grad: list[float]) -> Result:
    return Result([torch.tensor([[1.0, 2.0]]), torch.tensor([logits])], torch.tensor(1.0), {"w": torch.tensor(grad)})


def test_errors_are_those_of_the_worst_sequence_and_parameter() -> None:
    true, actual = result([3.0, 4.0], [1.0, 0.0]), result([3.0, 4.4], [1.0, 0.5])
    assert compare(actual, true).logits == pytest.approx(0.1)
    assert compare(actual, true, half=True).logits == pytest.approx(0.08)
    assert compare(actual, true).worst == compare(actual, true, half=True).worst == 0.5
    for half in (False, True):
        assert compare(true, true, half=half).worst == 0.0
        assert compare(result([3.0, float("nan")], [1.0, 0.0]), true, half=half).worst == float("inf")
        without = Result(true.logits, true.loss, {})
        assert compare(without, true, half=half).grads == 1.0, "what only one has is zero on the other"
        assert compare(true, without, half=half).grads == float("inf")


def test_nothing_to_compare_proves_nothing() -> None:
    """Passes without logits or gradients, or with only zeros, prove nothing. One zero gradient of several is fine."""
    true = result([3.0, 4.0], [1.0, 0.0])
    for nothing in (true._replace(logits=[]), true._replace(grads={}), result([3.0, 4.0], [0.0, 0.0])):
        assert compare(nothing, nothing).worst == float("inf")
    one = true._replace(logits=[torch.zeros(1, 2), *true.logits])
    assert compare(one, one).logits == float("inf"), "nothing is known of one sequence"
    unused = true._replace(grads={**true.grads, "unused": torch.zeros(2)})
    assert compare(unused, unused).worst == 0.0


def test_the_median_of_the_draws_counts() -> None:
    true, far = result([3.0, 4.0], [1.0, 0.0]), result([3.0, 40.0], [1.0, 0.0])
    assert compare_draws([far, true, true], [true] * 3, half=True).worst == 0.0
    assert compare_draws([far, far, true], [true] * 3, half=True).logits == pytest.approx(7.2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bamba", "mixtral"])
def test_half_precision_is_as_near_to_float32_as_the_stock_model(model_type: str) -> None:
    oracle = oracle_of(model_type, HALF)
    assert oracle.dtype == torch.bfloat16
    assert len(oracle.results) == DRAWS
    assert torch.finfo(torch.bfloat16).eps / 2 <= oracle.bound <= FACTOR * STEADY
    actual = oracle.prove(fastpack.patch(HALF.build(model_type)))
    assert actual.problem is None


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_5_moe_text", "xlnet"])
def test_what_rounding_throws_far_off_is_proved_in_float32(model_type: str) -> None:
    """One model has experts that no row names; the other's stock forward takes no other dtype."""
    oracle = oracle_of(model_type, HALF)
    assert oracle.dtype == torch.float32
    assert oracle.bound == FULL_BOUND
    actual = oracle.prove(fastpack.patch(WIDE.build(model_type)))
    assert actual.problem is None


def test_a_leak_is_seen_in_half_precision() -> None:
    """The stock model leaks: it gets the packing's arguments, but ignores them."""
    assert (oracle_of("llama", HALF).prove(HALF.build("llama")).problem or "").startswith("not exact")


def test_heads_of_a_real_size() -> None:
    config = tiny.tiny_config("llama", head_dim=64)
    assert (config.head_dim, config.hidden_size, config.num_attention_heads) == (64, 256, 4)
    assert tiny.tiny_config("llama", head_dim=128).hidden_size == 512
    text = tiny.tiny_config("gemma3", head_dim=64, text_config={"num_attention_heads": 2}).text_config
    assert (text.head_dim, text.query_pre_attn_scalar, text.num_attention_heads) == (64, 64, 2)
    assert text.vocab_size == tiny.VOCAB
    with pytest.raises(ValueError, match="multiple"):
        tiny.tiny_config("llama", head_dim=20)


@pytest.mark.parametrize("model_type", ["llama", "mamba2", "deepseek_v3", "qwen3_next", "gemma4"])
def test_wider_models_have_activations_of_the_same_size(model_type: str) -> None:
    ids_BS = tiny.plain_tokens(2, 12)
    with torch.no_grad():
        spreads = [tiny.build_tiny(model_type, head_dim=n)(input_ids=ids_BS).logits.std() for n in (16, 64)]
    assert 0.5 < spreads[1] / spreads[0] < 2.0


def test_the_float32_model_has_the_weights_of_the_other() -> None:
    fine = finer_copy(functools.partial(HALF.build, "llama"), HALF.build("llama"), torch.float32)
    for name, parameter in HALF.build("llama").named_parameters():
        assert parameter.dtype == torch.bfloat16
        wide = fine.get_parameter(name)
        assert wide.dtype == torch.float32
        assert torch.equal(wide, parameter.float())


def test_what_a_machine_is_tried_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Setting.of_this_machine() == Setting("cpu", "float32", 16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Setting.of_this_machine() == Setting("cuda", "bfloat16", 64)
    assert Setting.of_this_machine(device="cpu") == Setting("cpu", "float32", 16)
    assert Setting.of_this_machine(dtype="float32") == Setting("cuda", "float32", 64)
