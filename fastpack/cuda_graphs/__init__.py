"""Replay a decoder stack's forward and backward from CUDA graphs, so that steps don't wait for kernel launches.

``patch(model, graphs="auto")`` turns this on. The embedding, the head and the loss run as usual. Between them, the
whole stack becomes a few graph launches forward and a few backward. It is recorded once for each
:class:`~fastpack.packing.buckets.Bucket` of sizes.

- :mod:`~.runner` decides whether to replay a batch.
- :mod:`~.recordings` chooses the recording and decides when to make another one.
- :mod:`~.step` records and replays one step.
- :mod:`~.pieces` cuts a recording into several graphs.
- :mod:`~.stack` finds changes of modules and weights.
- :mod:`~.recorder` talks to the device.

Costs:

- Bucket padding: up to a sixteenth more tokens a step, 2 % on average. While a larger recording serves a batch, up to
  50 % more, or up to 100 % more if the recording's matmuls leave bucket padding out (a padding token then costs a tenth
  of a real one). This ends once a recording of the batch's own sizes is worth making.
- Memory: the activations and weight gradients of the largest bucket. Recordings share this memory with each other, but
  with nothing else. Handing gradients over takes one more copy of the gradients of the trained weights.
- DDP: its communication does not overlap the backward, since all gradients arrive at once.

A batch that can't be replayed runs eagerly and is counted under the reason (:class:`GraphStats` and
:func:`fastpack.report`). This happens

- without gradients (evaluation);
- while an earlier forward still waits for its backward (two forwards before a backward, as in DPO);
- with dropout under gradient checkpointing;
- with hooks on the stack's modules (FSDP, ZeRO-3, accelerate's weight offloading);
- if a kernel needs lengths on the host (attention, recurrences in plain torch);
- if anything waits for the device;
- if memory is too small for another recording;
- for models whose layers have enough work to hide their launches.

Dropout without checkpointing draws new random numbers in each replay.
"""
