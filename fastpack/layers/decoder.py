"""The fast forward of a decoder layer: norms, projections and residual additions in as few passes as possible.

Attention and MLP compute the same as in their own replaced forwards. This forward also fuses each norm with the
projections after it, and each residual addition with the projection before it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.families.mixer_spec import MixerSpec
from fastpack.families.spec import AnyAttentionSpec, DecoderSpec, MlpSpec
from fastpack.layers.attention import attend_heads, attention_forward, drop, drops, project_qkv
from fastpack.layers.mixers.fast import run_fast
from fastpack.layers.mixers.forward import fast_mixer
from fastpack.layers.mlp import mlp_block, mlp_forward
from fastpack.layers.project import call_on_row, fast_forward, project_modules
from fastpack.layers.read_projection import linear_sizes
from fastpack.layers.runtime import Runtime
from fastpack.offload import ACTIVATION_SLOT
from fastpack.ops.autograd import as_row, checkpoint_hook
from fastpack.ops.linear.gated_mlp import bytes_per_token
from fastpack.packing.mask import require_packing
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.utils.hooks import carries_hooks, checkpointing, has_hooks
from fastpack.utils.protocols import LayerLike
from fastpack.utils.replacement import Replacement

TILE_BYTES = 2**29
"""The bytes of a checkpointed MLP's largest tensors, above twice of which it runs in tiles of tokens."""


def decoder_forward(
    patched: Replacement[DecoderSpec, Runtime],
    hidden_states: Tensor,
    *args: Any,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: object = None,
    packed_seq_lens: PackedSeqLens | None = None,
    **kwargs: Any,
) -> Any:
    """Run the layer on ``[1, T, hidden]``, or the stock forward without lengths or without fastpack's attention."""
    layer, runtime = patched.owner, patched.runtime
    packed_seq_lens = runtime.packing_of(layer, packed_seq_lens)
    mixing = _mixing(layer, patched.spec)
    if packed_seq_lens is None or mixing is None or args:
        return patched.stock(
            hidden_states,
            *args,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            **({} if runtime.context is not None else {"packed_seq_lens": packed_seq_lens}),
            **kwargs,
        )
    require_packing(layer, packed_seq_lens, attention_mask)
    run = functools.partial(_run, layer, patched.spec, runtime, mixing.spec, position_embeddings, packed_seq_lens)
    if layer.gradient_checkpointing and layer.training and _checkpoints_in_forward(type(layer)):
        return layer._gradient_checkpointing_func(run, hidden_states)
    return run(hidden_states)


def _mixing(layer: LayerLike, spec: DecoderSpec) -> Replacement[Any, Runtime] | None:
    """Return the replacement of the layer's attention, or of the module in its place; None if its own forward runs."""
    attention = getattr(layer, "self_attn", None)
    fast = None if attention is None else fast_forward(attention, attention_forward)
    mixer = None if spec.mixer is None else getattr(layer, spec.mixer, None)
    return fast if fast is not None or mixer is None else fast_mixer(mixer)


def _checkpoints_in_forward(cls: type) -> bool:
    """Return whether transformers checkpoints inside the forward that is replaced; older versions do it outside."""
    return cls.forward.__code__.co_name == "forward_with_checkpointing"  # type: ignore[attr-defined]


def _runs_again(layer: LayerLike) -> bool:
    """Return whether torch's non-reentrant checkpointing recomputes this layer, or is recomputing it."""
    if not (layer.gradient_checkpointing and layer.training) or torch.compiler.is_compiling():
        return False
    return checkpointing(layer) == "plain"


def _is_run_again(layer: LayerLike) -> bool:
    """Return whether torch's checkpointing is recomputing this layer for its backward, which never reads the result.

    During the layer's recomputation, the innermost saved-tensor hooks are those of the recomputation. The recomputation
    of a larger block also contains a first forward of the layer. There the innermost hooks belong to the layer's own
    checkpointing, if that is torch's non-reentrant kind.
    """
    if not _runs_again(layer):
        return False
    if not _checkpoints_in_forward(type(layer)) and has_hooks(layer, that_read=True):
        return False  # the hooks run again, too, and read the result
    if torch._C._len_torch_dispatch_stack():
        return False  # selective checkpointing looks up every operation
    return checkpoint_hook().startswith("_recomputation_hook.")


def _run(
    layer: LayerLike,
    spec: DecoderSpec,
    runtime: Runtime,
    mixing: AnyAttentionSpec | MixerSpec,
    position_embeddings: tuple[Tensor, Tensor] | None,
    packed: PackedSeqLens,
    hidden_states: Tensor,
) -> Tensor:
    attention_dropout, mlp_dropout = _dropouts(layer, spec)
    x = hidden_states.squeeze(0)
    # in functions of their own, whose tensors are freed before the MLP runs
    if isinstance(mixing, MixerSpec):
        assert spec.mixer is not None
        assert mixing.fast is not None
        mixer, norm = getattr(layer, spec.mixer), _child(layer, spec.pre_attention)
        x = run_fast(mixer, mixing.fast, runtime, x, packed, norm=norm, residual=True)
    else:
        x = _run_attention(layer, spec, runtime, mixing, position_embeddings, packed, x, attention_dropout)
    return as_row(_run_mlp(layer, spec, runtime, x, mlp_dropout, packed))


