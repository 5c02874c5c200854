"""fastpack: one call that makes any Hugging Face causal LM train without padding, exactly.

Example:
    >>> import fastpack
    >>> fastpack.patch(model)  # or a trainer, such as TRL's  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    >>> print(fastpack.report(model))  # doctest: +SKIP
    >>> fastpack.unpatch(model)  # doctest: +SKIP

:func:`patch` documents every option, and what a patched model does with padded and packed batches; :func:`verify`
checks a patched model against the stock one.

Importing fastpack imports nothing else and changes nothing: each name is imported when it is first used.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastpack import attention_dispatch as attention_dispatch
    from fastpack.api import fit as fit
    from fastpack.api import patch as patch
    from fastpack.api import patched as patched
    from fastpack.api import report as report
    from fastpack.api import unpatch as unpatch
    from fastpack.api import verify as verify
    from fastpack.data.collators import with_packed_seq_lens as with_packed_seq_lens
    from fastpack.data.packed_collators import PackedPreferenceCollator as PackedPreferenceCollator
    from fastpack.data.packed_collators import PackedSFTCollator as PackedSFTCollator
    from fastpack.data.sampler import TokenBudgetSampler as TokenBudgetSampler
    from fastpack.data.vision_collator import PackedVisionCollator as PackedVisionCollator
    from fastpack.errors import BackendUnavailableError as BackendUnavailableError
    from fastpack.errors import DoesNotFitError as DoesNotFitError
    from fastpack.errors import FastpackError as FastpackError
    from fastpack.errors import FastpackWarning as FastpackWarning
    from fastpack.errors import KernelUnavailableError as KernelUnavailableError
    from fastpack.errors import NoFasterWarning as NoFasterWarning
    from fastpack.errors import PackingError as PackingError
    from fastpack.errors import PatchError as PatchError
    from fastpack.errors import UnsupportedModelError as UnsupportedModelError
    from fastpack.errors import UntriedVersionWarning as UntriedVersionWarning
    from fastpack.exactness.verification import ContaminationError as ContaminationError
    from fastpack.exactness.verification import InconclusiveError as InconclusiveError
    from fastpack.exactness.verification import Verification as Verification
    from fastpack.ops.quantized_stack import QuantizedStack as QuantizedStack
    from fastpack.packing.seqlens import PackedSeqLens as PackedSeqLens
    from fastpack.patching.merges import exact_merges as exact_merges
    from fastpack.patching.options import TokenBudget as TokenBudget
    from fastpack.patching.quantize import quantize_experts as quantize_experts
    from fastpack.patching.report import PatchReport as PatchReport
    from fastpack.patching.shard_experts import shard_experts as shard_experts
    from fastpack.patching.state import is_patched as is_patched
    from fastpack.trainers import metrics as metrics
    from fastpack.trainers import preference_losses as preference  # noqa: F401
    from fastpack.trainers import reference as reference
    from fastpack.trainers.preference_losses import PairLogProbs as PairLogProbs
    from fastpack.trainers.preference_losses import PreferenceLoss as PreferenceLoss
    from fastpack.trainers.preference_losses import pair_log_probs as pair_log_probs
    from fastpack.trainers.preference_losses import pair_log_probs_of_logits as pair_log_probs_of_logits
    from fastpack.trainers.preference_losses import preference_loss as preference_loss
    from fastpack.trainers.shard_base import shard_base as shard_base
    from fastpack.utils.compile import activation_memory_budget as activation_memory_budget

__version__ = "0.1.0"

_NAMES = {
    "fastpack.api": ("fit", "patch", "patched", "report", "unpatch", "verify"),
    "fastpack.data.collators": ("with_packed_seq_lens",),
    "fastpack.data.packed_collators": ("PackedPreferenceCollator", "PackedSFTCollator"),
    "fastpack.data.sampler": ("TokenBudgetSampler",),
    "fastpack.data.vision_collator": ("PackedVisionCollator",),
    "fastpack.errors": (
        "BackendUnavailableError",
        "DoesNotFitError",
        "FastpackError",
        "FastpackWarning",
        "KernelUnavailableError",
        "NoFasterWarning",
        "PackingError",
        "PatchError",
        "UnsupportedModelError",
        "UntriedVersionWarning",
    ),
    "fastpack.exactness.verification": ("ContaminationError", "InconclusiveError", "Verification"),
    "fastpack.ops.quantized_stack": ("QuantizedStack",),
    "fastpack.packing.seqlens": ("PackedSeqLens",),
    "fastpack.patching.merges": ("exact_merges",),
    "fastpack.patching.options": ("TokenBudget",),
    "fastpack.patching.quantize": ("quantize_experts",),
    "fastpack.patching.report": ("PatchReport",),
    "fastpack.patching.shard_experts": ("shard_experts",),
    "fastpack.patching.state": ("is_patched",),
    "fastpack.trainers.preference_losses": (
        "PairLogProbs",
        "PreferenceLoss",
        "pair_log_probs",
        "pair_log_probs_of_logits",
        "preference_loss",
    ),
    "fastpack.trainers.shard_base": ("shard_base",),
    "fastpack.utils.compile": ("activation_memory_budget",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
_SHORT_PATHS = {
    "metrics": "fastpack.trainers.metrics",
    "preference": "fastpack.trainers.preference_losses",
    "reference": "fastpack.trainers.reference",
}

__all__ = sorted([*_MODULE_OF, "__version__"])


def __getattr__(name: str) -> Any:
    """Import a public name, or a module of fastpack, when it is first used."""
    if name in _MODULE_OF:
        value = getattr(import_module(_MODULE_OF[name]), name)
    elif name == "attention_dispatch":
        value = import_module("fastpack.attention_dispatch")
    else:
        raise AttributeError(f"module 'fastpack' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted({*globals(), *__all__, *_SHORT_PATHS, "attention_dispatch"})


class _ShortPath(ModuleType):
    """A module of fastpack under a shorter path, imported when one of its names is first used."""

    def __init__(self, name: str, path: str) -> None:
        """Set up the module ``name``, which stands for the one at ``path``."""
        super().__init__(name, f"{path}, under a shorter path.")
        self._path = path

    def __getattr__(self, name: str) -> Any:
        """Import the module and return one of its attributes."""
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(import_module(self._path), name)

    def __dir__(self) -> list[str]:
        """List the names of the module."""
        return dir(import_module(self._path))


for _name, _path in _SHORT_PATHS.items():
    globals()[_name] = sys.modules[f"fastpack.{_name}"] = _ShortPath(f"fastpack.{_name}", _path)
