"""Compute a family's rows in its own process, one mode after the other, and write them to a file.

The model is proved exact on text and, if it is in the image-text mapping, on images; with LoRA on its experts; it is
verified, and trained for three steps with TRL: whole, with LoRA, and on packed batches, patched and unpatched.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import fastpack
from fastpack.errors import BackendUnavailableError, PatchError, UnsupportedModelError
from fastpack.exactness.family_settings import NOT_BUILT
from fastpack.exactness.image_oracle import ImageOracle
from fastpack.exactness.image_settings import LAYOUTS, TEXT_ALONE
from fastpack.exactness.image_text import image_text_types, not_built
from fastpack.exactness.oracle import Oracle
from fastpack.exactness.tiny import model_types, plain_tokens
from fastpack.exactness.verification import ContaminationError, InconclusiveError, Verification
from fastpack.families.refused import REFUSED, REFUSED_IMAGES
from fastpack.families.registry import family_of
from fastpack.families.spec import Family
from fastpack.model.unwrap import find_parts
from fastpack.patching.support import too_old
from fastpack.testing.experts import EXPERTS, expert_rows
from fastpack.testing.id_tokenizer import tokenizer_of_ids
from fastpack.testing.record import Row, Setting

EXACT, IMAGES, VERIFY = "exact", "images", "verify"
TRAINED = ("plain", "lora", "packed")
MODES = (EXACT, IMAGES, EXPERTS, VERIFY, *TRAINED)
USUAL = (EXACT, IMAGES, *TRAINED)
"""The default modes; training also verifies a model first."""
EACH = "each"
STEPS, BATCH = 3, 4
LENGTHS = (5, 33, 12, 20, 9, 40, 3, 17, 28, 6, 11, 36)
LOSS_BOUND, HALF_LOSS_BOUND = 1e-4, 3e-2
IMAGE_BOUND = 1e-4
"""The bound of errors on images: towers are of many kinds, and rounding in some is more than in text models."""

NOT_AS_PADDED = ("big_bird", "cpmant")
"""Models whose stock logits of a padded sequence differ from those of the sequence alone. A patched model gives the
logits of the sequence alone."""
MAMBAS = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")
NOT_FOR_LORA = ("out_proj", "conv1d")
"""Modules of :data:`MAMBAS` that PEFT must not wrap, since fused kernels read their weights."""


@dataclass(frozen=True)
class Task:
    """The work on every family.

    Attributes:
        modes: some of :data:`MODES`.
        backends: ``each`` (every backend that can serve), ``auto``, or the name of a backend.
        setting: the device, dtype and head size.
    """

    modes: Sequence[str]
    backends: str
    setting: Setting


def modes_of(family: str, task: Task) -> list[str]:
    """Return the modes of a task that apply to a family.

    Mode ``images`` is for names in the image-text mapping, and the others are for models that run on ids alone.
    """
    no_text = family in LAYOUTS and (LAYOUTS[family].required or LAYOUTS[family].typed)
    has_images = family in image_text_types() and family not in TEXT_ALONE
    return [mode for mode in task.modes if (has_images if mode == IMAGES else not no_text)]


def work(family: str, task: Task, sent: Path, log: Path) -> None:
    """Write every row of a family to the file ``sent``, one line of JSON each, and null after the last.

    Printed output goes to the file ``log``.
    """
    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    faulthandler.enable(2)
    warnings.simplefilter("ignore")
    if task.setting.device == "cpu":
        torch.set_num_threads(1)  # more threads would only wait, as tensors are small
    else:
        torch.backends.cudnn.allow_tf32 = False  # TF32 convolutions would exceed 1e-4
    with sent.open("w") as lines:
        for row in rows(family, task):
            print(json.dumps(asdict(row)), file=lines, flush=True)
        print("null", file=lines)  # the end: errors of libraries while the interpreter exits are not the family's


def rows(family: str, task: Task) -> Iterator[Row]:
    """Yield the rows of every mode and backend, or one row that says why the family is refused.

    All errors of building, patching or running the model may be raised, except for the refusal of a listed family.
    """
    unbuilt = NOT_BUILT.get(family) if family in model_types() else not_built(family)
    if unbuilt is not None:
        yield Row(family, EXACT, refused=unbuilt)
        if IMAGES in modes_of(family, task) and not_built(family) is None:
            yield from image_rows(family, task)
        return
    if family in REFUSED:
        yield _refused(family, task.setting)
        return
    row = row_of(family, task.setting)
    outdated = None if row is None else too_old(row)
    if outdated is not None:
        yield Row(family, EXACT, refused=outdated)
        return
    modes = modes_of(family, task)
    if VERIFY in modes:
        yield from _proved(family, VERIFY, task.setting, _backends(task.setting.build(family), task.backends), verified)
    if {EXACT, *TRAINED} & {*modes}:
        yield from text_rows(family, task)
    if EXPERTS in modes:
        routers = () if row is None else row.routers
        yield from expert_rows(family, task.setting, _backends(task.setting.build(family), task.backends), routers)
    if IMAGES in modes:
        yield from image_rows(family, task)


def text_rows(family: str, task: Task) -> Iterator[Row]:
    """Yield the rows of mode ``exact`` and of training, which are on text, for each backend."""
    oracle = oracle_of(family, task.setting)
    setting = replace(task.setting, dtype=str(oracle.dtype).removeprefix("torch."))
    backends = _backends(setting.build(family), task.backends)
    if EXACT in task.modes:
        yield from _proved(family, EXACT, setting, backends, oracle.prove)
    yield from train_rows(family, [mode for mode in task.modes if mode in TRAINED], setting, backends)


def oracle_of(family: str, setting: Setting) -> Oracle:
    """Return the oracle of a family's tiny model: its results for each sequence alone, with fixed choices of experts.

    All errors of building or running the stock model in float32 may be raised.
    """
    row = row_of(family, setting)
    routers = () if row is None else row.routers
    return Oracle.of(functools.partial(setting.build, family), getattr(torch, setting.dtype), routers)


def image_rows(family: str, task: Task) -> Iterator[Row]:
    """Yield a row for each backend: the model on rows with images, or the reason why it takes none.

    All errors of building, patching or running the model may be raised, except for the refusal of a listed family's
    images. Images are tried in float32.
    """
    setting = replace(task.setting, dtype="float32")
    if (unbuilt := not_built(family)) is not None:
        yield Row(family, IMAGES, refused=unbuilt)
        return
    if family in REFUSED_IMAGES:
        yield _refused_images(family, setting)
        return
    stock = setting.build_for_images(family)
    row = family_of(find_parts(stock).backbone)
    build = functools.partial(setting.build_for_images, family)
    oracle = ImageOracle.of(build, () if row is None else row.routers, least=IMAGE_BOUND)
    for backend in _backends(stock, task.backends):
        model = fastpack.patch(setting.build_for_images(family), attention=backend)
        try:
            yield _proved_row(family, IMAGES, setting, model, oracle.prove(model))
        except BackendUnavailableError as error:  # it serves text, but no blocks of images
            yield Row(family, IMAGES, backend=backend, left_out=str(error))


def _refused_images(family: str, setting: Setting) -> Row:
    model = fastpack.patch(setting.build_for_images(family))
    ids = plain_tokens(1, 4).to(setting.device)
    try:
        model(input_ids=ids, pixel_values=torch.zeros(1, device=setting.device))
    except UnsupportedModelError:
        return Row(family, IMAGES, refused=REFUSED_IMAGES[family])
    return Row(family, IMAGES, problem="its images are in the list of refused ones, but the patched model took them")


def row_of(family: str, setting: Setting) -> Family | None:
    """Return the row of a tiny model's backbone, which another family or a composite may share; None if it has none."""
    return family_of(find_parts(setting.build(family)).backbone)


