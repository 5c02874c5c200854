"""The attention that a stock model would run now: transformers' own, or another package's.

A patched model computes its attention itself. It bypasses transformers' table of attention functions, torch's
``scaled_dot_product_attention``, and the modes that reroute it. Context and sequence parallelism (Ulysses, ring
attention) use these three. If another package has changed one of the three, fastpack raises and names it: when it
patches a model, and each time the model runs. Under ``torch.compile`` the check runs while the model is traced, and
guards keep its result valid from then on.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fastpack.errors import PatchError
from fastpack.utils.classes import names_in, package_of, place_of
from fastpack.utils.compile import cached_constant, constant

STOCK_CONFIG = "_fastpack_stock_config"
"""The attribute of a private config (of a module on fastpack's interface) that holds the stock config."""

_OWN = ("transformers", "torch", "fastpack")
"""Packages whose attention functions a patch may replace: they compute plain attention."""
_SDPA = torch._C._nn.scaled_dot_product_attention
_TABLE = "ALL_ATTENTION_FUNCTIONS"
_TRANSFORMERS_SDPA = "transformers.integrations.sdpa_attention.sdpa_attention_forward"
_TRAIN_UNPATCHED = "train this model unpatched (fastpack.unpatch(model))"


def attention_table(file: object) -> Any:
    """Return transformers' table of attention functions, as a modelling file reads it.

    A registered function is in every table. A function assigned by ``ALL_ATTENTION_FUNCTIONS[name] = ...`` is only in
    that one table, which nearly all files share.
    """
    return getattr(file, _TABLE, getattr(sys.modules["transformers.modeling_utils"], _TABLE))


def _mask_table() -> Any:
    return sys.modules["transformers.masking_utils"].ALL_MASK_ATTENTION_FUNCTIONS


def eager_function(file: object) -> Any:
    """Return the eager attention of a modelling file, or None if it has none."""
    return getattr(file, "eager_attention_forward", None)


@dataclass(eq=False)
class StockAttention:
    """The attention that one patched backbone replaces.

    Attributes:
        modules: the modules that call transformers' table, one for each config and class, each with the name of its
            modelling file.
        bypassed: whether a patch computes attention itself. If False, the stock functions run, with one row per
            sequence. Another package's function is then allowed, except with several processes, which may share
            sequences.
        usable: names of transformers' own implementations that the model can be set to.
        spreads: whether the patched model spreads each batch over ranks itself, so that accelerate's settings for that
            are no reason to refuse it.
    """

    modules: tuple[tuple[Any, str], ...] = ()
    bypassed: bool = False
    usable: tuple[str, ...] = ("eager",)
    spreads: bool = False

    def check(self, afterwards: str = "") -> None:
        """Raise if the stock model would attend by a function that transformers does not ship.

        Args:
            afterwards: text to add at the end of the message.

        Raises:
            PatchError: the message names context or sequence parallelism if that is the cause, else the function or
                the mode.
        """
        reason = self._reason()
        if reason is not None:
            raise PatchError(f"{reason}{afterwards}")

    def _reason(self) -> str | None:
        reason = None if self.spreads else accelerates_parallelism()
        if reason is not None or not (self.bypassed or _several_processes()):
            return reason
        sdpa = F.scaled_dot_product_attention
        if sdpa is not _SDPA:
            return _describe_sdpa(sdpa)
        for mode in _get_current_function_mode_stack():
            reason = reason or _describe_mode(type(mode))
        if not torch.compiler.is_compiling():  # the compiler does not run under a mode of this kind
            for mode in _get_current_dispatch_mode_stack():
                reason = reason or _describe_mode(type(mode))
        for module, file_name in self.modules:
            file = sys.modules[file_name]
            for config in (module.config, getattr(module.config, STOCK_CONFIG, None)):
                if config is not None:
                    reason = reason or self._in_table(config._attn_implementation, file)
        return reason

    def _in_table(self, name: str | None, file: object) -> str | None:
        table, eager = attention_table(file), eager_function(file)
        function = table.get(name, eager)
        foreign = function if not _is_own(function) else None
        for helper in _helpers(function):
            used = function.__globals__[helper]
            if foreign is None and not _is_own(used):
                foreign = used
        if foreign is None:
            masks = _mask_table().get(name)
            return None if _is_own(masks) else _describe_masks(masks, name)
        others = tuple((other, table.get(other, eager)) for other in self.usable)
        return _describe_function(foreign, name, others, name in table._local_mapping)


def sequence_parallelism(config: Any) -> str | None:
    """Return ``cp_size=2`` or the like if accelerate's ``ParallelismConfig`` spreads sequences, else None."""
    sizes = {name: getattr(config, name, None) or 1 for name in ("cp_size", "sp_size")}
    return next((f"{name}={size}" for name, size in sizes.items() if size > 1), None)


def describe_parallelism(spread: str, whose: str) -> str:
    """Return why a model can't run with ``spread``, which :func:`sequence_parallelism` returned for ``whose``."""
    kind = "context" if spread.startswith("cp") else "sequence"
    return (
        f"{whose} has {spread}: {kind} parallelism spreads each sequence over processes, and a patched model would "
        f"attend only to this process's part. Leave {spread.partition('=')[0]} at 1, or {_TRAIN_UNPATCHED}. "
        "(fastpack.patch(trainer) honours cp_size over torch's FSDP2; patch(model, context_mesh=mesh) is for a loop of "
        "your own.)"
    )


@constant
def accelerates_parallelism() -> str | None:
    """Return why no patched model can run if the accelerator spreads sequences over processes, else None."""
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    if state is None:
        return None
    spread = sequence_parallelism(state._shared_state.get("parallelism_config"))
    return None if spread is None else describe_parallelism(spread, "accelerate's ParallelismConfig of this process")


@constant
def _several_processes() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@constant
def _is_own(function: object) -> bool:
    return function is None or package_of(function) in _OWN


@cached_constant
def _helpers(function: object) -> tuple[str, ...]:
    """Return the names of the functions in its own file that a transformers function calls.

    Transformers' flash attention function, for example, does all of its work in such a function.
    """
    if package_of(function) != "transformers" or not hasattr(function, "__globals__"):
        return ()
    names = function.__globals__
    return tuple(name for name in names_in(function) if hasattr(names.get(name), "__globals__"))


@constant
def _describe_sdpa(function: object) -> str:
    return (
        f"torch.nn.functional.scaled_dot_product_attention is now {place_of(function)}, not torch's, and a patched "
        f"model would not call it. {_IF_SPREAD} If it computes the same, restore torch's "
        "(torch.nn.functional.scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention); if not, "
        f"{_TRAIN_UNPATCHED}."
    )


@constant
def _describe_mode(mode: type) -> str | None:
    """Return why a model can't run under a mode; None for fastpack's modes and torch's modes that keep attention."""
    handlers = (getattr(mode, name, None) for name in ("__torch_function__", "__torch_dispatch__"))
    places = [place_of(handler) for handler in handlers if handler is not None]
    if all(place.split(".")[0] in _OWN and not place.startswith(_SPREADS) for place in places):
        return None  # modes that set devices, checkpoint, count operations, ...
    return (
        f"the mode {place_of(mode)} is active. It may reroute attention, and a patched model would bypass "
        f"it. {_IF_SPREAD} Leave the mode while the model runs, or {_TRAIN_UNPATCHED}."
    )


@constant
def _describe_function(function: object, name: str | None, others: tuple[tuple[str, Any], ...], assigned: bool) -> str:
    own = [other for other, its in others if other != name and _is_own(its)]
    if own:
        mend = f"call model.set_attn_implementation({own[0]!r})"
    elif assigned:
        mend = f"remove it (del transformers.modeling_utils.{_TABLE}[{name!r}])"
    elif name == "sdpa":
        mend = f"restore transformers' own (transformers.AttentionInterface.register('sdpa', {_TRANSFORMERS_SDPA}))"
    else:
        mend = "restore transformers' own function"
    return (
        f"the model attends by {place_of(function)} (attn_implementation={name!r}), which is not transformers' own: "
        f"fastpack's attention would compute something else. {_IF_SPREAD} If it computes the same, {mend} first; if "
        f"not, {_TRAIN_UNPATCHED}."
    )


@constant
def _describe_masks(function: object, name: str | None) -> str:
    return (
        f"the masks of attn_implementation={name!r} are made by {place_of(function)}, which is not transformers' own, "
        "and a patched model builds no masks. Remove it from transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS, "
        f"or {_TRAIN_UNPATCHED}."
    )


_IF_SPREAD = (
    "If it is context or sequence parallelism (Ulysses, ring attention), each process would attend only to its own "
    "part of a sequence."
)
_SPREADS = "torch.distributed.tensor.experimental"
"""The package of torch's own context parallelism."""
