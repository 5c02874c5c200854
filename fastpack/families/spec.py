"""What a family declares: which upstream classes it has, and what each of them computes.

A declaration holds names and facts, no code. The shared forwards in :mod:`fastpack.layers` read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fastpack.ops.norm import Rounding
from fastpack.ops.rope import Layout


@dataclass(frozen=True)
class AttentionSpec:
    """Causal self-attention with rotary positions.

    Attributes:
        qkv: name of the one projection to queries, keys and values; None for ``q_proj``, ``k_proj``, ``v_proj``.
        qk_norm: where ``q_norm`` and ``k_norm`` act: on each ``head``, on the whole projection (``flat``), or
            nowhere. A module that has none of the two (Cohere without ``use_qk_norm``) is taken as it is.
        rope_layout, rope_in_float32: how positions are applied.
        rope_switch: name of an attribute that is falsy in layers without rotary positions.
        window, softcap: name of an attribute (dotted for one of the config's) that holds it, or None.
    """

    qkv: str | None = None
    qk_norm: Literal["head", "flat"] | None = None
    rope_layout: Layout = "half"
    rope_in_float32: bool = False
    rope_switch: str | None = None
    window: str | None = None
    softcap: str | None = None


@dataclass(frozen=True)
class NormSpec:
    """Root-mean-square or layer normalisation; see :mod:`fastpack.ops.norm`."""

    kind: Literal["rms", "layer"] = "rms"
    eps: str = "variance_epsilon"
    rounding: Rounding = "before"
    unit_offset: bool = False


@dataclass(frozen=True)
class MlpSpec:
    """A gated MLP: ``down(activation(gate(x)) * up(x))``.

    Attributes:
        gate_up: name of the one projection to gate and up; None for ``gate_proj`` and ``up_proj``.
        activation: name of the activation's attribute.
    """

    gate_up: str | None = None
    activation: str = "act_fn"


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder layer: attention, then an MLP, each added to the residual stream.

    Attributes:
        pre_attention, post_attention, pre_mlp, post_mlp: names of the norms before and behind each branch, or None.
        residual_scale: name of the factor on each branch, or None for 1.
        dropouts: names of the dropouts behind attention and MLP, or None.
    """

    pre_attention: str | None = "input_layernorm"
    post_attention: str | None = None
    pre_mlp: str | None = "post_attention_layernorm"
    post_mlp: str | None = None
    residual_scale: str | None = None
    dropouts: tuple[str, str] | None = None


@dataclass(frozen=True)
class HeadSpec:
    """From the last hidden state to the loss: ``logits = softcap(lm_head(hidden) * scale / divisor)``.

    Attributes:
        scale, divisor, softcap: name of an attribute (dotted for one of the config's) that holds it, or None; a softcap
            whose value is None is none.
        experts: whether a load-balancing loss over router logits is added.
    """

    scale: str | None = None
    divisor: str | None = None
    softcap: str | None = None
    experts: bool = False


@dataclass(frozen=True)
class MixerSpec:
    """A module that mixes tokens and knows no boundaries: it is given one row a sequence, padded on the right.

    Attributes:
        mask: what it gets in the place of a mask: floats ``added`` to the scores, bools of what is ``seen`` or of what
            is ``hidden``, or None.
        window, chunk: name of an attribute (dotted for one of the config's) that holds how many tokens a query sees,
            or how many are in a chunk, where only the mask knows of it. Where the config lists ``layer_types``, it
            holds for ``sliding_attention`` or ``chunked_attention`` alone.
        alibi: name of an argument ``[H, 1, T]``, which becomes ``[n H, 1, L]``.
        kept: names of arguments that are handed on as they are.
        left_out: names of keywords that it is not given, such as positions that it makes itself.
        states: how many states for a cache it returns behind its result, which are dropped.
    """

    mask: Literal["added", "seen", "hidden"] | None = None
    window: str | None = None
    chunk: str | None = None
    alibi: str | None = None
    kept: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    states: int = 0


Rung = Literal["fast", "varlen", "re-padded mixer", "re-padded model"]
Spec = AttentionSpec | NormSpec | MlpSpec | DecoderSpec | HeadSpec


@dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
        model_type: transformers' name of it.
        backbone: class name of the module that the heads call.
        attention: class names of its attention modules, each of which calls transformers' attention interface.
        mixers: what else mixes tokens, by class name, one for each sequence run by the stock forward.
        repadded: whether the whole backbone runs on rows of equal length, since nobody can see where it mixes tokens.
        scoped: whether a module, or the head, drops the keyword ``packed_seq_lens`` on its way to the attention.
        package: transformers' sub-package, where it is not the model_type; file: that of the modeling code, likewise.
        by_choice: whether the config's ``is_decoder`` says that it is causal; else it is an encoder.
        repadded_if: name of a setting of the config with which the family is one of re-padded models, or None.
        alibi: name of the backbone's method that makes ALiBi's biases of a 2-D mask, or None.
        unmasked: whether its backbone is given no mask, since it builds one of its own, or takes none.
        fast: what each class with a fast forward computes; empty for a family of the varlen rung.
        proved: hashes (:func:`fastpack.families.source_hash`) of the upstream forwards that the fast forwards were
            proved equal to, by class name. A class whose source has another hash keeps its stock forward.
    """

    model_type: str
    backbone: str
    attention: tuple[str, ...] = ()
    package: str = ""
    mixers: dict[str, MixerSpec] = field(default_factory=dict)
    repadded: bool = False
    scoped: bool = False
    file: str = ""
    by_choice: bool = False
    repadded_if: str | None = None
    alibi: str | None = None
    unmasked: bool = False
    fast: dict[str, Spec] = field(default_factory=dict)
    proved: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def rung(self) -> Rung:
        """The highest one that its modules can reach."""
        if self.repadded:
            return "re-padded model"
        if self.mixers:
            return "re-padded mixer"
        return "fast" if self.fast else "varlen"

    @property
    def needs_scope(self) -> bool:
        """True where the packing must reach modules otherwise than by keyword."""
        return self.scoped or self.repadded or bool(self.mixers)

    @property
    def module(self) -> str:
        """Dotted name of the upstream module that defines the classes."""
        package = self.package or self.model_type
        return f"transformers.models.{package}.modeling_{self.file or package}"
