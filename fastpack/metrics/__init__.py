"""What a run does with its tokens and its time, logged by the trainer itself.

>>> from fastpack.metrics import attach
>>> attach(trainer)        # doctest: +SKIP
>>> trainer.train()        # doctest: +SKIP

The figures stand beside the loss, wherever ``report_to`` sends it: in TensorBoard, W&B and the others, in the progress
bar, in ``trainer.state.log_history`` and so in ``trainer_state.json``. Each name begins with ``fastpack/``. Where a
trainer logs every n-th step they are of those n steps; where it trains on several ranks they are of all.

Of a step (the mean since the last time that it logged):

======================== ==============================================================================================
``real_tokens``          tokens that are not padding, a step, on all ranks
``trained_tokens``       those whose prediction the loss takes: their label is not ignored, and they are not the first
                         of their sequence. Where padding has labels, the one behind a text counts, which its last token
                         learns. Of preference trainers, those of the completions. Left out where the model is not given
                         a label for each token (rewards, classes)
``padding_tokens``       padding in the batches as they come to the model, a step
``padding_share``        the share of it, 0 to 1
``wasted_share``         the share of padding in what the layers work on: 0 in a patched model that is told which slots
                         are padding (by a mask or ``packed_seq_lens``), else ``padding_share``; what a packed row was
                         filled up with reaches the layers everywhere
``padding_share_without`` what that share would be if the sequences of each batch stood in rows of their own, all as
                         long as the longest: in padded batches
``step_seconds``         wall clock of a step, from its begin to its end
``tokens_per_second_per_gpu`` real tokens a second and rank, over the time inside steps and in waiting for batches
``tflops_per_gpu``       10^12 operations a second and rank over the same time: all products that the real tokens need
                         (:mod:`fastpack.flops`), the second forward of checkpointing and forwards of a
                         reference model among them, and the head on every position that it was given
``mfu``                  these over what the device can do (:func:`attach`), 0 to 1
``mfu_once``             the same without what checkpointing does a second time ("model FLOPs utilization" as of
                         Chowdhery et al., "PaLM", arXiv:2204.02311, appendix B, where the former is called "hardware
                         FLOPs utilization"); left out where nothing is recomputed
``data_share``           the share of all time that was spent in waiting for batches, 0 to 1
``outside_share``        that spent outside of steps: in waiting for batches, logging, evaluating, saving
``peak_memory_gib``      the most memory since training began, of the rank with the most: in tensors on a GPU, of the
                         process on a CPU
======================== ==============================================================================================

Of the run so far, a run that was resumed from a checkpoint included: ``total_real_tokens``, ``total_trained_tokens``,
``total_padding_tokens``, ``total_padding_share``, ``total_wasted_share``, ``total_padding_share_without``. These also
stand in what the trainer logs, and returns, at the end.

Counting happens on the device when the model is called; nothing is copied from it before the trainer logs (or saves,
or evaluates), which takes one collective and one copy. On a GPU time is that in which the device reaches a moment: what
hides behind its work takes none.

Not counted are evaluation, tokens that a trainer generates, calls with a cache, and what a bucket of fixed size is
filled up with. Each rank is taken to have batches of its own. Prefixes that are shared count once for each sequence, in
tokens and in operations, so that sharing shows as more of both a second: ``mfu`` is then above what the device did. Of
a loss that computes no logits, the head counts on the positions with a label where ``loss="fused"`` or TRL's kernel on
a GPU leaves out the others, else on all.
"""

from fastpack.metrics.callback import PREFIX, MetricsCallback, attach

__all__ = ["PREFIX", "MetricsCallback", "attach"]
