"""Log-probabilities on disk, and which model and settings they are of.

::

    folder/log_probs.json        {"reference": what they are of, "log_probs": {id of a sequence: nats}}

The file is written beside its place, then renamed into it: whenever a run is killed, the folder holds all that it held
before. A cache is right for one reference alone, which is told by what decides its values:

- every weight: a SHA-256 of what ``state_dict`` holds, 4-bit scales and tables with it, without adapters that are off
  and under the names of the bare model, so that a base under PEFT is the same reference as that model alone;
- the class and the config, without what decides nothing (names, versions, tokens of generation);
- the config of the adapter that is on in the reference, if one is;
- autocast's dtype.

What only rounds (attention kernel, batch, device) is left out.
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
FORMAT = "2"  # changes whenever an id or a value is made in another way
# entries of configs that a log-probability does not depend on, and that trainers and versions change
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


@dataclass(frozen=True)
class ReferenceCache:
    """The cache of one reference in one folder, which need not be there yet.

    Attributes:
        folder: where it is.
        reference: what :func:`identify` found.
    """

    folder: Path
    reference: Mapping[str, str]

    def load(self) -> dict[str, float]:
        """Return everything in it, in nats by the sequence's id; nothing where there is no cache yet.

        Raises:
            ReferenceCacheError: the file is another reference's, or can't be read.
        """
        path = self.folder / FILE
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            there, log_probs = dict(held["reference"]), dict(held["log_probs"])
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ReferenceCacheError(
                f"{path} can't be read ({type(error).__name__}: {error}). Put back what was there, or pass a new "
                "folder to compute anew. Nothing was changed."
            ) from error
        names = sorted({*there, *self.reference})
        pairs = {name: (there.get(name), self.reference.get(name)) for name in names}
        differences = [f"{name}: {a!s:.80} there, {b!s:.80} here" for name, (a, b) in pairs.items() if a != b]
        if differences:
            raise ReferenceCacheError(
                f"{path} holds log-probabilities of another reference: {'; '.join(differences)}. Pass another folder, "
                "or the model and settings that it was made with. Nothing was changed."
            )
        return log_probs

    def add(self, log_probs: Mapping[str, float]) -> None:
        """Put these in too; raise as :meth:`load` does."""
        body = json.dumps({"reference": dict(self.reference), "log_probs": {**self.load(), **log_probs}})
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".{FILE}.{uuid4().hex}"
        temporary.write_text(body, encoding="utf-8")
        temporary.replace(self.folder / FILE)


def is_peft(model: nn.Module) -> bool:
    """Return whether this is a PeftModel, whose adapters can be switched; a model with adapters inside is none."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def identify(model: nn.Module, adapter: str | None) -> dict[str, str]:
    """Return what tells this reference from others, by name. Every weight is read once; autocast is that of the moment.

    Args:
        model: a causal LM, plain or PEFT's.
        adapter: the name of PEFT's adapter that is on in the reference; None for the base.

    Raises:
        UnsupportedModelError: the model has no head over a vocabulary.
        PatchError: weights are partitioned, offloaded or merged with an adapter's, or adapters can't be switched; there
            is no such adapter.
    """
    head = find_parts(model).head
    if head is None or head.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no head over a vocabulary: log-probabilities are those of a ...ForCausalLM."
        )
    configs: Any = getattr(model, "peft_config", {}) if is_peft(model) else {}
    if adapter is not None and adapter not in configs:
        raise PatchError(f"there is no adapter {adapter!r} on this model, only {sorted(configs) or 'none'}.")
    device = next(head.parameters()).device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    found = {"format": FORMAT, "class": type(head).__name__, "autocast": str(autocast)}
    found |= _named("config", head.config.to_dict())
    if adapter is not None:
        found |= _named("adapter", configs[adapter].to_dict())
    weights = hashlib.sha256()
    for name, tensor in _weights(model, head, adapter):
        weights.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        weights.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return {**found, "weights": weights.hexdigest()}


def _named(prefix: str, config: Mapping[str, Any]) -> dict[str, str]:
    """Return a config's entries as JSON by name, without those that don't affect results, also in nested configs."""
    text = json.dumps(config, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
    kept = json.loads(text, object_hook=lambda held: {k: v for k, v in held.items() if k not in _NO_MATTER})
    return {f"{prefix}.{name}": json.dumps(value, sort_keys=True) for name, value in kept.items()}


def _weights(model: nn.Module, head: nn.Module, adapter: str | None) -> Iterator[tuple[str, Tensor]]:
    """Names and values of all that the reference computes with, those of its adapter included, by name."""
    wrappers = {name for name, module in head.named_modules() if "base_layer" in module._modules}
    if wrappers and not is_peft(model):
        raise PatchError(
            f"this {type(model).__name__} has adapters inside, and is no PeftModel: which ones are on in the reference "
            "can't be chosen. Wrap it by peft.get_peft_model, or pass the model without adapters."
        )
    if any(getattr(module, "merged_adapters", None) for module in head.modules()):
        raise PatchError("adapters are merged into the weights of the base: model.unmerge_adapter() first.")
    for name, tensor in sorted(head.state_dict().items()):
        if not isinstance(tensor, Tensor):
            continue
        if tensor.device.type == "meta" or is_partitioned(tensor) or hasattr(tensor, "placements"):
            raise PatchError(
                f"{name} is offloaded or spread over processes: a reference is told by its weights, which have to be "
                "there. Do this before the model is sharded, on each rank with a whole one."
            )
        path = name.split(".")
        added = "modules_to_save" in path or any(
            ".".join(path[:i]) in wrappers and path[i] != "base_layer" for i in range(1, len(path))
        )
        if added and adapter not in path:
            continue
        # the adapter's name is the user's, and decides nothing
        dropped = {"base_layer", "original_module", "token_adapter", *([adapter] if added else [])}
        yield ".".join(part for part in path if part not in dropped), tensor
