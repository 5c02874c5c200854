"""A causal LM head's own loss without logits, in training: ``patch(model, loss="fused")``.

The head's forward is the family's (:class:`fastpack.families.spec.HeadSpec`), but for its product with the vocabulary
and its loss, which :func:`fastpack.ops.loss.linear_cross_entropy.linear_cross_entropy` computes on real tokens.

Shape suffixes: B rows, S columns of the batch as it came; T real tokens.
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
from fastpack.model.labels import targets_of
from fastpack.ops.dequantize import dequantize
from fastpack.ops.implementation import Implementation
from fastpack.ops.linear.parts import Projection
from fastpack.ops.loss import IGNORE_INDEX
from fastpack.ops.loss.linear_cross_entropy import Weight, linear_cross_entropy
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.utils.classes import defined_in, stock_class
from fastpack.utils.hooks import carries_hooks
from fastpack.utils.protocols import HeadLike
from fastpack.utils.replacement import Replacement
from fastpack.utils.signatures import keeps_some_logits

TOKEN_STATISTICS = "token_statistics"
"""The keyword of a call with labels that brings :class:`TokenStatistics`."""
FUSED_LM_HEAD = "fused_lm_head"
"""The keyword by which TRL's trainers ask TRL's forward of a head for their own loss."""


class TokenStatistics:
    """Numbers about its predictions that a fused loss gives in passing.

    No dataclass: what maps a function over the tensors of arguments (FSDP's casts) would hand on a copy.

    Attributes:
        sums: float32 ``[3]``: of the predictions' entropies, of labels that are the likeliest token, of labels. None
            where no fused loss ran.
    """

    def __init__(self) -> None:
        """Set up without sums."""
        self.sums: Tensor | None = None


def is_trls(forward: Any) -> bool:
    """Return whether a forward is the one that TRL assigns to a head.

    It computes TRL's loss if ``fused_lm_head`` says so, and otherwise calls the forward before it.
    """
    if not defined_in(forward).startswith("trl."):
        return False
    return FUSED_LM_HEAD in inspect.signature(forward, follow_wrapped=False).parameters


def fused_loss_rejects(head: HeadLike, kind: str, spec: Spec | None) -> str | None:
    """Say why a head's stock loss is kept, or None. Asked before its forward is swapped.

    Args:
        head: as it was found, without our forward.
        kind: what the head computes, ``causal_lm`` for one with a vocabulary.
        spec: the declaration of its class; None where there is none, or its source is not one that this was proved on.
    """
    if kind != "causal_lm":
        return f"{type(head).__name__} is no causal LM: its loss is another"
    if not isinstance(spec, HeadSpec):
        return f"the forward of {type(head).__name__} is not one that the fused loss was proved on"
    if head.base_model is head:
        return f"base_model_prefix={head.base_model_prefix!r} names nothing that {type(head).__name__} holds"
    if hasattr(head, "_hf_hook"):
        return f"{type(head).__name__} carries accelerate's hooks"
    if "_original_forward" in head.__dict__:
        return f"accelerate wrapped the forward of {type(head).__name__} for an earlier run: patch before the first one"
    if "forward" in head.__dict__ and not is_trls(head.__dict__["forward"]):
        return f"the forward of {type(head).__name__} was already replaced (trainers that bring a loss do this)"
    if _is_meta(head.lm_head):
        return None  # sharded loading: read again at the first batch
    return _why_not_now(head)


def _is_meta(module: nn.Module) -> bool:
    weight = next(module.parameters(), None)  # FSDP's first version may keep all parameters itself
    return weight is not None and weight.device.type == "meta"


def fused_loss_fails(head: Any, *, asked_for: bool = False) -> str | None:
    """Return why a head's fused loss does not run now, because of what came after the patch; or None.

    Args:
        head: the head.
        asked_for: whether a trainer with TRL's forward asks for the head's own loss.
    """
    forward = head.__dict__.get("forward")
    beneath = forward.earlier if isinstance(forward, Replacement) else None
    of_trl = is_trls(forward) or is_trls(beneath)  # over ours, or under it
    if of_trl and not asked_for:
        return "TRL's trainers bring a loss, unless patch(trainer, loss='fused') gave one this (report(trainer) tells)"
    origin = defined_in(forward)
    if origin.startswith(("trl.", "liger_kernel.")) and not of_trl:  # wrappers of others call what they found
        return f"the forward of {type(head).__name__} was replaced after the patch, by {origin}, which brings a loss"
    unread = _is_meta(head.lm_head) and not hasattr(head.lm_head, "_hf_hook")
    return None if unread else _why_not_now(head)


def fused_loss_serves(head: HeadLike, arguments: Mapping[str, Any]) -> bool:
    """Return whether this call computes its loss without logits: in training, with labels, and with all logits.

    Warns:
        FastpackWarning: something about the head changed since the patch, so that its stock loss runs.
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
    """Return whether a head's ``loss_function`` is transformers' own for causal LMs, not one that somebody set."""
    loss = head.loss_function
    named = (getattr(loss, "__module__", ""), getattr(loss, "__name__", "")) == _STOCK_LOSS
    return named and not hasattr(loss, "__wrapped__")  # somebody's decorator has its names


def _why_not_now(head: HeadLike) -> str | None:
    """Say why the head's loss can't be fused as users and PEFT have left the head; or None."""
    if not has_stock_loss(head):
        return f"the loss_function of {type(head).__name__} is {head.loss_function!r}"
    module = _serving(head.lm_head)
    if any(isinstance(d, nn.Dropout) and d.p > 0 for d in getattr(module, "lora_dropout", {}).values()):
        return "there is dropout before the LoRA of lm_head"
    found = read_projection(module)
    return f"lm_head has to be called as a module: {found}" if isinstance(found, str) else None


def _serving(module: Any) -> Any:
    """Return the layer that runs: PEFT's trained copy (``modules_to_save``) if there is one, else the module itself."""
    cls = type(module)
    if (cls.__module__, cls.__name__) != ("peft.utils.other", "ModulesToSaveWrapper") or carries_hooks(module):
        return module
    if module.disable_adapters or not module.active_adapters:
        return module.original_module
    return module.modules_to_save[module.active_adapters[0]]


@dataclass(frozen=True, eq=False)
class HeadProduct:
    """A head's product with the vocabulary, as :func:`linear_cross_entropy` takes it.

    Attributes:
        weight: ``[V, H]``, or what makes it of a 4-bit one.
        bias: ``[V]`` or None.
        lora: A ``[R, H]``, B ``[V, R]`` and their factor, or None.
        softcap: the bound of the logits, or None.
        logit_scale: what the product is multiplied by.
    """

    weight: Weight
    bias: Tensor | None
    lora: tuple[Tensor, Tensor, float] | None
    softcap: float | None
    logit_scale: float


def read_head(head: HeadLike, spec: HeadSpec) -> HeadProduct | str:
    """Read what the head computes now, PEFT's adapters and copies as they are switched; or why it has to be called."""
    projection = read_projection(_serving(head.lm_head))
    if isinstance(projection, str):
        return projection
    lora = projection.lora
    return HeadProduct(
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
    **arguments: Any,
) -> Any:
    """Run a head's forward with a fused loss, on a batch whose packing was read and whose first labels are ignored.

    Args:
        head: the head.
        spec: its spec.
        kernels: the implementation of the loss.
        labels: ``[B, S]``.
        packed_seq_lens: the batch's packing.
        token_statistics: the statistics to fill in, or None.
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
        targets = shift_labels.reshape(-1)  # every slot's, as they came
    else:
        targets = targets_of(packed, labels, ignore_index)[0]
    count = _begin_count(targets, ignore_index)
    sums = None if token_statistics is None else torch.zeros(2, device=targets.device)
    outputs = head.base_model(packed_seq_lens=packed, return_dict=True, **arguments)
    hidden = outputs.last_hidden_state
    product = read_head(head, spec)
    assert isinstance(product, HeadProduct)  # as fused_loss_serves found
    loss = linear_cross_entropy(
        hidden.flatten(0, 1) if shift_labels is not None else packed.unpad(hidden)[0],
        product.weight,
        targets,
        bias=product.bias,
        lora=product.lora,
        softcap=product.softcap,
        logit_scale=product.logit_scale,
        ignore_index=ignore_index,
        reduction="mean",
        num_items=arguments.get("num_items_in_batch"),
        num_kept=count(),
        statistics=sums,
        implementation=kernels,
    )
    if token_statistics is not None and sums is not None:
        token_statistics.sums = torch.cat([sums, (targets != ignore_index).sum(0, keepdim=True)])
    if not hasattr(outputs, "router_logits"):
        return CausalLMOutputWithPast(loss=loss, hidden_states=outputs.hidden_states, attentions=outputs.attentions)
    balance: Tensor | None = None
    if spec.balanced and arguments["output_router_logits"]:
        balance = sys.modules[stock_class(head).__module__].load_balancing_loss_func(
            outputs.router_logits, head.num_experts, head.num_experts_per_tok, arguments.get("attention_mask")
        )
        loss = loss + head.router_aux_loss_coef * balance.to(loss.device)
    return MoeCausalLMOutputWithPast(
        loss=loss,
        aux_loss=balance,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
        router_logits=outputs.router_logits,
    )


def _value(head: HeadLike, name: str | None, default: object = None) -> Any:
    return default if name is None else attrgetter(name)(head)


def _weight(projection: Projection) -> Weight:
    """Return the dense weight, or a function that makes it from a 4-bit weight."""
    if projection.quant_state is None:
        return projection.weight
    return partial(dequantize, projection.weight, projection.quant_state, projection.dtype)


def _begin_count(labels: Tensor, ignore_index: int) -> Callable[[], int | None]:
    """Begin to count the labels that are kept, so that the loss can leave the others' rows out.

    The copy to the host is queued on a GPU ahead of the backbone's kernels and read behind their launch: whoever reads
    it waits for the previous step at most, never for this one. None on a CPU, where the op counts for itself, and
    where waiting is not allowed.
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
