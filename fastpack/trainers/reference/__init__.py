"""Reference log-probabilities of preference data, computed once without padding and kept on disk.

::

    trainer = DPOTrainer(model, ref_model=reference, ...)       # or a KTOTrainer, or LoRA without a ref_model
    fastpack.reference.precompute(trainer, folder="ref")        # adds the columns, and frees the reference model
    trainer.train()

    dataset = with_reference_log_probs(dataset, reference, folder="ref")  # for your own training loop

The folder is a cache of one reference. A second run with the same model and data computes nothing. New examples are
computed and added. Another model raises an error that says what differs. ``columns`` has the two functions, ``compute``
runs the model, and ``cache`` reads and writes the folder and identifies the reference.
"""

from fastpack.errors import MissingReferenceError, ReferenceCacheError
from fastpack.trainers.reference.columns import precompute, with_reference_log_probs

__all__ = ["MissingReferenceError", "ReferenceCacheError", "precompute", "with_reference_log_probs"]
