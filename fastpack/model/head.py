"""A head around the backbone: it reads the packing where labels need it, and its loss runs on real tokens."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from fastpack.errors import PackingError
from fastpack.graphs import runner_of
from fastpack.layers.drift import Watch
from fastpack.model.backbone import PER_TOKEN, _adds_noise, _pack, _refuse_adapters
from fastpack.model.checks import (
    refuse_packed_prompts,
    refuse_packed_stock,
    refuse_pooled_padding,
    refuse_replica,
    takes_stock_path,
)
from fastpack.model.labels import (
    hands_on,
    ignore_index_of,
    shifts_labels,
    targets_of,
    without_first_labels,
    without_padding,
)
from fastpack.model.loss import (
    FUSED_LM_HEAD,
    TOKEN_STATISTICS,
    FusedLoss,
    fused_head,
    fused_loss_serves,
    has_stock_loss,
    is_trls,
)
from fastpack.model.outputs import put_back
from fastpack.model.unwrap import find_parts, refuse_strange_backbone
from fastpack.packing.context import PackingScope
from fastpack.packing.inputs import take_packing
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.utils.classes import defined_in, is_upstreams, mentions, stock_class
from fastpack.utils.forwards import Forward, binds, bound_with, call_stock, without_itself
from fastpack.utils.signatures import accepted, bind, keeps_some_logits, parameters, shape_of, source_of, wants_tuple

if TYPE_CHECKING:
    pass

HeadKind = Literal["causal_lm", "sequence_classification", "token_classification"]


def head_forward(
    head: Any,
    kind: HeadKind,
    loss: FusedLoss | None,
    scope: PackingScope | None,
    prefixes: bool,
    stock: Forward | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A head's forward, its labels seen to (:func:`prepare_head`).

    Where a stock head computes its own loss over a padded batch, the head and the loss run on real tokens too. With
    ``loss`` its own loss is computed without logits in training. With ``prefixes``, those that
    sequences share are found where the lengths are read.
    """
    graphs = None if torch.compiler.is_compiling() else runner_of(head.base_model)
    with nullcontext() if graphs is None else graphs.looking_ahead(head.base_model):
        return _run_head(head, kind, loss, scope, prefixes, stock, without_itself(head, args), kwargs)


def _run_head(
    head: Any,
    kind: HeadKind,
    loss: FusedLoss | None,
    scope: PackingScope | None,
    prefixes: bool,
    stock: Forward | None,
    args: tuple[Any, ...],
    kwargs: Any,
) -> Any:
    statistics = kwargs.pop(TOKEN_STATISTICS, None)
    refuse_packed_prompts(args, kwargs)
    _refuse_adapters(head, args, kwargs)
    if reads_packing(head, kind, scope, args, kwargs):
        args, kwargs = prepare_head(head, kind, scope, prefixes, args, kwargs)
    if kind == "causal_lm" and shifts_labels(head):
        kwargs = without_first_labels(head, kwargs)
    packed = kwargs.get("packed_seq_lens")
    if kind != "causal_lm" or not isinstance(packed, PackedSeqLens):
        return _call_head(head, scope, stock, *args, **kwargs)
    # TRL's own loss is left in force; asked for none, TRL's forward is the one before it. Pickling leaves the class's
    is_class_own = getattr(stock, "__func__", None) is type(head).forward
    as_stock = stock is None or is_class_own or (is_trls(stock) and not kwargs.get(FUSED_LM_HEAD))
    fused = loss is not None and as_stock and fused_loss_serves(head, kwargs)
    flatten = (stock is None or fused) and _loss_on_real_tokens(head, packed, kwargs)
    if not (flatten or fused):
        return _call_head(head, scope, stock, *args, **kwargs)
    as_tuple = wants_tuple(head, kwargs)
    run: Forward = functools.partial(_call_head, head, scope, stock)
    if loss is not None and fused:
        run = functools.partial(fused_head, head, loss, token_statistics=statistics)
    if flatten:
        flat = {name: packed.unpad(kwargs[name]) for name in _PER_SLOT if kwargs.get(name) is not None}
        targets = flat["labels"]
        if shifts_labels(head):
            targets = flat["shift_labels"] = targets_of(packed, kwargs["labels"], ignore_index_of(head, kwargs))
        if kwargs.get("num_items_in_batch") is not None:
            flat["num_items_in_batch"] = without_padding(head, kwargs, targets)
        row = packed.flattened()
        kwargs = {**kwargs, **flat, "attention_mask": None, "position_ids": None, "packed_seq_lens": row}
        if _balances(head):
            kwargs["attention_mask"] = row.without_filler()
    outputs = run(**kwargs, return_dict=True)
    if flatten:
        outputs = put_back(outputs, packed)
    return outputs.to_tuple() if as_tuple else outputs


def _call_head(head: Any, scope: PackingScope | None, stock: Forward | None, *args: Any, **kwargs: Any) -> Any:
    """The stock head; where it would drop the packing on its way to the backbone, the scope keeps it."""
    packed = kwargs.get("packed_seq_lens")
    if scope is None or not isinstance(packed, PackedSeqLens):
        return call_stock(head, stock, *args, **kwargs)
    if kwargs.get("use_cache") is None:  # some heads ask for a cache of their own accord
        kwargs["use_cache"] = False
    kept = accepted(type(head).forward, kwargs) if stock is None else kwargs
    with scope.offering(source_of(kwargs), packed):
        return call_stock(head, stock, *args, **kept)


