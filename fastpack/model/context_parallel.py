"""Spread each batch over the ranks of a group: every rank runs the layers on its share of the tokens.

Shape suffixes: T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fastpack.errors import PackingError, PatchError
from fastpack.ops.exchange import all_rows
from fastpack.packing.fingerprints import fingerprints, joined
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.utils.console import counted


@dataclass(eq=False)
class ContextParallel:
    """The group of ranks that share each batch of one patched model, for as long as the patch lasts.

    A deep copy shares the group. A pickle has none, since its ranks exist in this run alone.

    Attributes:
        mesh: the 1-D mesh of the ranks; None in an unpickled model.
        media: the names of arguments that the backbone itself puts in place of tokens.
        batches: the number of batches so far.
    """

    mesh: DeviceMesh | None
    media: tuple[str, ...] = ()
    batches: int = 0

    def __deepcopy__(self, memo: Any) -> ContextParallel:
        """Return the same group."""
        return ContextParallel(self.mesh, self.media)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the mesh."""
        return ContextParallel, (None, self.media)

    def shard(self, arguments: Mapping[str, Any], packed: PackedSeqLens, ids: Tensor | None = None) -> PackedSeqLens:
        """Return ``packed`` for modules that run on this rank's share; every rank calls this at once.

        The host waits for the device once, to compare the batches of the ranks.

        Args:
            arguments: the backbone's arguments, before they are un-padded.
            packed: the batch's packing.
            ids: the ids ``[B, S]`` from which a composite has made the embeddings of its text model, or None.

        Raises:
            PatchError: this model was unpickled, and knows no group.
            PackingError: there are media; the ranks have different batches; or there are fewer tokens than ranks. All
                of them raise it.
        """
        mesh = self._known_mesh()
        if torch.compiler.is_compiling():
            raise PatchError(
                "torch.compile can't trace the exchanges between the ranks of a context_mesh: leave fullgraph=True out."
            )
        names = ("input_ids",) if ids is not None else ("input_ids", "inputs_embeds")
        given = [arguments.get(name) for name in names]
        rows = [packed.unpad(x).flatten(1) for x in (ids, *given) if x is not None]
        found = [name for name in self.media if arguments.get(name) is not None]
        self._check_same([packed.cu_seqlens[None], packed.position_ids, *rows], packed, len(found))
        if found:
            raise PackingError(
                f"this model's backbone puts {', '.join(found)} in place of the tokens of images, and a rank has only "
                "its share of these. Send text only, or patch without context_mesh."
            )
        self.batches += 1
        return packed.shard(mesh.get_local_rank(), mesh.size(), mesh.get_group())

    def _known_mesh(self) -> DeviceMesh:
        """Return the mesh, or raise a PatchError in an unpickled model."""
        if self.mesh is None:
            raise PatchError(
                "this model was patched with a context_mesh and pickled since, and the ranks of that mesh are not "
                "here. Patch it again: fastpack.patch(model, context_mesh=mesh)."
            )
        return self.mesh

    def check_labels(self, labels: Tensor, packed: PackedSeqLens) -> None:
        """Raise a PackingError on every rank unless all ranks have the same labels; the host waits for the device."""
        self._check_same([labels.reshape(1, -1)], packed)

    def _check_same(self, rows: Sequence[Tensor], packed: PackedSeqLens, media: int = 0) -> None:
        """Raise unless all ranks have the same batch, by fingerprints of rows ``[1, ...]`` and the number of media."""
        mesh = self._known_mesh()
        counts = torch.tensor([packed.total_tokens, packed.num_sequences, media], device=rows[0].device)
        own = torch.cat([counts, joined([fingerprints(row) for row in rows])[0]])
        prints = all_rows(own[None], [1] * mesh.size(), mesh.get_group()).tolist()
        others = [rank for rank, each in enumerate(prints) if each != prints[0]]
        if others:
            raise PackingError(
                "the ranks of a context-parallel group must have the same batch, but rank 0 has "
                f"{_described(prints[0])}, and rank {others[0]} has {_described(prints[others[0]])}. Give the data "
                "loader's sampler one replica for each group, not for each rank."
            )

    def describe(self) -> str:
        """Return the line for the report."""
        if self.mesh is None:
            return "context parallelism: the ranks are not known; patch the model again"
        so_far = f", {counted(self.batches, 'batch', 'es')} so far" if self.batches else ""
        return f"context parallelism: each batch is spread over {self.mesh.size()} ranks{so_far}"


def _described(fingerprint: list[int]) -> str:
    tokens, sequences, media, number, _ = fingerprint
    of_media = f" and {counted(media, 'argument')} with images" if media else ""
    return f"{tokens} tokens in {sequences} sequences{of_media} (fingerprint {number % 2**16:04x})"
