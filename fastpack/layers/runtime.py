"""What every swapped forward of one patched model shares."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastpack.ops.projection_parts import Workspace
from fastpack.options import PatchOptions


@dataclass(frozen=True, eq=False)
class Runtime:
    """The user's choices, and scratch memory."""

    options: PatchOptions
    workspace: Workspace = field(default_factory=Workspace)