def _refused(family: str, setting: Setting) -> Row:
    try:
        fastpack.patch(setting.build(family))
    except UnsupportedModelError:
        return Row(family, EXACT, refused=REFUSED[family])
    return Row(family, EXACT, problem="it is in the list of refused families, but patch accepted it")


def _proved(
    family: str,
    mode: str,
    setting: Setting,
    backends: Sequence[str],
    prove: Callable[[Any], Verification | None],
) -> Iterator[Row]:
    for backend in backends:
        model = fastpack.patch(setting.build(family), attention=backend)
        yield _proved_row(family, mode, setting, model, prove(model))


def _proved_row(family: str, mode: str, setting: Setting, model: Any, verification: Verification | None) -> Row:
    checks = verification.checks if verification is not None and mode != VERIFY else ()
    kinds = {check.what: check.error for check in checks if not check.at_least}
    return Row.of(family, mode, setting, model, verification, kinds=kinds)


def _backends(model: Any, which: str) -> list[str]:
    """Return the requested backend, or those that serve every layer of a model (with ``auto`` if layers differ)."""
    if which != EACH:
        return [which]
    with fastpack.patched(model):
        serving = [name for name, why in fastpack.report(model).backends.items() if why is None]
    alone = []
    for name in serving:
        try:
            with fastpack.patched(model, attention=name):
                alone.append(name)
        except BackendUnavailableError:
            continue  # it serves only some of the layers
    return alone if alone == serving and serving else [*alone, "auto"]


