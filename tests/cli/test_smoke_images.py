"""``fastpack smoke --modes images``: image-text models on rows with images."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_runs import ON_CPU, smoke_main
from transformers import LlavaForConditionalGeneration

import fastpack
from fastpack.exactness.image_oracle import IMAGE_KINDS
from fastpack.exactness.inputs import INPUT_KINDS
from fastpack.families.refused import REFUSED_IMAGES
from fastpack.testing import worker
from fastpack.testing.record import Record, Setting
from fastpack.testing.worker import Task


def test_an_image_text_model_on_text_and_on_images(tmp_path: Path) -> None:
    result = tmp_path / "run.json"
    flags = ["internvl", "llama", "--modes", "exact", "images", "--backends", "auto", "--json", str(result)]
    assert smoke_main([*flags, *ON_CPU]) == 0
    text, images, llama = Record.read(result).rows
    assert (text.mode, images.mode, llama.mode) == ("exact", "images", "exact")
    assert {row.verdict for row in (text, images, llama)} == {"exact"}
    assert text.tier == images.tier == "fast"
    assert text.kinds.keys() > INPUT_KINDS.keys()
    assert images.kinds.keys() > IMAGE_KINDS.keys()
    assert images.bound == worker.IMAGE_BOUND


def test_a_leak_fails_on_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastpack, "patch", lambda model, **_: model)
    monkeypatch.setattr(fastpack, "report", lambda _: SimpleNamespace(tier="", backend=""))
    (row,) = worker.image_rows("internvl", Task(("images",), "auto", Setting()))
    assert (row.problem or "").startswith("not exact: images, flattened")


def test_refused_images_are_a_row_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(("images",), "auto", Setting())
    for family in REFUSED_IMAGES:
        (row,) = worker.rows(family, task)
        assert (row.verdict, row.refused) == ("refused", REFUSED_IMAGES[family])
    monkeypatch.setitem(REFUSED_IMAGES, "llava", "made up")
    monkeypatch.setattr(LlavaForConditionalGeneration, "forward", lambda *_, **__: None)
    (row,) = worker.rows("llava", task)
    assert row.verdict == "FAILED"
