"""Decide what classes compute whose source nobody has proved: by a twin of them, a tiny model on the CPU.

A spec matches a class where the twin, patched by it, passes three checks:

- in float32 it gives what its own stock forward gives for each sequence alone, by the rule of
  :mod:`fastpack.exactness.rule`: the outputs, and the gradients of all parameters and of the inputs;
- with every dropout on, it drops what the stock layers drop, attending through our interface;
- in bfloat16, for the same inputs as the class's own forward, norms and gated MLPs, with their projections, give the
  very bits, and attention and layers are as near to float32 as the rule asks for: float32 hides how a class rounds.

Nothing of the user's model is run, changed or copied but its config.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from fastpack.families.spec import AnyAttentionSpec, Family, HeadSpec, Spec
from fastpack.layers.rope_tables import unknown_tables
from fastpack.patching.recognise import own_class
from fastpack.utils.classes import foreign_forward, stock_class


def match_by_twin(backbone: nn.Module, family: Family, candidates: Mapping[str, Spec]) -> dict[str, str]:
    """Say which classes of a model compute what their specs say.

    It takes no random number and no memory of a device, changes nothing of the model, and is the same on every rank:
    the twin depends on classes and config alone.

    Args:
        backbone: the user's, of any weights, dtype and device, quantised or with adapters. Its config says what the
            twin is to have.
        family: its family as :func:`fastpack.patching.support.covered_family` gives it.
        candidates: specs to try by class name, each a class of the family's upstream module. A head's is tried with
            the loss fused.

    Returns:
        For each candidate an empty string where it matches, else a short reason. Those that match do so together.
    """
    reasons = {name: _not_to_be_tried(backbone, family, name, spec) for name, spec in candidates.items()}
    tried = {name: spec for name, spec in candidates.items() if not reasons[name]}
    layers = {name: spec for name, spec in tried.items() if not isinstance(spec, HeadSpec)}
    heads = {name: spec for name, spec in tried.items() if isinstance(spec, HeadSpec)}
    if not tried:
        return reasons
    # late, since heavy: it is of no use to who has a release that was proved
    from fastpack.exactness.twins import apart
    from fastpack.patching.twin_checks import head_problem, match_layers

    with apart():
        reasons |= match_layers(backbone, family, layers) if layers else {}
        for name, spec in heads.items():
            fast = {n: s for n, s in layers.items() if not reasons[n]}
            reasons[name] = head_problem(backbone, family, name, spec, fast) or ""
    return reasons


def _not_to_be_tried(backbone: nn.Module, family: Family, name: str, spec: Spec) -> str:
    """Why a class is not to be matched by what it computes in a twin; an empty string where it may be."""
    if isinstance(spec, HeadSpec):
        cls = getattr(sys.modules[family.module], name, None)
        return f"its file has no {name}" if cls is None else _foreign(cls)
    if isinstance(spec, AnyAttentionSpec) and (strange := unknown_tables(backbone)) is not None:
        return strange
    mine = [module for module in backbone.modules() if own_class(module, family) == name]
    if not mine:
        return f"the model has no {name}"
    return _foreign(stock_class(mine[0]))


def _foreign(cls: Any) -> str:
    """A forward that somebody has put on a class: a twin of it would prove it by itself."""
    found = foreign_forward(cls)
    return "" if found is None else f"its class's forward is {found} now, not transformers'"
