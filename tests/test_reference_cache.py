"""The cache of reference log-probabilities on disk: whose it is, what becomes of a damaged one, what is never lost."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from references import Kill, policy, tokenised
from test_adapters import lora_config, with_lora
from tiny import tiny_model

from fastpack.reference import ReferenceCacheError, with_reference_log_probs
from fastpack.reference import cache as module
from fastpack.reference.cache import HEADER, ReferenceCache
from fastpack.reference.identity import Identity, _sums, identify

IDS = [bytes([i]) * 16 for i in range(6)]


def identity(model: Any, adapter: str | None = None, ld_alpha: float | None = None) -> Identity:
    return identify(model, adapter=adapter, ld_alpha=ld_alpha)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def model() -> Any:
    return policy()


@pytest.fixture
def cache(model: Any, tmp_path: Path) -> ReferenceCache:
    """Of six values in two shards, complete."""
    made = ReferenceCache(tmp_path / "cache", identity(model))
    made.add({IDS[i]: -float(i) for i in range(4)})
    made.add({IDS[i]: -i / 3 for i in range(4, 6)})
    made.finish()
    return made


def test_what_was_put_in_comes_out(cache: ReferenceCache, model: Any, tmp_path: Path) -> None:
    stored = ReferenceCache(cache.folder, identity(policy())).load()
    assert stored is not None
    assert stored.complete
    assert stored.values == {one: -float(i) if i < 4 else -i / 3 for i, one in enumerate(IDS)}, "to the last bit"
    assert ReferenceCache(tmp_path / "another", identity(model)).load() is None
    assert not (tmp_path / "another").exists()


def test_anyone_can_read_it(cache: ReferenceCache) -> None:
    header = json.loads((cache.folder / HEADER).read_text())
    assert header["count"] == 6
    assert header["key"] == cache.identity.key
    assert header["model"]["class"] == "LlamaForCausalLM"
    assert header["made"].keys() == {"on", "fastpack", "torch", "transformers"}
    table = pyarrow.parquet.read_table(cache.folder / header["shards"][0]["file"])
    assert table.column_names == ["id", "log_prob"]
    assert table["id"].to_pylist() == [one.hex() for one in IDS[:4]]


# ---- whose it is


def changed(change: Callable[[Any], Any], **settings: Any) -> Identity:
    model = policy()
    with torch.no_grad():
        change(model)
    return identity(model, **settings)


def one_bit(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.view(torch.int32)[3, 5] ^= 1


def two_signs(model: Any) -> None:
    """The highest bits of two words, which cancel in sums of 64 bits whose factors are not random."""
    model.model.layers[1].mlp.up_proj.weight[3, 5:7] *= -1


def swapped_rows(model: Any) -> None:
    weight = model.lm_head.weight
    weight[[4, 9]] = weight[[9, 4]]


def swapped_layers(model: Any) -> None:
    first, second = (layer.input_layernorm.weight for layer in model.model.layers)
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)


OTHERS: dict[str, tuple[Callable[[], Identity], str]] = {
    "one bit": (lambda: changed(one_bit), "weights: "),
    "two signs": (lambda: changed(two_signs), "weights: "),
    "rows": (lambda: changed(swapped_rows), "weights: "),
    "layers": (lambda: changed(swapped_layers), "weights: "),
    "dtype": (lambda: changed(lambda m: m.bfloat16()), "weights: "),
    "config": (
        lambda: changed(lambda m: setattr(m.config, "rms_norm_eps", 1e-5)),
        r"\(LlamaForCausalLM, 21,728 parameters\): config.rms_norm_eps: 1e-06 there, 1e-05 here\. Pass another folder",
    ),
    "another class": (
        lambda: identity(tiny_model("mistral")),
        'MistralForCausalLM.*config.model_type: "llama" there, "mistral" here',
    ),
    "ld_alpha": (lambda: changed(lambda m: None, ld_alpha=0.5), "ld_alpha: null there, 0.5 here"),
    "adapter": (lambda: identity(with_lora(policy()), adapter="default"), "adapter: null there, "),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_reference(name: str, cache: ReferenceCache) -> None:
    build, text = OTHERS[name]
    other = ReferenceCache(cache.folder, build())
    before = files(cache.folder)
    assert other.identity.key != cache.identity.key
    for call in (other.load, other.finish, lambda: other.add({IDS[0]: 0.0})):
        with pytest.raises(ReferenceCacheError, match=text):
            call()
    assert files(cache.folder) == before, "nothing lost"


def test_autocast_is_another(cache: ReferenceCache, model: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        other = identity(model)
    assert other.differences(cache.identity.parts) == ['autocast: null there, "torch.bfloat16" here']


def test_what_does_not_matter(cache: ReferenceCache) -> None:
    """The name, what trainers set, how attention is computed, and adapters that are off."""
    model = policy()
    model.config.use_cache = False
    model.config.pad_token_id = 5
    model.config._name_or_path = "elsewhere"
    model.config.architectures = ["LlamaForCausalLM"]
    model.set_attn_implementation("eager")
    model.eval().requires_grad_(False)
    assert identity(model).key == cache.identity.key
    tokens = {"target_modules": ["q_proj"], "trainable_token_indices": [3, 4]}
    tied = tiny_model("llama", tie_word_embeddings=True)
    assert identity(with_lora(copy.deepcopy(tied), **tokens)).key == identity(tied).key
    for settings in ({}, {"target_modules": ["q_proj", "lm_head"]}, tokens, {"modules_to_save": ["lm_head"]}):
        tuned = with_lora(policy(), **settings)
        assert identity(tuned).key == cache.identity.key
    with torch.no_grad():
        tuned.base_model.model.lm_head.modules_to_save["default"].weight += 1
    assert identity(tuned).key == cache.identity.key
    on = identity(tuned, adapter="default")
    with torch.no_grad():
        tuned.base_model.model.lm_head.modules_to_save["default"].weight += 1
    assert identity(tuned, adapter="default").key != on.key


def test_adapters_are_told_by_weights_and_config() -> None:
    found = {}
    for name, settings in {"a": {}, "b": {"lora_alpha": 4}, "c": {"r": 2, "lora_alpha": 4}}.items():
        tuned = with_lora(policy(), **settings)
        found[name] = identity(tuned, adapter="default")
    assert len({one.key for one in found.values()}) == 3
    assert any("adapter.lora_alpha: 8 there, 4 here" in one for one in found["b"].differences(found["a"].parts))
    # whatever it is called
    tuned = with_lora(policy())
    tuned.add_adapter("ref", lora_config())
    for name, parameter in tuned.named_parameters():
        if ".default." in name:
            tuned.get_parameter(name.replace(".default.", ".ref.")).data.copy_(parameter.data)
    assert identity(tuned, adapter="ref").key == found["a"].key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool])
@pytest.mark.parametrize("count", [0, 1, 3, 65536, 200_001])
def test_every_byte_of_a_tensor_counts(count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    if dtype is torch.bool:
        data &= 1
    found = _sums(data.view(dtype))
    for at in {0, count * dtype.itemsize // 2, count * dtype.itemsize - 1} if count else ():
        other = data.clone()
        other[at] ^= 1
        assert _sums(other.view(dtype)) != found
    longer = torch.cat([data.new_zeros(dtype.itemsize), data]).view(dtype)[1:]
    assert _sums(longer) == found, "wherever it begins in its storage"
    assert _sums(data.view(dtype).reshape(-1, 1).expand(-1, 2)[:, 0]) == found


@pytest.mark.gpu
def test_the_same_on_a_gpu() -> None:
    model = tiny_model("llama", vocab_size=200_000).bfloat16()
    assert identity(model).key == identity(model.cuda()).key


# ---- damage


def cut_short(folder: Path, shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-20])


def turned_bit(folder: Path, shard: Path) -> None:
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 4
    shard.write_bytes(data)


def gone(folder: Path, shard: Path) -> None:
    shard.unlink()


def header_cut(folder: Path, shard: Path) -> None:
    (folder / HEADER).write_text((folder / HEADER).read_text()[:-40])


def header_edited(folder: Path, shard: Path) -> None:
    (folder / HEADER).write_text((folder / HEADER).read_text().replace('"complete": true', '"complete": false'))


def header_of_others(folder: Path, shard: Path) -> None:
    (folder / HEADER).write_text('{"format": "else"}')


def header_no_text(folder: Path, shard: Path) -> None:
    (folder / HEADER).write_bytes(b"\xff\xfe\x00")


def header_gone(folder: Path, shard: Path) -> None:
    (folder / HEADER).unlink()


DAMAGE: dict[Callable[[Path, Path], None], str] = {
    cut_short: "is truncated, or was changed",
    turned_bit: "is truncated, or was changed",
    gone: "is gone",
    header_cut: "is damaged",
    header_edited: "changed after it was written",
    header_of_others: "is not one of",
    header_no_text: "can't be read",
    header_gone: "not empty and has no header",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage(damage: Callable[[Path, Path], None], model: Any, tmp_path: Path) -> None:
    data, folder = tokenised(), tmp_path / "cache"
    with_reference_log_probs(data, model, folder=folder)
    shard = next(folder.glob("*.parquet"))
    damage(folder, shard)
    before = files(folder)
    for compute in ("new", "missing", "never"):
        with pytest.raises(ReferenceCacheError, match=DAMAGE[damage]) as raised:
            with_reference_log_probs(data, model, folder=folder, compute=compute)  # type: ignore[arg-type]
        assert str(folder) in str(raised.value)
        assert "folder" in str(raised.value), "how to mend it"
    assert files(folder) == before, "nothing overwritten"


def test_a_folder_of_something_else(model: Any, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(ReferenceCacheError, match="not empty"):
        with_reference_log_probs(tokenised(), model, folder=tmp_path)
    with pytest.raises(ReferenceCacheError, match="can't be read"):
        with_reference_log_probs(tokenised(), model, folder=tmp_path / "thesis.txt")
    assert files(tmp_path) == {"thesis.txt": b"all of it"}
    (tmp_path / "empty").mkdir()
    with_reference_log_probs(tokenised(), model, folder=tmp_path / "empty")


# ---- never half of it


@pytest.mark.parametrize("what", ["the shard", "the header"])
def test_killed_while_it_writes(what: str, cache: ReferenceCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that was begun is not there, and what was there is whole."""
    names = {"the shard": ".parquet", "the header": HEADER}
    stock = Path.replace

    def ending(self: Path, target: Any) -> Path:
        if str(target).endswith(names[what]):
            raise Kill
        return stock(self, target)

    before = files(cache.folder)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", ending)
        with pytest.raises(Kill):
            cache.add({bytes([9]) * 16: -9.0})
    after = files(cache.folder)
    assert {name: after[name] for name in before} == before
    assert len(after) == len(before) + (what == "the header"), "a shard that no header names is left, and does no harm"
    stored = cache.load()
    assert stored is not None
    assert len(stored.values) == 6
    cache.add({bytes([9]) * 16: -9.0})
    stored = cache.load()
    assert stored is not None
    assert len(stored.values) == 7


