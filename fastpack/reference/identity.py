"""Which model and settings log-probabilities are of.

A cache is right for one model under one set of settings, so both are told apart by what decides the values:

- every weight, bit by bit: what ``state_dict`` holds, 4-bit scales and tables with it. Each tensor is read once, where
  it is, as 32-bit words, which are multiplied by random odd numbers of 64 bits and added up modulo 2^64, 2^16 at a time
  (M. Dietzfelbinger, "Universal hashing and k-wise independent random variables via integer arithmetic without primes",
  STACS 1996); the sums go into a SHA-256 with names, shapes and dtypes. Integer sums are the same in any order and on
  any device. A single changed word always shows; changes of several in one run go unseen once in 2^32 times at most. It
  is no defence against someone who wants to be unseen. (0.9 GB/s on one CPU core);
- the config, without what decides nothing (names, versions, tokens of generation);
- the adapter that is on in the reference, if one is, with its config;
- ``ld_alpha``, and autocast's dtype.

What only rounds (attention kernel, batch, device) is left out, as is the name. Names of weights are those of the bare
model, so that a base under PEFT is the same reference as that model alone.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.errors import PatchError, UnsupportedModelError
from fastpack.model.unwrap import find_parts
from fastpack.utils.sharding import is_partitioned

_WORDS = 1 << 16
"""Words in a sum."""
_NO_MATTER = frozenset(
    (
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "peft_version",
        "problem_type",
        "return_dict",
        "transformers_version",
        "use_cache",
        # of an adapter's config
        "base_model_name_or_path",
        "inference_mode",
        "revision",
    )
)
"""Entries of configs that a log-probability does not depend on, and that trainers and versions change."""


@dataclass(frozen=True)
class Identity:
    """A reference: what has to be the same (``parts``), and what is told beside (``name``).

    Attributes:
        parts: JSON, by what is compared: ``config`` (a dict, compared key by key), ``weights``, ``adapter``,
            ``ld_alpha``, ``autocast``.
        name: class, where it was loaded from, revision and number of parameters.
    """

    parts: Mapping[str, Any]
    name: Mapping[str, Any]

    @property
    def key(self) -> str:
        """SHA-256 of the parts."""
        return hashlib.sha256(json.dumps(self.parts, sort_keys=True).encode()).hexdigest()

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """What another's parts have, and what is here, in words; empty where they agree."""
        found = []
        for part in sorted({*self.parts, *other}):
            here, there = self.parts.get(part), other.get(part)
            if here == there:
                continue
            if isinstance(here, Mapping) and isinstance(there, Mapping):
                found += [
                    f"{part}.{name}: {_short(there.get(name))} there, {_short(here.get(name))} here"
                    for name in sorted({*here, *there})
                    if here.get(name) != there.get(name)
                ]
            else:
                found.append(f"{part}: {_short(there)} there, {_short(here)} here")
        return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def identify(model: nn.Module, *, adapter: str | None, ld_alpha: float | None) -> Identity:
    """What tells this reference from others; reads every weight once. Autocast is that of the moment.

    Args:
        model: a causal LM, plain or PEFT's.
        adapter: the name of PEFT's adapter that is on in the reference; None for the base.
        ld_alpha: the factor on tokens that a pair's completions don't share in number, None for 1.

    Raises:
        PatchError: weights are partitioned, offloaded or merged with an adapter's; there is no such adapter.
    """
    head = find_parts(model).head
    if head is None or head.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no head over a vocabulary: log-probabilities are those of a ...ForCausalLM."
        )
    configs = getattr(model, "peft_config", {})
    if adapter is not None and adapter not in configs:
        raise PatchError(f"there is no adapter {adapter!r} on this model, only {sorted(configs) or 'none'}.")
    device = next(head.parameters()).device.type
    autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
    weights, update = hashlib.sha256(), hashlib.sha256()
    for path, tensor, added in _weights(head, adapter):
        (update if added else weights).update(f"{path} {tuple(tensor.shape)} {tensor.dtype} {_sums(tensor)}\n".encode())
    parts = {
        "config": _plain(head.config.to_dict()),
        "weights": weights.hexdigest(),
        "adapter": None if adapter is None else {**_plain(configs[adapter].to_dict()), "weights": update.hexdigest()},
        "ld_alpha": ld_alpha,
        "autocast": autocast,
    }
    name = {
        "class": type(head).__name__,
        "loaded_from": getattr(head.config, "_name_or_path", "") or None,
        "revision": getattr(head.config, "_commit_hash", None),
        "parameters": sum(p.numel() for p in head.parameters()),
    }
    return Identity(json.loads(json.dumps(parts, sort_keys=True)), name)


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config as JSON has it, without what does not matter, nested configs likewise."""
    kept = {str(name): value for name, value in config.items() if name not in _NO_MATTER}
    kept = {name: _plain(value) if isinstance(value, Mapping) else value for name, value in kept.items()}
    return json.loads(json.dumps(kept, sort_keys=True, default=_as_text))


def _as_text(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)


def _weights(head: nn.Module, adapter: str | None) -> Iterator[tuple[str, Tensor, bool]]:
    """Name, value and whether it is the adapter's, of what the reference computes with, by name."""
    wrappers: set[str] = set()
    for name, module in head.named_modules():
        if "base_layer" in module._modules:
            wrappers.add(name)
        if getattr(module, "merged_adapters", None):
            raise PatchError(
                f"adapters are merged into {name}, so that its weight is not the base's: model.unmerge_adapter() first."
            )
    state = head.state_dict()
    copied = {name.split(f".modules_to_save.{adapter}.")[0] for name in state if f".modules_to_save.{adapter}." in name}
    for name in sorted(state):
        tensor = state[name]
        if not isinstance(tensor, Tensor):
            continue
        if tensor.device.type == "meta" or is_partitioned(tensor) or hasattr(tensor, "placements"):
            raise PatchError(
                f"{name} is offloaded or spread over processes: a reference is told by its weights, which have to be "
                "there. Do this before the model is sharded, on each rank with a whole one."
            )
        path, added = name.split("."), False
        if "modules_to_save" in path:
            at = path.index("modules_to_save")
            if path[at + 1] != adapter:
                continue
            added = True
        elif name.split(".original_module.")[0] in copied:
            continue  # the adapter's copy of it runs
        elif any(".".join(path[:i]) in wrappers and path[i] != "base_layer" for i in range(1, len(path))):
            if adapter not in path:
                continue
            added = True
        # the adapter's name is the user's, and decides nothing
        dropped = {"base_layer", "original_module", "token_adapter"} | ({adapter} if added else set())
        yield ".".join(part for part in path if part not in dropped), tensor, added


@torch.no_grad()
def _sums(tensor: Tensor) -> list[int]:
    """Of the tensor's bytes as 32-bit words: for each 2^16 words the sum of their products with the factors."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.device.type not in ("cpu", "cuda"):
        flat = flat.cpu()
    data = flat.view(torch.uint8)
    if data.numel() % 4 or data.storage_offset() % 4:
        data = torch.cat([data, data.new_zeros(-data.numel() % 4)])
    factors = _factors().to(data.device)
    # on a CPU what fits its cache, on a GPU what fills it
    at_once = _WORDS if data.device.type == "cpu" else 64 * _WORDS
    found: list[int] = []
    for words in data.view(torch.int32).split(at_once):
        whole = len(words) // _WORDS * _WORDS
        found += (words[:whole].view(-1, _WORDS) * factors).sum(1).tolist()
        if whole < len(words):
            found.append(int((words[whole:] * factors[: len(words) - whole]).sum()))
    return found


@functools.cache
def _factors() -> Tensor:
    """2^16 odd numbers of 64 bits, the same everywhere."""
    stream = hashlib.shake_256(b"fastpack reference").digest(8 * _WORDS)
    return torch.frombuffer(bytearray(stream), dtype=torch.int64) | 1
