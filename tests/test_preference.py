"""Preference losses on packed pairs against TRL's own ``DPOTrainer`` on the padded batch, with stock models.

Rewards are differences of log-probabilities, and agree to 1e-6 beta times the largest of those.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from datasets import Dataset
from oracle import FLOAT32_BOUND, Result, compare, relative
from test_trainers import tokenizer
from tiny import VOCAB, tiny_model
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trl import DPOConfig, DPOTrainer

import fastpack
from fastpack import PackedSeqLens, PackingError
from fastpack.batching.packed import PackedPreferenceCollator
from fastpack.packing import IGNORE_INDEX
from fastpack.preference import PairLogProbs, PreferenceLoss, pair_log_probs, pair_log_probs_of_logits, preference_loss

BETA = 0.3
LOG_PROB_BOUND = 1e-6
TEXTS = [(1, 1, 1), (4, 9, 2), (12, 3, 25), (2, 7, 7), (9, 30, 1)]
"""Words of prompt, chosen and rejected; TRL adds an end to each completion."""


@dataclass(frozen=True)
class Case:
    """One loss, in TRL's words."""

    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    use_weighting: bool = False
    ld_alpha: float | None = None


CASES = {
    "sigmoid": Case(),
    "hinge": Case("hinge"),
    "ipo": Case("ipo"),
    "robust": Case("robust", label_smoothing=0.1),
    "wpo": Case(use_weighting=True),
    "ld": Case(ld_alpha=0.4),
    "ld, nothing of the rest": Case(ld_alpha=0.0),
    "wpo, ipo": Case("ipo", use_weighting=True),
    # no WPO with hinge: TRL 1.16 writes over the relu's result, and its backward raises
    "wpo, ld, robust": Case("robust", label_smoothing=0.2, use_weighting=True, ld_alpha=0.4),
}


