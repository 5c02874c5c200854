"""Replaying a decoder stack's forward and backward from CUDA graphs, where a step waits for launches.

``patch(model, graphs="auto")``. The embedding, the head and the loss run as ever; between them the whole stack is a few
launches forward and as many backward, recorded once for each :class:`~fastpack.packing.buckets.Bucket` of sizes
(:mod:`~.runner` decides whether to replay, :mod:`~.recordings` which,
:mod:`~.step` does it, :mod:`~.pieces` cuts it in pieces, :mod:`~.stack`
looks for what has changed, :mod:`~.recorder` talks to the device).

What it costs: up to a sixteenth more tokens a step, 2 % on average, and up to 50 % while a roomier recording serves (up
to 100 % where its products leave these tokens out, at a tenth of the time of others), until one of the batch's own
sizes is worth its making; memory for the activations and weight gradients of the largest bucket, which recordings share
among themselves but with nobody else; one more copy of the gradients of the weights that are trained, while they are
handed over; no overlap of DDP's communication with the backward, since all gradients arrive at once.

A batch that can't be replayed runs as it is, and is counted under the reason (:class:`GraphStats`, and
:func:`fastpack.report`). That is so without a gradient (evaluation), while a forward still waits for its backward (two
forwards before a backward, as in DPO), with dropout under gradient checkpointing, with hooks on the stack's modules
(FSDP, ZeRO-3, accelerate offloading weights), with attention whose kernel needs lengths on the host, where anything
waits for the device, where memory is too small for another recording, and for models whose layers have enough work to
hide their launches. Dropout without checkpointing is drawn anew in each replay.
"""