_PER_SLOT = ("input_ids", "inputs_embeds", "labels", *PER_TOKEN)


def _loss_on_real_tokens(head: Any, packed: PackedSeqLens, arguments: Mapping[str, Any]) -> bool:
    """True where labels of a padded batch come to a head of transformers, and nothing but its own loss reads them, to
    which it hands on what each token predicts."""
    if arguments.get("labels") is None or packed.batch_shape is None or packed.is_empty:
        return False
    if packed.indices is None or arguments.get("shift_labels") is not None or keeps_some_logits(arguments):
        return False
    cls = stock_class(head)
    own_head = cls.__module__.startswith("transformers.models.") and is_upstreams(cls.forward)
    takes_targets = not shifts_labels(head) or (hands_on(head) and has_stock_loss(head))
    return own_head and takes_targets and not _adds_noise(find_parts(head).backbone, packed)


def head_pre_hook(
    kind: HeadKind,
    scope: PackingScope | None,
    prefixes: bool,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The same before a head whose ``forward`` someone replaced after us, as TRL does; None where ours is in place.

    Raises:
        PatchError: the module is a replica that ``nn.DataParallel`` made.
    """
    refuse_replica(module)
    forward = module.__dict__.get("forward")
    if binds(forward, head_forward):
        return None  # it does so itself
    refuse_packed_prompts(args, kwargs)
    _refuse_adapters(module, args, kwargs)
    if not reads_packing(module, kind, scope, args, kwargs):
        return None
    graphs = runner_of(module.base_model) if _leaves_modules_alone(module, forward) else None
    seen = None if graphs is None else graphs.look_ahead(module.base_model)
    args, kwargs = prepare_head(module, kind, scope, prefixes, args, kwargs)
    packed = kwargs.get("packed_seq_lens")
    if isinstance(packed, PackedSeqLens):
        if graphs is not None:
            graphs.believe(seen, packed)
        if scope is not None:
            scope.offer(source_of(kwargs), packed)
    return args, without_first_labels(module, kwargs) if kind == "causal_lm" and shifts_labels(module) else kwargs


def _leaves_modules_alone(head: Any, forward: Any) -> bool:
    """True where nobody but TRL's own forward runs between our hook on the head and the backbone."""
    alone = len(head._forward_pre_hooks) == 1 and "_hf_hook" not in head.__dict__
    return alone and defined_in(forward).startswith("trl.") and not torch.compiler.is_compiling()


def prepare_head(
    head: Any,
    kind: HeadKind,
    scope: PackingScope | None,
    prefixes: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Read the packing, where :func:`reads_packing` says that the head needs it, and hand it on.

    Raises:
        PackingError: several sequences a row reached a sequence-classification head, which pools one token a row; or it
            would pool a slot of padding.
    """
    arguments = bind(type(head), args, kwargs)
    if takes_stock_path(head, arguments):
        refuse_packed_stock(arguments, take_packing(dict(arguments)))  # which the head may not hand on
        return args, kwargs
    if not torch.compiler.is_compiling():
        backbone = refuse_strange_backbone(head)
        watch = bound_with(backbone, Watch)
        if watch is not None:  # before positions are read, which context parallelism puts in another order
            watch.attention.check()
    packed = arguments["packed_seq_lens"] = _pack(arguments, take_packing(arguments), prefixes=prefixes)
    if _balances(head):
        arguments["attention_mask"] = _balanced_by(arguments.get("attention_mask"), packed)
    rows = shape_of(arguments)[0]
    if kind == "sequence_classification" and packed.num_sequences > rows:
        raise PackingError(
            f"a packed batch of {packed.num_sequences} sequences in {rows} row(s) reached {type(head).__name__}, which "
            "gives one result a row. Send a padded batch: it runs padding-free inside all the same."
        )
    if kind == "sequence_classification":
        refuse_pooled_padding(head, arguments, packed)
    return (), arguments


def reads_packing(
    head: Any, kind: HeadKind, scope: PackingScope | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """True where the packing is read at the head, and not only at the backbone."""
    needs_packing = kind == "sequence_classification" or (
        kind == "causal_lm" and (_has_labels(head, args, kwargs) or _balances(head))
    )
    # one break is enough, at the first door; and a head with a scope would lose what it does not read
    return needs_packing or scope is not None or torch.compiler.is_compiling()


def _balances(head: Any) -> bool:
    """True where a head weighs the balance of its experts by the mask."""
    return mentions(head, "load_balancing_loss_func")


def _balanced_by(mask_BS: Tensor | None, packed: PackedSeqLens) -> Tensor | None:
    """A mask by which tokens weigh the same, whatever their segment's number, and filler nothing."""
    real_1S = packed.without_filler()
    if mask_BS is not None and mask_BS.ndim == 4:
        mask_BS = packed.padding_mask()
    if mask_BS is None:
        return real_1S
    mask = (mask_BS > 0).to(mask_BS.dtype)
    return mask if real_1S is None else mask * real_1S.to(mask.dtype)


def _has_labels(head: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if kwargs.get("labels") is not None:
        return True
    names = parameters(type(head).forward)
    return "labels" in names[: len(args)] and args[names.index("labels")] is not None
