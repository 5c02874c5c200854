"""Offloading: what gradient checkpointing keeps, or would compute again, waits in host memory for the backward.

``patch(model, offload="checkpoints")``. Checkpointing saves one input ``[1, T, H]`` a layer; both kinds of
``torch.utils.checkpoint`` save it through autograd, where ``torch.autograd.graph.saved_tensors_hooks`` sees it. Hooks
around the backbone's forward (:mod:`~fastpack.offload.saved`)

1. copy each of them to pinned host memory on a stream of its own, and free it on the device once that is done; the
   last few, which the backward needs first, stay;
2. start the copy back of the next one needed, in the backward, before the current layer runs again.

Once buffers are there, and rates are known, nothing waits on the host. The copy of an input is over long before the
layer beside it: it moves 2H bytes a token, where a layer computes some 24 H^2 operations forward. Host buffers are
handed on from step to step (:mod:`~fastpack.offload.transfer`).

``offload="activations"`` gives the time that is left to gate and up of gated MLPs, which are most of what a layer's
second run would multiply (:mod:`~fastpack.offload.products`).

Where steps are recorded (``graphs``), so are the copies, in host buffers that live as long as a recording.

Sources: PyTorch's notes "CUDA semantics" (streams, memory management) and its tutorial "Hooks for autograd saved
tensors".
"""

from __future__ import annotations

KEPT = "_fastpack_kept"
"""The attribute under which a layer that runs finds its slot for products."""
