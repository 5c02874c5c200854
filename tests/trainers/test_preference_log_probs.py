"""Log-probabilities of packed pairs: their sums, the forms of heads, no waiting for the device, and errors."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from oracle import FLOAT32_BOUND, relative
from packing_cases import filled_up
from preference_losses import CASES, Case, loss_of
from tiny import VOCAB
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastpack import PackedSeqLens, PackingError
from fastpack.cuda_graphs.recorder import no_synchronisation
from fastpack.data.packed_collators import PackedPreferenceCollator
from fastpack.ops.loss import IGNORE_INDEX
from fastpack.trainers.preference_losses import PairLogProbs, pair_log_probs, pair_log_probs_of_logits, preference_loss


def drawn(*lengths: tuple[int, int, int]) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Return a batch of pairs of these lengths with hidden states and a head."""
    generator = torch.Generator().manual_seed(3)
    examples = [
        {f"{k}_ids": [5 + i] * n for i, (k, n) in enumerate(zip(("prompt", "chosen", "rejected"), triple, strict=True))}
        for triple in lengths
    ]
    batch = filled_up(PackedPreferenceCollator()(examples), 64)
    return batch, torch.randn(1, 64, 16, generator=generator), torch.randn(VOCAB, 16, generator=generator)


def test_tokens_are_those_that_something_predicts() -> None:
    """Without a prompt, no token predicts a completion's first token; labels in the middle may be ignored."""
    batch, hidden, weight = drawn((3, 4, 6), (0, 5, 2))
    batch["labels"][0, 4] = IGNORE_INDEX  # the second token of the first chosen completion
    result = pair_log_probs(hidden, weight, batch["labels"], batch["packed_seq_lens"])
    assert result.chosen_tokens.tolist() == [3, 4]
    assert result.rejected_tokens.tolist() == [6, 1]
    assert result.weights is None
    each = torch.log_softmax(hidden[0] @ weight.T, -1)
    want = sum(each[t - 1, batch["input_ids"][0, t]] for t in (3, 5, 6))
    assert relative(result.chosen[0], want) <= 1e-6
    cut = pair_log_probs(hidden, weight, batch["labels"], batch["packed_seq_lens"], ld_alpha=0.0)
    start = 7 + 5  # behind both chosen sequences
    want = sum(each[t - 1, batch["input_ids"][0, t]] for t in range(start + 3, start + 6))
    assert relative(cut.rejected[0], want) <= 1e-6, "as many as the shorter one has that count"


def test_long_texts() -> None:
    """float32 can't represent small differences of log-probabilities in the thousands, which is the control."""
    generator = torch.Generator().manual_seed(5)
    packed_seq_lens = PackedSeqLens.from_lengths([700, 900, 650, 800])
    labels = torch.randint(3, VOCAB, (1, packed_seq_lens.total_tokens), generator=generator)
    hidden = torch.randn(1, packed_seq_lens.total_tokens, 16, generator=generator)
    weight = torch.randn(VOCAB, 16, generator=generator)
    other = weight + 1e-3 * torch.randn(VOCAB, 16, generator=generator)
    result = [pair_log_probs(hidden, w, labels, packed_seq_lens) for w in (weight, other)]
    sums = []
    for w in (weight, other):
        each = torch.log_softmax(hidden[0].double() @ w.double().T, -1)[:-1].gather(1, labels[0, 1:, None])[:, 0]
        offsets = packed_seq_lens.cu_seqlens.tolist()
        sums.append([each[start : stop - 1].sum() for start, stop in pairwise(offsets)])
    truth = [PairLogProbs(*torch.tensor(x).view(2, 2), *[result[0].chosen_tokens] * 2) for x in sums]
    assert float(truth[0].chosen.max()) < -3000
    rounded = [replace(x, chosen=x.chosen.float(), rejected=x.rejected.float()) for x in truth]
    want, ours, control = (loss_of(*x, Case()) for x in (truth, result, rounded))
    assert relative(ours.loss, want.loss) <= FLOAT32_BOUND < relative(control.loss, want.loss)
    assert relative(ours.margins, want.margins) <= 2e-4 < 1e-3 <= relative(control.margins, want.margins)


@pytest.mark.parametrize("form", ["softcap", "scale", "bias", "LoRA", "callable", "autocast"])
def test_what_a_head_may_do(form: str) -> None:
    """Hidden states and logits give the same log-probabilities and WPO weights."""
    batch, hidden, weight = drawn((3, 4, 6), (2, 5, 2))
    generator = torch.Generator().manual_seed(4)
    options: dict[str, Any] = {}
    logits = hidden @ weight.T
    bound = 1e-5
    inputs: Any = weight
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
        inputs = lambda: weight  # noqa: E731
    elif form == "autocast":
        logits, bound = (hidden.bfloat16() @ weight.bfloat16().T).float(), 1e-5
    rest = (batch["labels"], batch["packed_seq_lens"])
    with torch.autocast("cpu", torch.bfloat16, enabled=form == "autocast"):
        result = pair_log_probs(hidden, inputs, *rest, wpo=True, chunk=5, **options)
    want = pair_log_probs_of_logits(logits, *rest, wpo=True)
    plain = pair_log_probs_of_logits(hidden @ weight.T, *rest, wpo=True)
    for key in ("chosen", "rejected", "weights"):
        assert relative(getattr(result, key), getattr(want, key)) <= bound, key
        if form != "callable":
            assert relative(getattr(result, key), getattr(plain, key)) > 1e-4, key


class ValuesStayThere(TorchDispatchMode):
    """A mode that raises if the host would wait for a device: a value is read, or a size depends on one."""

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
    """``num_kept`` is passed; without it, a CPU alone counts the kept labels, which is the control."""
    batch, hidden, weight = drawn((3, 4, 6), (2, 5, 2))
    hidden.requires_grad_()
    rest = (batch["labels"], batch["packed_seq_lens"])
    options: dict[str, Any] = {"ld_alpha": CASES[case].ld_alpha, "wpo": CASES[case].use_weighting}
    with ValuesStayThere():
        if head == "hidden":
            result = pair_log_probs(hidden, weight, *rest, num_kept=40, **options)
        else:
            result = pair_log_probs_of_logits(hidden @ weight.T, *rest, **options)
        loss_of(result, result, CASES[case]).loss.backward()
    with ValuesStayThere(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        pair_log_probs(hidden, weight, *rest, **options)
    again = pair_log_probs(hidden, weight, *rest, **options)
    assert relative(result.chosen.detach(), again.chosen.detach()) <= FLOAT32_BOUND


@pytest.mark.usefixtures("compile_anew")
def test_in_one_graph() -> None:
    batch, hidden, weight = drawn((3, 4, 6), (2, 5, 2))
    rest = (batch["labels"], batch["packed_seq_lens"])

    def step(hidden: Tensor) -> Tensor:
        result = pair_log_probs(hidden, weight, *rest, ld_alpha=0.4, wpo=True)
        return loss_of(result, result, CASES["wpo, ipo"]).losses

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
        result = pair_log_probs(hidden, weight, labels, sequences, **options)
        loss_of(result, result, CASES[case]).loss.backward()
        return result

    step()
    with no_synchronisation():
        result = step()
        with pytest.raises(RuntimeError, match="synchroniz"):
            result.chosen.tolist()


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
