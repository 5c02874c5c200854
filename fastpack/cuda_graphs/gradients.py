"""The outputs of a backbone that a recording keeps, and the tensors that have gradients in it.

Shape suffixes: Tb tokens of the bucket, H hidden size, R routers, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.cuda_graphs.recorder import CaptureRefusedError

ROUTER_LOGITS = "router_logits"
"""The name of the routers' logits in a backbone's outputs."""


def recorded_outputs(outputs: Any) -> list[Tensor]:
    """Return the hidden states ``[1, Tb, H]`` and, if a backbone returned them, the routers' logits ``[R, Tb, E]``.

    Raises:
        CaptureRefusedError: the backbone returned something else too, or logits that can't be stacked or have no
            gradient.
    """
    hidden = outputs.last_hidden_state
    recorded = ("last_hidden_state", ROUTER_LOGITS)
    extras = [name for name, value in outputs.items() if value is not None and name not in recorded]
    if extras:
        raise CaptureRefusedError(f"it also returns {', '.join(extras)}")
    logits = getattr(outputs, ROUTER_LOGITS, None)
    if logits is None:
        return [hidden]
    if len({each.shape for each in logits}) != 1 or logits[0].ndim != 2 or len(logits[0]) != hidden.shape[1]:
        raise CaptureRefusedError(f"its routers' logits have shapes {[tuple(each.shape) for each in logits]}")
    stacked = torch.stack(logits)
    if not stacked.requires_grad:
        raise CaptureRefusedError("its routers' logits have no gradient")
    return [hidden, stacked]


def find_gradients(
    forward: Callable[[], list[Tensor]], leaf: Tensor, aliases: Mapping[nn.Parameter, nn.Parameter], *, may_draw: bool
) -> tuple[dict[Tensor, bool], list[Tensor], bool]:
    """Run one eager pass and find which tensors have gradients.

    Args:
        forward: the pass.
        leaf: the embeddings.
        aliases: the aliases of the trained parameters.
        may_draw: whether the pass may draw random numbers on its device, which a replay draws anew.

    Returns:
        Whether the leaf and each alias has a gradient; the outputs; and whether these and all gradients are finite.

    Raises:
        CaptureRefusedError: the pass draws random numbers when it may not; it reads a parameter that no module of the
            stack has among its own (whose gradient would be lost); or nothing has a gradient.
    """
    candidates = [t for t in (leaf, *aliases.values()) if t.requires_grad]
    before = _random_states(leaf.device)
    outputs = forward()
    leaves = _leaf_ids(outputs)
    if not leaves <= {id(t) for t in candidates}:
        raise CaptureRefusedError("a module reads a parameter that no module of the stack has among its own")
    if not leaves:
        raise CaptureRefusedError("nothing in the stack has a gradient")
    with no_autocast(leaf.device):
        zeros = [torch.zeros_like(output) for output in outputs]
        gradients = torch.autograd.grad(outputs, candidates, zeros, allow_unused=True)
    drew = [not torch.equal(a, b) for a, b in zip(before, _random_states(leaf.device), strict=True)]
    if drew[0] and not may_draw:
        raise CaptureRefusedError("it draws random numbers (dropout) under gradient checkpointing")
    if any(drew[1:]):
        raise CaptureRefusedError("it draws random numbers on the host")
    has_gradient = {leaf: False, **{t: gradient is not None for t, gradient in zip(candidates, gradients, strict=True)}}
    finite = all(bool(t.isfinite().all()) for t in (*outputs, *gradients) if t is not None)
    return has_gradient, [output.detach() for output in outputs], finite


def _leaf_ids(outputs: Sequence[Tensor]) -> set[int]:
    """Return the ids of the tensors at which the autograd graph of ``outputs`` ends."""
    ids: set[int] = set()
    visited: set[Any] = set()
    stack: list[Any] = [output.grad_fn for output in outputs]
    while stack:
        node = stack.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable"):
            ids.add(id(node.variable))
        stack.extend(following for following, _ in node.next_functions)
    return ids


def no_autocast(device: torch.device) -> torch.autocast:
    """Return a context without autocast, for a backward.

    A loss's backward runs outside autocast as well. Checkpointed layers run again under the autocast of their forward.
    """
    return torch.autocast(device.type, enabled=False)


def _random_states(device: torch.device) -> list[Tensor]:
    """Return the random states of the device and, if it is another, of the host."""
    if device.type == "cuda":
        return [torch.cuda.get_rng_state(device), torch.get_rng_state()]
    return [torch.get_rng_state()]
