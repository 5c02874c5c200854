"""Check that each layer's window fits the layer's place; :mod:`fastpack.layers.attention` reads the window itself.

The stock model chooses a layer's mask by the layer's place in ``config.layer_types`` and by ``config.sliding_window``.
A packed layer reads the window that it was built with. The two agree until a user moves layers (removes some, or
replicates them with PEFT's ``layer_replication``) or changes the config of a built model.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import nn

from fastpack.errors import PatchError
from fastpack.families.mixer_spec import MixerSpec
from fastpack.families.spec import AttentionSpec, LatentAttentionSpec, SharedAttentionSpec
from fastpack.layers.hf_attention import stock_config
from fastpack.utils.classes import mentions, stock_class
from fastpack.utils.protocols import ConfigLike
from fastpack.utils.replacement import replacement_on

MixingSpec = Any
"""The spec of a module that mixes tokens: one of attention, a :class:`MixerSpec`, or None if it is not known."""

SLIDING, CHUNKED, FULL = "sliding_attention", "chunked_attention", "full_attention"
_RECURRENT = ("linear_attention", "conv")
"""The types of layers whose mask only marks padding: it hides no later tokens."""
EARLIER = {"mamba": "linear_attention", "attention": FULL}
"""Names of layer types in configs of Granite's and Nemotron's hybrids before transformers 5.13, with today's names."""


def window_of(module: nn.Module, spec: MixingSpec) -> int | None:
    """Return the window that an attention module was built with, or None."""
    if not isinstance(spec, AttentionSpec) and not hasattr(module, "sliding_window"):
        forward = inspect.unwrap(stock_class(module).forward)
        reads_config = "sliding_window" in forward.__code__.co_consts  # the name in a getattr
        window = getattr(module.config, "sliding_window", None) if reads_config else None
        return window if isinstance(window, int) else None
    flag = "is_sliding" if hasattr(module, "is_sliding") else None  # EXAONE 4 has a window in every layer
    attention = spec if isinstance(spec, AttentionSpec) else AttentionSpec(window="sliding_window", window_if=flag)
    if attention.window is None or (attention.window_if is not None and not getattr(module, attention.window_if)):
        return None
    window = attrgetter(attention.window)(module) if hasattr(module, attention.window.split(".")[0]) else None
    return window if isinstance(window, int) else None


def masked_size(module: nn.Module, spec: MixerSpec, name: str | None, kind: str) -> int | None:
    """Return the size of the window or chunk in a mixer's mask, or None if the layer has none.

    Args:
        module: the mixer.
        spec: the mixer's spec in its family's row.
        name: ``spec.window`` or ``spec.chunk``: the attribute that holds the size, or None.
        kind: the type in ``layer_types`` of layers with a window, or of layers with chunks.
    """
    if name is None:
        return None
    kinds = getattr(module.config, "layer_types", None)
    size: int | None = attrgetter(name)(module)
    return size if kinds is None or spec.in_every_layer or kinds[module.layer_idx] == kind else None


def narrowest_window(backbone: Any, specs: Mapping[int, MixingSpec]) -> int | None:
    """Return the size of the narrowest window or chunk of all layers, in tokens, or None if no layer has one.

    Args:
        backbone: the decoder.
        specs: the spec of each module that mixes tokens, by the module's ``id``; empty if these modules are not known.
    """
    sizes = [] if specs else [getattr(backbone.config.get_text_config(decoder=True), "sliding_window", None)]
    for module in backbone.modules():
        spec = specs.get(id(module))
        if isinstance(spec, MixerSpec):
            sizes += [masked_size(module, spec, spec.window, SLIDING), masked_size(module, spec, spec.chunk, CHUNKED)]
        elif id(module) in specs:
            sizes.append(window_of(module, spec))
    return min((size for size in sizes if size is not None), default=None)


@dataclass(frozen=True)
class WindowMismatch:
    """A layer whose window differs from its mask in the stock model: a description, and how to fix it."""

    what: str
    mend: str


def misplaced(backbone: Any, specs: Mapping[int, MixingSpec], composite: Any = None) -> Iterator[WindowMismatch]:
    """Yield a mismatch for each layer whose window is not the window that its place and the config require.

    Args:
        backbone: the decoder.
        specs: the spec of each module that mixes tokens, by the module's ``id``.
        composite: the module that makes the masks of its text model, the backbone, or None.
    """
    for name, module in backbone.named_modules(remove_duplicate=False):
        if id(module) not in specs:
            continue
        owner, place = _placed(backbone, name)
        if place is None or not _masks_by_place(owner):
            continue
        mismatches = (
            _mismatch(config, name, module, specs[id(module)], place)
            for config in _configs(composite or backbone, owner)
        )
        yield from itertools.islice(filter(None, mismatches), 1)


def _masks_by_place(owner: nn.Module) -> bool:
    """Return whether a module picks the mask of each of its layers by the layer's place in the config's list."""
    return mentions(owner, "layer_types") or mentions(owner, "layers_block_type")


def mask_maker(composite: Any) -> Any:
    """Return a composite whose own forward makes the masks of its text model; else None."""
    makes = composite is not None and any(mentions(composite, name) for name in _MASK_FUNCTIONS)
    return composite if makes else None


_MASK_FUNCTIONS = ("create_causal_mask", "create_masks_for_generate")


def _configs(outer: Any, owner: Any) -> list[Any]:
    """Return the configs from which the stock model makes masks: the layer owner's, and that of a wrapper, if any."""
    own = owner.config
    wrapper = own if owner is outer else outer.config.get_text_config(decoder=True)
    return [own] if wrapper is own else [own, wrapper]


