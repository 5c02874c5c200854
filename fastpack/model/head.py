"""A head's forward: it reads the packing if labels need it, and its loss runs on real tokens."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from fastpack.errors import PackingError
from fastpack.families.composites import composite_spec
from fastpack.families.spec import HeadSpec
from fastpack.model.backbone import adds_noise, pack, refuse_adapters
from fastpack.model.checks import (
    refuse_packed_prompts,
    refuse_packed_stock,
    refuse_pooled_padding,
    refuse_replica,
    takes_stock_path,
)
from fastpack.model.composite import entered
from fastpack.model.labels import (
    ignore_index_of,
    passes_loss_keywords,
    shifts_labels,
    targets_of,
    without_first_labels,
    without_padding,
)
from fastpack.model.loss import (
    FUSED_LM_HEAD,
    TOKEN_STATISTICS,
    fused_head,
    fused_loss_serves,
    has_stock_loss,
    is_trl_forward,
)
from fastpack.model.model_runtime import ModelRuntime, runtime_of
from fastpack.model.outputs import repad_outputs
from fastpack.model.per_token import PER_TOKEN
from fastpack.model.position_axes import position_axes
from fastpack.model.unwrap import find_parts, patched_backbone
from fastpack.packing.inputs import take_packing
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.utils.classes import defined_in, is_upstreams, mentions, stock_class
from fastpack.utils.protocols import HeadLike
from fastpack.utils.replacement import (
    Forward,
    PreHook,
    Replacement,
    replaces,
)
from fastpack.utils.signatures import accepted, bind, keeps_some_logits, shape_of, source_of, wants_tuple

if TYPE_CHECKING:  # heavy, and imported where a model is patched with graphs
    from fastpack.cuda_graphs.runner import GraphRunner

HeadKind = Literal["causal_lm", "sequence_classification", "token_classification"]


@dataclass(frozen=True)
class Head:
    """A head's kind, and its loss.

    Attributes:
        kind: what the head computes.
        loss: the spec of a head whose own loss runs fused; None for the stock loss.
    """

    kind: HeadKind
    loss: HeadSpec | None = None


PatchedHead = Replacement[Head, "ModelRuntime"]


def head_forward(patched: PatchedHead, *args: Any, **kwargs: Any) -> Any:
    """Run a head's forward with arguments from :func:`prepare_head`.

    If a stock head computes its own loss over a padded batch, the head and the loss run on real tokens too. In training
    a fused loss is computed without logits.

    Args:
        patched: the replacement of the head's forward.
        *args: positional arguments of the stock forward.
        **kwargs: its keywords, and those of :data:`fastpack.packing.inputs.PACKING_KEYWORDS`.
    """
    graphs, backbone = _graphs_of(patched.owner, patched.runtime)
    with nullcontext() if graphs is None else graphs.early_snapshot(backbone):
        return _run_head(patched, args, kwargs)


def _run_head(patched: PatchedHead, args: tuple[Any, ...], kwargs: Any) -> Any:
    head, kind, loss = patched.owner, patched.spec.kind, patched.spec.loss
    statistics = kwargs.pop(TOKEN_STATISTICS, None)
    refuse_packed_prompts(args, kwargs)
    refuse_adapters(head, args, kwargs)
    if reads_packing(head, kind, patched.runtime, args, kwargs):
        args, kwargs = prepare_head(head, kind, patched.runtime, args, kwargs)
    if kind == "causal_lm" and shifts_labels(head):
        kwargs = without_first_labels(head, kwargs)
    packed = kwargs.get("packed_seq_lens")
    spreading = patched.runtime.context_parallel
    if spreading is not None and isinstance(packed, PackedSeqLens) and kwargs.get("labels") is not None:
        spreading.check_labels(kwargs["labels"], packed)
    if kind != "causal_lm" or not isinstance(packed, PackedSeqLens):
        return _call_head(patched, *args, **kwargs)
    # TRL's own loss stays in force. Without a request for that loss, TRL's forward calls the one that it replaced.
    # After unpickling, `earlier` is the forward of the class.
    earlier = patched.earlier
    is_class_own = getattr(earlier, "__func__", None) is type(head).forward
    as_stock = earlier is None or is_class_own or (is_trl_forward(earlier) and not kwargs.get(FUSED_LM_HEAD))
    fused = loss is not None and as_stock and fused_loss_serves(head, kwargs)
    flatten = (earlier is None or fused) and _loss_on_real_tokens(head, packed, kwargs)
    if not (flatten or fused):
        return _call_head(patched, *args, **kwargs)
    as_tuple = wants_tuple(head, kwargs)
    run: Forward = functools.partial(_call_head, patched)
    if loss is not None and fused:
        runtime = patched.runtime
        run = functools.partial(
            fused_head,
            head,
            loss,
            runtime.layers.kernels,
            token_statistics=statistics,
            context_parallel=runtime.context_parallel if runtime.composite is None else None,
        )
    if flatten:
        flat = {name: packed.unpad(kwargs[name]) for name in _PER_SLOT if kwargs.get(name) is not None}
        targets = flat["labels"]
        if shifts_labels(head):
            targets = flat["shift_labels"] = targets_of(packed, kwargs["labels"], ignore_index_of(head, kwargs))
        if kwargs.get("num_items_in_batch") is not None:
            flat["num_items_in_batch"] = without_padding(head, kwargs, targets)
        row = packed.flattened()
        mask = row.padding.mask() if _balances(head) else None
        kwargs = {**kwargs, **flat, "attention_mask": mask, "position_ids": None, "packed_seq_lens": row}
    outputs = run(**kwargs, return_dict=True)
    if flatten:
        outputs = repad_outputs(outputs, packed)
    return outputs.to_tuple() if as_tuple else outputs


def _call_head(patched: PatchedHead, *args: Any, **kwargs: Any) -> Any:
    """Call the stock head. If the head may drop the packing on the way to the backbone, the handover passes it on."""
    head, runtime = patched.owner, patched.runtime
    packed = kwargs.get("packed_seq_lens")
    if runtime.composite is head:
        arguments = bind(type(head), args, kwargs)
        with entered(head, composite_spec(head), runtime, arguments):
            return patched.stock(**(accepted(type(head).forward, arguments) if patched.earlier is None else arguments))
    if not runtime.drops_packing or not isinstance(packed, PackedSeqLens):
        return patched.stock(*args, **kwargs)
    if kwargs.get("use_cache") is None:  # some heads use a cache by default
        kwargs["use_cache"] = False
    keywords = accepted(type(head).forward, kwargs) if patched.earlier is None else kwargs
    with runtime.handover.offering(source_of(kwargs), packed):
        return patched.stock(*args, **keywords)


_PER_SLOT = ("input_ids", "inputs_embeds", "labels", *PER_TOKEN)
"""The arguments of a head with an entry for each slot of the batch."""


def _loss_on_real_tokens(head: HeadLike, packed: PackedSeqLens, arguments: Mapping[str, Any]) -> bool:
    """Return whether the head and its loss can run on real tokens of a padded batch.

    They can if only transformers' own loss reads the labels, and the head passes each token's target on to it.
    """
    if arguments.get("labels") is None or packed.padding.batch_shape is None or packed.padding.is_empty:
        return False
    if packed.padding.indices is None or arguments.get("shift_labels") is not None or keeps_some_logits(arguments):
        return False
    cls = stock_class(head)
    own_head = cls.__module__.startswith("transformers.models.") and is_upstreams(cls.forward)
    takes_targets = not shifts_labels(head) or (passes_loss_keywords(head) and has_stock_loss(head))
    parts = find_parts(head)
    return parts.composite is None and own_head and takes_targets and not adds_noise(parts.backbone, packed)


def head_pre_hook(
    hook: PreHook[Head, ModelRuntime],
    module: HeadLike,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Prepare the arguments of a head whose ``forward`` was replaced after the patch, as TRL does.

    Args:
        hook: this hook.
        module: the head.
        args: the positional arguments of its call.
        kwargs: its keywords.

    Returns:
        The arguments and keywords; None if they don't change.

    Raises:
        PatchError: the module is a replica that ``nn.DataParallel`` made.
    """
    refuse_replica(module)
    forward = module.__dict__.get("forward")
    if replaces(forward, head_forward) and forward.enabled:
        return None  # our forward prepares the arguments itself
    refuse_packed_prompts(args, kwargs)
    refuse_adapters(module, args, kwargs)
    kind, runtime = hook.spec.kind, hook.runtime
    if not reads_packing(module, kind, runtime, args, kwargs):
        return None
    graphs, snapshot = None, None
    if _leaves_modules_alone(module, forward):
        graphs, backbone = _graphs_of(module, runtime)
        snapshot = None if graphs is None else graphs.take_snapshot(backbone)
    args, kwargs = prepare_head(module, kind, runtime, args, kwargs)
    packed = kwargs.get("packed_seq_lens")
    if isinstance(packed, PackedSeqLens):
        if graphs is not None:
            graphs.use_snapshot(snapshot, packed)
        if runtime.drops_packing:
            runtime.handover.offer(source_of(kwargs), packed)
    return args, without_first_labels(module, kwargs) if kind == "causal_lm" and shifts_labels(module) else kwargs


