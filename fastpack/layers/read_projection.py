"""Read a projection: base weight, bias, quantisation, and LoRA's A, B and scale.

Layers read each projection at each call, since adapters may be switched at any time, and compute with its parts. A
projection that can't be read, or that another adapter than LoRA wraps, is called as a module; the report says why.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.errors import PatchError
from fastpack.ops.linear.operands import Lora, Projection, product_dtype
from fastpack.utils.classes import stock_class
from fastpack.utils.hooks import carries_hooks
from fastpack.utils.protocols import ConfigLike
from fastpack.utils.replacement import replacement_on
from fastpack.utils.sharding import is_gathered, is_partitioned


def read_projection(module: nn.Module, *, at_rest: bool = False) -> Projection | str:
    """Return the parts of a linear layer (plain, 4-bit or wrapped by LoRA), or why it must be called as a module.

    Args:
        module: the projection.
        at_rest: True for a report, which does not compute with the parts: a weight that FSDP2 has sharded then counts
            as whole, since it is whole while its layer runs.
    """
    reason = _why_opaque(module)
    if reason is not None:
        return reason
    cls = type(module)
    if cls is nn.Linear:
        return _read_linear(module, at_rest)
    if cls.__name__ == "Linear4bit" and cls.__module__.startswith("bitsandbytes."):
        return _read_4bit(module, at_rest)
    if wraps_parameter(module) and linear_sizes(_wrapped(module)) is None:
        return f"LoRA on weights of a {type(_wrapped(module)).__name__}, which PEFT adds to these"
    if hasattr(module, "lora_A") and cls.__module__ in _PEFT_MODULES:
        return _read_lora(module, at_rest)
    if _base_layer(module) is not None:
        return f"wrapped by {cls.__module__}.{cls.__name__}, an adapter that is not read (plain LoRA is)"
    if cls.__name__ == "Linear8bitLt":
        return "LLM.int8 has a matmul of its own"
    return f"a {cls.__name__}"


def takes_dtype(parts: Projection, dtype: torch.dtype) -> bool:
    """Return whether a projection can be computed from its parts for an input of this dtype.

    Without autocast, bitsandbytes casts its input to its compute dtype and the result back; LoRA's matmuls don't.
    """
    cast = dtype == torch.float32 and torch.is_autocast_enabled(parts.weight.device.type)
    return parts.quant_state is None or parts.dtype == dtype or cast


def read_update(module: nn.Module) -> tuple[nn.Module, Lora | None] | str:
    """Return a projection's base layer, to be called as a module, and its LoRA update; or why it can't be split."""
    reason = _why_opaque(module)
    if reason is not None:
        return reason
    if not (hasattr(module, "lora_A") and type(module).__module__ in _PEFT_MODULES):
        return module, None
    update = active_update(module)
    return update if isinstance(update, str) else (module.base_layer, update)  # type: ignore[return-value]


_BY_ROWS = {
    "adapter_names": "it names an adapter for each row of a batch",
    "aLoRA": "it begins after the invocation tokens of each row of a batch",
    "Lily": "its router averages over all tokens of a batch",
    "Poly": "it mixes its parts by the task of each row of a batch",
    "Shadow": "its second transformer reads the rows of a batch",
    "X-LoRA": "it scales its parts by the rows and columns of a batch",
}
"""PEFT's methods that read the rows of a padded batch, which a patched model does not have, and what they do."""


def refuse_rows(modules: Iterable[nn.Module]) -> None:
    """Raise if an active adapter depends on the rows of a batch.

    Raises:
        PatchError: the adapter would get one row of all real tokens, and fail or silently mix the sequences.
    """
    for module in modules:
        method = _reads_rows(module)
        if method is not None:
            raise PatchError(
                f"{method} can't run on a patched model: {_BY_ROWS[method]}, and there are no rows without padding. "
                "Merge it if PEFT can (merge_and_unload()), disable it, or leave the model unpatched."
            )


