"""What :func:`fastpack.verify` says of a model, as a row of the table has it."""

from __future__ import annotations

from typing import Any

import fastpack
from fastpack.errors import ContaminationError, InconclusiveError, PatchError


def verified(model: Any) -> dict[str, Any]:
    """Return ``error`` and ``bound`` of the check that comes nearest to its bound, and the ``problem``, if any.

    All are None for a model whose tokens verify can't tell by their ids; the sweep can.
    """
    try:
        found = fastpack.verify(model)
    except (ContaminationError, InconclusiveError) as error:
        found = error.verification
    except PatchError:
        return {"error": None, "bound": None, "problem": None}
    off = ", ".join(check.what for check in found.checks if not check.passed)
    problem = None if found.passed else f"{found.verdict}: {off}"
    return {"error": found.nearest.error, "bound": found.nearest.bound, "problem": problem}
