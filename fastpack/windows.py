"""Windows of layers against their places.

Upstream masks a layer by its place in ``config.layer_types``; a packed one reads the window that the layer was built
with. Both are one until somebody moves layers: cuts some out, or replicates them (PEFT's ``layer_replication``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import nn

from fastpack.classes import mentions
from fastpack.errors import PatchError
from fastpack.families.spec import AttentionSpec, LatentAttentionSpec, MixerSpec, SharedAttentionSpec
from fastpack.layers.interface import stock_config
from fastpack.layers.stock import bound_with

Form = Any
"""What is known of a module that mixes tokens: a spec of attention, a :class:`MixerSpec`, or nothing (None)."""

SLIDING, FULL = "sliding_attention", "full_attention"


def window_of(module: Any, form: Form) -> int | None:
    """The window that an attention module has of its own."""
    spec = form if isinstance(form, AttentionSpec) else AttentionSpec(window="sliding_window")
    if spec.window is None or (spec.window_if is not None and not getattr(module, spec.window_if)):
        return None
    window = attrgetter(spec.window)(module) if hasattr(module, spec.window.split(".")[0]) else None
    return window if isinstance(window, int) else None


def misplaced(backbone: Any, forms: Mapping[int, Form]) -> Iterator[str]:
    """What there is to say of each layer that has, or lacks, a window other than its place asks for.

    Args:
        forms: the form of each module that mixes tokens, by the module's ``id``.
    """
    config = backbone.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ()
    layers = min(len(kinds), getattr(config, "num_hidden_layers", len(kinds)))
    for name, module in backbone.named_modules(remove_duplicate=False):
        if id(module) not in forms:
            continue
        owner, place = _placed(backbone, name)
        if place is None or place >= layers or not mentions(owner, "layer_types"):
            continue
        own, asked = _kind(module, forms[id(module)], kinds), kinds[place]
        if own in (None, asked) or (asked == SLIDING and getattr(config, "sliding_window", None) is None):
            continue
        yield (
            f"{name} was built for {own}, but config.layer_types[{place}], by which the stock model masks it, says "
            f"{asked}"
        )


def forms_of(backbone: nn.Module) -> dict[int, Form]:
    """The forms of a patched backbone's modules, as they were bound."""
    found: dict[int, Form] = {}
    for module in backbone.modules():
        form = next(filter(None, (bound_with(module, kind) for kind in _FORMS)), None)
        if form is not None or stock_config(module) is not None:
            found[id(module)] = form
    return found


_FORMS: tuple[type[Any], ...] = (MixerSpec, AttentionSpec, LatentAttentionSpec, SharedAttentionSpec)


@dataclass(eq=False)
class LayerOrder:
    """The list of a backbone's layers as it was when it was last looked at: moved ones are seen at the next forward.

    Attributes:
        owner: what holds the list, as ``layers``.
        seen: its layers in order.
    """

    owner: nn.Module
    seen: list[nn.Module | None]

    @classmethod
    def of(cls, backbone: nn.Module) -> LayerOrder | None:
        """That of the list by whose places the stock model masks; None where it goes by no place."""
        owners = (m for m in backbone.modules() if "layers" in m._modules and mentions(m, "layer_types"))
        owner = next(owners, None)
        return None if owner is None else cls(owner, _layers(owner))

    def check(self, backbone: nn.Module) -> None:
        """Raise where layers were moved so that their windows are others than their places ask for.

        It waits for nobody, and costs a look at each layer's identity while none was moved.
        """
        now = _layers(self.owner)
        if now == self.seen:
            return
        found = next(misplaced(backbone, forms_of(backbone)), None)
        if found is not None:
            raise PatchError(f"layers were moved after the patch: {found}. Call unpatch(model), {MEND}, and patch it.")
        self.seen = now


def _layers(owner: nn.Module) -> list[nn.Module | None]:
    held = owner._modules.get("layers")
    return [] if held is None else list(held._modules.values())


MEND = "set config.layer_types to the layers' kinds in their present order, and each layer_idx to its layer's place"
"""Behind which stock and packed attention agree again."""


def _placed(backbone: nn.Module, name: str) -> tuple[nn.Module, int | None]:
    """What holds the list of layers that a module is in, and its layer's place there; None where it is in no list."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if at is None:
        return backbone, None
    return backbone.get_submodule(".".join(parts[: at - 1])), int(parts[at])


def _kind(module: Any, form: Form, kinds: Any) -> str | None:
    """What a module computes as, in the words of ``layer_types``; None where they don't matter to it."""
    if isinstance(form, MixerSpec):
        masked = (form.window or form.chunk) and not form.in_every_layer
        at = getattr(module, "layer_idx", None)
        return kinds[at] if masked and at is not None and at < len(kinds) else None
    if not {SLIDING, FULL}.issuperset(kinds):
        return None
    return FULL if window_of(module, form) is None else SLIDING