def refuse_row_adapters(model: nn.Module) -> None:
    """Raise if an adapter that was added after the patch depends on the rows of a batch.

    If PEFT's configs name such a method, all modules are checked, else only one layer.

    Raises:
        PatchError: see :func:`refuse_rows`.
    """
    configs = model.__dict__.get("peft_config")
    if not isinstance(configs, dict):
        return
    if any(map(_may_read_rows, configs.values())):
        refuse_rows(model.modules())
    else:  # PEFT tells all layers or none which adapter each row uses, so one layer is enough
        refuse_rows(itertools.islice((m for m in model.modules() if _base_layer(m) is not None), 1))


def _may_read_rows(config: ConfigLike) -> bool:
    package = method_of(config).lower()
    return package in (*_TUNERS_BY_ROWS, "xlora") or getattr(config, "alora_invocation_tokens", None) is not None


def method_of(config: ConfigLike) -> str:
    """Return PEFT's name for the method of one of its configs: ``LORA``, ``PREFIX_TUNING``."""
    peft_type = getattr(config, "peft_type", "")
    return getattr(peft_type, "value", peft_type)


_TUNERS_BY_ROWS = {"lily": "Lily", "poly": "Poly", "shadow": "Shadow"}
"""PEFT's packages whose adapters all read rows, and fastpack's names for them."""


def _reads_rows(module: nn.Module) -> str | None:
    """Return the name of a layer's active adapter if it depends on the rows of a batch, else None."""
    if _base_layer(module) is None or getattr(module, "disable_adapters", False):
        return None
    if any("adapter_names" in getattr(hook, "keywords", ()) for hook in module._forward_pre_hooks.values()):
        return "adapter_names"
    mixture: Any = getattr(module.__dict__.get("forward"), "__self__", None)
    if type(mixture).__module__.startswith("peft.tuners.xlora."):
        return None if mixture.adapters_disabled else "X-LoRA"
    if _active_variants(module, "ALora"):
        return "aLoRA"
    return _TUNERS_BY_ROWS.get(_adapter(module))


def _active_variants(module: Any, kind: str) -> list[str]:
    """Return a layer's active adapters of one of PEFT's variants of LoRA; ``kind`` begins the variant's class name."""
    variants = getattr(module, "lora_variant", {})
    if not variants or module.disable_adapters or module.merged:
        return []
    return [name for name in module.active_adapters if type(variants.get(name)).__name__.startswith(kind)]


_PEFT_MODULES = ("peft.tuners.lora.layer", "peft.tuners.lora.bnb")


def _why_opaque(module: nn.Module) -> str | None:
    if carries_hooks(module):
        return "it carries hooks, or a forward of its own (offloading does this)"
    return None


def why_not_plain(weight: Tensor, at_rest: bool = False) -> str | None:
    """Return why a weight can't be used directly, or None."""
    if type(weight) not in (nn.Parameter, Tensor) and not (at_rest and is_gathered(weight)):
        return f"its weight is a {type(weight).__name__}"
    if weight.numel() == 0 or is_partitioned(weight):
        return "its weight is partitioned"
    if weight.device.type == "meta":
        return "its weight is offloaded"
    return None


def _read_linear(module: Any, at_rest: bool) -> Projection | str:
    weight: Tensor = module.weight
    return why_not_plain(weight, at_rest) or Projection(weight, product_dtype(weight, weight.dtype), module.bias)


def _read_4bit(module: Any, at_rest: bool) -> Projection | str:
    weight, state = module.weight, _quant_state(module)
    plain = type(weight).__name__ == "Params4bit" or why_not_plain(weight, at_rest) is None
    if not plain or state is None or weight.numel() == 0:
        return "its 4-bit weight is not quantised yet, partitioned or offloaded"
    if getattr(state, "packing_format_for_cpu", False):
        return "its 4-bit weight is packed for a CPU"
    if module.compute_dtype is None or not module.compute_type_is_set:
        return "it has not chosen its compute dtype yet"
    # autocast also casts inside bitsandbytes' matmul, whatever its compute dtype
    return Projection(weight, product_dtype(weight, module.compute_dtype), module.bias, quant_state=state)


def _quant_state(module: Any) -> Any:
    """Return the ``QuantState`` of a 4-bit layer, or None; a weight that FSDP2 gathers leaves it with the layer."""
    state = getattr(module.weight, "quant_state", None)
    return module.quant_state if state is None else state


