"""Stand-ins for kernels that are not installed, with the real signatures and strict checks of arguments.

Each accepts what the real function accepts, and refuses what that function refuses or would silently misread. On a CPU
the attention is plain torch, computed from the arguments alone. On a GPU it is torch's own varlen FlashAttention
kernel. Signatures:

- FlashAttention 2.8, ``flash_attn/flash_attn_interface.py``; 3, ``hopper/flash_attn_interface.py``; 4,
  ``flash_attn/cute/interface.py`` (all Dao-AILab/flash-attention);
- xformers 0.0.35, ``xformers/ops/fmha/__init__.py`` and ``attn_bias.py``;
- torch 2.11 and 2.13, ``torch/nn/attention/varlen.py``.
"""

from __future__ import annotations

import importlib.machinery
import itertools
import math
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


def module(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> types.ModuleType:
    """Install an importable module of this name for the length of the test, also as its parent's attribute."""
    built = types.ModuleType(name)
    origin = "a stand-in" if attributes else None  # a folder without code of its own has none
    built.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, origin=origin, is_package=True)
    built.__path__ = []  # a package without anything beside what is put into sys.modules
    for key, value in attributes.items():
        setattr(built, key, value)
    monkeypatch.setitem(sys.modules, name, built)
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        monkeypatch.setattr(sys.modules[parent], child, built, raising=False)
    return built


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: list[int],
    scale: float,
    left: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute packed causal attention in plain torch; a query sees ``left`` tokens before itself."""
    out: list[Tensor] = []
    groups = q.shape[1] // k.shape[1]
    for begin, end in itertools.pairwise(offsets):
        scores = torch.einsum("ihd,jhd->hij", q[begin:end], k[begin:end].repeat_interleave(groups, 1)) * scale
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        size = end - begin
        seen = torch.zeros(size, size, dtype=torch.bool)
        for i in range(size):
            seen[i, 0 if left is None else max(0, i - left) : i + 1] = True
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            column = sinks.to(scores.dtype)[:, None, None].expand(-1, size, 1)
            scores = torch.cat([scores, column], -1)
        weights = scores.softmax(-1)[..., :size]
        out.append(torch.einsum("hij,jhv->ihv", weights, v[begin:end].repeat_interleave(groups, 1)))
    return torch.cat(out)


def kernel(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float, left: int | None, **more: Any
) -> Tensor:
    """Run :func:`attention` on a CPU; on a GPU run torch's FlashAttention-2, with its own autograd."""
    if not q.is_cuda:
        return attention(q, k, v, cu_seqlens.tolist(), scale, left, **more)
    from torch.nn.attention.varlen import varlen_attn

    from fastpack.backends.torch_varlen import grouped_heads

    assert not any(more.values()), "torch's kernel has neither softcap nor sinks"
    size = (-1 if left is None else left, 0)
    grouped = grouped_heads(q.shape[1] != k.shape[1])
    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, scale=scale, window_size=size, **grouped)


def check_varlen(q: Tensor, k: Tensor, v: Tensor, q_ends: Any, k_ends: Any, q_max: Any, k_max: Any) -> None:
    """Check what every varlen kernel requires of its tensors."""
    for x in (q, k, v):
        assert x.ndim == 3
        assert x.dtype == q.dtype
        assert x.device == q.device
        assert x.stride(-1) == 1
    assert k.shape[:2] == v.shape[:2]
    assert q.shape[1] % k.shape[1] == 0
    for ends, longest in ((q_ends, q_max), (k_ends, k_max)):
        assert isinstance(ends, Tensor)
        assert ends.dtype == torch.int32
        assert ends.is_contiguous()
        assert ends.device == q.device
        assert type(longest) is int, "max_seqlen must be a Python int: a tensor would wait for the device"
        if not ends.is_cuda:
            assert ends[0] == 0
            assert ends[-1] == q.shape[0]
            assert longest == int(ends.diff().max())


def check_window(window_size: Any, none: int | None) -> int | None:
    """Check a window: ``(none, none)`` for no limit, else the tokens before the query, and 0 after it."""
    assert type(window_size) is tuple
    assert len(window_size) == 2
    if window_size == (none, none):
        return None
    left, right = window_size
    assert type(left) is int
    assert left >= 0
    assert right == 0
    return left


def flash_attn_2(calls: list[dict[str, Any]]) -> Callable[..., Tensor]:
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        calls.append({"generation": 2, "dropout_p": dropout_p, "softcap": softcap, "window_size": window_size})
        check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        assert q.shape[-1] == v.shape[-1]
        assert causal is True
        assert type(softmax_scale) is float
        assert not (softcap and dropout_p), "Softcapping does not support dropout for now"
        left = check_window(window_size, -1)
        return kernel(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, left, softcap=softcap)

    return flash_attn_varlen_func


def flash_attn_3(calls: list[dict[str, Any]]) -> Callable[..., Any]:
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        qv: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        sm_margin: int = 0,
        return_attn_probs: bool = False,
    ) -> Any:
        calls.append({"generation": 3, "softcap": softcap, "window_size": window_size})
        check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        assert causal is True
        assert type(softmax_scale) is float
        left = check_window(window_size, -1)
        return kernel(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, left, softcap=softcap)

    return flash_attn_varlen_func


