"""The cache of log-probabilities on disk, and the identity of the reference that they belong to.

::

    folder/log_probs.json        {"reference": its identity, "log_probs": {id of a sequence: nats}}

The file is written under another name and then renamed, so if a run is killed, the folder still has everything that it
had before. A cache belongs to one reference, which is identified by everything that decides its values:

- every weight: a SHA-256 of the ``state_dict`` with 4-bit scales and tables, without adapters that are off. Names are
  those of the model without PEFT, so a base under PEFT is the same reference as that model alone;
- the class and the config, without entries that don't affect values (names, versions, special tokens of generation);
- the config of the adapter that is on in the reference, if there is one;
- autocast's dtype.

Settings that change only the rounding (attention kernel, batch, device) are left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn

from fastpack.errors import PatchError, ReferenceCacheError, UnsupportedModelError
from fastpack.model.unwrap import find_parts
from fastpack.utils.sharding import is_partitioned

FILE = "log_probs.json"
FORMAT = "2"  # changes whenever ids or values are computed in another way
# config entries that don't affect log-probabilities, but differ between trainers and versions
_IRRELEVANT = frozenset(
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


@dataclass(frozen=True)
class ReferenceCache:
    """The cache of one reference in a folder.

    Attributes:
        folder: the folder, which need not exist yet.
        reference: the reference's identity, by :func:`identify`.
    """

    folder: Path
    reference: Mapping[str, str]

    def load(self) -> dict[str, float]:
        """Return all log-probabilities, in nats, by the sequence's id; empty if there is no cache yet.

        Raises:
            ReferenceCacheError: the file belongs to another reference, or can't be read.
        """
        path = self.folder / FILE
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            cached, log_probs = dict(content["reference"]), dict(content["log_probs"])
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ReferenceCacheError(
                f"{path} can't be read ({type(error).__name__}: {error}). Restore the file, or pass a new "
                "folder to compute everything again. Nothing was changed."
            ) from error
        names = sorted({*cached, *self.reference})
        pairs = {name: (cached.get(name), self.reference.get(name)) for name in names}
        differences = [f"{name}: {a!s:.80} there, {b!s:.80} here" for name, (a, b) in pairs.items() if a != b]
        if differences:
            raise ReferenceCacheError(
                f"{path} holds log-probabilities of another reference: {'; '.join(differences)}. Pass another folder, "
                "or the model and settings that it was made with. Nothing was changed."
            )
        return log_probs

    def add(self, log_probs: Mapping[str, float]) -> None:
        """Add log-probabilities to the file; raise as :meth:`load` does."""
        body = json.dumps({"reference": dict(self.reference), "log_probs": {**self.load(), **log_probs}})
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".{FILE}.{uuid4().hex}"
        temporary.write_text(body, encoding="utf-8")
        temporary.replace(self.folder / FILE)


def is_peft(model: nn.Module) -> bool:
    """Return whether a model is a PeftModel, whose adapters can be switched (others may have adapters inside)."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def identify(model: nn.Module, adapter: str | None) -> dict[str, str]:
    """Return the identity of a reference: values by name, of which at least one differs for any other reference.

    This reads every weight once. Autocast's dtype is the one at the time of the call.

    Args:
        model: a causal LM, plain or a PEFT model.
        adapter: the name of the PEFT adapter that is on in the reference; None for the base.

    Raises:
        UnsupportedModelError: the model has no head over a vocabulary.
        PatchError: weights are partitioned, offloaded, or merged with an adapter's weights; adapters can't be switched;
            or there is no adapter of that name.
    """
    head = find_parts(model).head
    if head is None or head.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no head over a vocabulary: pass a model with one, a ...ForCausalLM."
        )
    configs: Any = getattr(model, "peft_config", {}) if is_peft(model) else {}
    if adapter is not None and adapter not in configs:
        raise PatchError(f"there is no adapter {adapter!r} on this model, only {sorted(configs) or 'none'}.")
    device = next(head.parameters()).device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    identity = {"format": FORMAT, "class": type(head).__name__, "autocast": str(autocast)}
    identity |= _named("config", head.config.to_dict())
    if adapter is not None:
        identity |= _named("adapter", configs[adapter].to_dict())
    weights = hashlib.sha256()
    for name, tensor in _weights(model, head, adapter):
        weights.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        weights.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return {**identity, "weights": weights.hexdigest()}


def _named(prefix: str, config: Mapping[str, Any]) -> dict[str, str]:
    """Return a config's entries as JSON by name, without irrelevant entries, also in nested configs."""
    text = json.dumps(config, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
    entries = json.loads(text, object_hook=lambda node: {k: v for k, v in node.items() if k not in _IRRELEVANT})
    return {f"{prefix}.{name}": json.dumps(value, sort_keys=True) for name, value in entries.items()}


def _weights(model: nn.Module, head: nn.Module, adapter: str | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values of the reference's weights, including its adapter's, in the order of names."""
    wrappers = {name for name, module in head.named_modules() if "base_layer" in module._modules}
    if wrappers and not is_peft(model):
        raise PatchError(
            f"this {type(model).__name__} has adapters inside, but is no PeftModel, so the reference's adapters can't "
            "be switched on. Wrap it with peft.get_peft_model, or pass the model without adapters."
        )
    if any(getattr(module, "merged_adapters", None) for module in head.modules()):
        raise PatchError("adapters are merged into the weights of the base: call model.unmerge_adapter() first.")
    for name, tensor in sorted(head.state_dict().items()):
        if not isinstance(tensor, Tensor):
            continue
        if tensor.device.type == "meta" or is_partitioned(tensor) or hasattr(tensor, "placements"):
            raise PatchError(
                f"{name} is offloaded or spread over processes, but a reference is identified by all of its weights. "
                "Call this before the model is sharded, with the whole model on each rank."
            )
        path = name.split(".")
        added = "modules_to_save" in path or any(
            ".".join(path[:i]) in wrappers and path[i] != "base_layer" for i in range(1, len(path))
        )
        if added and adapter not in path:
            continue
        # the adapter's name doesn't affect values
        dropped = {"base_layer", "original_module", "token_adapter", *([adapter] if added else [])}
        yield ".".join(part for part in path if part not in dropped), tensor
