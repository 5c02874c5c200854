"""Check the windows of layers against their places; each attention reads its own in :mod:`fastpack.layers.attention`.

Upstream masks a layer by its place in ``config.layer_types`` and by ``config.sliding_window``; a packed one reads the
window that the layer was built with. Both are one until somebody moves layers (cuts some out, or replicates them, as
PEFT's ``layer_replication`` does), or changes the config of a model that is built.
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
from fastpack.families.spec import AttentionSpec, LatentAttentionSpec, MixerSpec, SharedAttentionSpec
from fastpack.layers.hf_attention import stock_config
from fastpack.utils.classes import mentions, stock_class
from fastpack.utils.protocols import ConfigLike
from fastpack.utils.replacement import replacement_on

Form = Any
"""What is known of a module that mixes tokens: a spec of attention, a :class:`MixerSpec`, or nothing (None)."""

SLIDING, CHUNKED, FULL = "sliding_attention", "chunked_attention", "full_attention"
_RECURRENT = ("linear_attention", "conv")
"""The types of layers whose mask says what is padding, and hides no later tokens."""
EARLIER = {"mamba": "linear_attention", "attention": FULL}
"""What the configs of Granite's and Nemotron's hybrids call them before transformers 5.13."""


def window_of(module: nn.Module, form: Form) -> int | None:
    """Return an attention module's own window."""
    if not isinstance(form, AttentionSpec) and not hasattr(module, "sliding_window"):
        forward = inspect.unwrap(stock_class(module).forward)
        reads_config = "sliding_window" in forward.__code__.co_consts  # by getattr
        window = getattr(module.config, "sliding_window", None) if reads_config else None
        return window if isinstance(window, int) else None
    flag = "is_sliding" if hasattr(module, "is_sliding") else None  # EXAONE 4 has a window in every layer
    spec = form if isinstance(form, AttentionSpec) else AttentionSpec(window="sliding_window", window_if=flag)
    if spec.window is None or (spec.window_if is not None and not getattr(module, spec.window_if)):
        return None
    window = attrgetter(spec.window)(module) if hasattr(module, spec.window.split(".")[0]) else None
    return window if isinstance(window, int) else None


def masked_size(module: nn.Module, spec: MixerSpec, name: str | None, kind: str) -> int | None:
    """Return the size of a mixer's window or chunk that only its mask applies, in layers that have one.

    Args:
        module: the mixer.
        spec: its spec.
        name: ``spec.window`` or ``spec.chunk``, the name of the attribute, or None.
        kind: the name of such layers in ``layer_types``.
    """
    if name is None:
        return None
    kinds = getattr(module.config, "layer_types", None)
    size: int | None = attrgetter(name)(module)
    return size if kinds is None or spec.in_every_layer or kinds[module.layer_idx] == kind else None


def narrowest_window(backbone: Any, forms: Mapping[int, Form]) -> int | None:
    """Return the window of the layer with the narrowest window or chunk; None if all tokens are seen.

    Args:
        backbone: the backbone.
        forms: the spec of each module that mixes tokens, by the module's ``id``; empty if they are unknown.
    """
    sizes = [] if forms else [getattr(backbone.config.get_text_config(decoder=True), "sliding_window", None)]
    for module in backbone.modules():
        form = forms.get(id(module))
        if isinstance(form, MixerSpec):
            sizes += [masked_size(module, form, form.window, SLIDING), masked_size(module, form, form.chunk, CHUNKED)]
        elif id(module) in forms:
            sizes.append(window_of(module, form))
    return min((size for size in sizes if size is not None), default=None)


@dataclass(frozen=True)
class Misfit:
    """A layer that has another window than stock masks it by: what there is to say, and how to mend it."""

    what: str
    mend: str


def misplaced(backbone: Any, forms: Mapping[int, Form]) -> Iterator[Misfit]:
    """Yield each layer that has, or lacks, a window contrary to its place and the config.

    Args:
        backbone: the backbone.
        forms: the spec of each module that mixes tokens, by the module's ``id``.
    """
    for name, module in backbone.named_modules(remove_duplicate=False):
        if id(module) not in forms:
            continue
        owner, place = _placed(backbone, name)
        if place is None or not _masks_by_place(owner):
            continue
        misfits = (_misfit(config, name, module, forms[id(module)], place) for config in _configs(backbone, owner))
        yield from itertools.islice(filter(None, misfits), 1)


def _masks_by_place(owner: nn.Module) -> bool:
    """Return True where a module picks the mask of each of its layers by the layer's place in the config's list."""
    return mentions(owner, "layer_types") or mentions(owner, "layers_block_type")


def _configs(backbone: Any, owner: Any) -> list[Any]:
    """Return the configs by which the stock model masks: of the layers' owner, and of a wrapper that makes masks."""
    own = owner.config
    outer = own if owner is backbone else backbone.config.get_text_config(decoder=True)
    return [own] if outer is own else [own, outer]


