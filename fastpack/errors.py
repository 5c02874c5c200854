"""What fastpack raises and warns with, two of which hold a :class:`fastpack.Verification` and stand beside it.

::

    FastpackError                   anything fastpack itself raises
    ├── PackingError (ValueError)   a batch whose lengths, masks or positions contradict each other
    ├── UnsupportedModelError       a model that no tier covers (TypeError)
    ├── ReferenceCacheError (ValueError)    a cache of another reference model, or a damaged one
    │   └── MissingReferenceError (LookupError)    examples that a cache does not have
    ├── ContaminationError          a patched model in which sequences see each other, or that is not exact
    ├── InconclusiveError           a patched model of which nobody can tell in its dtypes whether it is exact
    ├── BackendUnavailableError     an attention backend, asked for by name, that can't serve (RuntimeError)
    ├── KernelUnavailableError (ValueError)     Triton kernels, asked for by name, that can't run there
    └── PatchError (RuntimeError)   a patch that can't be made or undone here
    FastpackWarning (UserWarning)   anything fastpack itself warns about
    ├── NoFasterWarning             a patched model that is exact, and no faster than padded
    └── UntriedVersionWarning       packages, or classes of them, that are newer than what fastpack was tried with

Each message says what came, what is allowed and how to mend it.
"""

from __future__ import annotations


class FastpackError(Exception):
    """Base of every error that fastpack raises on purpose."""


class PackingError(FastpackError, ValueError):
    """Lengths, masks, offsets or positions of a batch contradict each other or can't be understood."""


class UnsupportedModelError(FastpackError, TypeError):
    """No tier is known to be exact for this model."""


class ReferenceCacheError(FastpackError, ValueError):
    """A cache of another model or other settings, or one that can't be read. Nothing in its folder was changed."""


class MissingReferenceError(ReferenceCacheError, LookupError):
    """Examples that have no log-probabilities of a reference, which was let go."""


class BackendUnavailableError(FastpackError, RuntimeError):
    """No attention backend, or not the one asked for, can serve this model on this machine."""


class KernelUnavailableError(FastpackError, ValueError):
    """Triton kernels were asked for by name, and can't run where the tensors are, or can't run here."""


class PatchError(FastpackError, RuntimeError):
    """This object can't be patched (or un-patched) as it stands."""


class FastpackWarning(UserWarning):
    """Base of every warning that fastpack raises."""


class NoFasterWarning(FastpackWarning):
    """The whole model runs on padded rows: every sequence is exact, and nothing is saved."""


class UntriedVersionWarning(FastpackWarning):
    """A package that fastpack builds on, or a class of it, is newer than what was tried, or of unknown version."""
