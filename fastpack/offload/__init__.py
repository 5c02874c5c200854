"""Offload saved layer inputs, and results that would be recomputed, to host memory until the backward.

``patch(model, offload="checkpoints")`` offloads layer inputs. Gradient checkpointing saves one input ``[1, T, H]`` a
layer. Both kinds of ``torch.utils.checkpoint`` save it through autograd, where
``torch.autograd.graph.saved_tensors_hooks`` sees it. Hooks around the backbone's forward
(:mod:`~fastpack.offload.saved`)

1. copy each input to pinned host memory on a separate stream, and free it on the device once the copy is done; the last
   few, which the backward needs first, stay on the device;
2. in the backward, start copying the next input back before the current layer runs again.

Once host buffers exist and rates are measured, nothing waits on the host. The copy of an input ends long before the
layer that runs at the same time: the copy moves 2H bytes a token, while the layer computes some 24 H^2 operations
forward. Host buffers are reused from step to step (:mod:`~fastpack.offload.transfer`).

In long sequences, our own attention kernels take longer than copies of their result to the host and back. Then the
result and its log-sum-exps are offloaded too, and attention does not run again in the backward.

``offload="activations"`` uses the remaining copy time for the gate and up activations of gated MLPs, which are most of
the matmul work of a layer's second run (:mod:`~fastpack.offload.activations`).

If steps are recorded (``graphs``), so are the copies, in host buffers that live as long as a recording.

Sources: PyTorch's notes "CUDA semantics" (streams, memory management) and its tutorial "Hooks for autograd saved
tensors".
"""

from __future__ import annotations

ACTIVATION_SLOT = "_fastpack_kept"
"""The attribute under which a running layer finds its :class:`~fastpack.offload.activations.Slot`."""
