"""A causal LM head's own loss without logits, in training: ``patch(model, loss="fused")``.

The head's forward is that of its family (:class:`fastpack.families.spec.HeadSpec`), except for its matmul with the
vocabulary and its loss. :func:`fastpack.ops.loss.linear_cross_entropy.linear_cross_entropy` computes these on real
tokens.

Shape suffixes: B rows and S columns of the original batch; T real tokens.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.errors import FastpackWarning
from fastpack.families.spec import HeadSpec, Spec
from fastpack.layers.read_projection import read_projection
from fastpack.model.context_parallel import ContextParallel
from fastpack.model.labels import targets_of
from fastpack.ops.dequantize import dequantize
from fastpack.ops.implementation import Implementation
from fastpack.ops.linear.operands import Projection
from fastpack.ops.loss import IGNORE_INDEX
from fastpack.ops.loss.linear_cross_entropy import Weight, linear_cross_entropy
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.utils.classes import defined_in, stock_class
from fastpack.utils.hooks import carries_hooks
from fastpack.utils.protocols import HeadLike
from fastpack.utils.replacement import Replacement
from fastpack.utils.signatures import keeps_some_logits

TOKEN_STATISTICS = "token_statistics"
"""The keyword that passes :class:`TokenStatistics` to a call with labels."""
FUSED_LM_HEAD = "fused_lm_head"
"""The keyword with which TRL's trainers request their own loss from TRL's forward of a head."""


class TokenStatistics:
    """Statistics of the predictions, which a fused loss fills in.

    This is no dataclass, since FSDP's casts copy every dataclass among the arguments, and the copy would be filled in.

    Attributes:
        aux_loss_coef: the factor of the auxiliary loss of experts in the loss, or None for the head's own.
        sums: float32 ``[3]``: the sum of the predictions' entropies, the number of labels that are the likeliest token,
            and the number of labels. None if no fused loss ran.
        aux_loss: the auxiliary loss of experts, without its factor and its gradient; None if it is no part of the loss.
    """

    def __init__(self, aux_loss_coef: float | None = None) -> None:
        """Set up without statistics."""
        self.aux_loss_coef = aux_loss_coef
        self.sums: Tensor | None = None
        self.aux_loss: Tensor | None = None


def is_trl_forward(forward: Any) -> bool:
    """Return whether a forward is the one that TRL assigns to a head.

    That forward computes TRL's loss if it gets ``fused_lm_head=True``, and otherwise calls the forward that it
    replaced. Forwards of fastpack's over it are looked through.
    """
    while isinstance(forward, Replacement):
        forward = forward.earlier
    if not defined_in(forward).startswith("trl."):
        return False
    return FUSED_LM_HEAD in inspect.signature(forward, follow_wrapped=False).parameters


def fused_loss_rejects(head: HeadLike, kind: str, spec: Spec | None) -> str | None:
    """Return why a patch can't fuse a head's stock loss, or None.

    Args:
        head: the head before its forward is replaced.
        kind: what the head computes, ``causal_lm`` for one with a vocabulary.
        spec: the spec of its class; None if it has none, or if the spec was not proved on the source of the class.
    """
    if kind != "causal_lm":
        return f"{type(head).__name__} is no causal LM, and has another loss"
    if not isinstance(spec, HeadSpec):
        return f"the forward of {type(head).__name__} was not proved with the fused loss"
    if head.base_model is head:
        return f"base_model_prefix={head.base_model_prefix!r} names no module of {type(head).__name__}"
    if hasattr(head, "_hf_hook"):
        return f"{type(head).__name__} carries accelerate's hooks"
    if "_original_forward" in head.__dict__:
        return f"accelerate wrapped the forward of {type(head).__name__} for an earlier run: patch before the first run"
    if "forward" in head.__dict__ and not is_trl_forward(head.__dict__["forward"]):
        return (
            f"the forward of {type(head).__name__} was already replaced (by a trainer with its own loss, for example)"
        )
    if _is_meta(head.lm_head):
        return None  # sharded loading: the head is read again at the first batch
    return _why_not_now(head)


def _is_meta(module: nn.Module) -> bool:
    weight = next(module.parameters(), None)  # FSDP's first version may keep all parameters itself
    return weight is not None and weight.device.type == "meta"


def fused_loss_fails(head: Any, *, asked_for: bool = False) -> str | None:
    """Return why a change after the patch keeps a head's fused loss from running, or None.

    Args:
        head: the head.
        asked_for: whether a trainer with TRL's forward requests the head's own loss.
    """
    forward = head.__dict__.get("forward")
    beneath = forward.earlier if isinstance(forward, Replacement) else None
    has_trl_forward = is_trl_forward(forward) or is_trl_forward(beneath)  # TRL's is over ours, or under it
    if has_trl_forward and not asked_for:
        return "TRL's trainers have their own loss; patch(trainer, loss='fused') fuses it (see report(trainer))"
    origin = defined_in(forward)
    if origin.startswith(("trl.", "liger_kernel.")) and not has_trl_forward:  # other wrappers call ours
        return f"the forward of {type(head).__name__} was replaced after the patch by {origin}, which has its own loss"
    not_loaded = _is_meta(head.lm_head) and not hasattr(head.lm_head, "_hf_hook")
    return None if not_loaded else _why_not_now(head)


def fused_loss_serves(head: HeadLike, arguments: Mapping[str, Any]) -> bool:
    """Return whether this call computes its loss without logits.

    It does so in training, with labels, if the logits of all tokens are requested.

    Args:
        head: the head.
        arguments: its arguments.

    Warns:
        FastpackWarning: the head was changed after the patch, so that its stock loss runs.
    """
    if not head.training or arguments.get("labels") is None or keeps_some_logits(arguments):
        return False
    reason = _why_not_now(head)
    if reason is not None:
        warnings.warn(
            f"loss='fused' can't serve this batch: {reason}. The stock loss runs, with logits.",
            FastpackWarning,
            stacklevel=2,
        )
    return reason is None


_STOCK_LOSS = ("transformers.loss.loss_utils", "ForCausalLMLoss")


def has_stock_loss(head: HeadLike) -> bool:
    """Return whether a head's ``loss_function`` is transformers' own for causal LMs, not a user's."""
    loss = head.loss_function
    named = (getattr(loss, "__module__", ""), getattr(loss, "__name__", "")) == _STOCK_LOSS
    return named and not hasattr(loss, "__wrapped__")  # a user's decorator has the same names


