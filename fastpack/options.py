"""What a user may choose about a patch, checked in one place."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, TypedDict, get_args

from fastpack.attention_dispatch import check_name
from fastpack.errors import PatchError
from fastpack.ops.implementation import Implementation, triton_installed

Graphs = Literal["auto"] | None
Loss = Literal["fused"] | None
Offload = Literal["checkpoints"] | None


class PatchKeywords(TypedDict, total=False):
    """The same as keywords of another call."""

    attention: str
    kernels: Implementation
    graphs: Graphs
    loss: Loss
    offload: Offload
    strict: bool


@dataclass(frozen=True)
class PatchOptions:
    """The keyword arguments of :func:`fastpack.patch`, which documents them."""

    attention: str = "auto"
    kernels: Implementation = "auto"
    graphs: Graphs = None
    loss: Loss = None
    offload: Offload = None
    strict: bool = False

    def check(self) -> None:
        """Raise unless each value is one of those allowed.

        Raises:
            BackendUnavailableError: no attention backend has this name.
            PatchError: another option has a value that it doesn't take; Triton was asked for and is not installed;
                ``graphs`` and ``offload`` were both asked for.
        """
        check_name(self.attention)
        for name, allowed in (
            ("kernels", get_args(Implementation)),
            ("graphs", (None, "auto")),
            ("loss", (None, "fused")),
            ("offload", (None, "checkpoints")),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise PatchError(f"{name}={value!r} is not a choice. Choose one of: {', '.join(map(repr, allowed))}.")
        if self.kernels == "triton" and not triton_installed():
            raise PatchError(
                "kernels='triton', but Triton is not installed: pip install triton, or pass kernels='auto'."
            )
        if self.graphs is not None and self.offload is not None:
            raise PatchError(
                f"graphs={self.graphs!r} and offload={self.offload!r} exclude each other: what a recorded step saves "
                "has its fixed place on the device. Pass one of them; graphs gain where layers are small, offloading "
                "where they are big."
            )

    def to_dict(self) -> dict[str, Any]:
        """By name."""
        return asdict(self)