def test_killed_while_it_writes_its_first_shard(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, between and behind its files: the same folder serves the next run."""
    stock = ReferenceCache._put
    for end in range(4):
        made = ReferenceCache(tmp_path / str(end), identity(model))
        written: list[str] = []

        def ending(self: ReferenceCache, name: str, data: bytes, end: int = end, written: list[str] = written) -> None:
            if len(written) == end:
                raise Kill
            written.append(name)
            stock(self, name, data)

        with monkeypatch.context() as patched:
            patched.setattr(ReferenceCache, "_put", ending)
            if end < 3:
                with pytest.raises(Kill):
                    made.add({IDS[0]: -1.0})
            else:
                made.add({IDS[0]: -1.0})
        assert len(written) == end
        stored = made.load()
        assert (None if stored is None else len(stored.values)) == (None, 0, 0, 1)[end]
        made.add({IDS[0]: -1.0, IDS[1]: -2.0})
        stored = made.load()
        assert stored is not None
        assert stored.values == {IDS[0]: -1.0, IDS[1]: -2.0}


def test_left_behind_temporary_files_do_no_harm(model: Any, tmp_path: Path) -> None:
    """Of a run that was ended so hard that it could not clear away."""
    (tmp_path / f".{HEADER}.123").write_text("{")
    made = ReferenceCache(tmp_path, identity(model))
    assert made.load() is None
    made.add({IDS[0]: -1.0})
    stored = made.load()
    assert stored is not None
    assert stored.values == {IDS[0]: -1.0}


def test_two_runs_at_once_keep_what_both_found(cache: ReferenceCache) -> None:
    other = ReferenceCache(cache.folder, cache.identity)
    more = [bytes([i]) * 16 for i in range(10, 14)]
    for i, one in enumerate(more):
        (cache, other)[i % 2].add({one: -float(i)})
    stored = cache.load()
    assert stored is not None
    assert all(stored.values[one] == -float(i) for i, one in enumerate(more))
    cache.add({more[3]: -3.0})
    assert len(list(cache.folder.glob("*.parquet"))) == 6, "the same twice is there once"


def test_a_shard_is_there_before_it_is_named(cache: ReferenceCache, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    stock = module.ReferenceCache._put

    def noted(self: ReferenceCache, name: str, data: bytes) -> None:
        order.append(name)
        stock(self, name, data)

    monkeypatch.setattr(module.ReferenceCache, "_put", noted)
    cache.add({bytes([7]) * 16: 0.5})
    assert [name == HEADER for name in order] == [False, True]
    data = (cache.folder / order[0]).read_bytes()
    assert order[0] == f"{hashlib.sha256(data).hexdigest()[:32]}.parquet"
