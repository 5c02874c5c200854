"""State of what runs in a thread, such as its batch; the base of classes that hold some."""

from __future__ import annotations

import threading
from typing import Any, Self


class ThreadScope(threading.local):
    """State that each thread has for itself. Copies of a model share it, and a pickle has none."""

    def __deepcopy__(self, memo: Any) -> Self:
        """Return the scope itself: copies share it."""
        return self

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        """Pickle an empty scope."""
        return type(self), ()