def _mismatch(config: ConfigLike, name: str, module: nn.Module, spec: MixingSpec, place: int) -> WindowMismatch | None:
    kinds = [EARLIER.get(kind, kind) for kind in getattr(config, "layer_types", None) or ()]
    if place >= min(len(kinds), getattr(config, "num_hidden_layers", len(kinds))):
        return None
    expected, size = kinds[place], getattr(config, "sliding_window", None)
    if expected == SLIDING and size is None:
        return None
    own = _kind(module, spec, kinds, expected)
    if own not in (None, expected):
        setting = f"config.layer_types[{place}], from which the stock model makes its mask, says {expected}"
        setting += ", whose mask lets attention see later tokens" if expected in _RECURRENT else ""
        return WindowMismatch(f"{name} was built for {own}, but {setting}", MEND)
    own_size = None if expected != SLIDING or isinstance(spec, MixerSpec) else window_of(module, spec)
    if own_size not in (None, size):
        setting = f"config.sliding_window, from which the stock model makes its mask, says {size}"
        return WindowMismatch(
            f"{name} was built for a window of {own_size}, but {setting}", f"set config.sliding_window to {own_size}"
        )
    return None


def specs_of(backbone: nn.Module) -> dict[int, MixingSpec]:
    """Return the specs of a patched backbone's token-mixing modules, by the module's ``id``."""
    specs: dict[int, MixingSpec] = {}
    for module in backbone.modules():
        replacement = replacement_on(module)
        spec = None if replacement is None or not isinstance(replacement.spec, _MIXING_SPECS) else replacement.spec
        if spec is not None or stock_config(module) is not None:
            specs[id(module)] = spec
    return specs


_MIXING_SPECS: tuple[type[Any], ...] = (MixerSpec, AttentionSpec, LatentAttentionSpec, SharedAttentionSpec)


def refuse_misplaced(backbone: nn.Module, specs: Mapping[int, MixingSpec], composite: Any = None) -> None:
    """Raise if layers' windows differ from the stock model's masks; arguments are those of :func:`misplaced`."""
    mismatches = list(misplaced(backbone, specs, composite))
    if mismatches:
        first, more = mismatches[0], f" (and {len(mismatches) - 1} more)" if mismatches[1:] else ""
        raise PatchError(
            f"layers were moved, or their config changed: {first.what}{more}. Before the patch, {first.mend}. "
            "Nothing was changed."
        )


@dataclass(eq=False)
class LayerOrder:
    """A backbone's layers, and their settings in the config, at the last check, so that a forward notices changes.

    Attributes:
        owner: the module that holds the list ``layers``.
        composite: the module that makes the masks of its text model, the backbone, or None.
        checked: the layers in order; and for each config, the layers' types and the window size.
    """

    owner: nn.Module
    composite: Any
    checked: _Layout

    @classmethod
    def of(cls, backbone: nn.Module, composite: Any = None) -> LayerOrder | None:
        """Return the order of the layers if the stock model chooses their masks by place, else None."""
        owners = (m for m in backbone.modules() if "layers" in m._modules and _masks_by_place(m))
        owner = next(owners, None)
        return None if owner is None else cls(owner, composite, _layout(composite or backbone, owner))

    def check(self, backbone: nn.Module) -> None:
        """Raise if layers were moved or their config changed, so that windows differ from the config.

        It never waits for the device. While nothing has changed, it compares each layer's identity and type.
        """
        now = _layout(self.composite or backbone, self.owner)
        if now == self.checked:
            return
        mismatch = next(misplaced(backbone, specs_of(backbone), self.composite), None)
        if mismatch is not None:
            raise PatchError(
                f"layers were moved, or their config changed, after the patch: {mismatch.what}. Call unpatch(model), "
                f"{mismatch.mend}, and patch it again."
            )
        self.checked = now


_Layout = tuple[list[nn.Module | None], list[tuple[tuple[str, ...], int | None]]]


def _layout(outer: nn.Module, owner: nn.Module) -> _Layout:
    module_list = owner._modules.get("layers")
    layers = [] if module_list is None else list(module_list._modules.values())
    settings = [
        (tuple(getattr(config, "layer_types", None) or ()), getattr(config, "sliding_window", None))
        for config in _configs(outer, owner)
    ]
    return layers, settings


MEND = (
    "set config.layer_types (or attn_layer_indices, if the config has these instead) to the layers' kinds in their "
    "present order, and each layer_idx to its layer's place; or move each layer to where the config has its kind"
)
"""The fix for moved layers: stock and packed attention then agree again."""


def _placed(backbone: nn.Module, name: str) -> tuple[nn.Module, int | None]:
    """Return the owner of the list of layers that holds a module, and the layer's place; without a list, None."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if at is None:
        return backbone, None
    return backbone.get_submodule(".".join(parts[: at - 1])), int(parts[at])


def _kind(module: nn.Module, spec: MixingSpec, kinds: Any, expected: str) -> str | None:
    """Return a module's own layer type, as in ``layer_types``, or None if any type at its place is right."""
    if isinstance(spec, MixerSpec) and spec.mask is None:
        recurrent = next((kind for kind in kinds if kind in _RECURRENT), None)
        return recurrent if expected in (SLIDING, FULL) else None
    if isinstance(spec, MixerSpec):
        masked = (spec.window or spec.chunk) and not spec.in_every_layer
        at = getattr(module, "layer_idx", None)
        return kinds[at] if masked and at is not None and at < len(kinds) else None
    of_config = isinstance(spec, AttentionSpec) and (spec.window or "").startswith("config.")
    if expected not in (SLIDING, FULL, *_RECURRENT) or (of_config and not {SLIDING, FULL}.issuperset(kinds)):
        return None  # such configs may give the type full to a layer that is masked by a window
    return FULL if window_of(module, spec) is None else SLIDING
