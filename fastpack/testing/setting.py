"""What the models of a run are: on which device, in which precision, and with heads of which size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fastpack.exactness.special import HEAD_DIM
from fastpack.exactness.tiny import build_tiny

GPU_HEAD_DIM = 64


@dataclass(frozen=True)
class Setting:
    """Tiny and float32 on a CPU; on a GPU bfloat16, with heads of a real size.

    Attributes:
        dtype: name of a dtype of torch; head_dim: a multiple of 16.
    """

    device: str = "cpu"
    dtype: str = "float32"
    head_dim: int = HEAD_DIM

    @classmethod
    def of_this_machine(cls, device: str | None = None, dtype: str | None = None) -> Setting:
        """What is None is what the machine is best tried with."""
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        gpu = device != "cpu"
        return cls(device, dtype or ("bfloat16" if gpu else "float32"), GPU_HEAD_DIM if gpu else HEAD_DIM)

    def build(self, model_type: str, dtype: torch.dtype | None = None) -> Any:
        """This family's model, in this precision or another, in training mode: some write states in place otherwise.

        Raises what :func:`fastpack.exactness.tiny.build_tiny` raises.
        """
        dtype = dtype or getattr(torch, self.dtype)
        return build_tiny(model_type, head_dim=self.head_dim, dtype=dtype).train().to(self.device)

    def named(self) -> str:
        """For people."""
        gpu = f" ({torch.cuda.get_device_name()})" if self.device.startswith("cuda") else ""
        return f"{self.device}{gpu}, {self.dtype}, heads of {self.head_dim}"
