"""Compare how fastpack's forwards and modules' own forwards round in bfloat16; float32 hides that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from fastpack.exactness.rule import bound_of, is_half, middle
from fastpack.families.spec import GatedNormSpec, MlpSpec, NormSpec
from fastpack.utils.replacement import Replacement

FLIPS = 0.01
"""The share of a norm's or an MLP's results that may round differently. Sums in another order flip a result at times;
rounding at another place flips a fifth of them."""


@dataclass(eq=False)
class RoundingComparison:
    """A comparison of fastpack's forwards with the modules' own forwards, on the same arguments in bfloat16.

    Attributes:
        problems: One sentence for each difference.
        seen: The names of the classes that were compared.
        paused: True while a module runs in float32.
    """

    problems: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    paused: bool = False

    def compare(
        self, name: str, ours: Replacement[Any, Any], module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        """Compare a module's output with fastpack's. With ``name`` and ``ours`` bound, this is a forward hook."""
        if self.paused:
            return
        self.seen.add(name)
        copied = tree_map(lambda x: x, (args, kwargs))  # some forwards write into a dict among their arguments
        stock, value = _first(output), _first(ours(*copied[0], **copied[1]))
        if value.dtype != stock.dtype:
            self.problems.append(f"gives {value.dtype} in bfloat16, not {stock.dtype}")
        elif not isinstance(ours.spec, (NormSpec, GatedNormSpec, MlpSpec)):
            self.paused = True  # its hooks are called in float32, too
            wide = _in_float32(module, args, kwargs)
            self.paused = False
            own, error = _off(stock, wide), _off(value, wide)
            if not error <= bound_of(own, torch.bfloat16):
                self.problems.append(f"off by {error:.1e} in bfloat16, where its own forward is off by {own:.1e}")
        elif (share := float((value != stock).float().mean())) > FLIPS:
            self.problems.append(f"rounds {share:.0%} of its results differently in bfloat16")


def _in_float32(module: nn.Module, args: Any, kwargs: Any) -> Tensor:
    """Return the result of a module's own forward in float32."""
    weights = {name: parameter.float() for name, parameter in module.named_parameters()}
    arguments = tree_map(lambda x: x.float() if isinstance(x, Tensor) and is_half(x.dtype) else x, (args, kwargs))
    return _first(functional_call(module, weights, *arguments))


def _off(value: Tensor, reference: Tensor) -> float:
    """Return the median of the tokens' relative errors: experts that flip for a few tokens should not count."""
    off = (value.float() - reference).norm(dim=-1) / reference.norm(dim=-1)
    return middle(off.flatten().tolist())


def _first(output: Any) -> Tensor:
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first
