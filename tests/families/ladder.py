"""Any causal LM, packed against each sequence alone: logits, and the gradient of every parameter.

The loss is a fixed weighted sum of the logits, so that no head's own loss is taken for granted; some have none.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from oracle import Result, compare
from torch import Tensor, nn

from fastpack.smoke.tiny import build_tiny, plain_tokens

LENGTHS = (7, 1, 12, 12, 20, 3)
"""A single token, two of a length, and one that outgrows windows and chunks of 8."""
BOUND = 1e-4


def build(model_type: str) -> Any:
    """In training mode: some families write states in place otherwise."""
    return build_tiny(model_type).train()


def make_sequences() -> list[Tensor]:
    return [plain_tokens(1, length, seed=i)[0] for i, length in enumerate(LENGTHS)]


def run(model: nn.Module, batch: dict[str, Any], lengths: tuple[int, ...] = LENGTHS) -> Result:
    """Logits of each sequence and gradients."""
    model.zero_grad(set_to_none=True)
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    mask = batch.get("attention_mask")
    flat = logits.flatten(0, -2)
    real = flat if mask is None else flat[mask.flatten() != 0]
    loss = (real * weights(real)).sum()
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Result(list(real.detach().split(lengths)), loss.detach(), grads)


def run_alone(model: nn.Module, sequences: list[Tensor]) -> Result:
    """The stock model on one sequence after the other, without padding."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    takes = any(p.name == "use_cache" or p.kind is p.VAR_KEYWORD for p in parameters)
    model.zero_grad(set_to_none=True)
    logits: list[Tensor] = []
    total = torch.zeros(())
    for sequence in sequences:
        found = model(input_ids=sequence[None], **({"use_cache": False} if takes else {})).logits[0]
        start = sum(map(len, logits))
        loss = (found * weights(found, start)).sum()
        loss.backward()
        total += loss.detach()
        logits.append(found.detach())
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Result(logits, total, grads)


def weights(logits: Tensor, start: int = 0) -> Tensor:
    """Fixed ones for tokens ``start`` on."""
    generator = torch.Generator().manual_seed(1)
    made = torch.randn(sum(LENGTHS), logits.shape[-1], generator=generator) / logits.shape[-1]
    return made[start : start + len(logits)]


def error(found: Result, alone: Result) -> float:
    """The worst of logits and gradients; parameters without a gradient on one side count as zero there."""
    names = found.grads.keys() | alone.grads.keys()
    for result, other in ((found, alone), (alone, found)):
        for name in names - result.grads.keys():
            result.grads[name] = torch.zeros_like(other.grads[name])
    measured = compare(found, alone)
    return max(measured.logits, measured.grads)
