"""Let trainers train adapters over MXFP4: transformers' quantizer says that a model in MXFP4 can't be trained.

It can't where transformers' kernels run the experts. In a patched model they don't. So the patch puts a copy of the
quantizer in its place, which says the opposite; ``unpatch`` restores the model's own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

from torch import nn
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

from fastpack.patching.changes import QUANTIZER, Attribute


class TrainableMxfp4Quantizer(Mxfp4HfQuantizer):
    """Transformers' quantizer of MXFP4, for a model whose adapters can be trained."""

    @property
    def is_trainable(self) -> bool:
        """True."""
        return True


def trainable_quantizers(models: Iterable[nn.Module | None]) -> tuple[Attribute, ...]:
    """Return the changes that put a trainable quantizer in the place of each of MXFP4's."""
    changes: list[Attribute] = []
    for model in models:
        quantizer = None if model is None else model.__dict__.get(QUANTIZER)
        if model is not None and type(quantizer) is Mxfp4HfQuantizer:
            trainable = copy.copy(quantizer)
            trainable.__class__ = TrainableMxfp4Quantizer
            changes.append(Attribute(model, QUANTIZER, trainable))
    return tuple(changes)