def _graphs_of(head: HeadLike, runtime: ModelRuntime) -> tuple[GraphRunner | None, Any]:
    """Return the graphs that run a head's backbone, and the backbone; None and None if there are none to run."""
    if runtime.graphs is None or torch.compiler.is_compiling():
        return None, None
    backbone = find_parts(head).backbone
    of_backbone = runtime_of(backbone)
    return None if of_backbone is None else of_backbone.graphs, backbone


def _leaves_modules_alone(head: HeadLike, forward: object) -> bool:
    """Return whether only TRL's own forward runs between our hook on the head and the backbone."""
    no_other_hook = len(head._forward_pre_hooks) == 1 and "_hf_hook" not in head.__dict__
    from_trl = defined_in(forward).startswith("trl.") or is_trl_forward(forward)
    return no_other_hook and from_trl and not torch.compiler.is_compiling()


def prepare_head(
    head: HeadLike,
    kind: HeadKind,
    runtime: ModelRuntime,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Read the packing for a head that needs it (:func:`reads_packing`), and add it to the keywords.

    Args:
        head: the head.
        kind: what the head computes.
        runtime: the runtime that the head shares with its backbone.
        args: the positional arguments of its call.
        kwargs: its keywords.

    Returns:
        The arguments and keywords of the head.

    Raises:
        PackingError: a sequence-classification head, which pools one token of each row, got a row with several
            sequences, or would pool a slot of padding.
    """
    arguments = bind(type(head), args, kwargs)
    if takes_stock_path(head, arguments):
        refuse_packed_stock(arguments, take_packing(dict(arguments)))  # the head may not pass them on
        return args, kwargs
    if not torch.compiler.is_compiling():
        backbone_runtime = runtime_of(patched_backbone(head))
        if backbone_runtime is not None:  # before positions are read, since context parallelism reorders them
            backbone_runtime.user_changes.attention.check()
    packed = arguments["packed_seq_lens"] = pack(
        arguments, take_packing(arguments), axes=position_axes(head.config), prefixes=runtime.sharing is not None
    )
    if _balances(head):
        # every token has weight 1, whatever the number of its segment, and padding has weight 0
        arguments["attention_mask"] = packed.padding.mask()
    rows = shape_of(arguments)[0]
    if kind == "sequence_classification" and packed.num_sequences > rows:
        raise PackingError(
            f"a packed batch of {packed.num_sequences} sequences in {rows} row(s) reached {type(head).__name__}, which "
            "returns one result for each row. Send a padded batch: the backbone runs without its padding."
        )
    if kind == "sequence_classification":
        refuse_pooled_padding(head, arguments, packed)
    return (), arguments


def reads_packing(
    head: HeadLike, kind: HeadKind, runtime: ModelRuntime, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Return whether the head reads the packing; if not, only the backbone does."""
    labelled = bind(type(head), args, kwargs).get("labels") is not None
    needs_packing = kind == "sequence_classification" or (kind == "causal_lm" and (labelled or _balances(head)))
    # if compiled, only the head reads it, for one graph break
    return needs_packing or runtime.drops_packing or torch.compiler.is_compiling()


def _balances(head: HeadLike) -> bool:
    """Return whether a head computes the load balance of its experts from the mask."""
    return mentions(head, "load_balancing_loss_func")
