"""Versions of other packages: too old ones raise, ones newer than tried warn, and both messages say how to fix it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from peft import LoraConfig, get_peft_model
from tiny import tiny_model

import fastpack
from fastpack import FastpackWarning, PatchError, UntriedVersionWarning
from fastpack.model.unwrap import packages_of
from fastpack.utils import versions as installation
from fastpack.utils.versions import DISTRIBUTION, NEWEST_TRIED, install_command, version_of, version_ranges

ROOT = Path(__file__).parent.parent.parent
Pretend = Callable[..., None]


@pytest.fixture(autouse=True)
def _ranges_anew() -> Iterator[None]:
    version_ranges.cache_clear()
    yield
    version_ranges.cache_clear()


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """``pretend(transformers="5.6.0")`` sets that package's version; the others keep theirs."""

    def pretend(**versions: str) -> None:
        monkeypatch.setattr(installation, "version_of", lambda name: versions.get(name) or version_of(name))

    return pretend


@pytest.mark.parametrize("package", ["transformers", "torch"])
def test_below_the_floor_nothing_is_patched(package: str, pretend: Pretend) -> None:
    pretend(**{package: "1.6.0"})
    model = tiny_model("llama")
    before = [dict(module.__dict__) for module in model.modules()]
    with pytest.raises(PatchError, match=rf"^{package} 1\.6\.0 is too old") as caught:
        fastpack.patch(model)
    assert f"needs {package}{version_ranges()[package]}" in str(caught.value)
    assert [module.__dict__ for module in model.modules()] == before
    assert f"`{install_command(package)}`" in str(caught.value)


def pip_takes(command: str) -> bool:
    """Return whether the installed packages satisfy an install command, which runs without an index."""
    _, *arguments = shlex.split(command)
    asked = [sys.executable, "-m", "pip", *arguments, "--no-index", "--dry-run"]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


def floor_of(package: str) -> str:
    return next(limit.version for limit in version_ranges()[package] if limit.operator == ">=")


@pytest.mark.parametrize("suffix", ["", ".0rc1", ".0.dev0", ".0+cu130", ".9"])
@pytest.mark.parametrize("package", ["transformers", "torch"])
def test_the_floor_itself_is_served(package: str, suffix: str, pretend: Pretend) -> None:
    """Pre-releases and local builds of the floor are accepted too, without a warning (which would be an error here)."""
    pretend(**{package: floor_of(package) + suffix})
    assert fastpack.is_patched(fastpack.patch(tiny_model("llama")))


@pytest.mark.parametrize(
    ("newer", "warned"),
    [
        ({"transformers": "6.0.0.dev0"}, []),  # each class is looked at by itself: tests/patching/test_match.py
        ({"peft": "0.99.0", "torch": "3.0.1+cpu"}, ["torch 3.0.1+cpu"]),
        ({name: f"{newest}.99" for name, newest in NEWEST_TRIED.items()}, []),
    ],
)
def test_newer_than_was_tried_is_told_in_one_line(newer: dict[str, str], warned: list[str], pretend: Pretend) -> None:
    pretend(**newer)
    model: Any = tiny_model("llama")
    ids = torch.randint(3, 90, (1, 8))
    stock = model(input_ids=ids).logits
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FastpackWarning)
        fastpack.patch(model)
    reported = [each for each in caught if issubclass(each.category, FastpackWarning)]
    assert len(reported) == bool(warned)
    for each in reported:
        assert issubclass(each.category, UntriedVersionWarning)
        assert "\n" not in str(each.message)
        assert all(name in str(each.message) for name in warned)
        assert each.filename == __file__
    torch.testing.assert_close(model(input_ids=ids).logits, stock)


def test_only_what_is_used_is_checked(pretend: Pretend) -> None:
    pretend(trl="1.14.2", peft="0.17.1", accelerate="1.9.0", bitsandbytes="0.49.0")
    plain: Any = tiny_model("llama")
    assert packages_of(plain) >= {"torch", "transformers"}
    fastpack.patch(plain)
    with pytest.raises(PatchError, match=r"peft 0\.17\.1 is too old"):
        fastpack.patch(get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"])))


@pytest.mark.parametrize("old", [{"trl": "1.14.2"}, {"accelerate": "1.9.0"}])
def test_a_trainer_brings_its_own_packages(
    old: dict[str, str], pretend: Pretend, tmp_path: Path, accelerate_afresh: None
) -> None:
    from transformers import Trainer, TrainingArguments
    from trl import SFTTrainer

    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = Trainer(tiny_model("llama"), arguments)
    of_trl = object.__new__(SFTTrainer)  # building a real one takes a tokenizer and data
    of_trl.__dict__ |= trainer.__dict__
    for each in (trainer, of_trl):
        fastpack.unpatch(fastpack.patch(each))
    pretend(**old)
    (name,) = old
    with pytest.raises(PatchError, match=f"{name} .* is too old"):
        fastpack.patch(of_trl)
    assert not fastpack.is_patched(of_trl)
    if name == "trl":
        assert fastpack.is_patched(fastpack.patch(trainer))


def test_the_suite_runs_with_what_was_tried() -> None:
    """A newer release is entered in NEWEST_TRIED when the suite passes with it."""
    assert [name for name in NEWEST_TRIED if installation.is_untried(name, str(version_of(name)))] == []
    for name, newest in NEWEST_TRIED.items():
        assert version_ranges()[name].contains(f"{newest}.0"), f"pip must be allowed to install {name} {newest}"


def test_what_was_imported_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An imported package's version counts, not one installed afterwards; else the installed version counts."""
    assert version_of("torch") == torch.__version__
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(__version__="5.6.0"))
    assert version_of("transformers") == "5.6.0"
    assert version_of("ruff") is not None
    assert version_of("no-such-package") is None


