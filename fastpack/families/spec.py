"""The declaration of a family: its upstream classes, and a spec of what each of them computes.

Declarations hold names and facts, no code. The shared forwards in :mod:`fastpack.layers` read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fastpack.families.mixer_spec import MixerSpec
from fastpack.ops.expert_operands import Columns
from fastpack.ops.kinds import Rounding
from fastpack.ops.rope import Layout
from fastpack.packing.two_way import TwoWay


@dataclass(frozen=True)
class AttentionSpec:
    """Causal self-attention, mostly with rotary positions.

    Attributes:
        qkv: the name of one projection to queries, keys and values; None for ``q_proj``, ``k_proj``, ``v_proj``.
        out: the name of the output projection.
        gated: whether ``q_proj`` also gives a gate for each head, whose sigmoid multiplies the head's result.
        gate: the name of another projection to such a gate, or to one number for each head; None if there is none.
        qk_norm: where the norms of queries and keys act: on each ``head``, on the whole projection (``flat``), on each
            head after RoPE (``rotated``), or None. A module without the norms (Cohere without ``use_qk_norm``) has
            none, whatever this says.
        flat_if: an attribute and its value with which the norms act on the whole projection, or None.
        norms: the names of these norms.
        key_scale: the name of a factor on the keys, or None.
        query_scale: the name of a factor on the queries behind their norm, or None.
        scales_by_position: whether queries grow with their positions, as the config's ``rope_parameters`` say.
        rope_layout, rope_in_float32: see :func:`fastpack.ops.rope.apply_rope`.
        rope_tables: the layout of cos and sin: each angle at both elements of its pair (``whole``), all angles twice
            although pairs are adjacent (``repeated``), or each angle once (``once``).
        rope_if: names of attributes. If there are any, a layer has RoPE only if one of them is true; a ``!`` before a
            name negates it.
        window, softcap, sinks: the name of the attribute that holds this value (dotted for an attribute of the config),
            or None.
        window_if: the name of an attribute that is falsy in layers without the window, or None.
        dropout, out_dropout: the name of the probability with which scores (``dropout``) or results of ``out``
            (``out_dropout``) are dropped, or None.
        two_way: how every layer uses the blocks of a batch that has some (images); None if it is causal in any batch.
    """

    qkv: str | None = None
    out: str = "o_proj"
    gated: bool = False
    gate: str | None = None
    qk_norm: Literal["head", "flat", "rotated"] | None = None
    flat_if: tuple[str, str] | None = None
    norms: tuple[str, str] = ("q_norm", "k_norm")
    key_scale: str | None = None
    query_scale: str | None = None
    scales_by_position: bool = False
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
    two_way: TwoWay | None = None


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values from a narrow latent.

    The modules have upstream's names, ``q_a_proj`` to ``kv_b_proj``. The config's ``rope_interleave`` says whether RoPE
    rotates adjacent elements.

    Attributes:
        rotates: whether parts of queries and keys are rotated; else no layer has positions (Kimi Linear).
        out, scales_by_position, dropout, out_dropout: as in :class:`AttentionSpec`.
    """

    rotates: bool = True
    out: str = "o_proj"
    scales_by_position: bool = False
    dropout: str | None = "attention_dropout"
    out_dropout: str | None = None


@dataclass(frozen=True)
class SharedAttentionSpec:
    """Self-attention whose later layers use the keys and values of an earlier one (Gemma 4).

    Queries, keys and values are normalised in each head. Without a ``v_proj`` the values are the keys' projection.

    Attributes:
        out, dropout, out_dropout: as in :class:`AttentionSpec`.
        two_way: as in :class:`AttentionSpec`.
        two_way_if: the module's attribute that is set in the layers which use blocks, the others being causal; None
            for all layers.
    """

    out: str = "o_proj"
    dropout: str | None = "attention_dropout"
    out_dropout: str | None = None
    two_way: TwoWay | None = None
    two_way_if: str | None = None


AnyAttentionSpec = AttentionSpec | LatentAttentionSpec | SharedAttentionSpec


