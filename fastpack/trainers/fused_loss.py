"""Give TRL's ``SFTTrainer`` the head's fused loss, without logits: ``fastpack.patch(trainer, loss="fused")``.

TRL's forward stays on the head. If it is called without ``fused_lm_head=True``, it runs the stock forward. For
``labels=``, :mod:`fastpack.model.loss` then computes the same loss as TRL, a mean over the tokens of a step. TRL's own
loss computes each logit twice, forward and backward, and waits for the device four times in each micro-batch to read
its metrics. Here the metrics are computed along with the loss, and are read when the trainer logs. Until then TRL's own
record of them lags behind. Trainers that compute their loss from log-probabilities have those fused instead:
:mod:`fastpack.trainers.log_probs`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastpack.model.loss import TOKEN_STATISTICS, TokenStatistics
from fastpack.model.unwrap import find_parts
from fastpack.patching.inspection import why_no_fused_loss
from fastpack.patching.options import Loss
from fastpack.patching.state import CONTEXT_PARALLEL, FUSED_LOSS, trainer_record
from fastpack.trainers import step_weights
from fastpack.trainers.budget import remove_budget
from fastpack.trainers.log_probs import LogProbsState, plan_log_probs, remove_state
from fastpack.utils.console import counted
from fastpack.utils.protocols import TrainerLike
from fastpack.utils.replacement import Replacement, replaces


@dataclass
class FusedLossState:
    """The fused loss of a trainer.

    Attributes:
        reads_head_loss: whether the loss is that of the head.
        rejected: why this trainer keeps its own loss, or None.
        unserved: why the head did not fuse the loss when it was asked to, or None; TRL's loss runs from then on.
        fused: the number of micro-batches with the fused loss.
        stock: the number of micro-batches with TRL's loss.
        why_stock: why the last micro-batch with TRL's loss did not get the fused loss.
        pending: for each micro-batch whose metrics have not been read from the device yet: its
            :attr:`TokenStatistics.sums`, its number of tokens, and its auxiliary loss of experts, 0 without one.
        changes: the replacements on the trainer.
    """

    reads_head_loss: ClassVar[bool] = True
    rejected: str | None
    unserved: str | None = None
    fused: int = 0
    stock: int = 0
    why_stock: str = ""
    pending: list[Tensor] = field(default_factory=list)
    changes: list[Replacement[Any, None]] = field(default_factory=list)

    def rejects(self, trainer: TrainerLike) -> str | None:
        """Return why the trainer keeps its own loss now, or None; its settings may have changed since the patch."""
        return self.rejected or next(_settings(trainer), None) or self.unserved

    def describe(self) -> str:
        """Return a line for the report."""
        ran = f"{counted(self.fused, 'micro-batch', 'es')} so far" if self.fused else "each micro-batch of training"
        others = f"; {self.stock} had TRL's own loss ({self.why_stock})" if self.stock else ""
        return f"loss: fused in {ran}, with TRL's metrics{others}"


def fused_loss_of(target: object) -> FusedLossState | None:
    """Return the state of a trainer's fused loss, or None; log-probabilities have another state."""
    state = trainer_record(target, FUSED_LOSS)
    return state if isinstance(state, FusedLossState) else None


def plan_fused_loss(target: Any, loss: Loss) -> Callable[[], None] | None:
    """Return a function that sets up or removes a trainer's fused loss and can't fail, or None for no change.

    The function also removes a token budget, since the budget wraps the loss; the caller has to set the budget up
    again.
    """
    state = fused_loss_of(target)
    if loss is None or not _brings_a_loss(target):
        return None if trainer_record(target, FUSED_LOSS) is None else functools.partial(_remove, target)
    why_not: str | None = None
    if not _sft_bases(target):
        plan = plan_log_probs(target)
        if not isinstance(plan, str):
            return plan
        why_not = plan
    in_force = state is not None and state.rejected is None
    rejected = next(_reasons(target, why_not, in_force=in_force), None)
    if state is not None and state.rejected == rejected and state.unserved is None:
        return None
    return functools.partial(_set_up, target, FusedLossState(rejected))


