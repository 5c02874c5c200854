"""Merges of PEFT's adapters that leave the base weights as they were, once they are unmerged.

PEFT adds an adapter's product to the base weight, and subtracts it again. Both round in the weight's dtype. Here each
layer keeps a copy of the weight from before the merge, and puts it back after PEFT's own ``unmerge``. The merge itself
is PEFT's.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from fastpack.errors import FastpackWarning, PatchError
from fastpack.layers.read_projection import wraps_parameter
from fastpack.utils.replacement import Replacement, replaces

Keep = Literal["host", "device"]
ModelT = TypeVar("ModelT", bound=nn.Module)
_SHOWN = 3
"""The number of layers that an error names."""
_METHODS = ("merge", "unmerge")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers that have as many bytes as a weight."""
_QUANTISED = ("Params4bit", "Int8Params")
"""bitsandbytes' weights. PEFT's merge makes a new one of them, and leaves the bytes of the one before alone."""


def exact_merges(model: ModelT, *, keep: Keep | None = "host") -> ModelT:
    """Make a PEFT model's ``unmerge_adapter()`` restore the base weights bit for bit.

    TRL's online trainers merge the adapter into the base weights, send these to vLLM, and unmerge it again, at every
    weight sync (for a vLLM server, twice at the first). PEFT does so by adding and subtracting, which rounds: in half
    precision the base weights are others after each sync, and drift. After this call, a merge first copies the weights
    that it changes, and ``unmerge`` puts the copies back. Merged weights are PEFT's own, bit for bit. Names, shapes and
    the state dict stay as they are.

    Example:
        >>> trainer = GRPOTrainer(model, args=GRPOConfig(use_vllm=True), peft_config=lora, ...)  # doctest: +SKIP
        >>> fastpack.patch(trainer)  # doctest: +SKIP
        >>> fastpack.exact_merges(trainer.model)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP

    **Which merges.** All that PEFT makes through its layers: ``merge_adapter``, ``unmerge_adapter`` and the unmerge of
    ``disable_adapter``; with several adapters, DoRA, ``safe_merge`` and ``target_parameters``; in a patched or a stock
    model, also while FSDP2 shards it. A weight that several layers share (tied embeddings, for example) is restored
    when the last of them is unmerged. ``merge_and_unload`` is as before. If dense base weights are changed while
    an adapter is merged into them (trained, loaded or cast), the copy is out of date: ``unmerge`` warns, and subtracts
    as PEFT does.

    **Memory.** The copies exist while adapters are merged: during a sync. Those of 4-bit and 8-bit weights are the
    quantised weights themselves, and stay on the device.

    The model keeps this through ``copy.deepcopy`` and pickling. Call it again after new layers got adapters.

    Args:
        model: a model with adapters of PEFT, patched or not.
        keep: where copies of dense weights are: ``host`` (pinned memory if the weight is on a CUDA device, so that no
            device memory is taken) or ``device`` (faster; as much device memory as the adapted weights take). None
            gives the model PEFT's own merges again.

    Returns:
        The same model.

    Raises:
        ValueError: another ``keep``.
        TypeError: not a model, but a trainer, for example.
        PatchError: the model has no adapter, or adapters are merged at the moment; or a layer's base weight can't be
            kept: it is quantised by another library than bitsandbytes, is a stack of
            :func:`fastpack.quantize_experts`, or belongs to an ``nn.MultiheadAttention``. Nothing was changed.

    Warns:
        FastpackWarning: at an ``unmerge``, if base weights were changed since the merge.
    """
    if keep is not None and keep not in get_args(Keep):
        raise ValueError(f"keep={keep!r}: choose one of {', '.join(map(repr, get_args(Keep)))}, or None to undo it.")
    if not isinstance(model, nn.Module):
        raise TypeError(f"exact_merges takes a model, not a {type(model).__name__}: pass trainer.model of a trainer.")
    layers = _mergeable_layers(model)
    if not layers:
        raise PatchError(f"this {type(model).__name__} has no adapters of PEFT: add them first. Nothing was changed.")
    merged = [name for name, layer in layers.items() if layer.merged]
    if merged:
        raise PatchError(
            f"adapters are merged into {_listed(merged)}: call model.unmerge_adapter() first. Nothing was changed."
        )
    if keep is not None:
        _check(layers)
    for layer in layers.values():
        for change in replacements_on(layer):
            change.undo()
    if keep is not None:
        _install(layers, keep)
    return model


def replacements_on(layer: nn.Module) -> list[Replacement[Any, Any]]:
    """Return the replacements of :func:`exact_merges` on a layer: those of ``merge`` and ``unmerge``, or none."""
    return [method for name in _METHODS if replaces(method := vars(layer).get(name), _run)]


