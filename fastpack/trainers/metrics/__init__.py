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
``step_seconds``         wall clock of a step, from its begin to its end
``tokens_per_second_per_gpu`` real tokens a second and rank, over the time inside steps and from each to the next, in
                         waiting for batches; logging, evaluating and saving take none of it
``mfu``                  model FLOPs utilization, 0 to 1: operations that the real tokens need, forward and backward,
                         nothing twice (:mod:`~.flops`), over what the device can do (:func:`attach`) in
                         the same time. Forwards alone, such as those of a reference model, are no part of it. Left out,
                         with a warning that says why, for a model that computes what has no formula here
``peak_memory_gib``      the most memory since training began, of the rank with the most: in tensors on a GPU, of the
                         process on a CPU
======================== ==============================================================================================

Of the run so far, a run that was resumed from a checkpoint included: ``total_real_tokens``, ``total_trained_tokens``,
``total_padding_tokens``, ``total_padding_share``. These also stand in what the trainer logs, and returns, at the end. A
checkpoint that a callback of the user's own asks for has those of the last time that the trainer logged.

Counting happens on the device when the model is called for a backward; nothing is copied from it before the trainer
logs (or saves, or evaluates), which takes one collective and one copy. On a GPU time is that in which the device
reaches a moment: what hides behind its work takes none.

Not counted are evaluation, tokens that a trainer generates, and what a bucket of fixed size is filled up with. Each
rank is taken to have batches of its own. Prefixes that are shared count once for each sequence, in tokens and in
operations, so that sharing shows as more of both a second: ``mfu`` is then above what the device did.
"""

from fastpack.trainers.metrics.callback import PREFIX, MetricsCallback, attach

__all__ = ["PREFIX", "MetricsCallback", "attach"]