def train_rows(family: str, modes: Sequence[str], setting: Setting, backends: Sequence[str]) -> Iterator[Row]:
    """Yield a row for each training mode (``plain``, ``lora``, ``packed``) in ``modes`` and each backend.

    If TRL can't train the stock model either, the mode has one row that says so.
    """
    bound = LOSS_BOUND if setting.dtype == "float32" else HALF_LOSS_BOUND
    # keyed by whether LoRA is on; the stock model always gets padded batches
    stock: dict[bool, tuple[list[float], float] | str] = {}
    for mode in modes:
        lora = mode == "lora"
        if lora not in stock:
            stock[lora] = _stock(family, lora, setting)
        trained = stock[lora]
        if isinstance(trained, str):
            yield Row(family, mode, dtype=setting.dtype, left_out=trained)
            continue
        stock_losses, stock_seconds = trained
        for backend in backends:
            model = _prepare(setting.build(family), lora)
            fastpack.patch(model, attention=backend)
            row = Row.of(family, mode, setting, model, verified(model))
            losses, seconds = _train(model, packed=mode == "packed")
            loss = _off(losses, stock_losses, packed=mode == "packed")
            row = replace(row, loss=loss, speed=stock_seconds / seconds)
            if family not in NOT_AS_PADDED and not loss <= bound:
                row = replace(row, problem=row.problem or f"losses are off by {loss:.1e}")
            yield row


def _stock(family: str, lora: bool, setting: Setting) -> tuple[list[float], float] | str:
    """Return the stock model's losses on padded batches, or why there are none."""
    try:
        return _train(_prepare(setting.build(family), lora), packed=False)
    except Exception as error:  # noqa: BLE001 - fastpack does not run here, and other libraries may raise anything
        return f"the stock model can't be trained in this mode: {type(error).__name__}: {str(error)[:200]}"


def _off(losses: Sequence[float], stock: Sequence[float], *, packed: bool) -> float:
    """Return the largest relative difference of losses.

    A loss is divided by the number of labels in the batch, and TRL's packed batches have one label less for each
    sequence than its padded batches. This changes the loss of some models (GPT-2), also stock; for most models, TRL
    computes the loss itself.
    """
    tokens = [sum(LENGTHS[at : at + BATCH]) for at in range(0, BATCH * STEPS, BATCH)]
    rescaled = [true * n / (n - BATCH) for true, n in zip(stock, tokens, strict=True)]
    worst = [
        max(abs(a - b) / abs(b) for a, b in zip(losses, true, strict=True))
        for true in ((stock, rescaled) if packed else (stock,))
    ]
    return min(worst)


def _prepare(model: Any, lora: bool) -> Any:
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(
        r=4,
        target_modules="all-linear",
        exclude_modules=list(NOT_FOR_LORA) if model.config.model_type in MAMBAS else None,
        lora_dropout=0.0,
    )
    wrapped = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return wrapped


def _train(model: Any, *, packed: bool) -> tuple[list[float], float]:
    """Return the losses of three steps of TRL's ``SFTTrainer``, and the seconds of all but the first."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    ends: list[float] = []

    class StepEnds(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 90, (length,), generator=generator).tolist() for length in LENGTHS]
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            learning_rate=1e-3,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            bf16=False,
            gradient_checkpointing=False,
            padding_free=packed,
            max_length=None,
            use_cpu=next(model.parameters()).device.type == "cpu",
            train_sampling_strategy="sequential",
            dataset_kwargs={"skip_prepare_dataset": True},
            **_without_balance(model.config),
        )
        data = Dataset.from_dict({"input_ids": ids, "labels": ids})
        trainer = SFTTrainer(
            model, args=arguments, train_dataset=data, processing_class=tokenizer_of_ids(), callbacks=[StepEnds()]
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], ends[-1] - ends[0]


def _without_balance(config: Any) -> dict[str, Any]:
    """Return settings that turn off TRL's balancing loss if the config lacks ``num_experts``, which TRL reads."""
    text = config.get_text_config()
    balanced = hasattr(text, "output_router_logits") and not hasattr(text, "num_experts")
    return {"router_aux_loss_coef": 0.0} if balanced else {}


def verified(model: Any) -> Verification | None:
    """Return the verification of a patched model, or None if verify can't tell its tokens by their ids."""
    try:
        return fastpack.verify(model)
    except (ContaminationError, InconclusiveError) as error:
        return error.verification
    except PatchError:
        return None