def _misfit(config: ConfigLike, name: str, module: nn.Module, form: Form, place: int) -> Misfit | None:
    kinds = [EARLIER.get(kind, kind) for kind in getattr(config, "layer_types", None) or ()]
    if place >= min(len(kinds), getattr(config, "num_hidden_layers", len(kinds))):
        return None
    asked, size = kinds[place], getattr(config, "sliding_window", None)
    if asked == SLIDING and size is None:
        return None
    own = _kind(module, form, kinds, asked)
    if own not in (None, asked):
        said = f"config.layer_types[{place}], by which the stock model masks it, says {asked}"
        said += ", whose mask lets attention see later tokens" if asked in _RECURRENT else ""
        return Misfit(f"{name} was built for {own}, but {said}", MEND)
    own_size = None if asked != SLIDING or isinstance(form, MixerSpec) else window_of(module, form)
    if own_size not in (None, size):
        said = f"config.sliding_window, by which the stock model masks it, says {size}"
        return Misfit(f"{name} was built for a window of {own_size}, but {said}", f"set that to {own_size}")
    return None


def forms_of(backbone: nn.Module) -> dict[int, Form]:
    """Return the specs of a patched backbone's modules, by the module's ``id``."""
    found: dict[int, Form] = {}
    for module in backbone.modules():
        ours = replacement_on(module)
        form = None if ours is None or not isinstance(ours.spec, _FORMS) else ours.spec
        if form is not None or stock_config(module) is not None:
            found[id(module)] = form
    return found


_FORMS: tuple[type[Any], ...] = (MixerSpec, AttentionSpec, LatentAttentionSpec, SharedAttentionSpec)


def refuse_misplaced(backbone: nn.Module, forms: Mapping[int, Form]) -> None:
    """Raise where layers' windows are not those by which the stock model masks."""
    found = list(misplaced(backbone, forms))
    if found:
        more = f" (and {len(found) - 1} more)" if found[1:] else ""
        raise PatchError(
            f"layers were moved, or their config changed: {found[0].what}{more}. Before the patch, {found[0].mend}. "
            "Nothing was changed."
        )


@dataclass(eq=False)
class LayerOrder:
    """A backbone's layers and their config at the last check, so that the next forward notices a change.

    Attributes:
        owner: the module that has the list of layers, as ``layers``.
        seen: the layers in order, and by each config their types and the size of windows.
    """

    owner: nn.Module
    seen: Looked

    @classmethod
    def of(cls, backbone: nn.Module) -> LayerOrder | None:
        """Return the order of the list by whose places the stock model masks, or None if it does not mask by place."""
        owners = (m for m in backbone.modules() if "layers" in m._modules and _masks_by_place(m))
        owner = next(owners, None)
        return None if owner is None else cls(owner, _look(backbone, owner))

    def check(self, backbone: nn.Module) -> None:
        """Raise where layers were moved, or their config changed, so that their windows are others than it asks for.

        It waits for nobody, and costs a look at each layer's identity and type while nothing was changed.
        """
        now = _look(backbone, self.owner)
        if now == self.seen:
            return
        found = next(misplaced(backbone, forms_of(backbone)), None)
        if found is not None:
            raise PatchError(
                f"layers were moved, or their config changed, after the patch: {found.what}. Call unpatch(model), "
                f"{found.mend}, and patch it."
            )
        self.seen = now


Looked = tuple[list[nn.Module | None], list[tuple[tuple[str, ...], int | None]]]


def _look(backbone: nn.Module, owner: nn.Module) -> Looked:
    held = owner._modules.get("layers")
    layers = [] if held is None else list(held._modules.values())
    said = [
        (tuple(getattr(config, "layer_types", None) or ()), getattr(config, "sliding_window", None))
        for config in _configs(backbone, owner)
    ]
    return layers, said


MEND = (
    "set config.layer_types (or attn_layer_indices, where that is made of these) to the layers' kinds in their present "
    "order, and each layer_idx to its layer's place, or let each layer stand where the config has its kind"
)
"""Behind which stock and packed attention agree again."""


def _placed(backbone: nn.Module, name: str) -> tuple[nn.Module, int | None]:
    """Return the owner of the list of layers that a module is in, and its layer's index; None if it is in no list."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if at is None:
        return backbone, None
    return backbone.get_submodule(".".join(parts[: at - 1])), int(parts[at])


def _kind(module: nn.Module, form: Form, kinds: Any, asked: str) -> str | None:
    """Return the kind of a module in the words of ``layer_types``; None if its place does not ask for a kind."""
    if isinstance(form, MixerSpec) and form.mask is None:
        recurrent = next((kind for kind in kinds if kind in _RECURRENT), None)
        return recurrent if asked in (SLIDING, FULL) else None
    if isinstance(form, MixerSpec):
        masked = (form.window or form.chunk) and not form.in_every_layer
        at = getattr(module, "layer_idx", None)
        return kinds[at] if masked and at is not None and at < len(kinds) else None
    of_config = isinstance(form, AttentionSpec) and (form.window or "").startswith("config.")
    if asked not in (SLIDING, FULL, *_RECURRENT) or (of_config and not {SLIDING, FULL}.issuperset(kinds)):
        return None  # such configs may call full what is masked by a window
    return FULL if window_of(module, form) is None else SLIDING
