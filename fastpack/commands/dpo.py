"""``fastpack dpo``: preference training with TRL's own DPOTrainer, policy and reference patched."""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import fastpack
from fastpack.commands.training import Command, Logs, run

if TYPE_CHECKING:
    from fastpack.commands.arguments import Given
    from fastpack.commands.meter import Summary
    from fastpack.patching.report import PatchReport


def main(arguments: Sequence[str]) -> int:
    """Train, and print what the run did."""
    return run(DPO, arguments)


def _columns(training: Any) -> Collection[set[str]]:
    return ({"chosen", "rejected"},)


def _columns_in_words(training: Any) -> str:
    return "DPO takes prompt, chosen and rejected (the prompt may also be the beginning of both)"


def _models(source: Any, given: Given) -> dict[str, Any]:
    """Policy and reference where TRL's own way would not do.

    TRL loads the reference from where the policy came from; random weights came from nowhere, so a copy of them is
    passed. With adapters the reference is the policy without them, and precomputed log-probabilities need none. Those
    are computed while the trainer is built, so that the policy has to be patched before it.
    """
    training = given.training
    if training.precompute_ref_log_probs and given.ours.patch:
        policy = _loaded(source, given) if isinstance(source, str) else source
        fastpack.patch(policy, **given.ours.patch_keywords())
        return {"model": policy, "quantization_config": None}
    if given.model.use_peft or training.precompute_ref_log_probs:
        return {}
    if given.ours.patch and _sharded(training):
        reference = _loaded(source, given) if isinstance(source, str) else copy.deepcopy(source)
        return {"ref_model": fastpack.patch(reference, **given.ours.patch_keywords())}
    return {} if isinstance(source, str) else {"ref_model": copy.deepcopy(source)}


def _sharded(training: Any) -> bool:
    """True where TRL shards the reference while its trainer is built, so that it has to be patched before."""
    asked = (os.environ.get(f"ACCELERATE_USE_{engine}", "false") for engine in ("FSDP", "DEEPSPEED"))
    return bool(training.fsdp or training.deepspeed or "true" in asked)


def _loaded(source: str, given: Given) -> Any:
    """The policy, as TRL loads it."""
    from trl import get_quantization_config  # type: ignore[attr-defined]
    from trl.trainer.utils import create_model_from_path

    loading = dict(given.training.model_init_kwargs)
    quantization = get_quantization_config(given.model)
    if quantization is not None:
        loading["quantization_config"] = quantization
    if given.training.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        loading["device_map"] = None
    return create_model_from_path(source, **loading)


def _advise(summary: Summary, given: Given, ranks: int, report: PatchReport) -> str | None:
    from fastpack.commands.meter import WASTE

    if given.ours.patch or summary.padding_share <= WASTE:
        return None
    padding = summary.slots - summary.real_tokens
    return (
        f"hint: {summary.padding_share:.0%} of the slots ({padding:,} of {summary.slots:,}) were padding, and every "
        "layer of policy and reference worked on them; without --no_patch the backbone skips them, with the same "
        "losses and rewards."
    )


def _rows(logs: Logs) -> Sequence[tuple[str, str]]:
    if "rewards/margins" not in logs:
        return ()
    margin, accuracy = logs["rewards/margins"], logs["rewards/accuracies"]
    return (("rewards, last step", f"margin {margin:.4f}, accuracy {accuracy:.0%}"),)


DPO = Command(
    name="dpo",
    trainer="DPOTrainer",
    config="DPOConfig",
    what="Train on preferences with TRL's DPOTrainer, padding-free.",
    formats="prompt, chosen and rejected, as texts or as messages",
    flags="[--loss_type sigmoid] ",
    columns=_columns,
    columns_in_words=_columns_in_words,
    advise=_advise,
    models=_models,
    rows=_rows,
)