def rounding_merges(model: nn.Module, among: Container[Tensor] | None = None) -> dict[torch.dtype, int]:
    """Count the layers whose unmerged base weights are rounded, by the half-precision dtype of the weight.

    Args:
        model: a model with adapters.
        among: the weights that can be; None for all.
    """
    dtypes = (
        place.weight.dtype
        for layer in _mergeable_layers(model).values()
        if not replacements_on(layer)
        for place in _places(layer)[:1]
        if place.weight is not None and (among is None or place.weight in among)
    )
    return {dtype: count for dtype, count in Counter(dtypes).items() if dtype in (torch.bfloat16, torch.float16)}


@dataclass(frozen=True, eq=False)
class Place:
    """The place of a parameter in a model."""

    module: nn.Module
    name: str

    @property
    def weight(self) -> Any:
        """The parameter that is there at the moment, or None."""
        return self.module._parameters.get(self.name)


@dataclass(eq=False)
class BaseWeight:
    """A weight that adapters are merged into, and its copy from before.

    Attributes:
        label: the layer's name, for messages.
        place: where the weight is.
        keep: where the copy of a dense weight is.
        layers: PEFT's layers that merge into it.
        before: the copy, while an adapter is merged and nothing else has changed the weight; else None.
        fingerprint: the merged weight's, to see such changes.
    """

    label: str
    place: Place
    keep: Keep
    layers: list[Any] = field(default_factory=list)
    before: Tensor | _Quantised | None = None
    fingerprint: tuple[Any, ...] | None = None

    @property
    def merged(self) -> bool:
        """True if any adapter is merged into the weight."""
        return any(layer.merged for layer in self.layers)

    def prepare(self) -> None:
        """Copy an unmerged weight; of a merged one, drop the copy if it is out of date.

        Raises:
            PatchError: the weight is of a kind that can't be kept, since the call of :func:`exact_merges`.
        """
        if self.merged:
            self._check_unchanged()
            return
        weight = self.place.weight
        reason = _why_not_kept(weight)
        if reason is not None:
            raise PatchError(
                f"{self.label} can't be merged exactly any more: {reason}. It was not changed. Unmerge the other "
                "layers (model.unmerge_adapter()), and call fastpack.exact_merges(model, keep=None) to merge as PEFT "
                "does."
            )
        self.before = _Quantised.of(self.place) if _is_quantised(weight) else _copy(weight, self.keep)

    def settle(self) -> None:
        """Restore the weight if no adapter is merged any more; else remember the merged weight's fingerprint."""
        if self.before is None:
            return
        if self.merged:
            self.fingerprint = _fingerprint(self.place.weight)
            return
        if isinstance(self.before, _Quantised):
            self.before.restore()
        else:
            _local(self.place.weight).copy_(self.before, non_blocking=True)
        self.before = self.fingerprint = None

    def _check_unchanged(self) -> None:
        if self.before is None or _fingerprint(self.place.weight) == self.fingerprint:
            return
        self.before = self.fingerprint = None
        warnings.warn(
            f"the base weight {self.place.name!r} of {self.label} was changed while an adapter was merged into it "
            "(trained, loaded or cast), so that it can't be restored exactly: PEFT's own unmerge subtracts the "
            "adapter, and rounds. Call model.unmerge_adapter() before base weights change.",
            FastpackWarning,
            stacklevel=2,
        )


@dataclass(frozen=True, eq=False)
class _Quantised:
    """A quantised weight from before a merge, and the attributes in which bitsandbytes describes it."""

    place: Place
    weight: Any
    attributes: list[tuple[Any, dict[str, Any]]]

    @classmethod
    def of(cls, place: Place) -> _Quantised:
        """Keep the weight itself: a merge puts another one in its place."""
        weight, of_layer = place.weight, vars(place.module)
        attributes = [(weight, dict(vars(weight)))]
        if "state" in of_layer:  # LLM.int8's, which the merge resets
            attributes.append((of_layer["state"], dict(vars(of_layer["state"]))))
        if "quant_state" in of_layer:  # a second reference to that of a 4-bit weight
            attributes.append((place.module, {"quant_state": of_layer["quant_state"]}))
        return cls(place, weight, attributes)

    def restore(self) -> None:
        """Put the weight back, with its attributes."""
        for owner, before in self.attributes:
            if owner is not self.place.module:
                vars(owner).clear()
            vars(owner).update(before)
        self.place.module._parameters[self.place.name] = self.weight