# Where the ranges come from: a checkout, an installed distribution, nothing.


def requirements_of_pyproject() -> dict[str, Any]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return {each.name: each.specifier for each in map(Requirement, lines) if str(each.specifier)}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages with the package in it, instead of a checkout, and nothing else."""
    folder = tmp_path / "site"
    (folder / "fastpack" / "utils").mkdir(parents=True)
    monkeypatch.setattr(installation, "__file__", str(folder / "fastpack" / "utils" / "versions.py"))
    monkeypatch.setattr(sys, "path", [str(folder)])
    return folder


METADATA = f"""Metadata-Version: 2.4
Name: {DISTRIBUTION}
Version: 0.1.0
Requires-Dist: transformers<9,>=7
Provides-Extra: trl
Requires-Dist: trl>=8.1; extra == "trl"
"""


def test_a_checkout_tells_its_own_ranges() -> None:
    """So does one that is only on PYTHONPATH, and it wins over metadata that an earlier installation left."""
    assert version_ranges() == requirements_of_pyproject()
    assert install_command("trl", "datasets") == "pip install 'trl>=1.15' 'datasets>=4.0'"
    assert pip_takes(install_command("trl", "datasets", "transformers"))
    assert not pip_takes(install_command("trl", "no-such-package")), "control"


def test_an_installed_distribution_tells_its_ranges(site: Path, pretend: Pretend) -> None:
    info = site / f"{DISTRIBUTION.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (site / "pyproject.toml").write_text('[project]\nname = "another"\ndependencies = ["transformers>=99"]\n')
    result = {name: str(allowed) for name, allowed in version_ranges().items()}
    assert result == {"transformers": "<9,>=7", "trl": ">=8.1"}
    assert install_command("trl", "unheard-of") == "pip install 'trl>=8.1' unheard-of"
    pretend(transformers="6.9.0")
    with pytest.raises(PatchError, match=r"transformers 6\.9\.0 is too old: fastpack needs transformers<9,>=7"):
        fastpack.patch(tiny_model("llama"))


def test_a_copy_without_metadata_says_that_nothing_is_known(site: Path) -> None:
    assert install_command("trl", "datasets") == "pip install trl datasets"
    with pytest.warns(UntriedVersionWarning, match=f"without {DISTRIBUTION}'s metadata"):
        model = fastpack.patch(tiny_model("llama"))
    assert fastpack.is_patched(model)


# The name.


def test_the_distribution_has_its_name_in_pyproject_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION != "fastpack"
    assert list(project["scripts"]) == ["fastpack"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    (itself,) = (Requirement(line) for line in extras if line.startswith("fastpack"))
    assert itself.name == DISTRIBUTION
    assert itself.extras <= project["optional-dependencies"].keys()


def test_no_text_installs_the_other_fastpack() -> None:
    """``fastpack`` on the package index is another project."""
    quoted, reported = r"""['"\\]*fastpack""", "(version|requires|files|distribution)"
    other_project = re.compile(rf"""pip install[^\n]* {quoted}(\[|['"\s@]|$)|{reported}\({quoted}['"]\)""")
    texts = [ROOT / "README.md", ROOT / "gists", ROOT / "notebooks", ROOT / "fastpack"]
    files = [file for text in texts for file in (text.rglob("*") if text.is_dir() else [text])]
    read = {file: file.read_text() for file in files if file.suffix in (".py", ".md", ".sh", ".ipynb")}
    result = [f"{file.name}: {each.group()}" for file, text in read.items() for each in other_project.finditer(text)]
    assert result == []
    assert other_project.search("pip install 'fastpack[trl]'"), "control"
    assert other_project.search('metadata.version("fastpack")'), "control"
