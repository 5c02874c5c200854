"""What a family declares: which upstream classes it has, and what each of them computes.

Both hold names and facts, no code. The shared forwards in :mod:`fastpack.layers` read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fastpack.ops.kinds import Rounding
from fastpack.ops.rope import Layout


@dataclass(frozen=True)
class AttentionSpec:
    """Causal self-attention, mostly with rotary positions.

    Attributes:
        qkv: name of the one projection to queries, keys and values; None for ``q_proj``, ``k_proj``, ``v_proj``.
        out: name of the projection behind it.
        gated: whether ``q_proj`` gives each head's queries and, beside them, a gate whose sigmoid multiplies its
            result.
        qk_norm: where the norms of queries and keys act: on each ``head``, on the whole projection (``flat``), on each
            head once it is at its position (``rotated``), or nowhere. A module without them (Cohere without
            ``use_qk_norm``) is taken as it is.
        norms: their names.
        key_scale: name of a factor on the keys, or None.
        rope_layout, rope_in_float32: how positions are applied.
        rope_tables: what cos and sin hold: each angle where its pair is (``whole``), the angles once and once more
            for elements in pairs side by side (``repeated``), or the angles once (``once``).
        rope_if: names of attributes; where there are some, layers without any that holds have no positions. A ``!``
            before a name turns it round.
        window, softcap, sinks: name of an attribute (dotted for one of the config's) that holds it, or None.
        window_if: name of an attribute that is falsy in layers without the window, or None.
        dropout, out_dropout: name of the probability with which scores, and the results behind ``out``, are dropped,
            or None.
    """

    qkv: str | None = None
    out: str = "o_proj"
    gated: bool = False
    qk_norm: Literal["head", "flat", "rotated"] | None = None
    norms: tuple[str, str] = ("q_norm", "k_norm")
    key_scale: str | None = None
    rope_layout: Layout = "half"
    rope_in_float32: bool = False
    rope_tables: Literal["whole", "repeated", "once"] = "whole"
    rope_if: tuple[str, ...] = ()
    window: str | None = None
    window_if: str | None = None
    softcap: str | None = None
    sinks: str | None = None
    dropout: str | None = "attention_dropout"
    out_dropout: str | None = None


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values from a narrow latent.

    Names of the modules are upstream's: ``q_a_proj`` to ``kv_b_proj``. Whether positions turn elements in pairs side
    by side, says the config's ``rope_interleave``.
    """

    out: str = "o_proj"
    dropout: str | None = "attention_dropout"
    out_dropout: str | None = None


@dataclass(frozen=True)
class SharedAttentionSpec:
    """Self-attention whose later layers take the keys and values of an earlier one (Gemma 4).

    Queries, keys and values are normalised in each head; where there is no ``v_proj``, values are the keys' projection.
    """

    out: str = "o_proj"
    dropout: str | None = "attention_dropout"
    out_dropout: str | None = None


AnyAttentionSpec = AttentionSpec | LatentAttentionSpec | SharedAttentionSpec


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
        gate_up: name of the one projection to gate and up, or those of the two; down: that of the last one.
        activation: name of the activation's attribute, None for SiLU by function.
        out_dropout: name of the probability with which the results are dropped, or None.
    """

    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    activation: str | None = "act_fn"
    out_dropout: str | None = None


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder layer: attention, then an MLP, each added to the residual stream.

    Attributes:
        pre_attention, post_attention, pre_mlp, post_mlp: names of the norms before and behind each branch, or None.
        residual_scale: name of the factor on each branch, or None for 1.
        dropouts: names of the dropouts behind attention and MLP, or None.
        mlp: name of the MLP, or of a block of experts; the first of a tuple is its result.
    """

    pre_attention: str | None = "input_layernorm"
    post_attention: str | None = None
    pre_mlp: str | None = "post_attention_layernorm"
    post_mlp: str | None = None
    residual_scale: str | None = None
    dropouts: tuple[str, str] | None = None
    mlp: str = "mlp"


@dataclass(frozen=True)
class HeadSpec:
    """From the last hidden state to the loss: ``logits = softcap(lm_head(hidden) * scale / divisor)``.

    Attributes:
        scale, divisor, softcap: name of an attribute (dotted for one of the config's) that holds it, or None; a softcap
            whose value is None is none.
        balanced: whether a load-balancing loss over the routers' logits is added, where they are asked for.
    """

    scale: str | None = None
    divisor: str | None = None
    softcap: str | None = None
    balanced: bool = False


@dataclass(frozen=True)
class MixerSpec:
    """A module that mixes tokens and knows no boundaries: it is given one row a sequence, padded on the right.

    Attributes:
        mask: what it gets in the place of a mask: floats ``added`` to the scores, bools of what is ``seen`` or of what
            is ``hidden``, or None.
        window, chunk: name of an attribute (dotted for one of the config's) that holds how many tokens a query sees,
            or how many are in a chunk, where only the mask knows of it. Where the config lists ``layer_types``, it
            holds for ``sliding_attention`` or ``chunked_attention`` alone, unless ``in_every_layer``.
        alibi: name of an argument ``[H, 1, T]``, which becomes ``[n H, 1, L]``.
        kept: names of arguments that are handed on as they are.
        left_out: names of keywords that it is not given, such as positions that it makes itself.
        counts_from: name of an attribute that holds the padding id, where it makes positions that count from the next
            number on and leave that id out; None for one that makes none, or from 0.
        states: how many states for a cache it returns behind its result, which are dropped.
        carried: name of the argument through which the next of its kind is handed what this one returns last: picked
            keys, as places in a row.
        scan: what its forward mixes tokens with, where kernels that know boundaries can do that on packed tokens
            (:mod:`fastpack.layers.mixers.packed`): a causal ``conv`` alone, or that and a recurrence; None for others.
    """

    mask: Literal["added", "seen", "hidden"] | None = None
    window: str | None = None
    chunk: str | None = None
    in_every_layer: bool = False
    alibi: str | None = None
    kept: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    counts_from: str | None = None
    states: int = 0
    carried: str | None = None
    scan: Literal["conv", "gated_delta", "kda", "ssd"] | None = None


Tier = Literal["fast", "varlen", "re-padded mixer", "re-padded model"]
TIERS: tuple[Tier, ...] = ("fast", "varlen", "re-padded mixer", "re-padded model")
"""From the highest to the lowest."""
Spec = AnyAttentionSpec | NormSpec | MlpSpec | DecoderSpec | HeadSpec


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
        refused_if: settings of the config with which the family can't be exact, and why.
        repadded_if: names of settings of the config with any of which the family is one of re-padded models.
        alibi: name of the backbone's method that makes ALiBi's biases of a 2-D mask, or None.
        since: the first release of transformers that has the family as the row says, as (major, minor), and what it is
            in earlier ones; None for any.
        unmasked: whether its backbone is given no mask, since it builds one of its own, or takes none.
        mask_window: name of a setting of the config: a window that upstream has in its mask alone, in layers of
            sliding attention where the config lists ``layer_types``.
        two_way_marks: an argument ``[B, S]`` that marks, with other numbers than 0, tokens that attend in both
            directions (of images, or of a prompt); or None.
        two_way_if: a setting of the text's config, and its value, with which these are read; None for any.
        unshifted: class name of a head whose own loss compares each token's logits with the label in the same place,
            not with the next one (decoders of encoder-decoders, mostly); empty for none.
        of_rows: names of arguments that speak of rows, which a patched model refuses: of shape ``[B]``,
            ``[B, patches]`` or ``[B, S, S]``, or a mask the other way round.
        switched_off: names of keywords that ask for a cache where they are left out, and are passed as False.
        shares_states: whether layers hand keys and values to later ones through keywords, which reentrant checkpointing
            loses, stock too.
        uncounted: whether it runs layers several times or not at all, or has products that no module shows: there is no
            formula for its operations.
        routers: class names of the modules in whose forward experts are chosen for each token, by ``torch.topk`` or
            ``max``: choices flip with rounding, and comparisons hold them.
        fast: the classes that get fast forwards, and what each computes (:mod:`fastpack.families.forms`): where its
            source is one that was proved (:mod:`fastpack.families.lock`), or a twin of it matches.
        earlier: what some of these computed in earlier releases of transformers instead.
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
    repadded_if: tuple[str, ...] = ()
    refused_if: dict[str, str] = field(default_factory=dict)
    alibi: str | None = None
    unmasked: bool = False
    since: tuple[tuple[int, int], str] | None = None
    mask_window: str | None = None
    two_way_marks: str | None = None
    two_way_if: tuple[str, object] | None = None
    unshifted: str = ""
    of_rows: tuple[str, ...] = ()
    switched_off: tuple[str, ...] = ()
    shares_states: bool = False
    uncounted: bool = False
    routers: tuple[str, ...] = ()
    fast: Mapping[str, Spec] = field(default_factory=dict)
    earlier: Mapping[str, Spec] = field(default_factory=dict)

    @property
    def tier(self) -> Tier:
        """The highest one that its modules can reach."""
        if self.repadded:
            return "re-padded model"
        if self.mixers:
            return "re-padded mixer"
        return "fast" if self.fast.keys() >= set(self.attention) else "varlen"

    @property
    def needs_scope(self) -> bool:
        """True where the packing must reach modules otherwise than by keyword."""
        return self.scoped or self.repadded or bool(self.mixers)

    @property
    def module(self) -> str:
        """Dotted name of the upstream module that defines the classes."""
        package = self.package or self.model_type
        return f"transformers.models.{package}.modeling_{self.file or package}"
