"""The errors and warnings of fastpack.

:class:`fastpack.ContaminationError` and :class:`fastpack.InconclusiveError` hold a :class:`fastpack.Verification`, and
are defined in its module.

::

    FastpackError                   anything fastpack itself raises
    ├── PackingError (ValueError)   a batch whose lengths, masks or positions contradict each other
    ├── UnsupportedModelError       a model that no tier covers (TypeError)
    ├── ReferenceCacheError (ValueError)    a cache of another reference model, or a damaged cache
    │   └── MissingReferenceError (LookupError)    examples that a cache does not have
    ├── ContaminationError          a patched model in which sequences see each other, or that is not exact
    ├── InconclusiveError           a patched model whose rounding would hide a leak in its dtypes
    ├── BackendUnavailableError     an attention backend, requested by name, that can't serve (RuntimeError)
    ├── KernelUnavailableError (ValueError)     Triton kernels, requested by name, that can't run here
    ├── DoesNotFitError             a card that is too small for a model's training
    └── PatchError (RuntimeError)   a patch that can't be made or undone here
    FastpackWarning (UserWarning)   anything fastpack itself warns about
    ├── NoFasterWarning             a patched model that is exact, but no faster than with padding
    └── UntriedVersionWarning       packages, or their classes, newer than those that fastpack was tried with

Each message says what fastpack got, what is allowed, and how to mend the problem.
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
    """Examples have no reference log-probabilities, and the reference model is no longer there to compute them."""


class BackendUnavailableError(FastpackError, RuntimeError):
    """No attention backend can serve this model on this machine, or the backend requested by name can't."""


class KernelUnavailableError(FastpackError, ValueError):
    """Triton kernels were requested by name, but can't run on this machine or on the tensors' device."""


class DoesNotFitError(FastpackError):
    """A card is too small for a model's weights and the state of its optimizer."""


class PatchError(FastpackError, RuntimeError):
    """This object can't be patched or unpatched in its present state."""


class FastpackWarning(UserWarning):
    """Base of every warning that fastpack raises."""


class NoFasterWarning(FastpackWarning):
    """The whole model runs on padded rows: results are exact, but nothing gets faster."""


class UntriedVersionWarning(FastpackWarning):
    """A package that fastpack builds on, or one of its classes, is newer than the tried ones or of unknown version."""
