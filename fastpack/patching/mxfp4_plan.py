"""The changes that a patch makes only to a model that transformers has loaded in MXFP4."""

from __future__ import annotations

from torch import nn

from fastpack.errors import PatchError
from fastpack.families.spec import ExpertsSpec, Family
from fastpack.layers.mxfp4_experts import EXPERTS, mxfp4_experts, read_mxfp4
from fastpack.model.unwrap import Parts
from fastpack.patching.changes import QUANTIZER, Attribute


def readable_mxfp4(backbone: nn.Module, family: Family) -> list[tuple[nn.Module, ExpertsSpec]]:
    """Return the modules that hold a router and experts in MXFP4, each with the spec of the experts.

    Raises:
        PatchError: such experts can't be read.
    """
    found = [(module, spec) for module, _, spec in mxfp4_experts(backbone, family)]
    for module, spec in found:
        operands = read_mxfp4(module.get_submodule(EXPERTS), spec)
        if isinstance(operands, str):
            raise PatchError(
                f"a {type(module).__name__} has experts in MXFP4, whose kernels return no gradient, and fastpack can't "
                f"read them: {operands}. Load the model with quantization_config=Mxfp4Config(dequantize=True). Nothing "
                "was changed."
            )
    return found


def quantizers(parts: Parts) -> tuple[Attribute, ...]:
    """Return the changes of quantizers that refuse training, although the patched model can be trained."""
    models = (parts.head, parts.composite, parts.backbone)
    if not any(QUANTIZER in model.__dict__ for model in models if model is not None):
        return ()
    from fastpack.patching.mxfp4_training import trainable_quantizers  # late: it imports transformers' quantizers

    return trainable_quantizers(models)
