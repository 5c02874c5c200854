"""What chips promise: dense matrix products of bfloat16 with sums in float32, operations a second.

From the makers' data sheets, where figures "with sparsity" were halved: "NVIDIA H100 Tensor Core GPU Datasheet" (SXM,
PCIe, NVL), "NVIDIA H200 Tensor Core GPU Datasheet", "NVIDIA A100 Tensor Core GPU Datasheet", "NVIDIA A30" and "NVIDIA
A10" product briefs, "NVIDIA L4", "NVIDIA L40", "NVIDIA L40S" datasheets, "NVIDIA Blackwell Architecture Technical
Brief" (HGX B200), "NVIDIA Ada GPU Architecture" and "NVIDIA Ampere GA102 GPU Architecture" white papers (GeForce,
appendix A), "NVIDIA T4 Tensor Core GPU Datasheet" and "NVIDIA V100 Tensor Core GPU Datasheet" (float16: these have no
bfloat16), "AMD Instinct MI300X" and "MI250X" data sheets (the latter of one of its two dies, which is a device to
torch).
"""

from __future__ import annotations

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
    ("T4", 65e12),
    ("V100-PCIE", 112e12),
    ("V100", 125e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    ("MI300X", 1307.4e12),
    ("MI250X", 191.5e12),
)
"""What a device's name holds as words of its own, and its peak; the first that fits is taken."""


def peak_of(name: str) -> float | None:
    """The peak of a device by the name that torch gives it, in operations a second; None for one not in the table."""
    if any(word in name.split() for word in ("Laptop", "Ti", "SUPER", "MIG")):
        return None  # other chips of nearly the same name, or part of one
    words = f" {' '.join(name.replace('-', ' ').split())} "
    for chip, peak in PEAKS:
        if f" {chip.replace('-', ' ')} " in words:
            return peak
    return None