def _read_lora(module: Any, at_rest: bool) -> Projection | str:
    base = read_projection(module.base_layer, at_rest=at_rest)
    if isinstance(base, str):
        return f"under LoRA, {base}"
    update = active_update(module, at_rest)
    if isinstance(update, str):
        return update
    return base if update is None else Projection(base.weight, base.dtype, base.bias, update, base.quant_state)


def active_update(module: Any, at_rest: bool = False) -> Lora | str | None:
    """Return the active LoRA update, None if there is none, or why PEFT must compute it."""
    if module.merged:
        if not module.disable_adapters or at_rest:
            return None
        module.unmerge()  # as PEFT's forward does: both runs of a checkpointed forward must find the same weights
    if module.disable_adapters:
        return None
    parts = module._modules  # read for each projection at each call, and nn.Module's own lookup is slow
    all_a, all_b = parts["lora_A"]._modules, parts["lora_B"]._modules
    active = [name for name in module.active_adapters if name in all_a]
    if len(active) != 1:
        return f"{len(active)} adapters are active at once" if active else None
    (name,) = active
    if name in module.lora_variant:
        return f"its adapter is a {type(module.lora_variant[name]).__name__}"
    a, b, dropout = all_a[name], all_b[name], parts["lora_dropout"]._modules[name]
    if type(a) is not nn.Linear or type(b) is not nn.Linear or b._parameters["bias"] is not None:
        return "its adapter is not two plain matrices"
    if carries_hooks(a) or carries_hooks(b) or carries_hooks(dropout):
        return "its adapter carries hooks"
    if type(dropout) not in (nn.Dropout, nn.Identity):
        return f"its adapter's dropout is a {type(dropout).__name__}"
    weight_a, weight_b = _weight_of(a), _weight_of(b)
    if weight_a is None or weight_b is None:
        return "its adapter has no weight"
    reason = why_not_plain(weight_a, at_rest) or why_not_plain(weight_b, at_rest)
    if reason is not None:
        return f"in its adapter, {reason}"
    probability = dropout.p if type(dropout) is nn.Dropout and dropout.training else 0.0
    return Lora(weight_a, weight_b, float(module.scaling[name]), probability)


def _weight_of(linear: nn.Module) -> Tensor | None:
    weight = linear._parameters.get("weight")
    return getattr(linear, "weight", None) if weight is None else weight  # FSDP's first version sets a view instead


def _base_layer(module: nn.Module) -> nn.Module | None:
    """Return the layer that an adapter wraps, or None. PEFT stores it under this name in all adapters."""
    return module._modules.get("base_layer")


def wraps_parameter(module: nn.Module | None) -> bool:
    """Return whether a module is PEFT's wrapper around a parameter that LoRA trains, under FSDP2's class or not."""
    cls = type(module)
    return cls.__name__.endswith("ParamWrapper") and any(each.__module__ in _PEFT_MODULES for each in cls.__mro__)


def _wrapped(module: nn.Module) -> nn.Module:
    """Return the module inside all adapters."""
    base = _base_layer(module)
    return module if base is None else _wrapped(base)


def linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """Return the input and output size of a linear layer of any library, quantised or not; None for other modules.

    Most layers name their sizes as ``nn.Linear`` does (HQQ's, HIGGS', BitNet's), some by other names; EETQ's has only
    a weight. An adapter's layer is not a linear layer; the layer that it wraps is.
    """
    if _base_layer(module) is not None:
        return None
    for names in _SIZES:
        inputs, outputs = (vars(module).get(name) for name in names)
        if isinstance(inputs, int) and isinstance(outputs, int):
            return inputs, outputs
    weight = module._parameters.get("weight") if type(module).__name__.endswith("Linear") else None
    return None if weight is None or weight.ndim != 2 else (weight.shape[0], weight.shape[1])


_SIZES = (("in_features", "out_features"), ("infeatures", "outfeatures"), ("nx", "nf"))
"""The attributes in which linear layers hold their input and output sizes; the last pair is GPT-2's."""


def _adapter(module: nn.Module) -> str:
    """Return PEFT's name for the adapter that wraps a layer (``lora``, ``ia3``, ``vera``), else its class name."""
    cls = stock_class(module)
    package = cls.__module__.split(".")
    return package[2] if package[:2] == ["peft", "tuners"] else cls.__name__


