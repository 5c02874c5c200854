"""fastpack: one call that makes any Hugging Face causal LM train without padding, exactly.

>>> import fastpack
>>> fastpack.patch(model)          # doctest: +SKIP
>>> print(fastpack.report(model))  # doctest: +SKIP

Importing this imports no model code and changes nothing.
"""

from fastpack.api import patch, patched, report, unpatch
from fastpack.data import with_packed_seq_lens
from fastpack.errors import (
    BackendUnavailableError,
    FastpackError,
    FastpackWarning,
    KernelUnavailableError,
    NoFasterWarning,
    PackingError,
    PatchError,
    UnsupportedModelError,
    UntriedVersionWarning,
)
from fastpack.exactness.verification import ContaminationError, InconclusiveError, Verification
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.patching.options import TokenBudget
from fastpack.patching.report import PatchReport
from fastpack.patching.state import is_patched
from fastpack.patching.verify import verify
from fastpack.utils.compile import activation_memory_budget

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailableError",
    "ContaminationError",
    "FastpackError",
    "FastpackWarning",
    "InconclusiveError",
    "KernelUnavailableError",
    "NoFasterWarning",
    "PackedSeqLens",
    "PackingError",
    "PatchError",
    "PatchReport",
    "TokenBudget",
    "UnsupportedModelError",
    "UntriedVersionWarning",
    "Verification",
    "__version__",
    "activation_memory_budget",
    "is_patched",
    "patch",
    "patched",
    "report",
    "unpatch",
    "verify",
    "with_packed_seq_lens",
]