def _brings_a_loss(target: object) -> bool:
    """Return whether a trainer has its own loss, as TRL's trainers do; transformers' uses the model's loss."""
    return hasattr(target, "compute_loss") and any(
        base.__module__.split(".")[0] == "trl" for base in type(target).__mro__
    )


def _sft_bases(trainer: object) -> list[Any]:
    """Return TRL's ``SFTTrainer`` if a trainer is one, in a list."""
    return [base for base in type(trainer).__mro__ if (base.__module__, base.__name__) == _SFT]


def _reasons(trainer: TrainerLike, why_not: str | None, *, in_force: bool) -> Iterator[str]:
    """Yield the reasons why a trainer keeps its own loss.

    Args:
        trainer: the trainer.
        why_not: why its log-probabilities can't be fused, if it is no ``SFTTrainer``.
        in_force: whether the trainer already has our loss. A wrapper that was put around our loss later is fine, since
            it calls our loss.
    """
    name = type(trainer).__name__
    bases = _sft_bases(trainer)
    if not bases:
        yield f"{name} has its own loss, without TRL's fused log-probabilities ({why_not})"
        return
    loss = None if in_force else beneath(trainer.__dict__.get("compute_loss"))
    own = loss is not None and getattr(loss, "__func__", None) is not bases[0].compute_loss
    if own or type(trainer).compute_loss is not bases[0].compute_loss:
        yield f"this {name} has a custom loss"
    yield from _settings(trainer)
    for axis in ("tp", "sp"):
        size = getattr(trainer, f"get_{axis}_size", None)
        if size is not None and int(size()) > 1:
            yield f"ranks share a batch here ({axis} of {int(size())})"
    if not (hasattr(trainer, "_metrics") and hasattr(trainer, "_total_train_tokens")):
        yield "this version of TRL keeps its metrics elsewhere"


def _settings(trainer: TrainerLike) -> Iterator[str]:
    """Yield the settings that make a trainer's loss differ from the head's; a user may change them at any time."""
    if trainer.compute_loss_func is not None:
        yield f"this {type(trainer).__name__} has a custom loss"
    if trainer.args.loss_type != "nll":
        yield f"loss_type is {trainer.args.loss_type!r}"
    if trainer.label_smoother is not None:
        yield "its labels are smoothed"
    if trainer.aux_loss_enabled and not hasattr(find_parts(trainer.model).head, "router_aux_loss_coef"):
        yield "it adds the auxiliary loss of experts, which its head doesn't have (router_aux_loss_coef=0.0 omits it)"
    elif not trainer.aux_loss_enabled and getattr(
        trainer.model.config.get_text_config(), "output_router_logits", False
    ):
        yield "the head would add the auxiliary loss of experts, and this trainer leaves it out"


_SFT = ("trl.trainer.sft_trainer", "SFTTrainer")


def beneath(compute_loss: object) -> Any:
    """Return the ``compute_loss`` that a token budget and our fused loss wrap, or None if it is the class's."""
    while replaces(compute_loss, step_weights.compute_loss) or replaces(compute_loss, _compute_loss):
        compute_loss = compute_loss.earlier
    return compute_loss


def _set_up(trainer: TrainerLike, state: FusedLossState) -> None:
    _remove(trainer)
    if state.rejected is None:
        for name, ours in (("compute_loss", _compute_loss), ("log", _log)):
            state.changes.append(Replacement(trainer, name, ours, state, None))
            state.changes[-1].install()
    trainer.__dict__[FUSED_LOSS] = state


def _remove(trainer: TrainerLike) -> None:
    remove_budget(trainer)
    log_probs = trainer_record(trainer, FUSED_LOSS)
    if isinstance(log_probs, LogProbsState):
        remove_state(trainer, log_probs)
    state = fused_loss_of(trainer)
    if state is None:
        return
    _read_pending(trainer, state)
    for change in reversed(state.changes):
        change.undo()
    del trainer.__dict__[FUSED_LOSS]


