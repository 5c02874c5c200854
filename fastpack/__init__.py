"""fastpack: one call that makes any Hugging Face causal LM train without padding, exactly.

>>> import fastpack
>>> fastpack.patch(model)          # doctest: +SKIP
>>> print(fastpack.report(model))  # doctest: +SKIP

Importing this imports no model code and changes nothing.
"""

from fastpack.batching import with_packed_seq_lens
from fastpack.compiling import activation_memory_budget
from fastpack.errors import (
    BackendUnavailableError,
    ContaminationError,
    FastpackError,
    FastpackWarning,
    InconclusiveError,
    KernelUnavailableError,
    NoFasterWarning,
    PackingError,
    PatchError,
    UnsupportedModelError,
    UntriedVersionWarning,
)
from fastpack.options import TokenBudget
from fastpack.packing import PackedSeqLens
from fastpack.patching import is_patched, patch, patched, unpatch
from fastpack.report import PatchReport
from fastpack.reporting import report
from fastpack.verification import Verification
from fastpack.verify import verify

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
