"""``fastpack distill``: on-policy distillation with TRL's own DistillationTrainer, student and teacher patched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoConfig
from trl.trainer.utils import create_model_from_path

import fastpack
from fastpack.cli import UsageError, require_there
from fastpack.cli.arguments import Command, OwnArguments, ParsedArgs
from fastpack.cli.loading import random_model, shards
from fastpack.cli.training import run


@dataclass
class DistillArguments(OwnArguments):
    """The flags that fastpack adds to those of TRL's distillation."""

    teacher_random_init: str | None = field(
        default=None,
        metadata={
            "help": "Instead of --teacher_model_name_or_path: a config (JSON file, folder or hub id), to build a "
            "teacher with random weights."
        },
    )


def main(arguments: Sequence[str]) -> int:
    """Train, and print a summary."""
    return run(DISTILL, arguments)


def _check(args: ParsedArgs) -> None:
    """Raise unless there is one teacher."""
    teachers = (args.training.teacher_model_name_or_path, args.ours.teacher_random_init)  # type: ignore[attr-defined]
    named = [name for name in teachers if name is not None]
    if len(named) != 1:
        raise UsageError("pass either --teacher_model_name_or_path MODEL or --teacher_random_init CONFIG")
    require_there(named[0])


def _models(source: Any, args: ParsedArgs) -> dict[str, Any]:
    """Return the teacher: dense, as in TRL's script, and patched here if TRL shards it while it builds the trainer."""
    training, ours = args.training, args.ours
    random: str | None = ours.teacher_random_init  # type: ignore[attr-defined]
    name = random or training.teacher_model_name_or_path
    revision = None if random else training.teacher_model_revision
    _check_vocabulary(source, name, revision, args)
    if random is not None:
        teacher = random_model(
            random, args, seed=training.seed + 1
        )  # weights other than a student's of the same config
    else:
        loading = {
            "revision": revision,
            "trust_remote_code": training.trust_remote_code,
            "attn_implementation": args.model.attn_implementation,
            "dtype": args.model.dtype,
        }
        training.teacher_model_init_kwargs = {**loading, **(training.teacher_model_init_kwargs or {})}
        teacher = name
    if not (ours.patch and shards(training)):
        return {"teacher_model": teacher}
    if isinstance(teacher, str):
        teacher = create_model_from_path(teacher, **training.teacher_model_init_kwargs)
        training.teacher_model_init_kwargs = None  # TRL refuses them beside a model
    return {"teacher_model": fastpack.patch(teacher, **ours.patch_keywords())}


def _check_vocabulary(source: Any, teacher: str, revision: str | None, args: ParsedArgs) -> None:
    """Raise if the teacher predicts other tokens than the student, before any weights are loaded."""
    trust = args.training.trust_remote_code
    config = AutoConfig.from_pretrained(teacher, revision=revision, trust_remote_code=trust)
    own = getattr(source, "config", None) or AutoConfig.from_pretrained(
        source, revision=args.training.model_init_kwargs.get("revision"), trust_remote_code=trust
    )
    ours, theirs = (each.get_text_config().vocab_size for each in (own, config))
    if ours != theirs:
        raise UsageError(
            f"the teacher {teacher} has {theirs:,} token ids, but the student has {ours:,}: their distributions are "
            "compared token by token. Pass a teacher with the student's vocabulary"
        )


DISTILL = Command(
    name="distill",
    trainer="DistillationTrainer",
    config="DistillationConfig",
    what="Train a student on a teacher's distribution with TRL's DistillationTrainer, both padding-free.",
    formats="prompt, as text or as messages",
    flags="--teacher_model_name_or_path TEACHER ",
    columns=lambda training: ({"prompt"},),
    models=_models,
    own=DistillArguments,
    check=_check,
    why_not_fused="TRL's own divergence is computed from hidden states chunk by chunk, without logits of a whole batch",
)