@dataclass(eq=False)
class _Guard:
    """The state that all layers of a model share: whether one of them is inside a merge or an unmerge."""

    inside: bool = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Mark calls inside as PEFT's own: to merge a second DoRA adapter, it unmerges the first and merges it anew."""
        self.inside = True
        try:
            yield
        finally:
            self.inside = False


def _run(replacement: Replacement[tuple[BaseWeight, ...], _Guard], *args: Any, **kwargs: Any) -> None:
    """Run PEFT's ``merge`` or ``unmerge``, with copies of the base weights, which are back once none is merged.

    If a merge raises, the weights are as before.
    """
    if replacement.runtime.inside:
        replacement.stock(*args, **kwargs)
        return
    weights = replacement.spec
    with replacement.runtime.entered():
        with torch.no_grad():
            for weight in weights:
                weight.prepare()
        try:
            replacement.stock(*args, **kwargs)
        finally:
            with torch.no_grad():
                for weight in weights:
                    weight.settle()


def _mergeable_layers(model: nn.Module) -> dict[str, Any]:
    """Return PEFT's layers that can merge, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer) and type(module).merge is not BaseTunerLayer.merge
    }


def _places(layer: Any) -> list[Place]:
    """Return the places of the weights that a layer's merge may change."""
    base = layer.get_base_layer()
    return [Place(base, name) for name in ([layer.parameter_name] if wraps_parameter(layer) else base._parameters)]


def _install(layers: dict[str, Any], keep: Keep) -> None:
    """Replace the layers' ``merge`` and ``unmerge``."""
    guard, shared = _Guard(), dict[int, BaseWeight]()
    for label, layer in layers.items():
        weights = []
        for place in _places(layer):
            if place.weight is not None:
                weight = shared.setdefault(id(place.weight), BaseWeight(label, place, keep))
                weight.layers.append(layer)
                weights.append(weight)
        for name in _METHODS:
            Replacement(layer, name, _run, tuple(weights), guard).install()


def _check(layers: dict[str, Any]) -> None:
    """Raise a PatchError if the base weights of some layers can't be kept."""
    reasons: dict[str, list[str]] = {}
    for name, layer in layers.items():
        if isinstance(layer.get_base_layer(), nn.MultiheadAttention):
            reasons.setdefault("PEFT takes its parameters away while it is merged", []).append(name)
            continue
        for place in _places(layer):
            optional = place.weight is None and place.name in place.module._parameters  # no bias
            reason = None if optional else _why_not_kept(place.weight)
            if reason is not None:
                reasons.setdefault(reason, []).append(name)
    if reasons:
        what = "; ".join(f"{_listed(names)}: {reason}" for reason, names in reasons.items())
        raise PatchError(
            f"these layers can't be merged exactly: {what}. Base weights can be dense, or 4-bit or 8-bit weights of "
            "bitsandbytes: load the model so, or leave exact_merges out and merge as PEFT does. Nothing was changed."
        )


def _why_not_kept(weight: Any) -> str | None:
    """Return why a weight can't be kept, or None."""
    if weight is None:
        return "its weight is not a parameter"
    if _is_quantised(weight):
        return None
    if type(weight) not in (nn.Parameter, Tensor) and not hasattr(weight, "placements"):
        return f"its weight is a {type(weight).__name__}"
    return None if weight.is_floating_point() else f"it has {weight.dtype} weights"


def _is_quantised(weight: Any) -> bool:
    return type(weight).__name__ in _QUANTISED and type(weight).__module__.startswith("bitsandbytes.")


def _copy(weight: Tensor, keep: Keep) -> Tensor:
    """Return a copy of a weight, or of this process's shard of it."""
    local = _local(weight)
    if keep == "device" or not local.is_cuda:
        return local.clone()
    # it waits for the device: other streams, deepcopy and pickle may read the copy
    return torch.empty_like(local, device="cpu", pin_memory=True).copy_(local)


def _fingerprint(weight: Any) -> tuple[Any, ...]:
    """Return what tells a dense weight from another one: dtype, shape, and the sum of its bits as integers.

    A quantised weight can't be trained, and bitsandbytes may pack its bytes anew in a forward: only its device counts.
    """
    if _is_quantised(weight):
        return type(weight), weight.device
    local = _local(weight)
    return local.dtype, local.shape, int(local.view(_INTEGERS[local.element_size()]).sum(dtype=torch.int64))


def _local(weight: Any) -> Tensor:
    """Return a weight's values, of a DTensor those on this process; they share its memory."""
    local: Tensor = (weight.to_local() if hasattr(weight, "to_local") else weight).detach()
    return local


def _listed(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
