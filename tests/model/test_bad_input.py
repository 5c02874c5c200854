"""Bad input raises a clear error before anything is changed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from oracle import FLOAT32_BOUND, flat, make_sequences, padded, positions, relative, run_alone, trl_keywords
from patch_checks import fingerprint
from tiny import VOCAB, tiny_model
from torch import nn
from transformers import AutoModel, AutoModelForSeq2SeqLM

import fastpack
from fastpack.exactness.tiny import build_tiny

SEQUENCES = make_sequences(VOCAB)
LENGTHS = [len(s) for s in SEQUENCES]
NUMBERED = torch.arange(1, 6).repeat_interleave(torch.tensor(LENGTHS))[None]


def refuses(model: Any, match: str, error: type[Exception] = fastpack.UnsupportedModelError, **options: Any) -> None:
    before = fingerprint(model) if isinstance(model, nn.Module) else None
    with pytest.raises(error, match=match):
        fastpack.patch(model, **options)
    if before is not None:
        assert fingerprint(model) == before


def test_an_encoder() -> None:
    refuses(tiny_model("bert", auto=AutoModel, is_decoder=False), "encoder")


def test_an_encoder_decoder() -> None:
    model = tiny_model("t5", auto=AutoModelForSeq2SeqLM, d_model=32, d_ff=48, num_layers=1, num_heads=2, d_kv=16)
    refuses(model, "encoder-decoder")


def test_images_in_the_batch_of_a_text_model() -> None:
    model = fastpack.patch(tiny_model("gemma3_text"))
    with pytest.raises(fastpack.UnsupportedModelError, match="pixel_values"):
        model(**padded(SEQUENCES, "right"), pixel_values=torch.zeros(1, 3, 8, 8))


def test_families_that_are_not_covered() -> None:
    refuses(build_tiny("prophetnet"), "'prophetnet' is refused: it predicts several tokens at once")
    model = tiny_model("llama")
    own = {"__module__": "elsewhere", "forward": lambda self, *args, **kwargs: None}
    model.model.__class__ = type("LlamaModel", (type(model.model),), own)
    refuses(model, "'llama'.*not covered")


@pytest.mark.parametrize("model_type", ["bert", "roberta", "rembert"])
def test_an_encoder_by_choice(model_type: str) -> None:
    refuses(build_tiny(model_type, is_decoder=False), "encoder.*is_decoder=True")


def test_not_a_model() -> None:
    refuses("meta-llama/Llama-3.1-8B", "takes a model", TypeError)
    refuses(nn.Linear(2, 2), "not a transformers model")


def test_a_bidirectional_config() -> None:
    refuses(tiny_model("gemma3_text", use_bidirectional_attention=True), "both directions")


@pytest.mark.parametrize(
    "attention", ["flash_attn", "torch_varlen", "xformers", "flex", "mem_efficient", "triton_packed"]
)
def test_a_backend_that_is_not_here(attention: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("asks for GPU backends without a GPU")
    refuses(tiny_model("llama"), f"{attention}.*can't serve", fastpack.BackendUnavailableError, attention=attention)


def test_a_backend_that_does_not_exist() -> None:
    refuses(tiny_model("llama"), "is not a backend", fastpack.BackendUnavailableError, attention="flashattn")


def test_kernels_that_nothing_here_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    refuses(tiny_model("llama"), "kernels='triton', but there is no GPU here", ValueError, kernels="triton")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    model = fastpack.patch(tiny_model("llama"), kernels="triton")  # it may still be moved to a GPU
    with pytest.raises(fastpack.KernelUnavailableError, match="the tensors are on the CPU"):
        model(**padded(SEQUENCES, "right"))


def test_wrapped_models() -> None:
    refuses(nn.DataParallel(tiny_model("llama")), "DataParallel", fastpack.PatchError)
    compiled = torch.compile(tiny_model("llama"))
    with pytest.raises(fastpack.PatchError, match="compiled"):
        fastpack.patch(compiled)


def test_fsdp_wrapped(tmp_path: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        model = tiny_model("llama")
        fully_shard(model)
        refuses(model, "FSDP2", fastpack.PatchError)
        inner = tiny_model("llama")
        fully_shard(inner.model)
        refuses(inner, "FSDP2", fastpack.PatchError)
    finally:
        dist.destroy_process_group()


def test_a_data_parallel_replica_refuses_to_run() -> None:
    model = fastpack.patch(tiny_model("llama"))
    replica = model._replicate_for_data_parallel()
    with pytest.raises(fastpack.PatchError, match="torchrun"):
        replica(**flat(SEQUENCES))


def test_strict_names_what_is_not_fast() -> None:
    refuses(tiny_model("gpt2"), "varlen", fastpack.PatchError, strict=True)


def test_an_attention_forward_that_someone_replaced() -> None:
    model = tiny_model("llama")
    layer = model.model.layers[0].self_attn
    layer.forward = functools.partial(layer.forward)
    refuses(model, "already replaced", fastpack.PatchError)


def test_an_attention_forward_that_is_its_own() -> None:
    """accelerate's hooks leave such a forward behind when they are removed."""
    model = tiny_model("llama")
    layer = model.model.layers[0].self_attn
    layer.forward = layer.forward
    assert fastpack.report(fastpack.patch(model)).tier == "fast"


BATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "lengths that do not sum to T": ({"packed_seq_lens": [3, 4]}, r"sum to 7.*79"),
    "cu_seq_lens against position_ids": (
        {**trl_keywords(SEQUENCES), "position_ids": torch.arange(79)[None]},
        "cu_seq_lens_q.*position_ids",
    ),
    "cu_seq_lens that end too early": ({"cu_seq_lens_q": torch.tensor([0, 7, 70])}, "ends at 70.*79"),
    "a mask with holes": ({"attention_mask": torch.tensor([[1] * 40 + [0] + [1] * 38])}, "hole"),
    "a 4-D mask of integers": ({"attention_mask": torch.ones(1, 1, 79, 79).long()}, "shape"),
    "a dict of masks": ({"attention_mask": {"full_attention": None}}, "dict"),
    "a packed batch with a cache": ({"packed_seq_lens": LENGTHS, "use_cache": True}, "use_cache"),
    "restarting positions with a cache": ({"position_ids": positions(SEQUENCES), "use_cache": True}, "restart"),
    "a numbered mask with a cache": ({"attention_mask": NUMBERED, "use_cache": True}, "attention_mask numbers several"),
    "a numbered mask of floats with a cache": (
        {"attention_mask": NUMBERED.float(), "use_cache": True},
        "numbers several",
    ),
    "a numbered mask with attentions": ({"attention_mask": NUMBERED, "output_attentions": True}, "output_attentions"),
    "a packed batch with attentions": ({"packed_seq_lens": LENGTHS, "output_attentions": True}, "output_attentions"),
    "jumping positions with attentions": (
        {"position_ids": torch.arange(79)[None] + (torch.arange(79) > 40), "output_attentions": True},
        "jump",
    ),
}


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("what", BATCHES)
def test_contradictory_batches(what: str, labels: bool) -> None:
    model = fastpack.patch(tiny_model("llama"))
    inputs, match = BATCHES[what]
    ids = torch.cat(SEQUENCES)[None]
    with pytest.raises(fastpack.PackingError, match=match):
        model(input_ids=ids, **inputs, **({"labels": ids} if labels else {}))
    run_alone(model, SEQUENCES)  # and the model still works


def test_a_numbered_mask_where_the_config_asks_for_attentions() -> None:
    model = tiny_model("gpt2")
    model.config.output_attentions = True
    fastpack.patch(model)
    ids = torch.cat(SEQUENCES)[None]
    with pytest.raises(fastpack.PackingError, match=r"attention_mask numbers several.*output_attentions=False"):
        model(input_ids=ids, attention_mask=NUMBERED)
    ours = model(input_ids=ids, attention_mask=NUMBERED, output_attentions=False).logits[0]
    alone = run_alone(fastpack.unpatch(model), SEQUENCES)
    assert relative(ours, torch.cat(alone.logits)) <= FLOAT32_BOUND
    leaked = model(input_ids=ids, attention_mask=NUMBERED).logits[0]
    assert relative(leaked, torch.cat(alone.logits)) > 1e3 * FLOAT32_BOUND, "the stock forward does not read numbers"


def test_a_packed_batch_into_a_sequence_classifier() -> None:
    from transformers import AutoModelForSequenceClassification

    model = fastpack.patch(tiny_model("llama", auto=AutoModelForSequenceClassification, num_labels=2))
    with pytest.raises(fastpack.PackingError, match="one result for each row"):
        model(input_ids=torch.cat(SEQUENCES)[None], packed_seq_lens=LENGTHS)


@pytest.mark.parametrize("inputs", ["ids", "another padding id", "embeddings", "prompts"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_classifier_that_would_pool_padding(inputs: str, side: str) -> None:
    """Padding holds zeros: the pooled result would be zero, without a gradient."""
    from peft import PromptTuningConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    model = tiny_model("llama", auto=AutoModelForSequenceClassification, num_labels=2, pad_token_id=0).eval()
    if inputs == "prompts":
        model = get_peft_model(model, PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3)).eval()
    alone = torch.cat([model(input_ids=s[None], attention_mask=torch.ones_like(s[None])).logits for s in SEQUENCES])
    ids = torch.nn.utils.rnn.pad_sequence(SEQUENCES, batch_first=True, padding_side=side)
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    if inputs == "another padding id":
        batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 3)
    if inputs == "embeddings":
        batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids"))
    fastpack.patch(model)
    if side == "right" and inputs != "ids":
        with pytest.raises(fastpack.PackingError, match="would pool a slot of padding in 4 of 5 rows"):
            model(**batch)
    elif side == "left" and inputs == "prompts":
        with pytest.raises(fastpack.PackingError, match="before the padding, pad on the right"):
            model(**batch)
    else:
        assert relative(model(**batch).logits, alone) <= FLOAT32_BOUND


def test_lost_packing_is_loud() -> None:
    """A layer that drops keywords must not leak, so its attention raises an error."""
    model = fastpack.patch(tiny_model("llama"))
    layer = model.model.layers[0]
    stock = layer.forward
    layer.forward = lambda *args, **kwargs: stock(*args, **{k: v for k, v in kwargs.items() if k != "packed_seq_lens"})
    with pytest.raises(fastpack.PatchError, match="drops keywords"):
        model(**padded(SEQUENCES, "right"))


@pytest.mark.parametrize(
    ("option", "allowed"),
    [
        ({"kernels": "cuda"}, "'auto', 'torch', 'triton'"),
        ({"graphs": "always"}, "None, 'auto'"),
        ({"graphs": True}, "None, 'auto'"),
        ({"loss": "mean"}, "None, 'fused'"),
        ({"offload": "everything"}, "None, 'checkpoints'"),
        ({"strict": "yes"}, "False, True"),
        ({"verify": "yes"}, "False, True"),
    ],
)
def test_options_say_what_is_allowed(option: dict[str, Any], allowed: str) -> None:
    model = tiny_model("llama")
    with pytest.raises(fastpack.PatchError) as error:
        fastpack.patch(model, **option)
    (name, value) = next(iter(option.items()))
    assert f"{name}={value!r}" in str(error.value)
    assert allowed in str(error.value)
    assert not any("forward" in module.__dict__ for module in model.modules())
