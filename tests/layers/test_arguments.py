"""What comes beside ids, mask and labels: taken along token by token, run as stock, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import FLOAT32_BOUND, relative

import fastpack
from fastpack.smoke.tiny import build_tiny, plain_tokens

IDS = plain_tokens(3, 12, seed=0)
MASK = (torch.arange(12) < torch.tensor([[12], [7], [3]])).long()
NUMBERS = torch.randint(0, 2, IDS.shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("model_type", "name", "config"),
    [
        ("bert", "token_type_ids", {}),
        ("ernie", "task_type_ids", {"use_task_id": True}),
        ("roc_bert", "input_shape_ids", {}),
        ("roc_bert", "input_pronunciation_ids", {}),
        ("xlm", "langs", {"n_langs": 2, "use_lang_emb": True}),
    ],
)
def test_per_token(model_type: str, name: str, config: dict[str, Any]) -> None:
    model = build_tiny(model_type, **config).eval()
    batch = {"input_ids": IDS, "attention_mask": MASK, name: NUMBERS}
    with torch.no_grad():
        stock = model(**batch).logits
        other = model(**{**batch, name: 1 - NUMBERS}).logits
        found = fastpack.patch(model)(**batch).logits
    real = MASK.bool()
    assert relative(found[real], stock[real]) <= FLOAT32_BOUND
    assert relative(other[real], stock[real]) > 1e-2, "the check can fail"


@pytest.mark.parametrize(
    ("model_type", "name", "value"),
    [
        ("xmod", "lang_ids", torch.zeros(3, dtype=torch.long)),
        ("xlm", "lengths", torch.tensor([12, 7, 3])),
        ("xlnet", "perm_mask", torch.zeros(3, 12, 12)),
        ("xlnet", "input_mask", 1.0 - MASK),
    ],
)
def test_what_is_about_rows_is_refused(model_type: str, name: str, value: torch.Tensor) -> None:
    model = fastpack.patch(build_tiny(model_type))
    with pytest.raises(fastpack.UnsupportedModelError, match=f"{name} came with the batch: that is about its rows"):
        model(input_ids=IDS, **{name: value})


def test_xlnet_generates_as_stock() -> None:
    model = build_tiny("xlnet").eval()
    settings = {"max_new_tokens": 4, "do_sample": False}
    stock = model.generate(IDS[:1], **settings)
    assert torch.equal(fastpack.patch(model).generate(IDS[:1], **settings), stock)


def test_positions_may_skip_where_lengths_are_told() -> None:
    """As PoSE trains long contexts, in rows that are all real tokens (Zhu et al., arXiv:2309.10400)."""
    model = build_tiny("llama").eval()
    positions = torch.cat([torch.arange(6), torch.arange(6) + 20]).expand(3, -1)
    with torch.no_grad():
        stock = model(input_ids=IDS, position_ids=positions, attention_mask=torch.ones_like(IDS)).logits
        fastpack.patch(model)
        found = model(input_ids=IDS, position_ids=positions, packed_seq_lens=[12] * 3).logits
        plain = model(input_ids=IDS).logits
    assert relative(found, stock) <= FLOAT32_BOUND
    assert relative(plain, stock) > 1e-2
    with pytest.raises(fastpack.PackingError, match="jump by 15"):
        model(input_ids=IDS, position_ids=positions)