def _why_not_now(head: HeadLike) -> str | None:
    """Return why the head's loss can't be fused in the head's present state, or None."""
    if not has_stock_loss(head):
        return f"the loss_function of {type(head).__name__} is {head.loss_function!r}"
    module = _serving(head.lm_head)
    if any(isinstance(d, nn.Dropout) and d.p > 0 for d in getattr(module, "lora_dropout", {}).values()):
        return "there is dropout before the LoRA of lm_head"
    projection = read_projection(module)
    return f"lm_head has to be called as a module: {projection}" if isinstance(projection, str) else None


def _serving(module: Any) -> Any:
    """Return the layer that runs: PEFT's trained copy (``modules_to_save``) if there is one, else the module itself."""
    cls = type(module)
    if (cls.__module__, cls.__name__) != ("peft.utils.other", "ModulesToSaveWrapper") or carries_hooks(module):
        return module
    if module.disable_adapters or not module.active_adapters:
        return module.original_module
    return module.modules_to_save[module.active_adapters[0]]


@dataclass(frozen=True, eq=False)
class HeadMatmul:
    """A head's matmul with the vocabulary: the operands of :func:`linear_cross_entropy`.

    Attributes:
        weight: ``[V, H]``, or a function that makes it from a 4-bit weight.
        bias: ``[V]`` or None.
        lora: A ``[R, H]``, B ``[V, R]`` and the scale of their product, or None.
        softcap: the bound of the logits, or None.
        logit_scale: the factor on the logits.
    """

    weight: Weight
    bias: Tensor | None
    lora: tuple[Tensor, Tensor, float] | None
    softcap: float | None
    logit_scale: float


def read_head(head: HeadLike, spec: HeadSpec) -> HeadMatmul | str:
    """Return the head's matmul, with the adapters and copies of PEFT that are active now.

    Args:
        head: the head.
        spec: its spec.

    Returns:
        The matmul, or the reason why the head has to be called as a module.
    """
    projection = read_projection(_serving(head.lm_head))
    if isinstance(projection, str):
        return projection
    lora = projection.lora
    return HeadMatmul(
        _weight(projection),
        projection.bias,
        None if lora is None else (lora.a, lora.b, lora.scale),
        _value(head, spec.softcap),
        _value(head, spec.scale, 1.0) / _value(head, spec.divisor, 1.0),
    )


