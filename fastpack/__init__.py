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
    FastpackError,
    FastpackWarning,
    PackingError,
    PatchError,
    UnsupportedModelError,
)
from fastpack.packing import PackedSeqLens
from fastpack.patching import is_patched, patch, patched, report, unpatch
from fastpack.report import PatchReport

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailableError",
    "FastpackError",
    "FastpackWarning",
    "PackedSeqLens",
    "PackingError",
    "PatchError",
    "PatchReport",
    "UnsupportedModelError",
    "__version__",
    "activation_memory_budget",
    "is_patched",
    "patch",
    "patched",
    "report",
    "unpatch",
    "with_packed_seq_lens",
]