@dataclass(frozen=True)
class NormSpec:
    """Root-mean-square or layer normalisation; see :mod:`fastpack.ops.norm`.

    Attributes:
        kind: the normalisation.
        eps: the name of the attribute that holds epsilon.
        rounding, unit_offset: see :func:`fastpack.ops.norm.rms_norm`.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: str = "variance_epsilon"
    rounding: Rounding = "before"
    unit_offset: bool = False


@dataclass(frozen=True)
class GatedNormSpec:
    """Root-mean-square normalisation with a gate; see :mod:`fastpack.ops.gated_norm`.

    Attributes:
        gate_first: whether the gate comes before the normalisation.
        activation: the gate's activation.
        rounding: whether x is rounded to its dtype before the weight is applied, or only after everything.
        group: the name of the attribute that holds the width of a group, or None for one group.
    """

    gate_first: bool = False
    activation: Literal["silu", "sigmoid"] = "silu"
    rounding: Rounding = "before"
    group: str | None = None


@dataclass(frozen=True)
class MlpSpec:
    """A gated MLP: ``down(activation(gate(x)) * up(x))``.

    Attributes:
        gate_up: the name of one projection to gate and up, or the names of two.
        down: the name of the last projection.
        activation: the name of the activation's attribute; None if the forward calls SiLU as a function.
        out_dropout: the name of the probability with which results are dropped, or None.
    """

    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    activation: str | None = "act_fn"
    out_dropout: str | None = None


@dataclass(frozen=True)
class ExpertsSpec:
    """A block of experts: the sum over a token's experts of ``weight * down(gated(inner(x)))``.

    Its forward takes the tokens ``[T, H]``, the experts that each has chosen ``[T, K]``, and their weights ``[T, K]``.
    The weights of all experts are stacked. For the gated unit see :class:`fastpack.ops.expert_operands.Gate`.

    Attributes:
        inner, down: the names of both stacks. A stack's bias has its name, and ``_bias`` after it.
        transposed: whether stacks are ``[E, in, out]``; else they are ``[E, out, in]``.
        bias: whether both layers have a bias.
        columns: where the gate is in the result of ``inner``.
        activation: the name of the activation's attribute; None if the forward calls SiLU as a function.
        alpha, limit: the name of the attribute that holds this value of the gated unit, or None.
        offset, clamps_after: as in the gated unit.
        mxfp4: the name of transformers' class for the same block with stacks in MXFP4, or None.
    """

    inner: str = "gate_up_proj"
    down: str = "down_proj"
    transposed: bool = False
    bias: bool = False
    columns: Columns = "halves"
    activation: str | None = "act_fn"
    alpha: str | None = None
    limit: str | None = None
    offset: float = 0.0
    clamps_after: bool = False
    mxfp4: str | None = None


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder layer: attention, then an MLP, each added to the residual stream.

    Attributes:
        pre_attention, post_attention, pre_mlp, post_mlp: the names of the norms before and after each branch, or None.
        residual_scale: the name of the factor on each branch, or None for 1.
        dropouts: the names of the dropouts after attention and MLP, or None.
        mlp: the name of the MLP or the block of experts. If that returns a tuple, its first item is the result.
        mixer: the name of the mixer that some layers have in place of attention, or None. Such a layer has no
            norm after a branch, no factor and no dropout.
    """

    pre_attention: str | None = "input_layernorm"
    post_attention: str | None = None
    pre_mlp: str | None = "post_attention_layernorm"
    post_mlp: str | None = None
    residual_scale: str | None = None
    dropouts: tuple[str, str] | None = None
    mlp: str = "mlp"
    mixer: str | None = None


@dataclass(frozen=True)
class HeadSpec:
    """A language-model head: ``logits = softcap(lm_head(hidden) * scale / divisor)``, then the loss.

    Attributes:
        scale, divisor, softcap: the name of the attribute that holds this value (dotted for an attribute of the
            config), or None. The value of a softcap may be None too.
        balanced: whether a load-balancing loss over the routers' logits is added, if these logits are requested.
    """

    scale: str | None = None
    divisor: str | None = None
    softcap: str | None = None
    balanced: bool = False


Tier = Literal["fast", "varlen", "re-padded mixer", "re-padded model"]
TIERS: tuple[Tier, ...] = ("fast", "varlen", "re-padded mixer", "re-padded model")
"""All tiers, from the highest to the lowest."""
Spec = AnyAttentionSpec | NormSpec | GatedNormSpec | MlpSpec | ExpertsSpec | DecoderSpec | HeadSpec


@dataclass(frozen=True)
class BlockSpec:
    """How a batch says which tokens see each other in both directions: the blocks of attention.

    Attributes:
        argument: the argument ``[B, S]`` that holds a type for each token.
        types: the types of the tokens that are in blocks.
        setting: a setting of the text model's config, and the value with which there are blocks; None if there always
            are.
        one_each: whether all such tokens of a sequence are one block; else each run of neighbours is one.
        required: why a batch can't come without the argument; empty if it can, and then has no blocks.
    """

    argument: str
    types: tuple[int, ...] = (1,)
    setting: tuple[str, object] | None = None
    one_each: bool = False
    required: str = ""


@dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
        model_type: the name in transformers.
        backbone: the class name of the module that the heads call.
        attention: the class names of attention modules that call transformers' attention interface.
        package: the sub-package of transformers, if its name is not ``model_type``.
        mixers: the other modules that mix tokens, by class name; their stock forward runs on one row for each sequence.
        repadded: whether the whole backbone runs on rows of equal length, since no module of it can be wrapped alone.
        drops_packing: whether a module, or the head, drops the keyword ``packed_seq_lens`` on its way to the attention.
        file: the name of the modeling file, if it is not that of the sub-package.
        causal_if_decoder: whether the model is causal only if its config has ``is_decoder=True``, and an encoder
            otherwise.
        repadded_if: the names of config settings; if any of them is set, the family is a re-padded model.
        refused_if: the config settings with which the family can't be exact, each with its reason.
        alibi: the name of the backbone's method that makes ALiBi's biases from a 2-D mask, or None.
        masks_by: the name of the backbone's method that builds a T x T mask from the 2-D one, or None; a patched one
            builds none.
        unmasked: whether the backbone gets no mask, since it builds its own or takes none.
        since: the first release of transformers for which this row is true, as (major, minor), and what the family does
            in earlier releases; None if it is true for all releases.
        mask_window: the name of a config setting: a window that upstream applies only in its mask, in layers of sliding
            attention if the config lists ``layer_types``.
        blocks: how a batch marks blocks of tokens that see each other in both directions (prompts), or None. Those of
            images are marked for the composite (:mod:`fastpack.families.composites`).
        two_way: how attention modules without a fast forward use the blocks of a batch; None if they are causal.
        unshifted: the class name of a head whose own loss compares a token's logits with the label in the same place,
            not the next one (mostly decoders of encoder-decoders); empty for none.
        row_arguments: the names of arguments about rows, which a patched model refuses: arguments of shape ``[B]``,
            ``[B, patches]`` or ``[B, S, S]``, or an inverted mask.
        media: the names of arguments with images, or features of images, that the backbone puts in place of tokens, in
            the order of these tokens.
        disabled_caches: the names of keywords that request a cache by default, and are passed as False.
        shares_states: whether layers pass keys and values to later layers by keyword, which reentrant checkpointing
            loses (in the stock model too).
        uncounted: whether there is no formula for its FLOPs, since it runs layers several times or not at all, or has
            matmuls outside of modules.
        routers: the class names of the modules that choose experts for each token, by ``torch.topk`` or ``max``.
            Rounding can change a choice, so comparisons fix the choices.
        fast: the classes with fast forwards, each with its spec (:mod:`fastpack.families.shared_specs`). A fast forward
            is used if the class's source was proved (:mod:`fastpack.families.lock`), or if a twin of the class matches.
        earlier: the specs of some of these classes in earlier releases of transformers.
        namesakes: the names in ``fast`` that a class of another family's file has, too.
    """

    model_type: str
    backbone: str
    attention: tuple[str, ...] = ()
    package: str = ""
    mixers: dict[str, MixerSpec] = field(default_factory=dict)
    repadded: bool = False
    drops_packing: bool = False
    file: str = ""
    causal_if_decoder: bool = False
    repadded_if: tuple[str, ...] = ()
    refused_if: dict[str, str] = field(default_factory=dict)
    alibi: str | None = None
    masks_by: str | None = None
    unmasked: bool = False
    since: tuple[tuple[int, int], str] | None = None
    mask_window: str | None = None
    blocks: BlockSpec | None = None
    two_way: TwoWay | None = None
    unshifted: str = ""
    row_arguments: tuple[str, ...] = ()
    media: tuple[str, ...] = ()
    disabled_caches: tuple[str, ...] = ()
    shares_states: bool = False
    uncounted: bool = False
    routers: tuple[str, ...] = ()
    fast: Mapping[str, Spec] = field(default_factory=dict)
    earlier: Mapping[str, Spec] = field(default_factory=dict)
    namesakes: tuple[str, ...] = ()

    @property
    def tier(self) -> Tier:
        """The highest tier that its modules can reach."""
        if self.repadded:
            return "re-padded model"
        if self.mixers and not self.packs_mixers:
            return "re-padded mixer"
        all_fast = all(spec.fast is not None for spec in self.mixers.values())
        return "fast" if all_fast and self.fast.keys() >= set(self.attention) else "varlen"

    @property
    def packs_mixers(self) -> bool:
        """True if it has mixers, all of them recurrences or convolutions, which run on packed tokens."""
        return bool(self.mixers) and all(spec.scan is not None for spec in self.mixers.values())

    @property
    def uses_blocks(self) -> bool:
        """True if some attention modules use the blocks of a batch."""
        return any(getattr(spec, "two_way", None) is not None for spec in (self, *self.fast.values()))

    @property
    def needs_packing_context(self) -> bool:
        """True if some modules must get the packing in another way than by keyword."""
        return self.drops_packing or self.repadded or bool(self.mixers)

    @property
    def module(self) -> str:
        """The dotted name of the upstream module that defines the classes."""
        package = self.package or self.model_type
        return f"transformers.models.{package}.modeling_{self.file or package}"
