"""The library's main functions: ``patch``, ``unpatch``, ``patched`` and ``report``.

A patch is planned and checked first; then the forwards of one model instance are replaced. No class is changed, and
torch and transformers are not changed either, with one exception: our attention is registered in transformers'
``AttentionInterface`` under a name of its own. The record of the patch is kept on the backbone itself, so it survives
``copy.deepcopy``, pickling and PEFT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack

from torch import nn

from fastpack.errors import PatchError
from fastpack.memory.fit import RESERVE, Fit, fit_card
from fastpack.memory.settings import FitAttention, FitLoss, Mode, TrainingSettings
from fastpack.memory.sizes import read_sizes
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
from fastpack.patching.state import BUDGET, CONTEXT_PARALLEL, FUSED_LOSS, options_of, trainer_record
from fastpack.patching.twin import match_by_twin
from fastpack.patching.verify import SPREAD, verify
from fastpack.trainers.context_parallel import context_mesh_of, plan_spread
from fastpack.trainers.padded_metrics import note_on_padding
from fastpack.trainers.supported import refuse_by_name
from fastpack.trainers.weight_sync import note_on_weight_sync
from fastpack.utils.replacement import do_nothing
from fastpack.utils.versions import check_versions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["fit", "patch", "patched", "report", "unpatch", "verify"]
T = TypeVar("T")
_verify = verify  # patch has a keyword of that name


def patch(
    target: T,
    *,
    attention: str = "auto",
    kernels: Implementation = "auto",
    graphs: Graphs = None,
    loss: Loss = None,
    offload: Offload = None,
    share_prefixes: SharePrefixes = None,
    context_mesh: DeviceMesh | None = None,
    strict: bool = False,
    verify: bool = False,
    max_tokens: int | TokenBudget | None = None,
) -> T:
    """Make a model train without padding.

    The model's results stay the same: losses, logits and gradients are those of each sequence alone. Only this
    instance is changed; its class, torch and transformers are not.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")  # doctest: +SKIP
        >>> fastpack.patch(model, loss="fused")  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
        >>> print(fastpack.report(model))  # doctest: +SKIP
        >>> fastpack.unpatch(model)  # doctest: +SKIP

    **Padded batches.** A padded batch has the shape ``[B, S]`` and an ``attention_mask`` of ones and zeros. Its padding
    may be on the right, on the left or on both sides. The backbone un-pads the batch, runs on the real tokens alone,
    and re-pads everything that it returns. The outputs are zero at padding. A classifier raises if it would pool a
    padding token.

    **Packed batches.** A packed batch runs without changes, and its sequences never see each other. The bounds of its
    sequences come from one of these inputs:

    - restarting ``position_ids``, for one row ``[1, T]`` or several rows ``[B, S]``;
    - the keywords of TRL and transformers, ``cu_seq_lens_q`` and ``cu_seq_lens_k``, or ``seq_idx``, for ``[1, T]``;
    - ``packed_seq_lens=[...]``, a list of lengths or a :class:`fastpack.PackedSeqLens`, for ``[1, T]``;
    - an integer ``attention_mask`` that numbers the sequences of each row, such as 1, 1, 2, 2, 0;
    - a 4-D mask ``[B, 1, S, S]`` with one causal block for each sequence, as LLaMA-Factory's ``neat_packing`` makes it.

    Inputs that contradict each other raise :class:`fastpack.PackingError`, which names both. Positions also raise if
    they repeat or are not whole numbers. A jump in the positions may mean a new sequence, so such a batch needs
    ``packed_seq_lens`` too, unless it has padding. Re-padded models and models like RoBERTa count positions themselves.
    They take only the positions 0, 1, 2, ... of each sequence; models like RoBERTa also take positions that begin at
    the padding id + 1. If rotary frequencies depend on a sequence's length, the model refuses a sequence whose
    positions continue above those of the sequence before it. Arguments about whole rows (X-MOD's ``lang_ids``, XLM's
    ``lengths``) are refused.

    **Labels.** In a packed batch the first label of each sequence is ignored, on a copy, so that no last token is
    trained on the first token of the next sequence. Some heads have a loss that does not shift labels, and keep all
    labels: decoders of encoder-decoders, XLM, XLNet and CPM-Ant. In a padded batch the last token of a row learns the
    label of the next slot, even if that slot is padding (if the end token is also the padding token, for example).
    Padding itself predicts nothing. Your own ``loss_function`` gets the padded batch. The first labels stay in it if
    every sequence begins a row.

    **num_items_in_batch.** The number that transformers' ``Trainer`` passes also counts first labels (in packed
    batches, and in batches padded on the left) and labels at padding. The model scales the number to the labels that
    remain. This is exact if an optimiser step is one micro-batch on one GPU; otherwise each micro-batch is corrected by
    its own share. For GPT-2 and the few other families whose loss ``Trainer`` does not know, the number counts the
    first label of every row, and stays unchanged. If the loss is divided outside of the model (by TRL's ``SFTTrainer``,
    by a ``Trainer`` with label smoothing or a ``compute_loss_func``, or by your own loop with a number for the whole
    step), set first labels and labels at padding to -100, or pad on the right.

    **Generation.** A patched model makes no cache by itself, whatever its config says. With ``use_cache=True``, or with
    a cache among its arguments, it runs the stock forward. ``generate()`` passes a cache; your own decoding loop has to
    pass ``use_cache=True``. A packed batch with a cache, or with ``output_attentions=True``, is refused, since both
    need the stock forward.

    **Hooks and hidden states.** Hooks on modules inside the model see one row of real tokens, ``[1, T, ...]``, not the
    rows of the batch. Initialise EVA adapters before the patch. Hidden states returned for a padded batch are copies,
    and the gradient of the loss does not flow through them.

    **Images.** In a vision-language model the text model inside runs without padding; the tower sees the batch as it
    came. Padded batches of any processor train as they are. :class:`fastpack.PackedVisionCollator` makes packed ones: a
    flattened batch of a model that rotates by several axes needs all of them, as ``position_ids [1 + axes, B, S]``,
    text positions first (``[4, B, S]`` for Qwen-VL).

    **Lengths.** The model reads the lengths from the batch once a step, and the host waits for the device meanwhile. To
    avoid this wait (it matters for small models on fast GPUs), wrap the collator:
    ``trainer.data_collator = fastpack.with_packed_seq_lens(trainer.data_collator)``. The model then trusts the
    collator's lengths, so code that masks or permutes a batch after the collator has to remove ``packed_seq_lens``.

    **Other libraries.** Patch first; then wrap the model in DDP, FSDP2 or ``torch.compile``. ``use_liger_kernel=True``
    may stay, whether Liger or fastpack comes first: fastpack's layers compute what Liger's norms, gated MLPs and RoPE
    compute. Liger's loss stays in force where the trainer uses it.

    **Quantised experts.** ``load_in_4bit`` leaves the stacked weights of experts dense;
    :func:`fastpack.quantize_experts` quantises them. gpt-oss trains as it is shipped, in MXFP4. Patch it before the
    trainer is built: transformers' quantizer says that MXFP4 can't be trained, and ``Trainer`` refuses; a patched
    model's quantizer says that it can.

    **Limits.** The following are refused with a message that names them, at the patch or at a batch: context and
    sequence parallelism of other packages, but see ``context_mesh``; attention or mask functions that are not
    transformers' own; images of Mllama and GIT, images and audio of Phi-4-multimodal; PEFT methods that read the rows
    of a batch (aLoRA, Lily, Poly, Shadow, X-LoRA, ``adapter_names``); and packed batches where PEFT puts virtual tokens
    before each row. Prefix tuning runs the stock forward. The fast forwards can be differentiated once, and only by
    autograd: a penalty on gradients raises, and so does ``torch.func.grad``. LLM.int8 (with a threshold above 0) and
    VeLoRA compute over the whole batch in the stock model, too; the report says that they are not isolated. With
    LongRoPE and dynamic NTK, each sequence gets the frequencies of its own length; the stock model gives all sequences
    of a padded batch those of the longest one.

    **Undo.** :func:`unpatch` restores the model exactly. :func:`patched` does so at the end of a ``with`` block. The
    patch is kept on the model, and survives ``copy.deepcopy``, pickling and PEFT.

    Args:
        target: A causal LM, or a sequence or token classifier, of a covered family (``fastpack families`` lists them);
            its bare backbone; one of these wrapped by PEFT or with 4-bit or 8-bit weights; or a trainer that holds one.
            In a trainer, the reference model and the teacher are patched too.
        attention: For each call, ``auto`` takes the first attention backend that can serve it. A name selects one
            backend: ``flash_attn``, ``torch_varlen``, ``cudnn``, ``xformers``, ``mem_efficient``, ``flex``,
            ``triton_packed``, ``segments`` or ``reference``.
        kernels: The implementation of norms, RoPE, gated units, LoRA's casts and the fused loss. ``auto`` takes Triton
            kernels on a CUDA device and plain torch elsewhere; ``torch`` takes the definitions in plain torch;
            ``triton`` takes only Triton kernels.
        graphs: ``auto`` records the forward and backward of the whole decoder stack as CUDA graphs, once for each
            bucket of batch sizes, and replays them. A batch that can't be replayed runs without graphs; the report
            counts these batches and says why. Graphs help models that wait for kernel launches. All recordings share
            the memory of the largest one. The allocator can't use this memory for anything else, so set
            ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``.
        loss: ``fused`` computes the loss of ``labels=`` in training (after ``model.train()``, also under ``no_grad``)
            without holding the logits; ``out.logits`` is then None. If fastpack does not know the head, the stock loss
            runs, and the report says so. Evaluation returns logits as before. A trainer's own loss stays in force, with
            two exceptions. If the target is TRL's ``SFTTrainer`` itself, it uses the head's fused loss in training.
            This loss is the same mean with the same metrics, and the metrics are read from the device only when they
            are logged; the auxiliary loss of experts is part of it. The trainer keeps another loss (``dft``, smoothed
            labels, or your own). If the target is one of TRL's trainers that compute their loss from log-probabilities
            of the labels (GRPO, RLOO, DPO, KTO and their kin, which call the model with ``fused_lm_head=True``), the
            policy and the reference model compute these, and entropies, without logits, for the tokens that have a
            label. The loss itself, whatever its ``loss_type``, and the metrics stay the trainer's. If the head's weight
            is not trained, the backward computes no logits again. A quantised head, and one that ZeRO-3 shards, keep
            TRL's own op, and so does a reference model whose forward accelerate has wrapped for mixed precision; the
            report says so.
        offload: This needs gradient checkpointing and a CUDA device; without them it does nothing, and the report says
            why. ``checkpoints`` keeps the inputs of checkpointed layers in pinned host memory until the backward. The
            copies run in parallel with the computation. Gradients stay the same. In half precision it saves (layers -
            3) x T x hidden size x 2 bytes of device memory, and takes as much host memory, each piece rounded up to a
            power of two. In long sequences (from some 8,000 tokens on), it also keeps the results of fastpack's own
            attention kernels there, so that the backward need not compute them again; those of three layers are on the
            device. ``activations`` also keeps the gate and up results of gated MLPs there, so that the backward
            need not compute them again. It does so for as many layers as the copies have time for. It estimates this
            number from the rates of copies and matmuls, which it measures at the first layer. The results of the last
            two layers stay on the device, and those of one more layer are being copied back. This takes 3 x T x 2 x
            intermediate size x 2 bytes more device memory than ``checkpoints``. The report says for how many layers
            these results are computed again after all, and why.
        share_prefixes: If several sequences of a batch begin alike, ``auto`` computes their common beginning only once:
            the prompt of a chosen and a rejected completion, for example, or the system prompt of many chats. It does
            so in every batch in which this saves a twentieth of the tokens or more. Every sequence still attends to all
            of its own tokens; results and gradients are the same. Fastpack's own kernel (``triton_packed``) has the
            keys of a common beginning once; other backends get copies of them. Where another backend is faster on whole
            sequences, ``auto`` takes our kernel if copies would attend 1.5 times as many pairs of tokens. The report
            says how many tokens were saved. This works only for models in which attention alone mixes tokens, and not
            together with ``graphs``. In a vision-language model, equal images of a batch go through the tower once
            (also if other layers than attention mix tokens), and prompts are shared if their images are the same. The
            tower sees all images where rows are padded with images of zeros (SmolVLM, if rows have different numbers of
            images), and where it draws random numbers or trains batch norms. Nothing is shared while dropout or other
            noise is active (each copy has its own), with ``inputs_embeds``, or under ``torch.compile``. Finding
            prefixes needs the token ids on the host. If the model reads the lengths from the batch, the ids come in the
            same copy. If the collator is fastpack's, or wrapped by :func:`fastpack.with_packed_seq_lens`, it has
            already found the prefixes. Otherwise the host waits for the device once a batch.
        context_mesh: A ``DeviceMesh`` of one dimension whose ranks share each batch (context parallelism, by exchange
            of heads). Every rank gets the same batch, and runs the layers on its share of the tokens; in attention it
            has all tokens of some heads. The outputs are whole on every rank, and so is the loss. The mean of the
            ranks' gradients is the gradient of that loss: wrap the model in DDP or FSDP2 over these ranks (and those
            of other batches), or average the gradients. Batches that differ between the ranks raise on each of them.
            Recurrences exchange heads, too. It works for models whose layers all run on packed tokens and whose heads
            can be divided by the ranks, and not together with ``graphs``, ``share_prefixes`` or ``verify``. For
            a trainer leave it out, and pass ``parallelism_config=accelerate.ParallelismConfig(cp_size=...)`` among the
            trainer's arguments: accelerate then gives each group the same batches, and the patched model spreads them
            instead of torch's context parallelism, with windows, packed sequences and DPO as well. A reference model
            that TRL shards has to be patched before, over a mesh of the same ranks with the name ``cp``.
        strict: Raise unless every layer is on the fast tier.
        verify: Run :func:`fastpack.verify` on the patched model, and unpatch the model again if this check fails.
        max_tokens: For trainers of transformers and TRL: fill each micro-batch with at most this number of tokens,
            instead of a fixed number of examples, and make the loss a mean over the whole optimiser step. A
            :class:`fastpack.TokenBudget` has further settings.

    Returns:
        The target itself. A second call with the same options does nothing; with other options it patches anew.

    Raises:
        UnsupportedModelError: The model is an encoder or an encoder-decoder, or its family is not covered.
        BackendUnavailableError: The backend requested by name can't serve this model here.
        KernelUnavailableError: ``kernels="triton"``, and Triton kernels can't run here.
        PatchError: A package that the target builds on is older than fastpack needs; the model is already wrapped by
            FSDP, DataParallel or ``torch.compile``; the trainer is TRL's ``AsyncGRPOTrainer``, or will build another
            model (``model_init``); ``strict`` is not met; an option has a value that it does not take; prefixes can't
            be shared exactly in this model; or ``max_tokens`` can't be kept with this trainer. Nothing has been changed
            when any of these is raised.
        PackingError: With ``max_tokens``, an example is longer than this limit, or the data set's lengths can't be
            known. Nothing has been changed.
        ContaminationError: With ``verify``, the patched model was not exact. It is unpatched again.
        InconclusiveError: With ``verify``, rounding in the model's dtypes would hide a leak. It is unpatched again.

    Warns:
        NoFasterWarning: The whole model runs on padded rows (the re-padded model tier).
        UntriedVersionWarning: A package that the target builds on is newer than those that fastpack was tried with; or
            a class mixes tokens in its stock forward, and its source was not tried.
        FastpackWarning: A test with a tiny twin showed that a class of the family computes something other than the
            class on which fastpack was proved. The class keeps its own forward.
    """
    if context_mesh is not None and not isinstance(target, nn.Module):
        raise PatchError(
            f"context_mesh was passed with a {type(target).__name__}, whose data loader decides which ranks get the "
            "same batches. Give the trainer's arguments parallelism_config=accelerate.ParallelismConfig(cp_size=...) "
            "instead, and leave context_mesh out. Nothing was changed."
        )
    mesh = context_mesh if isinstance(target, nn.Module) else context_mesh_of(target)
    options = PatchOptions(attention, kernels, graphs, loss, offload, share_prefixes, mesh, strict)
    options.check()
    if not isinstance(verify, bool):
        raise not_a_choice("verify", verify, (False, True))
    if verify and options.spreads:
        raise PatchError(SPREAD)
    models = models_of(target)
    check_versions(packages_of(target))
    refuse_by_name(target)
    _refuse_model_init(target, options)
    set_up, spread = _plan_trainer(target, loss, max_tokens), plan_spread(target, mesh)
    for plan in plan_all(models, options, match_by_twin):
        apply(plan, options)
    set_up()
    spread()
    if verify:
        with ExitStack() as on_failure:
            on_failure.callback(unpatch, target)
            _verify(target)
            on_failure.pop_all()
    return target


def _refuse_model_init(target: Any, options: PatchOptions) -> None:
    """Raise if a trainer will build a new model in ``train()``, which would not be patched."""
    if getattr(target, "model_init", None) is not None and options_of(target.model) != options:
        raise PatchError(
            f"this {type(target).__name__} calls its model_init for a new model whenever train() begins, and then a "
            "patch of the present model is lost. Patch the new model inside model_init, with these options: "
            "model_init=lambda: fastpack.patch(...)."
        )


def unpatch(target: T) -> T:
    """Restore every forward and config of a patched model or trainer exactly.

    A target that is not patched is not changed. If other code has wrapped a forward of fastpack's since the patch, that
    forward stays inside the wrapper, but it is disabled: it calls the stock forward.

    Example:
        >>> fastpack.unpatch(model)  # doctest: +SKIP

    Args:
        target: A model or trainer, as :func:`patch` takes it.

    Returns:
        The target itself.
    """
    for model in models_of(target):
        restore(model)
    _plan_trainer(target, None, None)()
    plan_spread(target, None)()
    return target


@contextmanager
def patched(target: T, **options: Unpack[PatchKeywords]) -> Iterator[T]:
    """Patch a model or trainer inside a ``with`` block only.

    On exit, also after an exception, the state before the block is restored: the stock model, or an earlier patch with
    its own options.

    Example:
        >>> with fastpack.patched(model, attention="segments"):  # doctest: +SKIP
        ...     model(input_ids=ids, packed_seq_lens=[7, 12], labels=ids).loss.backward()

    Args:
        target: A model or trainer, as :func:`patch` takes it.
        **options: The keywords of :func:`patch`, except ``verify``.

    Yields:
        The target itself, patched.
    """
    before = [(model, options_of(model)) for model in models_of(target)]
    budget, fused = trainer_record(target, BUDGET), trainer_record(target, FUSED_LOSS)
    mesh = None if trainer_record(target, CONTEXT_PARALLEL) is None else context_mesh_of(target)
    try:
        yield patch(target, **options)
    finally:
        _plan_trainer(target, None if fused is None else "fused", None if budget is None else budget.budget)()
        plan_spread(target, mesh)()
        for model, earlier in before:
            if earlier is None:
                unpatch(model)
            else:
                patch(model, **vars(earlier))


def _plan_trainer(target: object, loss: Loss, max_tokens: int | TokenBudget | None) -> Callable[[], None]:
    """Return a function that sets a trainer's fused loss and token budget, or removes the ones that it has.

    Nothing is changed before that function is called. It sets the loss first, since the budget wraps the loss.
    """
    budgeted = max_tokens is not None or trainer_record(target, BUDGET) is not None
    fused = not isinstance(target, nn.Module) and (loss is not None or trainer_record(target, FUSED_LOSS) is not None)
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
    """Return a report of what a patch has changed.

    The report names the tier of every layer, the forwards that were swapped, the attention backend that serves, and
    what was not changed and why. Print it, or call its ``to_dict()``. It describes the present state of the model:
    adapters, hooks and devices may have changed since the patch.

    Example:
        >>> report = fastpack.report(model)  # doctest: +SKIP
        >>> print(report)  # doctest: +SKIP
        >>> report.tier, report.backend  # doctest: +SKIP
        ('fast', 'triton_packed')

    Args:
        target: A model or a trainer. For a trainer, the report is about the model that it trains.
    """
    notes = () if isinstance(target, nn.Module) else (note_on_padding(target), note_on_weight_sync(target))
    return inspect_patch(target, *filter(None, notes))


def fit(
    model: Any,
    vram: float,
    *,
    mode: Mode = "qlora",
    rank: int = 32,
    checkpointing: bool = True,
    offload: Literal["checkpoints"] | None = "checkpoints",
    loss: FitLoss = "fused",
    accumulation: bool = False,
    attention: FitAttention = "auto",
    length: int = 512,
    reserve: float = RESERVE,
) -> Fit:
    """Return the longest batches that a card holds when a model trains with fastpack.

    Only the model's config is read, and no GPU is needed. The numbers are for bfloat16, one GPU and AdamW;
    :mod:`fastpack.memory.step` has their terms.

    Example:
        >>> found = fastpack.fit("Qwen/Qwen3-8B", 24)  # doctest: +SKIP
        >>> found.sequence, found.tokens  # doctest: +SKIP

    Args:
        model: A config of transformers, a folder with one, or a name on the hub.
        vram: The card's memory in GiB, as vendors name it.
        mode: What trains: ``full``, ``lora`` or ``qlora``; LoRA is on all linear layers except the head.
        rank: LoRA's rank.
        checkpointing: Whether layers are checkpointed, with ``use_reentrant=False``.
        offload: As for :func:`patch`.
        loss: ``fused``, as for :func:`patch`, or the loss of TRL's trainers, ``trl``.
        accumulation: Whether an optimiser step has several micro-batches, so that gradients wait.
        attention: ``auto`` as for :func:`patch`, or ``triton_packed``, which needs the least memory.
        length: The number of tokens of each short sequence, for :attr:`Fit.tokens`.
        reserve: The GiB of the card that are not given to tensors: CUDA's context, fragments.

    Returns:
        The number of tokens of the longest single sequence, the most tokens in short ones, and the terms of the peak.

    Raises:
        DoesNotFitError: The card is too small for any batch.
        PatchError: An option has a value that it does not take.
        UnsupportedModelError: The memory of a part of this model was not worked out.
    """
    settings = TrainingSettings(mode, rank, checkpointing, offload, loss, accumulation, attention=attention)
    settings.check()
    if isinstance(model, str):
        from transformers import AutoConfig

        model = AutoConfig.from_pretrained(model)
    return fit_card(read_sizes(model), settings, vram, length=length, reserve=reserve)
