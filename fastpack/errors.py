"""What fastpack raises and warns with.

::

    FastpackError                   anything fastpack itself raises
    ├── PackingError (ValueError)   a batch whose lengths, masks or positions contradict each other
    ├── UnsupportedModelError       a model that no rung of the ladder covers (TypeError)
    ├── BackendUnavailableError     an attention backend, asked for by name, that can't serve (RuntimeError)
    └── PatchError (RuntimeError)   a patch that can't be made or undone here
    FastpackWarning (UserWarning)   anything fastpack itself warns about

Each message says what came, what is allowed and how to mend it.
"""

from __future__ import annotations


class FastpackError(Exception):
    """Base of every error that fastpack raises on purpose."""


class PackingError(FastpackError, ValueError):
    """Lengths, masks, offsets or positions of a batch contradict each other or can't be understood."""


class UnsupportedModelError(FastpackError, TypeError):
    """No rung of the ladder is known to be exact for this model."""


class BackendUnavailableError(FastpackError, RuntimeError):
    """No attention backend, or not the one asked for, can serve this model on this machine."""


class PatchError(FastpackError, RuntimeError):
    """This object can't be patched (or un-patched) as it stands."""


class FastpackWarning(UserWarning):
    """Base of every warning that fastpack raises."""