def describe_projection(module: nn.Module) -> str | None:
    """Return the kind of a projection: ``linear``, ``4-bit``, ``8-bit`` or another library's class.

    An adapter adds ``+ lora``, ``+ ia3``, .... Return None for a module that is not a projection and has no weights
    that LoRA trains.
    """
    base = _base_layer(module)
    if base is not None:
        inner = describe_projection(base)
        if wraps_parameter(module):
            return inner if wraps_parameter(base) else f"{inner or type(base).__name__} + lora"
        return None if inner is None else f"{inner} + {_adapter(module)}"
    names = {cls.__name__ for cls in type(module).__mro__}
    if "Linear4bit" in names:
        return "4-bit"
    if "Linear8bitLt" in names:
        return "8-bit"
    if isinstance(module, nn.Linear):
        return "linear"
    return None if linear_sizes(module) is None else type(module).__name__


def projections_of(model: nn.Module) -> list[nn.Module]:
    """Return every projection of a model, except adapters' parts (LoRA's A and B) and the layers that they wrap."""
    inside = {
        id(child)
        for module in model.modules()
        if _base_layer(module) is not None or linear_sizes(module) is not None
        for child in module.modules()
        if child is not module
    }
    return [m for m in model.modules() if id(m) not in inside and describe_projection(m) is not None]


def count_projections(model: nn.Module) -> dict[str, int]:
    """Count a model's projections of each kind, the most frequent first."""
    return dict(Counter(str(describe_projection(module)) for module in projections_of(model)).most_common())


def not_isolated(model: nn.Module) -> tuple[str, ...]:
    """Return a line for each way in which a batch's sequences influence each other; most models have none.

    Such a model is reported, not refused, since the stock model mixes the sequences of a padded batch, too.
    """
    return tuple(dict.fromkeys(filter(None, map(_why_not_isolated, model.modules()))))


def _why_not_isolated(module: Any) -> str | None:
    if describe_projection(module) == "8-bit" and module.state.threshold > 0:
        return "LLM.int8 picks outlier columns over all tokens of a batch: 8-bit layers are not isolated"
    for name in _active_variants(module, "Velora"):
        kind = module.lora_velora_init_type[name]
        if kind == "batch_average" or (kind == "batch_average_once" and not module.lora_velora_initialized[name]):
            when = "the first batch" if kind == "batch_average_once" else "each batch"
            return (
                f"VeLoRA ({kind}) projects the gradients of LoRA's A on a mean over all tokens of {when}: sequences "
                "are not isolated; init_type='random' isolates them"
            )
    return None


def count_opaque(model: nn.Module) -> dict[str, int]:
    """Count the projections that are called as modules, by reason, the most frequent reason first."""
    stream = _stream_dtype(model)
    reasons = (_why_called(module, stream) for module in projections_of(model))
    return dict(Counter(reason for reason in reasons if reason is not None).most_common())


def _why_called(module: nn.Module, stream: torch.dtype | None) -> str | None:
    """Return why a projection is called as a module if its input has this dtype, or None."""
    if wraps_parameter(module) and replacement_on(module) is not None:
        return None  # the fast forward of experts reads it
    method = _reads_rows(module)
    if method is not None:
        return f"not isolated, and refused when it runs: {method}, {_BY_ROWS[method]}"
    parts = read_projection(module, at_rest=True)
    if isinstance(parts, str):
        return parts
    if stream is None or takes_dtype(parts, stream) or torch.is_autocast_enabled(parts.weight.device.type):
        return None
    input_dtype, computed = _name(stream), _name(parts.dtype)
    half = parts.dtype if stream == torch.float32 else stream
    remedy = f"set {'fp16' if half == torch.float16 else 'bf16'}=True"
    if half == stream:
        remedy += f", or load it with bnb_4bit_compute_dtype=torch.{input_dtype}"
    return f"outside autocast its 4-bit weight computes in {computed}, and its input is {input_dtype}: {remedy}"


def _stream_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the dtype of projections' inputs outside autocast: the embeddings' dtype, which wider norms promote."""
    weights: list[Any] = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)][:1]
    weights += [m.weight for m in model.modules() if type(m).__name__.endswith("Norm") and hasattr(m, "weight")]
    dtypes = [weight.dtype for weight in weights if isinstance(weight, Tensor)]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