def fused_head(
    head: HeadLike,
    spec: HeadSpec,
    kernels: Implementation,
    *,
    labels: Tensor,
    packed_seq_lens: PackedSeqLens,
    token_statistics: TokenStatistics | None = None,
    context_parallel: ContextParallel | None = None,
    **arguments: Any,
) -> Any:
    """Run a head's forward with a fused loss.

    If ranks share the batch, each computes the loss of its own tokens, and returns the sum over all ranks.

    Args:
        head: the head.
        spec: its spec.
        kernels: the implementation of the loss.
        labels: int64 ``[B, S]``, with the first label of each sequence ignored.
        packed_seq_lens: the batch's packing.
        token_statistics: the statistics to fill in, or None.
        context_parallel: the group of ranks that share the batch, or None.
        **arguments: the other arguments of the stock forward.

    Returns:
        The stock output, with ``logits=None``.
    """
    from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

    packed = packed_seq_lens
    for name in ("logits_to_keep", "return_dict", FUSED_LM_HEAD):
        arguments.pop(name, None)
    if spec.balanced and arguments.get("output_router_logits") is None:
        arguments["output_router_logits"] = head.config.output_router_logits
    ignore_index = arguments.get("ignore_index", IGNORE_INDEX)
    shift_labels = arguments.get("shift_labels")
    if shift_labels is not None:
        targets = shift_labels.reshape(-1)  # one for every slot, unchanged
    else:
        targets = targets_of(packed, labels, ignore_index)[0]
    num_items, shards, own_targets = arguments.get("num_items_in_batch"), None, targets
    if context_parallel is not None and _each_may_score_its_own(head, packed, targets, arguments):
        packed = context_parallel.shard(arguments, packed)
        shards = packed.shards
        assert shards is not None
        num_items = (targets != ignore_index).sum() if num_items is None else num_items
        own_targets = shards.keep(targets[None])[0]
    count = _begin_count(own_targets, ignore_index)
    sums = None if token_statistics is None else torch.zeros(2, device=targets.device)
    outputs = head.base_model(packed_seq_lens=packed, return_dict=True, **arguments)
    hidden = outputs.last_hidden_state
    if shards is None:
        hidden = hidden.flatten(0, 1) if shift_labels is not None else packed.unpad(hidden)[0]
    else:
        hidden = hidden.squeeze(0)
    product = read_head(head, spec)
    assert isinstance(product, HeadMatmul)  # fused_loss_serves has checked it
    loss = linear_cross_entropy(
        hidden,
        product.weight,
        own_targets,
        bias=product.bias,
        lora=product.lora,
        softcap=product.softcap,
        logit_scale=product.logit_scale,
        ignore_index=ignore_index,
        reduction="mean",
        num_items=num_items,
        num_kept=count(),
        statistics=sums,
        implementation=kernels,
    )
    if shards is not None:
        loss, sums = shards.sum(loss), None if sums is None else shards.sum(sums)
    if token_statistics is not None and sums is not None:
        token_statistics.sums = torch.cat([sums, (targets != ignore_index).sum(0, keepdim=True)])
    if not hasattr(outputs, "router_logits"):
        return CausalLMOutputWithPast(loss=loss, hidden_states=outputs.hidden_states, attentions=outputs.attentions)
    balance: Tensor | None = None
    if spec.balanced and arguments["output_router_logits"]:
        mask = arguments.get("attention_mask")
        if mask is None and loss.is_cuda:  # without one, transformers before 5.24 waits for the device in each layer
            mask = outputs.router_logits[0].new_ones(1, len(outputs.router_logits[0]))
        balance = sys.modules[stock_class(head).__module__].load_balancing_loss_func(
            outputs.router_logits, head.num_experts, head.num_experts_per_tok, mask
        )
        factor = head.router_aux_loss_coef
        if token_statistics is not None:
            token_statistics.aux_loss = balance.detach()
            factor = factor if token_statistics.aux_loss_coef is None else token_statistics.aux_loss_coef
        loss = loss + factor * balance.to(loss.device)
    return MoeCausalLMOutputWithPast(
        loss=loss,
        aux_loss=balance,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
        router_logits=outputs.router_logits,
    )


def _each_may_score_its_own(
    head: HeadLike, packed: PackedSeqLens, targets: Tensor, arguments: Mapping[str, Any]
) -> bool:
    """Return whether each rank may compute the loss of its own tokens: each has a target, and nobody asks for more."""
    asked = arguments.get("output_hidden_states")
    asked = getattr(head.config, "output_hidden_states", False) if asked is None else asked
    return len(targets) == packed.total_tokens and not asked


def _value(head: HeadLike, name: str | None, default: object = None) -> Any:
    return default if name is None else attrgetter(name)(head)


def _weight(projection: Projection) -> Weight:
    """Return the dense weight, or a function that makes it from a 4-bit weight."""
    if projection.quant_state is None:
        return projection.weight
    return partial(dequantize, projection.weight, projection.quant_state, projection.dtype)


def _begin_count(labels: Tensor, ignore_index: int) -> Callable[[], int | None]:
    """Begin to count the labels that are kept, so that the loss can leave the other rows out.

    On a GPU the copy to the host is queued before the backbone's kernels, and read after their launch. So the host
    waits for the previous step at most, never for this one.

    Args:
        labels: int64 ``[T]``, the targets.
        ignore_index: the label that is ignored.

    Returns:
        A function that returns the number. It returns None on a CPU, where the op counts labels itself, and whenever
        the host must not wait.
    """
    if not labels.is_cuda or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return lambda: None
    host = torch.empty((), dtype=torch.int64, pin_memory=True)
    host.copy_((labels != ignore_index).sum(), non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(labels.device))

    def read() -> int:
        done.synchronize()
        return int(host)

    return read
