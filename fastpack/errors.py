"""The errors and warnings of fastpack.

:class:`fastpack.ContaminationError` and :class:`fastpack.InconclusiveError` hold a :class:`fastpack.Verification`, and
are defined beside it.

::

    FastpackError                   anything fastpack itself raises
    ├── PackingError (ValueError)   a batch whose lengths, masks or positions contradict each other
    ├── UnsupportedModelError       a model that no tier covers (TypeError)
    ├── ReferenceCacheError (ValueError)    a cache of another reference model, or a damaged one
    │   └── MissingReferenceError (LookupError)    examples that a cache does not have
    ├── ContaminationError          a patched model in which sequences see each other, or that is not exact
    ├── InconclusiveError           a patched model whose rounding would hide a leak in its dtypes
    ├── BackendUnavailableError     an attention backend asked for by name that can't serve (RuntimeError)
    ├── KernelUnavailableError (ValueError)     Triton kernels asked for by name that can't run there
    └── PatchError (RuntimeError)   a patch that can't be made or undone here
    FastpackWarning (UserWarning)   anything fastpack itself warns about
    ├── NoFasterWarning             a patched model that is exact, and no faster than padded
    └── UntriedVersionWarning       packages, or their classes, newer than what fastpack was tried with

Each message says what came, what is allowed, and how to mend it.
"""

from __future__ import annotations


class FastpackError(Exception):
    """Base of every error that fastpack raises on purpose."""


class PackingError(FastpackError, ValueError):
    """Lengths, masks, offsets or positions of a batch contradict each other or can't be understood."""


class UnsupportedModelError(FastpackError, TypeError):
    """No tier is known to be exact for this model."""


class ReferenceCacheError(FastpackError, ValueError):
    """A cache belongs to another model or other settings, or can't be read. Nothing in its folder was changed."""


class MissingReferenceError(ReferenceCacheError, LookupError):
    """Examples without reference log-probabilities, when the reference model is no longer there to compute them."""


class BackendUnavailableError(FastpackError, RuntimeError):
    """No attention backend can serve this model on this machine, or the one asked for can't."""


class KernelUnavailableError(FastpackError, ValueError):
    """Triton kernels were asked for by name, and can't run on this machine or on the tensors' device."""


class PatchError(FastpackError, RuntimeError):
    """This object can't be patched (or un-patched) as it stands."""


class FastpackWarning(UserWarning):
    """Base of every warning that fastpack raises."""


class NoFasterWarning(FastpackWarning):
    """The whole model runs on padded rows: results are exact, and nothing gets faster."""


class UntriedVersionWarning(FastpackWarning):
    """A package that fastpack builds on, or one of its classes, is newer than what was tried, or of unknown version."""