def model_of(shift: float = 0.0) -> Any:
    """The same weights each time; ``shift`` makes others of them."""
    model = tiny_model("llama", attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += shift * torch.randn(parameter.shape, generator=generator)
    return model


def trainer_of(case: Case, *, shift: float = 0.05) -> Any:
    """TRL's, whose reference model is another one."""
    generator = torch.Generator().manual_seed(0)
    words = [
        [" ".join(f"w{i}" for i in torch.randint(3, VOCAB, (n,), generator=generator).tolist()) for n in lengths]
        for lengths in TEXTS
    ]
    rows = [{"prompt": p, "chosen": f" {c}", "rejected": f" {r}"} for p, c, r in words]
    by_words = tokenizer()
    by_words.backend_tokenizer.pre_tokenizer = Whitespace()
    with tempfile.TemporaryDirectory() as folder:
        return DPOTrainer(
            model_of(),
            model_of(shift),
            args=DPOConfig(
                output_dir=folder,
                beta=BETA,
                loss_type=[case.loss_type],
                label_smoothing=case.label_smoothing,
                use_weighting=case.use_weighting,
                ld_alpha=case.ld_alpha,
                report_to="none",
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=by_words,
        )


@dataclass
class Step:
    """One pass over all pairs: log-probabilities ``[4, P]`` of both models, rewards ``[2, P]``, loss and gradients."""

    log_probs: Tensor
    rewards: Tensor
    loss: Tensor
    grads: dict[str, Tensor]


def grads_of(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def padded(trainer: Any) -> Step:
    """TRL's loss."""
    examples = list(trainer.train_dataset)
    batch = trainer.data_collator(examples)
    assert not batch["attention_mask"].all(), "there is padding"
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    both = [torch.stack(trainer.compute_ref_log_probs(m, batch)) for m in (trainer.model, trainer.ref_model)]
    rewards = BETA * (both[0] - both[1])
    metrics = trainer._metrics["train"]
    assert metrics["rewards/margins"][0] == pytest.approx(float((rewards[0] - rewards[1]).mean()), rel=1e-5)
    assert metrics["rewards/chosen"][0] == pytest.approx(float(rewards[0].mean()), rel=1e-5)
    return Step(torch.cat(both).detach(), rewards.detach(), loss.detach(), grads_of(trainer.model))


def log_probs(model: Any, batch: dict[str, Any], case: Case, *, head: str, **changes: Any) -> PairLogProbs:
    """Ours, of a patched model; ``changes`` are of what the helper is told, not of what the model is."""
    rest = {key: value for key, value in batch.items() if key != "labels"}
    labels, packed = (changes.get(key, batch[key]) for key in ("labels", "packed_seq_lens"))
    options: dict[str, Any] = {"ld_alpha": case.ld_alpha, "wpo": case.use_weighting}
    if head == "logits":
        return pair_log_probs_of_logits(model(**rest).logits, labels, packed, **options)
    hidden = model.model(**rest).last_hidden_state
    return pair_log_probs(hidden, model.lm_head.weight, labels, packed, chunk=16, **options)


def loss_of(policy: PairLogProbs, reference: PairLogProbs, case: Case, beta: float = BETA) -> PreferenceLoss:
    loss_type: Any = case.loss_type
    return preference_loss(
        policy.chosen,
        policy.rejected,
        reference.chosen,
        reference.rejected,
        beta=beta,
        loss_type=loss_type,
        label_smoothing=case.label_smoothing,
        chosen_tokens=policy.chosen_tokens,
        rejected_tokens=policy.rejected_tokens,
        weights=policy.weights,
    )


def packed(
    trainer: Any, case: Case, *, head: str = "hidden", beta: float = BETA, size: Any = None, **changes: Any
) -> Step:
    """Our loss on the columns that TRL made."""
    batch = PackedPreferenceCollator(**(size or {}))(list(trainer.train_dataset))
    model, other = fastpack.patch(model_of()), fastpack.patch(model_of(0.05))
    policy = log_probs(model, batch, case, head=head, **changes)
    with torch.no_grad():
        reference = log_probs(other, batch, case, head=head, **changes)
    found = loss_of(policy, reference, case, beta)
    found.loss.backward()
    both = torch.stack([policy.chosen, policy.rejected, reference.chosen, reference.rejected])
    assert not found.chosen_rewards.requires_grad
    assert torch.equal(found.margins, found.chosen_rewards - found.rejected_rewards)
    assert found.losses.shape == found.accuracies.shape == (len(TEXTS),)
    rewards = torch.stack([found.chosen_rewards, found.rejected_rewards])
    return Step(both.detach(), rewards, found.loss.detach(), grads_of(model))


def errors(found: Step, want: Step) -> dict[str, float]:
    """Relative to its bound each: 1 is just allowed."""
    grads = compare(Result([want.loss], want.loss, found.grads), Result([want.loss], want.loss, want.grads)).grads
    scale = 1e-6 * BETA * float(want.log_probs.abs().max())
    margins = (found.rewards[0] - found.rewards[1]) - (want.rewards[0] - want.rewards[1])
    return {
        "log_probs": relative(found.log_probs, want.log_probs) / LOG_PROB_BOUND,
        "loss": relative(found.loss, want.loss) / FLOAT32_BOUND,
        "grads": grads / FLOAT32_BOUND,
        "rewards": float((found.rewards - want.rewards).abs().max()) / scale,
        "margins": float(margins.abs().max()) / scale,
    }


@pytest.mark.parametrize("name", CASES)
def test_as_trl_on_the_padded_batch(name: str) -> None:
    case = CASES[name]
    trainer = trainer_of(case)
    want = padded(trainer)
    for head in ("hidden", "logits"):
        for size in ({}, {"pad_to": 320}, {"pad_to_multiple_of": 64}):
            found = errors(packed(trainer, case, head=head, size=size), want)
            assert max(found.values()) <= 1, (head, size, found)


def test_the_cases_are_different_losses() -> None:
    """The control of the names above: no setting of TRL's is without effect here, and a wrong beta is seen."""
    trainer = trainer_of(Case())
    steps = {name: packed(trainer, case) for name, case in CASES.items()}
    steps["a wrong beta"] = packed(trainer, Case(), beta=1.001 * BETA)
    want = steps.pop("sigmoid")
    for name, step in steps.items():
        found = errors(step, want)
        assert min(found["loss"], found["grads"]) > 10, (name, found)
    assert errors(steps["a wrong beta"], want)["rewards"] > 10
    assert errors(steps["a wrong beta"], want)["log_probs"] == 0


@pytest.mark.parametrize("name", ["sigmoid", "ipo", "wpo, ld, robust"])
def test_wrong_segments_are_seen(name: str) -> None:
    """The control: lengths in another order, boundaries off by one, chosen and rejected swapped."""
    case = CASES[name]
    trainer = trainer_of(case)
    batch = PackedPreferenceCollator()(list(trainer.train_dataset))
    lengths = list(batch["packed_seq_lens"].lengths)
    assert max(errors(packed(trainer, case), padded(trainer)).values()) <= 1
    want = packed(trainer, case)
    shuffled = [*lengths[1:], lengths[0]]
    off_by_one = [lengths[0] - 1, lengths[1] + 1, *lengths[2:]]
    for wrong in (shuffled, off_by_one):
        given = PackedSeqLens.from_lengths(wrong)
        found = errors(packed(trainer, case, packed_seq_lens=given), want)
        assert found["log_probs"] > 1e3, wrong
        assert found["loss"] > 10, wrong
    swapped = [{**e, "chosen_ids": e["rejected_ids"], "rejected_ids": e["chosen_ids"]} for e in trainer.train_dataset]
    trainer.train_dataset = Dataset.from_list(swapped)
    assert errors(packed(trainer, case), want)["loss"] > 10


def test_the_first_loss_is_ln_2() -> None:
    """With the reference's log-probabilities from the same packed batch, and with TRL's padded ones as columns."""
    trainer = trainer_of(Case(), shift=0.0)
    examples = list(trainer.train_dataset)
    theirs = trainer.compute_ref_log_probs(trainer.ref_model, trainer.data_collator(examples))
    for number, example in enumerate(examples):
        example |= {"ref_chosen_logps": float(theirs[0][number]), "ref_rejected_logps": float(theirs[1][number])}
    batch = PackedPreferenceCollator()(examples)
    columns = {key: batch.pop(key) for key in ("ref_chosen_logps", "ref_rejected_logps")}
    model = fastpack.patch(model_of())
    for name in ("sigmoid", "robust"):
        case = CASES[name]
        policy = log_probs(model, batch, case, head="hidden")
        own = loss_of(policy, policy, case)
        assert abs(own.loss.item() - math.log(2)) <= 1e-6
        assert not own.margins.any()
        padded_ones = PairLogProbs(*columns.values(), policy.chosen_tokens, policy.rejected_tokens)
        assert abs(loss_of(policy, padded_ones, case).loss.item() - math.log(2)) <= 1e-6
        other = log_probs(fastpack.patch(model_of(0.05)), batch, case, head="hidden")
        assert abs(loss_of(policy, other, case).loss.item() - math.log(2)) > 1e-3, "the control: another reference"


def test_training_step_by_step() -> None:
    """Ten steps of AdamW on TRL's loss and on ours."""
    trainer, case = trainer_of(Case()), Case()
    ours, other = fastpack.patch(model_of()), fastpack.patch(model_of(0.05))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (trainer.model, ours)]
    rows = list(trainer.train_dataset)
    seen = []
    for step in range(10):
        examples = [rows[step % 5], rows[(step + 2) % 5], rows[(step + 3) % 5]]
        batch = PackedPreferenceCollator(pad_to=256)(examples)
        with torch.no_grad():
            reference = log_probs(other, batch, case, head="hidden")
        mine = loss_of(log_probs(ours, batch, case, head="hidden"), reference, case).loss
        theirs = trainer.compute_loss(trainer.model, trainer.data_collator(examples))
        for loss, optimizer in zip((theirs, mine), optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert relative(mine.detach(), theirs.detach()) <= FLOAT32_BOUND, step
        seen.append(float(mine.detach()))
    assert len(set(seen)) == 10, "it trains"


def drawn(*lengths: tuple[int, int, int]) -> tuple[dict[str, Any], Tensor, Tensor]:
    """A batch of pairs of these lengths with hidden states and a head."""
    generator = torch.Generator().manual_seed(3)
    examples = [
        {f"{k}_ids": [5 + i] * n for i, (k, n) in enumerate(zip(("prompt", "chosen", "rejected"), triple, strict=True))}
        for triple in lengths
    ]
    batch = PackedPreferenceCollator(pad_to=64)(examples)
    return batch, torch.randn(1, 64, 16, generator=generator), torch.randn(VOCAB, 16, generator=generator)


def test_tokens_are_those_that_something_predicts() -> None:
    """Without a prompt the first token of a completion is given; labels in the middle may be ignored."""
    batch, hidden, weight = drawn((3, 4, 6), (0, 5, 2))
    batch["labels"][0, 4] = IGNORE_INDEX  # the second token of the first chosen completion
    found = pair_log_probs(hidden, weight, batch["labels"], batch["packed_seq_lens"])
    assert found.chosen_tokens.tolist() == [3, 4]
    assert found.rejected_tokens.tolist() == [6, 1]
    assert found.weights is None
    each = torch.log_softmax(hidden[0] @ weight.T, -1)
    want = sum(each[t - 1, batch["input_ids"][0, t]] for t in (3, 5, 6))
    assert relative(found.chosen[0], want) <= 1e-6
    cut = pair_log_probs(hidden, weight, batch["labels"], batch["packed_seq_lens"], ld_alpha=0.0)
    start = 7 + 5  # behind both chosen sequences
    want = sum(each[t - 1, batch["input_ids"][0, t]] for t in range(start + 3, start + 6))
    assert relative(cut.rejected[0], want) <= 1e-6, "as many as the shorter one has that count"


def test_long_texts() -> None:
    """Where log-probabilities are in the thousands float32 can't hold their small differences, which is the control."""
    generator = torch.Generator().manual_seed(5)
    packed_seq_lens = PackedSeqLens.from_lengths([700, 900, 650, 800])
    labels = torch.randint(3, VOCAB, (1, packed_seq_lens.total_tokens), generator=generator)
    hidden = torch.randn(1, packed_seq_lens.total_tokens, 16, generator=generator)
    weight = torch.randn(VOCAB, 16, generator=generator)
    other = weight + 1e-3 * torch.randn(VOCAB, 16, generator=generator)
    found = [pair_log_probs(hidden, w, labels, packed_seq_lens) for w in (weight, other)]
    sums = []
    for w in (weight, other):
        each = torch.log_softmax(hidden[0].double() @ w.double().T, -1)[:-1].gather(1, labels[0, 1:, None])[:, 0]
        offsets = packed_seq_lens.cu_seqlens.tolist()
        sums.append([each[start : stop - 1].sum() for start, stop in pairwise(offsets)])
    truth = [PairLogProbs(*torch.tensor(x).view(2, 2), *[found[0].chosen_tokens] * 2) for x in sums]
    assert float(truth[0].chosen.max()) < -3000
    rounded = [replace(x, chosen=x.chosen.float(), rejected=x.rejected.float()) for x in truth]
    want, ours, control = (loss_of(*x, Case()) for x in (truth, found, rounded))
    assert relative(ours.loss, want.loss) <= FLOAT32_BOUND < relative(control.loss, want.loss)
    assert relative(ours.margins, want.margins) <= 2e-4 < 1e-3 <= relative(control.margins, want.margins)


@pytest.mark.parametrize("form", ["softcap", "scale", "bias", "LoRA", "callable", "autocast"])
def test_what_a_head_may_do(form: str) -> None:
    """Hidden states and logits give the same, WPO's weights too."""
    batch, hidden, weight = drawn((3, 4, 6), (2, 5, 2))
    generator = torch.Generator().manual_seed(4)
    options: dict[str, Any] = {}
    logits = hidden @ weight.T
    bound = 1e-5
    given: Any = weight
    if form == "softcap":
        options, logits = {"softcap": 2.0, "logit_scale": 0.5}, 2 * torch.tanh(0.5 * logits / 2)
    elif form == "scale":
        options, logits = {"logit_scale": 0.3}, 0.3 * logits
    elif form == "bias":
        options["bias"] = torch.randn(VOCAB, generator=generator)
        logits = logits + options["bias"]
    elif form == "LoRA":
        a, b = torch.randn(4, 16, generator=generator), torch.randn(VOCAB, 4, generator=generator)
        options["lora"], logits = (a, b, 0.25), logits + 0.25 * hidden @ a.T @ b.T
    elif form == "callable":
        given = lambda: weight  # noqa: E731
    elif form == "autocast":
        logits, bound = (hidden.bfloat16() @ weight.bfloat16().T).float(), 1e-5
    rest = (batch["labels"], batch["packed_seq_lens"])
    with torch.autocast("cpu", torch.bfloat16, enabled=form == "autocast"):
        found = pair_log_probs(hidden, given, *rest, wpo=True, chunk=5, **options)
    want = pair_log_probs_of_logits(logits, *rest, wpo=True)
    plain = pair_log_probs_of_logits(hidden @ weight.T, *rest, wpo=True)
    for key in ("chosen", "rejected", "weights"):
        assert relative(getattr(found, key), getattr(want, key)) <= bound, key
        if form != "callable":
            assert relative(getattr(found, key), getattr(plain, key)) > 1e-4, key


class ValuesStayThere(TorchDispatchMode):
    """Raises where the host would wait for a device: a value is read, or a size depends on one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        masks = [x for x in indices if x is not None and x.dtype == torch.bool]
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "repeat_interleave") or masks:
            raise AssertionError(f"{name} looks at values")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("head", ["hidden", "logits"])
@pytest.mark.parametrize("case", ["sigmoid", "wpo, ipo", "wpo, ld, robust"])
def test_no_value_is_read(case: str, head: str) -> None:
    """With ``num_kept``: on a CPU, and there alone, the kept labels are counted otherwise, which is the control."""
    batch, hidden, weight = drawn((3, 4, 6), (2, 5, 2))
    hidden.requires_grad_()
    rest = (batch["labels"], batch["packed_seq_lens"])
    options: dict[str, Any] = {"ld_alpha": CASES[case].ld_alpha, "wpo": CASES[case].use_weighting}
    with ValuesStayThere():
        if head == "hidden":
            found = pair_log_probs(hidden, weight, *rest, num_kept=40, **options)
        else:
            found = pair_log_probs_of_logits(hidden @ weight.T, *rest, **options)
        loss_of(found, found, CASES[case]).loss.backward()
    with ValuesStayThere(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        pair_log_probs(hidden, weight, *rest, **options)
    again = pair_log_probs(hidden, weight, *rest, **options)
    assert relative(found.chosen.detach(), again.chosen.detach()) <= FLOAT32_BOUND


@pytest.mark.usefixtures("compile_anew")
def test_in_one_graph() -> None:
    batch, hidden, weight = drawn((3, 4, 6), (2, 5, 2))
    rest = (batch["labels"], batch["packed_seq_lens"])

    def step(hidden: Tensor) -> Tensor:
        found = pair_log_probs(hidden, weight, *rest, ld_alpha=0.4, wpo=True)
        return loss_of(found, found, CASES["wpo, ipo"]).losses

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert relative(compiled(hidden), step(hidden)) <= FLOAT32_BOUND


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["sigmoid", "wpo, ipo", "wpo, ld, robust"])
def test_no_synchronisation(case: str) -> None:
    batch, hidden, weight = drawn((3, 4, 6), (2, 5, 2))
    hidden, weight, labels = hidden.cuda().requires_grad_(), weight.cuda(), batch["labels"].cuda()
    sequences = batch["packed_seq_lens"].to("cuda")
    options: dict[str, Any] = {"ld_alpha": CASES[case].ld_alpha, "wpo": CASES[case].use_weighting}

    def step() -> PairLogProbs:
        found = pair_log_probs(hidden, weight, labels, sequences, **options)
        loss_of(found, found, CASES[case]).loss.backward()
        return found

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = step()
        with pytest.raises(RuntimeError, match="synchroniz"):
            found.chosen.tolist()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_is_refused() -> None:
    four = [torch.zeros(3)] * 4
    tokens = torch.ones(3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"shapes \(3,\), \(2,\)"):
        preference_loss(four[0], torch.zeros(2), *four[2:], beta=0.1)
    with pytest.raises(ValueError, match="beta=0"):
        preference_loss(*four, beta=0)
    for name in ("wpo", "ld"):
        with pytest.raises(ValueError, match=rf"loss_type='{name}'.*weights="):
            preference_loss(*four, beta=0.1, loss_type=name)  # type: ignore[arg-type]
    for smoothing, kind in ((0.5, "robust"), (-0.1, "robust"), (0.1, "sigmoid")):
        with pytest.raises(ValueError, match=rf"label_smoothing={smoothing}"):
            preference_loss(*four, beta=0.1, loss_type=kind, label_smoothing=smoothing)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pass both numbers of tokens"):
        preference_loss(*four, beta=0.1, loss_type="ipo", chosen_tokens=tokens)
    with pytest.raises(ValueError, match=r"rejected_tokens has shape \(1,\) for 3 pairs"):
        preference_loss(*four, beta=0.1, loss_type="ipo", chosen_tokens=tokens, rejected_tokens=tokens[:1])
    with pytest.raises(ValueError, match=r"weights has shape \(3, 1\)"):
        preference_loss(*four, beta=0.1, weights=torch.ones(3, 1))
    batch, hidden, weight = drawn((3, 4, 6))
    rest = (batch["labels"], batch["packed_seq_lens"])
    with pytest.raises(ValueError, match=r"ld_alpha=1\.5"):
        pair_log_probs(hidden, weight, *rest, ld_alpha=1.5)
    with pytest.raises(PackingError, match=r"\(1, 63, 16\) are not those .* with 64 tokens"):
        pair_log_probs(hidden[:, 1:], weight, *rest)
    with pytest.raises(PackingError, match="labels hold 63"):
        pair_log_probs_of_logits(hidden @ weight.T, rest[0][:, 1:], rest[1])
