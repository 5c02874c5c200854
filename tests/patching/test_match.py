"""Classes whose source is not proved: fast if a twin matches, else on their own forward, with a warning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from oracle import make_sequences, run_alone
from patch_checks import check_exact
from tiny import VOCAB, tiny_model
from torch import nn
from transformers.models.llama import modeling_llama as llama

import fastpack
from fastpack import api
from fastpack.errors import FastpackWarning, PatchError, UntriedVersionWarning
from fastpack.exactness.tiny import build_tiny
from fastpack.families import lock
from fastpack.families.registry import FAMILIES
from fastpack.families.shared_specs import LLAMA_HEAD, LLAMA_NORM, OLMO2_NORM
from fastpack.families.spec import Family, Spec
from fastpack.patching.match import match_specs


class Judge:
    """A stand-in for the twin: it records what it is asked, and answers for each class."""

    def __init__(self, why: str = "", only: Mapping[Spec, str] | None = None) -> None:
        self.why, self.only = why, only or {}
        self.asked: list[Mapping[str, Spec]] = []

    def __call__(self, backbone: nn.Module, family: Family, candidates: Mapping[str, Spec]) -> Mapping[str, str]:
        self.asked.append(dict(candidates))
        return {name: self.only.get(form, self.why) for name, form in candidates.items()}


def judged_by(judge: Judge, changed: pytest.MonkeyPatch, *unknown: str) -> Judge:
    changed.setattr(api, "match_by_twin", judge)
    for name in unknown:
        changed.delitem(lock.proved(), name)
    return judge


def test_nobody_is_asked_of_what_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = judged_by(Judge("no"), monkeypatch)
    report = fastpack.report(fastpack.patch(tiny_model("llama"), loss="fused"))
    assert not judge.asked
    assert (report.matched, report.skipped) == ((), ())


def test_what_matches_is_fast_and_said_to_be_matched(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = judged_by(Judge(), monkeypatch, "LlamaMLP", "LlamaAttention")
    model = tiny_model("llama")
    alone = run_alone(model, make_sequences(VOCAB))
    report = fastpack.report(fastpack.patch(model, strict=True))
    assert [set(each) for each in judge.asked] == [{"LlamaMLP", "LlamaAttention"}]
    assert (report.tier, report.skipped, report.swapped["mlp"]) == ("fast", (), 2)
    assert report.matched == ("LlamaAttention", "LlamaMLP")
    assert "matched by a twin" in str(report)
    check_exact(model, alone)


def test_what_does_not_match_keeps_its_forward_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    judged_by(Judge("off by 0.5"), monkeypatch, "LlamaMLP")
    model = tiny_model("llama")
    alone = run_alone(model, make_sequences(VOCAB))
    with pytest.warns(FastpackWarning, match=r"LlamaMLP of .*: off by 0\.5\. Its own forward runs") as reported:
        fastpack.patch(model)
    assert [each.filename for each in reported] == [__file__]
    report = fastpack.report(model)
    assert "mlp" not in report.swapped
    assert report.matched == ()
    ((what, why),) = report.skipped
    assert (what, "off by 0.5" in why) == ("LlamaMLP", True)
    check_exact(model, alone)
    with pytest.warns(FastpackWarning), pytest.raises(PatchError, match="strict=True"):
        fastpack.patch(tiny_model("llama"), strict=True)


@pytest.mark.parametrize(("why", "fused"), [("", True), ("off by 0.5", False)])
def test_a_head_whose_loss_is_to_be_fused(why: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = judged_by(Judge(why), monkeypatch, "LlamaForCausalLM")
    fastpack.patch(tiny_model("llama"))
    assert not judge.asked, "its forward is the stock one"
    if fused:
        model = fastpack.patch(tiny_model("llama"), loss="fused")
    else:
        with pytest.warns(FastpackWarning, match="LlamaForCausalLM"):
            model = fastpack.patch(tiny_model("llama"), loss="fused")
    assert judge.asked == [{"LlamaForCausalLM": LLAMA_HEAD}]
    assert [what for what, _ in fastpack.report(model).skipped] == ([] if fused else ["LlamaForCausalLM", "loss"])


def test_a_replaced_forward_is_never_matched(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = judged_by(Judge(), monkeypatch)
    for cls in (llama.LlamaMLP, llama.LlamaForCausalLM):
        monkeypatch.setattr(cls, "forward", lambda self, *args, **kwargs: None)
    report = fastpack.report(fastpack.patch(tiny_model("llama"), loss="fused"))
    assert not judge.asked
    assert {"LlamaMLP", "loss"} <= {what for what, _ in report.skipped}


@pytest.mark.parametrize(("matching", "form"), [(OLMO2_NORM, OLMO2_NORM), (LLAMA_NORM, LLAMA_NORM), (None, None)])
def test_a_form_of_earlier_releases_is_tried_too(
    matching: Spec | None, form: Spec | None, monkeypatch: pytest.MonkeyPatch, recwarn: Any
) -> None:
    judge = Judge("off", {} if matching is None else {matching: ""})
    model = build_tiny("nemotron_h")
    family = FAMILIES["nemotron_h"]
    result, left = match_specs(model, family, ["NemotronHRMSNorm"], judge)
    assert result.get("NemotronHRMSNorm") == form
    assert len(left) == len(recwarn) == (form is None)
    assert len(judge.asked) == 1 + (form != OLMO2_NORM)


def test_untried_stock_attention_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    fastpack.patch(build_tiny("gpt2"))  # a warning is an error here
    monkeypatch.delitem(lock.proved(), "GPT2Attention")
    with pytest.warns(UntriedVersionWarning, match="GPT2Attention of transformers") as reported:
        fastpack.patch(build_tiny("gpt2"))
    assert [each.filename for each in reported] == [__file__]


def test_a_mixer_that_was_not_read_runs_on_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fastpack.report(fastpack.patch(build_tiny("lfm2"))).tier == "fast"
    monkeypatch.delitem(lock.proved(), "Lfm2ShortConv (packed)")
    assert fastpack.report(fastpack.patch(build_tiny("lfm2"))).tier == "re-padded mixer"
    monkeypatch.delitem(lock.proved(), "Lfm2ShortConv")
    with pytest.warns(UntriedVersionWarning, match="Lfm2ShortConv"):
        fastpack.patch(build_tiny("lfm2"))
