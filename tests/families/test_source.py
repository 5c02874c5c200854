"""A spec holds for the source that it was proved on, and for no other: upstream changes, and users replace code."""

from __future__ import annotations

from contextlib import nullcontext
from types import FunctionType
from typing import Any

import pytest
import torch
from patch_checks import written_in
from transformers.models.llama import modeling_llama as llama
from transformers.models.phimoe.modeling_phimoe import PhimoeAttention
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeAttention

import fastpack
from fastpack.errors import FastpackWarning
from fastpack.exactness.rule import FULL_BOUND
from fastpack.exactness.tiny import build_tiny, plain_tokens
from fastpack.families.source import UNREADABLE, source_hash
from fastpack.testing.record import Setting
from fastpack.testing.worker import oracle_of

LENGTHS = [5, 1, 13]


IDS = plain_tokens(1, sum(LENGTHS), seed=0)


@torch.no_grad()
def alone(model: Any) -> torch.Tensor:
    return torch.cat([model(input_ids=s[None], use_cache=False).logits[0] for s in IDS[0].split(LENGTHS)])


def relative(result: torch.Tensor, reference: torch.Tensor) -> float:
    return float((result - reference).abs().max() / reference.abs().max())


def doubled(self: Any, x: torch.Tensor) -> torch.Tensor:
    return 2 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def hidden(function: FunctionType) -> FunctionType:
    """Return the same function without a file from which its source could be read."""
    return FunctionType(function.__code__.replace(co_filename="<nowhere>"), function.__globals__)


REPLACED: dict[str, tuple[Any, str, Any]] = {
    "a forward": (llama.LlamaMLP, "forward", doubled),
    "one without a source": (llama.LlamaMLP, "forward", hidden(doubled)),
    "a lambda": (llama.LlamaMLP, "forward", lambda self, x: self.down_proj(self.up_proj(x))),
    "a helper": (llama, "apply_rotary_pos_emb", lambda q, k, cos, sin, unsqueeze_dim=1: (q, k)),
}


@pytest.mark.parametrize("name", REPLACED)
def test_replaced_code_is_honoured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds after a first patch of the same family, too."""
    fastpack.patch(build_tiny("llama"))
    where, attribute, value = REPLACED[name]
    before = alone(build_tiny("llama").eval())
    monkeypatch.setattr(where, attribute, value)
    after = alone(build_tiny("llama").eval())
    assert relative(after, before) > 0.01, "the replacement computes something else"
    warning = (
        pytest.warns(FastpackWarning, match="a twin of it does not match") if name == "a helper" else nullcontext()
    )
    with warning:
        model = fastpack.patch(build_tiny("llama").eval())
    assert fastpack.report(model).skipped
    assert not fastpack.report(model).matched
    with torch.no_grad():
        assert relative(model(input_ids=IDS, packed_seq_lens=LENGTHS).logits[0], after) <= FULL_BOUND


def test_an_unreadable_source_has_no_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    readable = source_hash(llama.LlamaMLP)
    monkeypatch.setattr(llama.LlamaMLP, "forward", hidden(llama.LlamaMLP.forward))
    assert source_hash(llama.LlamaMLP) == UNREADABLE != readable


@pytest.mark.parametrize(("model_type", "cls"), [("qwen2_moe", Qwen2MoeAttention), ("phimoe", PhimoeAttention)])
def test_a_window_in_the_mask_alone_outlives_its_spec(
    model_type: str, cls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' interface does not get the window, so that an unknown attention runs on rows, with masks."""
    stock = cls.forward

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Upstream has changed."""
        return stock(self, hidden_states * 1.1, *args, **kwargs)

    monkeypatch.setattr(cls, "forward", written_in(cls.__module__, forward))
    with pytest.warns(FastpackWarning, match=cls.__name__):
        model = fastpack.patch(Setting().build(model_type))
    assert fastpack.report(model).tier == "re-padded mixer"
    assert oracle_of(model_type, Setting()).prove(model).problem is None
