"""Metrics of a run's tokens and time, which the trainer logs.

>>> from fastpack.metrics import attach
>>> attach(trainer)        # doctest: +SKIP
>>> trainer.train()        # doctest: +SKIP

The metrics appear beside the loss wherever ``report_to`` sends it: in TensorBoard, W&B and the others, in the progress
bar, in ``trainer.state.log_history`` and so in ``trainer_state.json``. Their names begin with ``fastpack/``. If a
trainer logs every n-th step, they are of those n steps; if it trains on several ranks, of all ranks.

Metrics of a step (the mean since the last log):

============================= =========================================================================================
``real_tokens``               tokens a step that are not padding, on all ranks
``trained_tokens``            tokens whose prediction enters the loss: their label is not ignored, and they are not the
                              first of their sequence. If padding has labels, the one after a text counts, which the
                              text's last token learns. For preference trainers they are tokens of completions. Left
                              out if the model gets no label for each token (rewards, classes)
``padding_tokens``            padding a step, in the batches as they come to the model
``padding_share``             the share of padding, 0 to 1
``step_seconds``              the wall-clock time of a step, from its begin to its end
``tokens_per_second_per_gpu`` real tokens a second and rank, over the time in steps and in waiting for batches, without
                              logging, evaluating and saving
``mfu``                       model FLOPs utilization, 0 to 1: the operations that the real tokens need, forward and
                              backward and nothing twice (:mod:`~.flops`), over those that the device can do in that
                              time (:func:`attach`). Forwards without a backward, as of a reference model, don't count.
                              Left out, with a warning that says why, for a model without a formula here
``peak_memory_gib``           the largest memory since training began, of the rank with the most: in tensors on a GPU,
                              of the process on a CPU
============================= =========================================================================================

Metrics of the run so far, resumed runs included: ``total_real_tokens``, ``total_trained_tokens``,
``total_padding_tokens``, ``total_padding_share``. The trainer also logs and returns them at the end. A checkpoint that
a user's own callback saves has those of the last log.

Tokens are counted on the device, when the model is called for a backward. Nothing is copied from the device before the
trainer logs, saves or evaluates, which takes one collective and one copy. On a GPU, times are those at which the device
reaches a point, so work that hides behind the device's work takes no time.

Evaluation, generated tokens and bucket padding are not counted. Each rank is expected to have its own batches. Shared
prefixes count once for each sequence, in tokens and in operations, so sharing raises both per second: ``mfu`` is then
higher than what the device did.
"""

from fastpack.trainers.metrics.callback import PREFIX, MetricsCallback, attach

__all__ = ["PREFIX", "MetricsCallback", "attach"]
