"""Reference log-probabilities without padding: those of each sequence alone, cached by the sequence's id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import lora_config, nf4, with_lora
from backbone_calls import Calls
from datasets import Dataset, concatenate_datasets
from references import BOUND, Kill, Scoring, alone, columns_of, off_by, policy, tokenised
from tiny import tiny_model

import fastpack
from fastpack.errors import PackingError, PatchError, UnsupportedModelError
from fastpack.exactness.tiny import build_tiny
from fastpack.trainers.reference import ReferenceCacheError, columns, with_reference_log_probs
from fastpack.trainers.reference.cache import FILE
from fastpack.trainers.reference.compute import PAIR_COLUMNS, Examples

ON_TINY = ("cohere", "granite", "gemma2", "mixtral", "qwen3", "gpt2")
"""Heads with a scale, a divisor, a softcap, experts; and one whose logits have to be computed."""


@pytest.mark.parametrize("model_type", [*ON_TINY, "opt", "bamba", "mpt"])
def test_families(model_type: str, tmp_path: Path) -> None:
    model: Any = tiny_model(model_type) if model_type in ON_TINY else build_tiny(model_type)
    data = tokenised()
    want = alone(data, model.eval())
    model.train()
    assert off_by(with_reference_log_probs(data, model, folder=tmp_path), want) <= BOUND
    assert model.training


@pytest.mark.parametrize("lora", [False, True])
def test_4bit(lora: bool, tmp_path: Path) -> None:
    """The base of a 4-bit policy with LoRA is the same reference as the 4-bit model, also for the cache."""
    model: Any = nf4(tmp_path / "model")
    data = tokenised()
    want = alone(data, model)  # in training mode: in evaluation bitsandbytes rounds its scales on some CPUs
    if lora:
        model = with_lora(model)
    result = with_reference_log_probs(data, model, folder=tmp_path / "cache")
    assert off_by(result, want) <= BOUND
    again = with_reference_log_probs(data, nf4(tmp_path / "model"), folder=tmp_path / "cache")
    assert off_by(again, result) == 0


def test_a_head_with_lora_and_a_bias(tmp_path: Path) -> None:
    model = tiny_model("phi")  # its head has a bias
    data = tokenised()
    want = alone(data, model.eval())
    tuned = with_lora(model, target_modules=["q_proj", "lm_head"])
    on = alone(data, tuned.eval())
    assert off_by(on, want) > 1e-2
    assert off_by(with_reference_log_probs(data, tuned, folder=tmp_path / "base"), want) <= BOUND
    assert off_by(with_reference_log_probs(data, tuned, folder=tmp_path / "on", adapter="default"), on) <= BOUND


def test_ids_do_not_depend_on_order_filters_batches_or_the_names_of_columns(tmp_path: Path, calls: Calls) -> None:
    data, model = tokenised(), policy()
    whole = with_reference_log_probs(data, model, folder=tmp_path / "cache")
    calls.tokens = {name: [] for name in calls.tokens}
    again: dict[str, Any] = {"folder": tmp_path / "cache"}
    for indices in ([5, 3, 3, 0], list(reversed(range(12))), []):
        part = with_reference_log_probs(data.select(indices), model, **again)
        assert len(part) == len(indices)
        for name in PAIR_COLUMNS:
            assert part[name][:] == [whole[name][i] for i in indices]
    odd = data.filter(lambda row: len(row["chosen_ids"]) % 2 == 1)
    assert 0 < len(with_reference_log_probs(odd, model, **again)) < len(data)
    older = data.rename_columns({f"{part}_ids": f"{part}_input_ids" for part in ("prompt", "chosen", "rejected")})
    assert (
        columns_of(with_reference_log_probs(older, model, **again))["ref_chosen_logps"].tolist()
        == whole["ref_chosen_logps"][:]
    )
    assert not calls.all or sum(calls.all) == 0, "nothing was computed"
    # other batches: the same to rounding
    small = with_reference_log_probs(data, model, folder=tmp_path / "small", max_tokens=1)
    assert off_by(small, whole) <= BOUND


def test_one_long_sequence_does_not_make_all_batches_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Scoring(monkeypatch)
    long = {"prompt_ids": [5] * 3, "chosen_ids": [6] * 200, "rejected_ids": [7] * 90}
    data = concatenate_datasets([tokenised(), Dataset.from_list([long])])
    with_reference_log_probs(data, policy(), folder=tmp_path, max_tokens=60)
    examples = Examples(data, "the data set")
    lengths = {sequence.id: len(sequence.ids) for row in range(len(data)) for sequence in examples[row]}
    batches = [[lengths[one] for one in batch] for batch in counts.batches]
    assert batches[:2] == [[203], [93]], "the dearest first"
    assert all(sum(batch) <= 60 for batch in batches[2:])
    assert max(map(len, batches)) > 1
    assert sum(map(len, batches)) == 26


def test_swapped_sides_are_found_and_other_prompts_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, model = tokenised(), policy()
    whole = with_reference_log_probs(data, model, folder=tmp_path)
    counts = Scoring(monkeypatch)
    swapped = data.rename_columns({"chosen_ids": "rejected_ids", "rejected_ids": "chosen_ids"})
    result = with_reference_log_probs(swapped, model, folder=tmp_path)
    assert result["ref_chosen_logps"][:] == whole["ref_rejected_logps"][:]
    assert not counts.batches
    # the same ids, of which others are scored
    moved = data.map(
        lambda row: {"prompt_ids": row["prompt_ids"][:-1], "chosen_ids": row["prompt_ids"][-1:] + row["chosen_ids"]}
    ).filter(lambda row: row["prompt_ids"])
    assert off_by(with_reference_log_probs(moved, model, folder=tmp_path), alone(moved, model.eval())) <= BOUND
    assert sum(map(len, counts.batches)) == 2 * len(moved)


def test_what_is_missing_is_computed_and_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Scoring(monkeypatch)
    data, model = tokenised(), policy()
    first = with_reference_log_probs(data.select(range(10)), model, folder=tmp_path)
    counts.batches = []
    whole = with_reference_log_probs(data, model, folder=tmp_path)
    assert sum(map(len, counts.batches)) == 4
    assert whole["ref_chosen_logps"][:10] == first["ref_chosen_logps"][:]
    counts.batches = []
    assert with_reference_log_probs(data, model, folder=tmp_path)["ref_chosen_logps"][:] == whole["ref_chosen_logps"][:]
    assert not counts.batches


def test_what_was_computed_before_a_kill_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, model = tokenised(), policy()
    monkeypatch.setattr(columns, "SAVE_EVERY", 2)
    counts = Scoring(monkeypatch)
    whole = with_reference_log_probs(data, model, folder=tmp_path / "whole", max_tokens=40)
    everything = sorted(one for batch in counts.batches for one in batch)
    assert len(counts.batches) > 6
    assert len(everything) == len(set(everything)) == 24
    counts.batches, counts.end = [], 5
    with pytest.raises(Kill):
        with_reference_log_probs(data, model, folder=tmp_path / "cache", max_tokens=40)
    assert not fastpack.is_patched(model)
    stored = [one for batch in counts.batches[:4] for one in batch]
    assert sorted(json.loads((tmp_path / "cache" / FILE).read_text())["log_probs"]) == sorted(stored)
    counts.batches, counts.end = [], None
    resumed = with_reference_log_probs(data, model, folder=tmp_path / "cache", max_tokens=40)
    anew = [one for batch in counts.batches for one in batch]
    assert sorted(stored + anew) == everything, "each sequence once"
    assert off_by(resumed, whole) <= BOUND


@pytest.mark.parametrize("how", ["plain", "lora", "another adapter", "patched", "an error"])
def test_the_model_is_what_it_was(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy()
    adapter = None
    if how in ("lora", "another adapter", "an error"):
        model = with_lora(model)
        model.add_adapter("ref", lora_config())
        model.set_adapter("default")
        model.base_model.model.lm_head.weight.requires_grad_(True)
        adapter = "ref" if how != "lora" else None
    if how == "patched":
        fastpack.patch(model, attention="segments")
    model.base_model.eval()

    def state() -> Any:
        return (
            [module.training for module in model.modules()],
            [parameter.requires_grad for parameter in model.parameters()],
            getattr(model, "active_adapters", None) if hasattr(model, "peft_config") else None,
            fastpack.is_patched(model),
            [sorted(module.__dict__) for module in model.modules()],
            fastpack.report(model).to_dict(),
            [getattr(module, "disable_adapters", None) for module in model.modules()],
        )

    before = state()
    if how == "an error":
        Scoring(monkeypatch).end = 0
        with pytest.raises(Kill):
            with_reference_log_probs(tokenised(), model, folder=tmp_path, adapter=adapter)
    else:
        with_reference_log_probs(tokenised(), model, folder=tmp_path, adapter=adapter)
    assert state() == before


def test_arguments_that_are_refused(tmp_path: Path) -> None:
    data, model = tokenised(), policy()
    for further, error, text in (
        ({"max_tokens": 0}, PackingError, "max_tokens=0"),
        ({"max_tokens": 1.5}, PackingError, "max_tokens=1.5"),
        ({"adapter": "mine"}, PatchError, "no adapter 'mine'"),
    ):
        with pytest.raises(error, match=text):
            with_reference_log_probs(data, model, folder=tmp_path, **further)
    with pytest.raises(PackingError, match="has the columns text"):
        with_reference_log_probs(Dataset.from_list([{"text": "a"}]), model, folder=tmp_path)
    with pytest.raises(PackingError, match="has images, and reference log-probabilities are computed for text alone"):
        with_reference_log_probs(data.add_column("images", [[]] * len(data)), model, folder=tmp_path)
    bad = data.select(range(2)).map(lambda row, i: {"rejected_ids": [3] * (1 - i)}, with_indices=True)
    with pytest.raises(PackingError, match=r"example 1 of the data set: .*empty completion"):
        with_reference_log_probs(bad, model, folder=tmp_path)
    with pytest.raises(PackingError, match=r"example 0 of the data set: the collator made 0 sequences"):
        with_reference_log_probs(data, model, folder=tmp_path, collator=lambda _: {"input_ids": torch.ones(2, 3)})
    with pytest.raises(UnsupportedModelError, match="no head"):
        with_reference_log_probs(data, model.model, folder=tmp_path)
    merged = with_lora(policy())
    merged.merge_adapter()
    with pytest.raises(PatchError, match="merged"):
        with_reference_log_probs(data, merged, folder=tmp_path)
    with pytest.raises(PatchError, match="no PeftModel"):
        with_reference_log_probs(data, with_lora(policy()).get_base_model(), folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_not_finite_is_not_kept(tmp_path: Path) -> None:
    model = policy()
    with torch.no_grad():
        model.lm_head.weight[5] = float("inf")
    with pytest.raises(ReferenceCacheError, match=r"not finite, for instance in example \d+ of the data set \(ref_"):
        with_reference_log_probs(tokenised(), model, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def process(rank: int, folder: str) -> None:
    """Run one of two ranks, which share the work, then hold different models, then different data."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    counted = 0
    model = policy()

    def count(*_: Any) -> None:
        nonlocal counted
        counted += 1

    model.model.layers[0].register_forward_pre_hook(count)
    data = tokenised()
    first = data.select(range(9))
    # a folder that only the first one writes to: the others have what it read
    own = Path(folder) / f"cache{rank}"
    result = with_reference_log_probs(first, model, folder=own, max_tokens=40)
    reported: dict[str, Any] = {"forwards": counted, "first": result["ref_chosen_logps"][:]}
    result = with_reference_log_probs(data, model, folder=own, max_tokens=40)
    reported["all"] = [result[name][:] for name in PAIR_COLUMNS]
    # a single sequence for two ranks
    one = with_reference_log_probs(tokenised(1, seed=5), model, folder=own)
    reported["one"] = one["ref_chosen_logps"][:]
    cases = {
        "model": lambda: with_reference_log_probs(data, policy(rank), folder=own),
        "data": lambda: with_reference_log_probs(tokenised(12, seed=rank), model, folder=own),
        "max_tokens": lambda: with_reference_log_probs(data, model, folder=own, max_tokens=40 + rank),
    }
    for name, case in cases.items():
        try:
            case()
        except ReferenceCacheError as error:
            reported[name] = str(error)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(reported))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(process, (str(tmp_path),), nprocs=2)
    reported = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    want = alone(tokenised(), policy().eval())
    for rank, one in enumerate(reported):
        assert one["first"] == one["all"][0][:9]
        for name, values in zip(PAIR_COLUMNS, one["all"], strict=True):
            assert torch.allclose(torch.tensor(values), torch.tensor(want[name][:]), rtol=BOUND, atol=0)
        assert all("ranks hold different models or data" in one[name] for name in ("model", "data", "max_tokens"))
        assert one["one"] == reported[0]["one"]
        assert (tmp_path / f"cache{rank}").exists() == (rank == 0), "the first one writes"
    assert abs(reported[0]["forwards"] - reported[1]["forwards"]) <= 1
    assert min(one["forwards"] for one in reported) >= 2, "both took part"


@pytest.mark.gpu
@pytest.mark.parametrize("lora", [False, True])
def test_on_a_gpu_in_bf16(lora: bool, tmp_path: Path) -> None:
    """The error against float32 is that of the stock model in bf16 on each sequence alone."""
    model: Any = tiny_model("llama", attn_implementation="sdpa", hidden_size=128, head_dim=32).cuda()
    data = tokenised(64)
    exact = alone(data, model.eval())
    model = model.bfloat16()
    stock = alone(data, model)
    if lora:
        model = with_lora(model)
    result = with_reference_log_probs(data, model, folder=tmp_path)
    assert off_by(result, exact) <= 1.5 * max(off_by(stock, exact), 1e-3)
    again = with_reference_log_probs(data, model.cpu(), folder=tmp_path)
    assert columns_of(again)["ref_chosen_logps"].equal(columns_of(result)["ref_chosen_logps"]), "the same on any device"
