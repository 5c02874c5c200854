"""``patch``, ``unpatch``, ``patched``, ``report``: plan, check, then swap forwards on one instance; and undo it.

Nothing of a class, of torch or of transformers is changed, except that our attention is registered under its own
name in transformers' ``AttentionInterface``. What was changed is kept on the backbone itself, so that it follows the
model through ``copy.deepcopy``, pickling and PEFT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any, TypeVar, Unpack

from torch import nn

from fastpack.errors import PatchError
from fastpack.layers.stock_attention import say_parallelism, sequence_parallelism
from fastpack.model.unwrap import models_of, packages_of
from fastpack.ops.implementation import Implementation
from fastpack.patching.apply import apply, plan_all, restore
from fastpack.patching.inspection import inspect_patch
from fastpack.patching.options import (
    Graphs,
    Loss,
    Offload,
    PatchKeywords,
    PatchOptions,
    SharePrefixes,
    TokenBudget,
    not_a_choice,
)
from fastpack.patching.report import PatchReport
from fastpack.patching.state import BUDGET, FUSED_LOSS, kept_on, options_of
from fastpack.patching.twin import match_by_twin
from fastpack.patching.verify import verify
from fastpack.trainers.padded_metrics import note_on_padding
from fastpack.utils.replacement import do_nothing
from fastpack.utils.versions import check_versions

__all__ = ["patch", "patched", "report", "unpatch", "verify"]
T = TypeVar("T")
_verify = verify  # patch has a flag of that name


def patch(
    target: T,
    *,
    attention: str = "auto",
    kernels: Implementation = "auto",
    graphs: Graphs = None,
    loss: Loss = None,
    offload: Offload = None,
    share_prefixes: SharePrefixes = None,
    strict: bool = False,
    verify: bool = False,
    max_tokens: int | TokenBudget | None = None,
) -> T:
    """Make a model train without padding. Changes this instance alone, and nothing about its results.

    A padded batch is un-padded before the backbone and put back behind it; a packed one (restarting
    ``position_ids``, TRL's ``cu_seq_lens_q``, or ``packed_seq_lens=``) is used as it is. Sequences never see each
    other. ``generate`` and anything else with a cache run the stock forward.

    Args:
        target: a causal LM, sequence or token classifier of a family that is covered, its bare backbone, one of
            these wrapped by PEFT or with 4-bit or 8-bit weights, or a trainer that holds one.
        attention: ``auto`` for the first attention backend that can serve each call, or one of ``flash_attn``,
            ``torch_varlen``, ``xformers``, ``mem_efficient``, ``flex``, ``triton_packed``, ``segments``, ``reference``.
        kernels: what computes norms, RoPE, gated units, LoRA's casts and the fused loss: ``auto`` for Triton kernels
            on a CUDA device and plain torch elsewhere, ``torch`` for the definitions, ``triton`` for kernels alone.
        graphs: ``auto`` replays the whole decoder stack as CUDA graphs, recorded once for each bucket of batch sizes,
            wherever that is right; the report counts the batches that ran as ever, and why. For models that wait for
            kernel launches.
        loss: ``fused`` computes the loss of ``labels=`` in training without holding the logits; ``out.logits`` is
            None there. Where a head is not one that was read, the stock loss runs, and the report says so. Evaluation
            returns logits as ever. A trainer's own loss is left in force, unless the target is TRL's ``SFTTrainer``
            itself: it takes the head's then, which is the same mean, and logs the same metrics, read from the device
            when they are logged.
        offload: ``checkpoints`` lets the inputs of checkpointed layers wait for the backward in pinned host memory,
            copied beside the computation: the same gradients, and (layers - 3) x T x hidden size x 2 bytes less device
            memory in half precision. It takes as much host memory, each piece rounded up to a power of two.
            ``activations`` lets gate and up of gated MLPs wait there too, which then are not multiplied a second time:
            of as many layers as there is time for, by the rates of copies and of products, measured when the first
            layer asks. Of the last two they stay on the device, and one more layer's are on their way back: 3 x T x 2 x
            intermediate size x 2 bytes more than with ``checkpoints``. The report says of how many layers they are
            made again after all, and why. Without gradient checkpointing or on another device than CUDA ``offload``
            does nothing, and the report says why.
        share_prefixes: ``auto`` runs what sequences of a batch have in common at their beginnings once, a prompt with
            its chosen and its rejected completion, or chats with one system prompt, in every batch in which that saves
            a twentieth of the tokens or more. Every sequence still attends to all of its own tokens, and results are
            the same, gradients included; the report says how many tokens were saved. For models in which attention
            alone mixes tokens.
            Where a dropout, or other noise, is active, nothing is shared, since each copy has its own, nor where
            ``inputs_embeds`` come, nor under ``torch.compile``. Finding them needs the ids on the host: they come with
            the lengths where those are read from the batch, with the batch where its collator is one of fastpack's or
            wrapped by :func:`fastpack.with_packed_seq_lens`; else the model waits for the device once a batch. Not
            together with ``graphs``.
        strict: raise unless every layer lands on the fast tier.
        verify: run :func:`fastpack.verify` on the patched model, and leave it unpatched where that fails.
        max_tokens: for trainers of transformers and TRL: micro-batches of at most so many tokens each, instead of so
            many examples, and losses that are means over the whole optimiser step; or a
            :class:`fastpack.TokenBudget`, which says more.

    Returns:
        ``target`` itself. A second call with the same options does nothing; with others it patches anew.

    Raises:
        UnsupportedModelError: an encoder, an encoder-decoder, a vision-language model, or a family not covered.
        BackendUnavailableError: the backend asked for by name can't serve this model here.
        KernelUnavailableError: ``kernels="triton"``, and nothing here can run them.
        PatchError: a package that the target builds on is older than fastpack needs; or the model is wrapped by FSDP,
            DataParallel or ``torch.compile``; or the trainer will build another one (``model_init``); or ``strict`` is
            not met; or an option has a value that it does not take; or prefixes can't be shared exactly in this model;
            or ``max_tokens`` can't be kept with this trainer. Nothing has been changed when any of these is raised.
        PackingError: ``max_tokens``: an example is longer, or the data set's lengths can't be known; nothing has been
            changed.
        ContaminationError: with ``verify``: the patched model was not exact, and is unpatched again.
        InconclusiveError: with ``verify``: rounding in the model's dtypes would hide a leak; it is unpatched again.

    Warns:
        NoFasterWarning: the whole model runs on padded rows (the re-padded model's tier).
        UntriedVersionWarning: a package that the target builds on is newer than what fastpack was tried with; or a
            class that mixes tokens in its stock forward has a source that was not tried.
        FastpackWarning: a class of the family computes something else than what fastpack was proved on, as a twin of
            it showed; it keeps its own forward.
    """
    options = PatchOptions(attention, kernels, graphs, loss, offload, share_prefixes, strict)
    options.check()
    if not isinstance(verify, bool):
        raise not_a_choice("verify", verify, (False, True))
    models = models_of(target)
    check_versions(packages_of(target))
    _refuse_model_init(target, options)
    _refuse_spread_sequences(target)
    set_up = _plan_trainer(target, loss, max_tokens)
    for plan in plan_all(models, options, match_by_twin):
        apply(plan, options)
    set_up()
    if verify:
        with ExitStack() as on_failure:
            on_failure.callback(unpatch, target)
            _verify(target)
            on_failure.pop_all()
    return target


def _refuse_model_init(target: Any, options: PatchOptions) -> None:
    """Raise where a trainer would train another model than the one it holds, and that one would be stock."""
    if getattr(target, "model_init", None) is not None and options_of(target.model) != options:
        raise PatchError(
            f"this {type(target).__name__} calls its model_init for a new model whenever train() begins, and a patch "
            "of the present one is lost then. Patch inside: model_init=lambda: fastpack.patch(...), with these options."
        )


def _refuse_spread_sequences(target: object) -> None:
    """Raise where a trainer's accelerator spreads each sequence over processes."""
    spread = sequence_parallelism(getattr(getattr(target, "accelerator", None), "parallelism_config", None))
    if spread is not None:
        whose = f"the accelerator of this {type(target).__name__}"
        raise PatchError(f"{say_parallelism(spread, whose)} Nothing was changed.")


def unpatch(target: T) -> T:
    """Restore every forward and config of a patched model or trainer exactly. Does nothing to one not patched.

    A forward that somebody has wrapped since stays inside their wrapper, disabled: it calls the stock one.
    """
    for model in models_of(target):
        restore(model)
    _plan_trainer(target, None, None)()
    return target


@contextmanager
def patched(target: T, **options: Unpack[PatchKeywords]) -> Iterator[T]:
    """``patch`` with these options on entry; on exit, also after an exception, what was in force before."""
    before = [(model, options_of(model)) for model in models_of(target)]
    budget, fused = kept_on(target, BUDGET), kept_on(target, FUSED_LOSS)
    try:
        yield patch(target, **options)
    finally:
        _plan_trainer(target, None if fused is None else "fused", None if budget is None else budget.budget)()
        for model, known in before:
            if known is None:
                unpatch(model)
            else:
                patch(model, **asdict(known))


def _plan_trainer(target: object, loss: Loss, max_tokens: int | TokenBudget | None) -> Callable[[], None]:
    """Plan to give a trainer the fused loss and, over it, a token budget, or to take off the ones that it has."""
    budgeted = max_tokens is not None or kept_on(target, BUDGET) is not None
    fused = not isinstance(target, nn.Module) and (loss is not None or kept_on(target, FUSED_LOSS) is not None)
    if not (budgeted or fused):
        return do_nothing
    from fastpack.trainers.budget import plan_budget  # heavy: these import transformers' trainer
    from fastpack.trainers.fused_loss import plan_fused_loss

    set_loss = plan_fused_loss(target, loss) if fused else None
    set_budget = plan_budget(target, max_tokens, anew=set_loss is not None)

    def set_up() -> None:
        if set_loss is not None:
            set_loss()
        set_budget()

    return set_up


def report(target: object) -> PatchReport:
    """Return what was swapped, which backend serves, what was left alone and why.

    For a trainer, the report of the model that it trains.
    """
    padding = None if isinstance(target, nn.Module) else note_on_padding(target)
    return inspect_patch(target, *(() if padding is None else (padding,)))