def flash_attn_4(calls: list[dict[str, Any]]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        page_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None),
        learnable_sink: Tensor | None = None,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        score_mod: Any = None,
        mask_mod: Any = None,
        block_sparse_tensors: Any = None,
        cu_total_m_blocks: Tensor | None = None,
        cu_total_n_blocks: Tensor | None = None,
        aux_tensors: list[Tensor] | None = None,
        return_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        calls.append({"generation": 4, "learnable_sink": learnable_sink, "window_size": window_size})
        check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        assert cu_seqlens_q is not None
        assert max_seqlen_q is not None
        assert causal is True
        assert type(softmax_scale) is float
        assert softcap == 0.0, "no varlen backward with a softcap"
        left = check_window(window_size, None)
        sinks = None
        if learnable_sink is not None:
            assert learnable_sink.shape == (q.shape[1],)
            assert learnable_sink.dtype == torch.bfloat16
            sinks = learnable_sink.detach()  # its backward knows no gradient of the sinks
        return kernel(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, left, sinks=sinks), None

    return flash_attn_varlen_func


def install_flash_attn(monkeypatch: pytest.MonkeyPatch, *generations: int) -> list[dict[str, Any]]:
    """Install stand-ins for these generations, and return the list of their calls."""
    calls: list[dict[str, Any]] = []
    if 2 in generations or 4 in generations:
        functions = {"flash_attn_varlen_func": flash_attn_2(calls)} if 2 in generations else {}
        module(monkeypatch, "flash_attn", **functions)
    if 3 in generations:
        module(monkeypatch, "flash_attn_interface", flash_attn_varlen_func=flash_attn_3(calls))
    if 4 in generations:
        module(monkeypatch, "flash_attn.cute", flash_attn_varlen_func=flash_attn_4(calls))
    return calls


class BlockDiagonalCausalMask:
    """xformers' bias, made from lengths on a device; a window that counts the query makes it a local one."""

    def __init__(self, lengths: list[int], device: torch.device, window: int | None = None) -> None:
        self.offsets = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        self.longest, self.window = max(lengths), window
        self.cu_seqlens = torch.tensor(self.offsets, dtype=torch.int32).to(device, non_blocking=True)

    @classmethod
    def from_seqlens(
        cls, q_seqlen: list[int], kv_seqlen: list[int] | None = None, *, device: torch.device | None = None
    ) -> BlockDiagonalCausalMask:
        assert type(q_seqlen) is list
        assert all(type(n) is int and n > 0 for n in q_seqlen)
        assert kv_seqlen is None
        assert isinstance(device, torch.device), "without a device it would be made on the current GPU"
        return cls(q_seqlen, device)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalMask:
        assert type(window_size) is int
        if window_size <= 0:
            raise ValueError(f"Expected `window_size > 0`, but window_size={window_size}")
        local = object.__new__(type(self))
        local.__dict__.update(self.__dict__, window=window_size)
        return local


def install_xformers(
    monkeypatch: pytest.MonkeyPatch, *, built_with_cuda: bool = True, failed: Exception | None = None
) -> list[dict[str, Any]]:
    """Install a stand-in for xformers, or for one whose kernels ``failed`` to load; return the list of calls."""
    calls: list[dict[str, Any]] = []

    def memory_efficient_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Any = None,
        p: float = 0.0,
        scale: float | None = None,
        *,
        op: Any = None,
        output_dtype: torch.dtype | None = None,
    ) -> Tensor:
        calls.append({"attn_bias": attn_bias, "p": p, "scale": scale})
        assert isinstance(attn_bias, BlockDiagonalCausalMask)
        assert attn_bias.cu_seqlens.device == query.device
        assert type(scale) is float
        for x in (query, key, value):
            assert x.ndim == 4
            assert x.shape[:3] == query.shape[:3], "a batch of 1, as many heads for keys as for queries"
            assert x.shape[0] == 1
            assert x.dtype == query.dtype
            assert x.stride(-1) == 1
        assert query.shape[1] == attn_bias.offsets[-1]
        left = None if attn_bias.window is None else attn_bias.window - 1
        return kernel(query[0], key[0], value[0], attn_bias.cu_seqlens, attn_bias.longest, scale, left)[None]

    module(monkeypatch, "xformers")
    module(monkeypatch, "xformers.ops", memory_efficient_attention=memory_efficient_attention)
    module(monkeypatch, "xformers.ops.fmha")
    module(monkeypatch, "xformers.ops.fmha.attn_bias", BlockDiagonalCausalMask=BlockDiagonalCausalMask)
    module(monkeypatch, "xformers._cpp_lib", _cpp_library_load_exception=failed)
    module(monkeypatch, "xformers.ops.fmha.common", _built_with_cuda=built_with_cuda and failed is None)
    return calls


def install_varlen_attn(monkeypatch: pytest.MonkeyPatch, *, asks_for_gqa: bool) -> list[dict[str, Any]]:
    """Install torch's ``varlen_attn`` as in torch 2.11, or as in 2.13, which asks for ``enable_gqa``."""
    from torch.nn.attention import varlen

    calls: list[dict[str, Any]] = []

    def run(q: Tensor, k: Tensor, v: Tensor, ends: Any, longest: Any, window_size: Any, scale: Any) -> Tensor:
        calls.append({"window_size": window_size})
        check_varlen(q, k, v, *ends, *longest)
        assert type(scale) is float
        assert q.shape[-1] == v.shape[-1]
        # (-1, 0) is causal without a limit here, while (-1, -1) would not be causal at all
        left = None if window_size == (-1, 0) else check_window(window_size, None)
        return kernel(q, k, v, ends[0], longest[0], scale, left)

    def varlen_attn_2_11(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        return run(query, key, value, (cu_seq_q, cu_seq_k), (max_q, max_k), window_size, scale)

    def varlen_attn_2_13(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: Tensor | None = None,
        block_table: Tensor | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        assert enable_gqa or query.shape[1] == key.shape[1], "Try setting enable_gqa=True for GQA."
        return run(query, key, value, (cu_seq_q, cu_seq_k), (max_q, max_k), window_size, scale)

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn_2_13 if asks_for_gqa else varlen_attn_2_11)
    return calls
