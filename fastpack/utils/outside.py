"""Call a function outside a compiled region. Only tracing code imports this module, since it imports the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


run_quantized_experts = torch.compiler.disable(
    _call,
    reason="the compiler can't trace quantised stacks of experts. For fullgraph=True train dense experts",
)
"""Call a function of quantised experts, with a graph break."""
