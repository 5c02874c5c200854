"""The declaration of a module that mixes tokens across the boundaries of a packed batch, and of what it computes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import chain
from typing import ClassVar, Literal


@dataclass(frozen=True)
class DeltaNetSpec:
    """A gated delta net: a convolution over queries, keys and values, the gated delta rule, a gated norm.

    Attributes:
        inner: the names of the projections: to queries, keys and values (side by side or one by one), to the norm's
            gate, to the rate, to the decay. Or, with ``split``, of projections to these in another order.
        split: the name of the method that takes the outputs of ``inner`` ``[1, T, ...]`` and returns queries, keys,
            values, gate, rate and decay; None if they need no split.
        norm: the name of the gated norm.
        out: the name of the output projection.
        doubled_if: the name of the attribute that doubles the rate if it is true, or None.
    """

    FIXED: ClassVar[tuple[str, ...]] = ("conv1d", "A_log", "dt_bias")
    inner: tuple[str, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    split: str | None = None
    norm: str = "norm"
    out: str = "out_proj"
    doubled_if: str | None = None


@dataclass(frozen=True)
class KimiDeltaSpec:
    """Kimi Delta Attention: a gated delta net with a decay for each channel of a key, which a module computes.

    Attributes:
        inner: the names of the projections to queries, keys, values and the rate.
        gate: the names of the two projections, one after the other, to the norm's gate.
        decay: the name of the module that returns the logarithm of the decay ``[1, T, heads, K]``.
        norm: the name of the gated norm.
        out: the name of the output projection.
    """

    FIXED: ClassVar[tuple[str, ...]] = ("conv1d",)
    inner: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "b_proj")
    gate: tuple[str, str] = ("g_a_proj", "g_b_proj")
    decay: str = "forget_gate"
    norm: str = "o_norm"
    out: str = "o_proj"


@dataclass(frozen=True)
class Mamba2Spec:
    """Mamba-2's mixer: one projection, a convolution, the scan, a gated norm, one more projection.

    Attributes:
        scale: the name of the factor on the input, or None.
        scales: the name of the factors on the results of the first projection, or None.
        norm_if: the name of the attribute that says whether there is a norm; without one, the scan's result is
            multiplied by the activated gate alone. None if there always is.
        out: the name of the output projection.
    """

    FIXED: ClassVar[tuple[str, ...]] = ("in_proj", "conv1d", "A_log", "dt_bias", "D", "norm", "time_step_limit")
    scale: str | None = None
    scales: str | None = None
    norm_if: str | None = None
    out: str = "out_proj"


@dataclass(frozen=True)
class GatedConvSpec:
    """A short convolution between two gates (LFM2): ``out_proj(C conv(B x))`` with ``B, C, x = in_proj(input)``.

    Attributes:
        out: the name of the output projection.
    """

    FIXED: ClassVar[tuple[str, ...]] = ("in_proj", "conv")
    out: str = "out_proj"


FastMixerSpec = DeltaNetSpec | KimiDeltaSpec | Mamba2Spec | GatedConvSpec


def attributes_of(spec: FastMixerSpec) -> list[str]:
    """Return the names of the attributes that a module must have."""
    values = (getattr(spec, field.name) for field in fields(spec))
    named = [(value,) if isinstance(value, str) else value or () for value in values]
    return [*spec.FIXED, *chain.from_iterable(named)]


@dataclass(frozen=True)
class MixerSpec:
    """A module that mixes tokens across boundaries: it runs on one row for each sequence, padded on the right.

    Attributes:
        mask: the mask that it gets: floats ``added`` to the scores, bools of ``seen`` or of ``hidden`` keys, bools
            ``[n, L]`` of ``real`` tokens, or None.
        window, chunk: the name of an attribute (dotted for an attribute of the config) that holds the window, or the
            size of a chunk, if only the mask applies it. If the config lists ``layer_types``, only layers of
            ``sliding_attention`` or ``chunked_attention`` have it, unless ``in_every_layer``.
        in_every_layer: whether every layer has that window or chunk, whatever ``layer_types`` lists.
        alibi: the name of an argument ``[H, 1, T]``, which becomes ``[n H, 1, L]`` for n rows of L slots.
        unchanged: the names of arguments that are passed on unchanged.
        left_out: the names of keywords that are not passed, such as positions that the module makes itself.
        counts_from: the name of an attribute that holds the padding id, or None. With it, the module makes positions
            itself: they count from the padding id + 1 on, and skip tokens with that id.
        states: the number of cache states that the module returns after its result; they are dropped.
        carried: the name of the argument that passes the last of this module's results to the next module of its kind:
            the picked keys, as indices in a row.
        shared: the name of the argument with a dict that modules fill with states for later modules, or None.
        scan: the operation that mixes tokens, if kernels can run it on packed tokens
            (:mod:`fastpack.layers.mixers.packed`): a causal ``conv``, or a recurrence after one; else None.
        fast: what the module computes, if fastpack has a fast forward for packed tokens; else None.
    """

    mask: Literal["added", "seen", "hidden", "real"] | None = None
    window: str | None = None
    chunk: str | None = None
    in_every_layer: bool = False
    alibi: str | None = None
    unchanged: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    counts_from: str | None = None
    states: int = 0
    carried: str | None = None
    shared: str | None = None
    scan: Literal["conv", "gated_delta", "kda", "ssd"] | None = None
    fast: FastMixerSpec | None = None
