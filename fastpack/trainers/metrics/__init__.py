"""Metrics of a run's tokens and time, which the trainer logs.

>>> from fastpack.metrics import attach
>>> attach(trainer)        # doctest: +SKIP
>>> trainer.train()        # doctest: +SKIP

The metrics appear beside the loss wherever ``report_to`` sends it: in TensorBoard, W&B and the others, in the progress
bar, in ``trainer.state.log_history`` and so in ``trainer_state.json``. Their names begin with ``fastpack/``. They cover
all steps since the last log, and all ranks.

Metrics of a step (means over the steps since the last log):

============================= =========================================================================================
``real_tokens``               tokens that are not padding, on all ranks
``trained_tokens``            tokens that are predicted in the loss: their label is not ignored, and they are not the
                              first of their sequence. If padding has labels, the first padding token after each text
                              counts too, since the text's last token predicts it. For preference trainers, these are
                              tokens of completions. Left out if the model gets no label for each token (rewards,
                              classes)
``padding_tokens``            padding tokens in the batches that the model gets
``padding_share``             the share of padding, 0 to 1
``step_seconds``              the wall-clock time of a step, from its start to its end
``tokens_per_second_per_gpu`` real tokens a second and rank. The time includes steps and waiting for batches, but not
                              logging, evaluating and saving
``mfu``                       model FLOPs utilization, 0 to 1: the operations that the real tokens need forward and
                              backward, without recomputation (:mod:`~.flops`), divided by the operations that the
                              device can do in the same time (:func:`attach`). Forwards without a backward, such as a
                              reference model's, don't count. Left out, with a warning that says why, if fastpack has
                              no formula for the model
``peak_memory_gib``           the peak memory since training began, on the rank with the most: of tensors on a GPU, of
                              the process on a CPU
============================= =========================================================================================

Metrics of the run so far, including the run that it resumed: ``total_real_tokens``, ``total_trained_tokens``,
``total_padding_tokens``, ``total_padding_share``. The trainer also logs and returns them at the end. A checkpoint that
your own callback saves has the totals of the last log.

Tokens are counted on the device, in each forward that a backward may follow. Nothing is copied from the device until
the trainer logs, saves or evaluates, which takes one collective and one copy. On a GPU, times are measured on the
device, so host work that overlaps with the device's work adds no time.

Evaluation, generated tokens and bucket padding are not counted. Each rank is expected to have its own batches. Shared
prefixes count once for each sequence, in tokens and in operations. So sharing raises both rates, and ``mfu`` is then
higher than the device's real utilization.
"""

from fastpack.trainers.metrics.callback import PREFIX, MetricsCallback, attach

__all__ = ["PREFIX", "MetricsCallback", "attach"]
