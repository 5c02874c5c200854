"""TRL's trainers: which of their models run without padding, and which trainers are refused.

The table has a row for each trainer class that TRL exports. ``fastpack families --trainers`` prints it, and the tests
train each of its rows against stock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fastpack.errors import PatchError

Role = Literal["model", "reference", "teacher"]
TRL_TRIED = "1.16"
"""The release of TRL whose trainers are in the table."""


@dataclass(frozen=True)
class SupportedTrainer:
    """One of TRL's trainer classes.

    Attributes:
        module: the public module that exports the class.
        name: the name of the class.
        title: its name in tables.
        models: the models that run without padding; a reference or teacher does if the trainer holds one.
        note: what else to know, or "".
        refused: why a patch is refused and what to do instead, or "" if the trainer can be patched.
    """

    module: str
    name: str
    title: str
    models: tuple[Role, ...] = ("model",)
    note: str = ""
    refused: str = ""

    @property
    def experimental(self) -> bool:
        """Whether the class is one of TRL's experimental trainers."""
        return self.module.startswith("trl.experimental")


_REFERENCE: tuple[Role, ...] = ("model", "reference")
_TEACHER: tuple[Role, ...] = ("model", "teacher")
_OLD_PATH = "an older import path of the stable class"

SUPPORTED = (
    SupportedTrainer("trl", "SFTTrainer", "SFT"),
    SupportedTrainer("trl", "DPOTrainer", "DPO", _REFERENCE),
    SupportedTrainer("trl", "KTOTrainer", "KTO", _REFERENCE),
    SupportedTrainer("trl", "RewardTrainer", "Reward"),
    SupportedTrainer("trl", "GRPOTrainer", "GRPO", _REFERENCE),
    SupportedTrainer("trl", "RLOOTrainer", "RLOO", _REFERENCE),
    SupportedTrainer("trl", "DistillationTrainer", "Distillation", _TEACHER),
    SupportedTrainer("trl.experimental.a2po", "A2POTrainer", "A2PO", _REFERENCE),
    SupportedTrainer(
        "trl.experimental.async_distillation",
        "AsyncDistillationTrainer",
        "AsyncDistillation",
        note="its batches are packed already; the teacher is on a server",
    ),
    SupportedTrainer(
        "trl.experimental.async_grpo",
        "AsyncGRPOTrainer",
        "AsyncGRPO",
        models=(),
        refused="its batches are trees of rollouts, without padding, that only its own attention reads. Train it "
        "unpatched, or use trl.GRPOTrainer with fastpack.patch(trainer, share_prefixes='auto')",
    ),
    SupportedTrainer("trl.experimental.bema_for_ref_model", "DPOTrainer", "BEMA DPO", _REFERENCE),
    SupportedTrainer("trl.experimental.cpo", "CPOTrainer", "CPO (SimPO)"),
    SupportedTrainer("trl.experimental.distillation", "DistillationTrainer", "Distillation", _TEACHER, note=_OLD_PATH),
    SupportedTrainer("trl.experimental.gkd", "GKDTrainer", "GKD", _TEACHER),
    SupportedTrainer("trl.experimental.gmpo", "GMPOTrainer", "GMPO", _REFERENCE),
    SupportedTrainer("trl.experimental.gold", "GOLDTrainer", "GOLD", _TEACHER),
    SupportedTrainer("trl.experimental.iw_opd", "IWOPDTrainer", "IW-OPD", _TEACHER),
    SupportedTrainer("trl.experimental.kto", "KTOTrainer", "KTO", _REFERENCE, note=_OLD_PATH),
    SupportedTrainer("trl.experimental.online_dpo", "OnlineDPOTrainer", "OnlineDPO", _REFERENCE),
    SupportedTrainer("trl.experimental.orpo", "ORPOTrainer", "ORPO"),
    SupportedTrainer("trl.experimental.sdft", "SDFTTrainer", "SDFT", _TEACHER),
    SupportedTrainer("trl.experimental.sdpo", "SDPOTrainer", "SDPO", _TEACHER),
    SupportedTrainer(
        "trl.experimental.server_distillation",
        "ServerDistillationTrainer",
        "ServerDistillation",
        note="the teacher is on a server",
    ),
    SupportedTrainer("trl.experimental.tpo", "TPOTrainer", "TPO"),
)
ABSENT = ("BCO", "Nash-MD", "PPO", "PRM", "XPO")
"""Trainers of earlier releases that are not in TRL :data:`TRL_TRIED`."""


def refuse_by_name(trainer: object) -> None:
    """Raise if a trainer's class, or a base class of it, can't be patched.

    Raises:
        PatchError: the table refuses the class.
    """
    for row in SUPPORTED:
        if row.refused and any(
            base.__name__ == row.name and base.__module__.startswith(f"{row.module}.") for base in type(trainer).__mro__
        ):
            raise PatchError(f"{row.name} can't be patched: {row.refused}. Nothing was changed.")


def trainer_rows() -> list[dict[str, str]]:
    """Return class, models and note of each of TRL's trainers, stable ones first."""
    return [
        {
            "trainer": f"{row.module}.{row.name}",
            "without padding": "refused" if row.refused else ", ".join(row.models),
            "note": row.refused or row.note,
        }
        for row in SUPPORTED
    ]


def trainers_markdown() -> str:
    """Return a Markdown table with one line for each set of models that run without padding."""
    lines = [f"| TRL {TRL_TRIED}: models without padding | stable | experimental |", "|---|---|---|"]
    for models in dict.fromkeys(row.models for row in SUPPORTED if not row.refused):
        rows = [row for row in SUPPORTED if row.models == models and row.note != _OLD_PATH]
        lines.append(f"| {', '.join(models)} | {_titles(rows, False)} | {_titles(rows, True)} |")
    lines.append(f"| refused | | {', '.join(row.title for row in SUPPORTED if row.refused)} |")
    return "\n".join([*lines, f"| not in TRL {TRL_TRIED} | {', '.join(ABSENT)} | |"])


def _titles(rows: Sequence[SupportedTrainer], experimental: bool) -> str:
    return ", ".join(row.title for row in rows if row.experimental is experimental)