def _compute_loss(
    patched: Replacement[FusedLossState, None],
    model: nn.Module,
    inputs: dict[str, Any],
    return_outputs: bool = False,
    num_items_in_batch: Tensor | int | None = None,
) -> Any:
    """Return the head's fused loss if training and the head allow it, else the loss of ``SFTTrainer.compute_loss``."""
    trainer, stock, state = patched.owner, patched.stock, patched.spec
    training = trainer.model.training and torch.is_grad_enabled() and not return_outputs
    if not training:
        _read_pending(trainer, state)  # TRL's loss reads the number of tokens so far
        return stock(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
    reason = why_no_fused_loss(trainer)
    if reason is None and num_items_in_batch is None:
        reason = "the trainer doesn't say how many labels the step has"
    if reason is None and "attention_mask" not in inputs and "position_ids" not in inputs:
        reason = "the batch has neither an attention_mask nor position_ids to count tokens by"  # TRL's loss raises then
    loss = None if reason is not None else _fused(trainer, state, model, inputs, num_items_in_batch)
    if loss is not None:
        return loss
    _read_pending(trainer, state)
    state.stock, state.why_stock = state.stock + 1, reason or state.unserved or ""
    return stock(model, inputs, num_items_in_batch=num_items_in_batch)


def _fused(
    trainer: TrainerLike, state: FusedLossState, model: nn.Module, inputs: dict[str, Any], num_items: Any
) -> Tensor | None:
    """Return the head's fused loss of a micro-batch, or None if the head ran its stock forward instead."""
    ranks = trainer.accelerator.num_processes if trainer.args.average_tokens_across_devices else 1
    balanced = trainer.aux_loss_enabled
    # the auxiliary loss is a mean over micro-batches, and the whole loss is multiplied by the number of ranks below
    factor = trainer.router_aux_loss_coef / trainer.current_gradient_accumulation_steps / ranks if balanced else None
    statistics = TokenStatistics(factor)
    # a step without labels has a loss of zero, as in TRL
    divisor = torch.as_tensor(num_items, device=inputs["labels"].device).clamp(min=1)
    call = {**inputs, "use_cache": False, "num_items_in_batch": divisor, TOKEN_STATISTICS: statistics}
    if balanced:
        call["output_router_logits"] = True
    outputs = model(**call)
    loss: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs.loss
    if statistics.sums is None:
        state.unserved = "the head ran its stock forward, as it does with a cache or for attention weights"
        return None
    if balanced and statistics.aux_loss is None:
        state.unserved = "the head leaves out the auxiliary loss of experts"
        return None
    if ranks > 1:
        loss = loss * ranks
    tokens = inputs["attention_mask"].sum() if "attention_mask" in inputs else inputs["position_ids"].shape[1]
    num_tokens = statistics.sums.new_zeros(1).add_(tokens)  # assigning a number would wait for the device
    aux_loss = num_tokens.new_zeros(1) if statistics.aux_loss is None else statistics.aux_loss.float().view(1)
    state.pending.append(torch.cat([statistics.sums, num_tokens, aux_loss]))
    state.fused += 1
    return loss


def _log(patched: Replacement[FusedLossState, None], *args: Any, **kwargs: Any) -> None:
    """Read the pending metrics, then run ``SFTTrainer.log``."""
    _read_pending(patched.owner, patched.spec)
    patched.stock(*args, **kwargs)


def _read_pending(trainer: TrainerLike, state: FusedLossState) -> None:
    """Read the pending sums of all ranks into TRL's metrics, as TRL's own loss does."""
    if not state.pending:
        return
    sums = trainer.accelerator.reduce(torch.stack(state.pending), reduction="sum")
    state.pending.clear()
    metrics = trainer._metrics["train"]
    spread = trainer_record(trainer, CONTEXT_PARALLEL)
    copies = 1 if spread is None else spread.ranks  # ranks that share batches count the same tokens
    for entropy, likeliest, labels, tokens, aux_loss in sums.tolist():
        metrics["entropy"].append(entropy / labels if labels else 0.0)
        metrics["mean_token_accuracy"].append(likeliest / labels if labels else 0.0)
        trainer._total_train_tokens += int(tokens) // copies
        if trainer.aux_loss_enabled:
            metrics["aux_loss"].append(aux_loss / trainer.accelerator.num_processes)
    metrics["num_tokens"] = [trainer._total_train_tokens]
