"""Peak rates of chips for dense bfloat16 matmuls with float32 sums, in operations a second.

The numbers are the makers'; numbers "with sparsity" are halved. The sources are "NVIDIA H100 Tensor Core GPU Datasheet"
(SXM, PCIe, NVL), "NVIDIA GH200 Grace Hopper Superchip" and "NVIDIA H200 Tensor Core GPU Datasheet", "NVIDIA A100 Tensor
Core GPU Datasheet", "NVIDIA A30" and "NVIDIA A10" product briefs, "NVIDIA L4", "NVIDIA L40", "NVIDIA L40S" datasheets,
"NVIDIA Blackwell Architecture Technical Brief" (HGX B200), "NVIDIA Ada GPU Architecture" and "NVIDIA Ampere GA102 GPU
Architecture" white papers (GeForce, appendix A), "AMD Instinct MI300X" data sheet.

Chips without bfloat16 matmuls (T4, V100) are left out, and so are AMD's MI250X and MI250, which report the same name,
``MI250X / MI250``.
"""

from __future__ import annotations

import re

PEAKS: tuple[tuple[str, float], ...] = (
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989.4e12),
    ("GH200", 989.4e12),
    ("H200 NVL", 835e12),
    ("H200", 989.4e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("A30", 165e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    ("MI300X", 1307.4e12),
)
"""Whole words in a device's name, and the device's peak; the first row that matches counts."""

_OTHER_CHIPS = frozenset({"D", "Laptop", "SUPER", "Ti"})
"""Words that mark another chip: the RTX 4090 D is slower than the RTX 4090."""
_PARTS = re.compile(r"\b(MIG|GRID|vGPU)\b|-\d+[ABCQ]\b")
"""The pattern of names that stand for a part of a chip: ``NVIDIA A10-4Q`` is a sixth of an A10."""


def peak_of(name: str) -> float | None:
    """Return the peak of a device by torch's name for it, in operations a second, or None if it is not in the table."""
    if _OTHER_CHIPS & set(name.split()) or _PARTS.search(name):
        return None
    words = f" {' '.join(name.replace('-', ' ').split())} "
    for chip, peak in PEAKS:
        if f" {chip.replace('-', ' ')} " in words:
            return peak
    return None