def _run_attention(
    layer: LayerLike,
    spec: DecoderSpec,
    runtime: Runtime,
    attention: AnyAttentionSpec,
    position_embeddings: tuple[Tensor, Tensor] | None,
    packed: PackedSeqLens,
    x: Tensor,
    dropout: nn.Module | None,
) -> Tensor:
    """Return x ``[T, hidden]`` plus the result of attention."""
    module, count = layer.self_attn, packed.row_count
    projected, x = project_qkv(module, attention, runtime, x, _child(layer, spec.pre_attention), count)
    store = layer.__dict__.get(ACTIVATION_SLOT)
    out = attend_heads(module, attention, runtime, projected, position_embeddings, packed, store=store)
    plain = spec.post_attention is None and spec.residual_scale is None
    fuses = plain and not dropout and not drops(module, attention.out_dropout)
    out_projection, residual = getattr(module, attention.out), x if fuses else None
    (out,), _ = project_modules([out_projection], out, runtime, residual=residual, row_count=count)
    if fuses:
        return out
    return _added(layer, spec, x, drop(module, attention.out_dropout, out), spec.post_attention, dropout)


def _run_mlp(
    layer: LayerLike, spec: DecoderSpec, runtime: Runtime, x: Tensor, dropout: nn.Module | None, packed: PackedSeqLens
) -> Tensor:
    """Return x ``[T, hidden]`` plus the result of the MLP or the experts."""
    norm, mlp = _child(layer, spec.pre_mlp), getattr(layer, spec.mlp)
    fast = fast_forward(mlp, mlp_forward)
    if fast is None:
        with runtime.rows.of(packed.row_count, packed.rows_of_ranks):
            result = mlp(x[None] if norm is None else norm(x[None]))
        out = (result[0] if isinstance(result, tuple) else result).squeeze(0)
        return _added(layer, spec, x, out, spec.post_mlp, dropout)
    mlp_spec = fast.spec
    fuses = not dropout and _fuses_residual(mlp, spec, mlp_spec)
    need_output = not (fuses and _is_run_again(layer))
    slot = layer.__dict__.get(ACTIVATION_SLOT)
    store = slot if slot is not None and slot.of_mlps else None
    out = mlp_block(
        mlp,
        mlp_spec,
        runtime,
        x,
        norm=norm,
        residual=fuses,
        need_output=need_output,
        store=store,
        tile_bytes=TILE_BYTES if fuses and _runs_again(layer) else None,
        row_count=packed.row_count,
    )
    return out if fuses else _added(layer, spec, x, drop(mlp, mlp_spec.out_dropout, out), spec.post_mlp, dropout)


def _fuses_residual(mlp: nn.Module, spec: DecoderSpec, mlp_spec: MlpSpec) -> bool:
    """Return whether nothing comes between an MLP's last projection and the residual addition."""
    return spec.post_mlp is None and spec.residual_scale is None and not drops(mlp, mlp_spec.out_dropout)


def tile_tokens(layer: nn.Module) -> int | None:
    """Return the tokens of a tile, or None for a layer whose MLP never runs in tiles.

    It runs in tiles where a batch has more than twice as many tokens. The number is right for a layer that computes in
    the dtype of its weights.
    """
    patched = fast_forward(layer, decoder_forward)
    if patched is None or not getattr(layer, "gradient_checkpointing", False) or checkpointing(layer) != "plain":
        return None
    mlp = getattr(layer, patched.spec.mlp)
    fast = fast_forward(mlp, mlp_forward)
    if fast is None or not _fuses_residual(mlp, patched.spec, fast.spec):
        return None
    if any(isinstance(module, nn.Dropout) and module.p for module in mlp.modules()):
        return None  # LoRA's: a tile that is computed again would drop others
    down = getattr(mlp, fast.spec.down)
    sizes = linear_sizes(getattr(down, "base_layer", down))
    floats = (weight for weight in layer.parameters() if weight.is_floating_point())
    return None if sizes is None else TILE_BYTES // bytes_per_token(sizes[0], next(floats).dtype)


def _added(
    layer: LayerLike, spec: DecoderSpec, x: Tensor, out: Tensor, norm: str | None, dropout: nn.Module | None
) -> Tensor:
    """Return x plus a branch's output, after the norm, dropout and scale that the family puts after the branch."""
    if norm is not None:
        out = call_on_row(getattr(layer, norm), out)
    if dropout:
        out = dropout(out)
    return x + (out if spec.residual_scale is None else out * getattr(layer, spec.residual_scale))


def _child(layer: LayerLike, name: str | None) -> Any:
    return None if name is None else getattr(layer, name)


def _dropouts(layer: LayerLike, spec: DecoderSpec) -> tuple[Any, Any]:
    """Return the dropout modules after attention and MLP, each None if it does nothing."""
    if spec.dropouts is None:
        return None, None
    first, second = (None if _is_idle(getattr(layer, name)) else getattr(layer, name) for name in spec.dropouts)
    return first, second


def _is_idle(module: nn.Module) -> bool:
    """Return whether a dropout does nothing and carries no hooks."""
    drops = type(module) is not nn.Identity and (type(module) is not nn.Dropout or (module.training and module.p))
    return not drops and not carries_hooks(module)
